"""No log, however mangled, makes the classifier raise, and equal logs get equal answers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner import secrecy
from tuner.failures import TABLE, FailureFacts, classify, configuration, lines, log, running
from tuner.records import Failure, Verdict

HERE = Path(__file__).parent
SEEDS = [path.read_bytes().decode()[:20_000] for path in sorted((HERE / "failure_logs").glob("*.log"))]
LINES = sorted({line for text in SEEDS for line in text.splitlines()})

facts = st.builds(
    FailureFacts,
    idle_free_gib=st.none() | st.floats(allow_nan=True),
    launch_free_gib=st.none() | st.floats(allow_nan=True),
    device_gib=st.none() | st.floats(allow_nan=True),
    other_processes=st.lists(st.integers(), max_size=2).map(tuple),
    stop_requested=st.booleans(),
    timed_out=st.booleans(),
    log_silent=st.booleans(),
    no_progress=st.booleans(),
    port_owner=st.none() | st.text(max_size=9),
    disk_free_bytes=st.none() | st.integers(),
    retries=st.none() | st.integers(0, 5),
    known_good=st.booleans(),
    searched=st.frozensets(st.sampled_from(["block-size", "max-num-seqs"])),
)
phases = st.sampled_from(["prepare", "launch", "warm-up", "measure", "stop", "nonsense"])
codes = st.none() | st.integers(-70, 300)
shuffled = st.lists(st.sampled_from(LINES), max_size=40).map("\n".join)


@st.composite
def mutilated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(SEEDS))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, len(text)))
    return text[:start] + draw(st.text(max_size=30)) + text[end:]


def sound(failure: Failure) -> None:
    assert isinstance(failure.verdict, Verdict)
    assert 0 < failure.violation <= 10
    assert failure.kind
    assert failure.cause is not None
    assert set(failure.moves.values()) <= {"up", "down", "on", "off"}
    assert all(len(line) <= 400 for line in failure.evidence)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.text(max_size=2000), mutilated(), shuffled), codes, phases, facts)
def test_never_raises(text: str, code: int | None, phase: str, facts: FailureFacts) -> None:
    failure = classify(text, exit_code=code, phase=phase, facts=facts)
    sound(failure)
    assert failure == classify(text, exit_code=code, phase=phase, facts=facts)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='(){}[]<>"`\\/=:,.-+ \t0123456789eE_pidERROR\n\r\x1b', max_size=3000))
def test_punctuation_does_not_upset_it(text: str) -> None:
    sound(classify(text, exit_code=None, phase="launch", facts=FailureFacts()))


def test_long_lines_and_repeats_are_harmless() -> None:
    for text in ("a" * 2_000_000, "(" * 200_000, "ERROR 11-30 12:00:00 [x.py:1] " * 20_000, "x = [" + "1, " * 300_000):
        sound(classify(text, exit_code=1, phase="launch", facts=FailureFacts()))


PATTERNS = sorted(
    {pattern for row in (*TABLE, *running.DEGRADED) for pattern in row.patterns}
    | {
        value
        for room in (configuration, lines, log, running, secrecy)
        for value in vars(room).values()
        if isinstance(value, re.Pattern)
    },
    key=lambda pattern: pattern.pattern,
)
UNITS = (
    "a",
    "0f",
    "a-b_",
    "a.",
    " ",
    "-",
    "--",
    "execute ",
    "nccl",
    "fp8",
    "token",
    "torch_compile_cache ",
    "error: ",
    "(",
)


@pytest.mark.parametrize("unit", UNITS)
def test_no_pattern_needs_more_than_a_moment_for_a_line(unit: str) -> None:
    """Twice as long may not take four times as long: of what was quadratic, a line took 8 ms, and a log a minute."""
    line = f"x {unit * (log.MAX_LINE // len(unit))}\n"
    for pattern in PATTERNS:
        spent = min(_search_s(pattern, line) for _ in range(3))
        assert spent < 4e-3, pattern.pattern


def _search_s(pattern: re.Pattern[str], line: str) -> float:
    began = time.thread_time()
    pattern.search(line)
    return time.thread_time() - began


def test_the_words_that_are_looked_for_first_leave_out_nothing() -> None:
    parts = lines._PARTS
    for line in LINES:
        assert not lines._WORDS.search(line) or any(part in line.lower() for part in parts), line
    for words in re.split(r"\|(?![^(]*\))", lines._WORDS.pattern.removeprefix("(?i)")):
        plain = re.sub(r"\\b|\(\?:ed\|ure\)|\[.*\]", "", words)
        assert any(part in plain for part in parts), words


def test_a_long_log_of_long_errors_takes_seconds() -> None:
    text = "".join(f"ERROR 09-27 05:20:38 [core.py:1] {number} {'a-b_' * 480}\n" for number in range(8000))
    began = time.thread_time()
    sound(classify(text, exit_code=1, phase="launch", facts=FailureFacts()))
    assert time.thread_time() - began < 15
