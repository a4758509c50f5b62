"""No flag, help text, start-up log or metrics text, however mangled, ends in anything but a value or an InputError."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.errors import InputError
from tuner.records import Config
from tuner.serve_args import (
    canonical,
    degraded,
    effective_from_metrics,
    effective_values,
    flattened,
    logged_version,
    parse_argv,
    parse_help,
    startup_facts,
    to_argv,
)

RECORDED = Path(__file__).parent / "recorded"
HELP = (RECORDED / "help" / "serve_help_0.33.0.txt").read_text()
FLAGS = parse_help(HELP, "0.33.0")
LOGS = [path.read_text()[:12_000] for path in sorted(RECORDED.glob("*/*.log"))]
METRICS = (RECORDED / "cpu-0.32.0" / "metrics.txt").read_text()
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

spellings = st.sampled_from(sorted(FLAGS.spellings))
keys = st.sampled_from(["", ".", ".mode", ".mode.x", ".custom_ops+", ".+", "..", ".a.b.c", "."])
values = st.one_of(
    st.sampled_from(
        ["0", "-1", "8K", "8k", "25.6k", "1.5", "nan", "inf", "1e999", "9" * 30, "auto", "true", "None", ""]
    ),
    st.sampled_from(["{}", '{"mode": 3}', "{mode: 3}", "[1, 2]", "[", "null", '"x"', '{"a": {"b": [1]}}']),
    st.integers().map(str),
    st.text(max_size=8),
)
words = st.one_of(
    st.builds("{}{}".format, spellings, keys),
    st.builds("{}{}={}".format, spellings, keys, values),
    st.builds("-O{}".format, values),
    values,
)
configs = st.dictionaries(
    st.one_of(st.builds("{}{}".format, st.sampled_from(sorted(FLAGS.flags)), keys), st.text(max_size=5)),
    st.one_of(st.booleans(), st.integers(), st.floats(), values),
    max_size=4,
)


@st.composite
def mutilated(draw: st.DrawFn, texts: list[str]) -> str:
    text = draw(st.sampled_from(texts))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 400)))
    return (
        text[:start]
        + draw(st.text(max_size=12) | st.sampled_from(["{[]: 1}", "9" * 5000, "1.2.3", "}", "'"]))
        + text[end:]
    )


@QUICK
@given(st.lists(words, max_size=5))
def test_words_become_a_configuration_that_can_be_written_or_an_input_error(given_words: list[str]) -> None:
    with contextlib.suppress(InputError):
        config = parse_argv(given_words, FLAGS)
        assert set(config) <= set(FLAGS.flags)
        assert parse_argv(to_argv(config, FLAGS), FLAGS) == config


@QUICK
@given(configs, configs)
def test_configurations_become_words_or_an_input_error(config: Config, effective: Config) -> None:
    with contextlib.suppress(InputError):
        assert all(isinstance(word, str) for word in to_argv(config, FLAGS))
    with contextlib.suppress(InputError):
        flattened(config)
        canonical(config, {}, effective)
        assert all(isinstance(sentence, str) for sentence in degraded(config, effective))


@QUICK
@given(st.text(max_size=300) | mutilated([HELP[:6000]]))
def test_any_help_gives_flags(text: str) -> None:
    assert all(flag.name == name for name, flag in parse_help(text, "0").flags.items())


@QUICK
@given(st.text(max_size=300) | mutilated(LOGS))
def test_any_log_gives_values_and_finite_facts(text: str) -> None:
    assert all(isinstance(value, bool | int | float | str) for value in effective_values(text).values())
    assert all(math.isfinite(value) for value in startup_facts(text).values())
    logged_version(text)


@QUICK
@given(st.text(max_size=300) | mutilated([METRICS]))
def test_any_metrics_give_values(text: str) -> None:
    assert all(isinstance(value, bool | int | float | str) for value in effective_from_metrics(text).values())


def test_numbers_that_are_none_are_left_out() -> None:
    assert startup_facts("Available KV cache memory: 1.2.3 GiB") == {}
    assert startup_facts("GPU KV cache size: ,, tokens") == {}
    assert effective_values("non-default args: {'a', 'b'}") == {}
    assert effective_values("non-default args: {[]: 1, 'seed': 7}") == {"seed": 7}
    assert effective_values("non-default args: {'a': 1.2.3, 'seed': 7}") == {"seed": 7}
