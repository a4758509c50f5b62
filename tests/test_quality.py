"""The quality guard: what is asked, how far answers are apart, what is concluded, and that a study obeys."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tuner.errors import InputError
from tuner.quality import (
    Answer,
    Closeness,
    built_in,
    compare,
    forcing_body,
    generation_body,
    load_prompts,
    read_forced,
    read_generation,
    scores,
)
from tuner.quality.judge import bootstrap
from tuner.records import PromptScore, QualityScores

# --- prompts ------------------------------------------------------------------------------------------------------


def test_the_built_in_prompts_are_varied_and_distinct() -> None:
    prompts = built_in()
    assert len(prompts.prompts) == len(set(prompts.prompts)) == 48
    lengths = sorted(len(message.content) for prompt in prompts.prompts for message in prompt)
    assert lengths[0] < 60
    assert lengths[-1] > 600


def test_prompts_of_the_user(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"Question {i}?"}) for i in range(6)]
    lines += [json.dumps("a plain text"), ""]
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    lines.append(json.dumps({"messages": conversation}))
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    found = load_prompts(tmp_path / "p.jsonl")
    assert len(found.prompts) == 8
    assert [message.role for message in found.prompts[-1]] == ["system", "user"]
    (tmp_path / "p.txt").write_text("\n".join(f"Question {i}?" for i in range(9)))
    assert load_prompts(tmp_path / "p.txt").prompts[0] == found.prompts[0]
    assert load_prompts(tmp_path / "p.txt").digest != found.digest


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("p.txt", "one\ntwo", "8 to 512 prompts"),
        ("p.txt", "\n".join(map(str, range(513))), "8 to 512 prompts"),
        ("p.txt", "\n".join([*map(str, range(9)), "3"]), "repeats line 4"),
        ("p.jsonl", "{", "line 1 = '{': is not JSON"),
        ("p.jsonl", "7", "is neither a text nor an object"),
        ("p.jsonl", '{"question": "?"}', "is neither a text nor an object"),
        ("p.jsonl", '{"prompt": 3}', "must be text"),
        ("p.jsonl", '{"prompt": "  "}', "must be text"),
        ("p.jsonl", '{"messages": []}', "must end with a message of the user"),
        ("p.jsonl", '{"messages": [{"role": "wizard", "content": "x"}]}', "is none of the choices"),
        ("p.jsonl", '{"messages": [{"role": "user"}]}', "this key is required"),
        ("p.jsonl", '{"messages": "hello"}', "must be a list"),
        ("p.txt", "x" * 200_001, "has more than 200000 characters"),
    ],
)
def test_bad_prompts_are_one_clear_error(tmp_path: Path, name: str, text: str, named: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=named) as caught:
        load_prompts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_prompts(tmp_path / "none.jsonl")


# --- what is asked and read ---------------------------------------------------------------------------------------


def test_generation_is_greedy_and_carries_token_ids() -> None:
    body = generation_body("m", (1, 2), 64)
    assert (body["temperature"], body["repetition_penalty"], body["max_tokens"]) == (0, 1.0, 64)
    document = {"choices": [{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.1234567, -9999.0]}}]}
    assert read_generation(document) == ((5, 6), (-0.12346, -20.0))


def test_forced_logprobs_are_those_of_the_answer() -> None:
    assert forcing_body("m", (1, 2), (5, 6))["prompt"] == [1, 2, 5, 6]
    entries = [None, {"2": {"logprob": -1.0}}, {"5": {"logprob": -0.5}}, {"6": {"logprob": -2}, "9": {"logprob": -0.1}}]
    assert read_forced({"choices": [{"prompt_logprobs": entries}]}, 2, (5, 6)) == (-0.5, -2.0)


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"token_ids": [1], "logprobs": None},
        {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
        {"token_ids": ["a"], "logprobs": {"token_logprobs": [-1.0]}},
        {"token_ids": [1], "logprobs": {"token_logprobs": [float("nan")]}},
    ],
)
def test_a_server_that_does_not_tell_is_noticed(choice: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_generation({"choices": [choice]})
    with pytest.raises(ValueError, match="prompt_logprobs"):
        read_forced({"choices": [choice]}, 1, (1,))


# --- distances ----------------------------------------------------------------------------------------------------


def answer(tokens: Sequence[int], logprobs: Sequence[float], forced: Sequence[float] | None = None) -> Answer:
    return Answer((1,), tuple(tokens), tuple(logprobs), tuple(logprobs if forced is None else forced))


def test_agreement_ends_at_the_first_difference() -> None:
    reference = answer((5, 6, 7, 8), (-1.0, -1.0, -1.0, -1.0))
    other = answer((5, 6, 9, 8), (-1.0, -1.0, -3.0, -1.0), forced=(-1.0, -1.0, -1.4, -1.0))
    (found,) = scores([reference], [other])
    assert (found.tokens, found.agreed, found.exact) == (4, 2, False)
    assert found.drift == pytest.approx(0.1)
    (same,) = scores([reference], [reference])
    assert (same.agreed, same.exact, same.drift) == (4, True, 0.0)


def test_drift_while_generating_counts_where_the_prompt_shows_none() -> None:
    """As with attention kernels that do not read a low-precision cache back while they read the prompt."""
    reference = answer((5, 6, 7, 8), (-1.0,) * 4)
    (found,) = scores([reference], [answer((5, 6, 7, 8), (-1.2,) * 4, forced=(-1.0,) * 4)])
    assert found.drift == pytest.approx(0.2)


def test_a_shorter_answer_is_a_difference() -> None:
    (found,) = scores([answer((5, 6, 7), (-1.0,) * 3)], [answer((5, 2), (-1.0,) * 2, forced=(-1.0,) * 3)])
    assert (found.agreed, found.exact) == (1, False)


def test_answers_to_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="other prompts"):
        scores([answer((5,), (-1.0,))], [])


# --- the verdict --------------------------------------------------------------------------------------------------


def made(flips: float, drift: float, seed: int, n: int = 48, tokens: int = 64) -> QualityScores:
    """Answers whose tokens differ with probability `flips` each and whose log-probabilities drift by `drift`."""
    draw = random.Random(seed)
    found = []
    for _ in range(n):
        agreed = next((i for i in range(tokens) if draw.random() < flips), tokens)
        found.append(PromptScore(tokens, agreed, agreed == tokens, drift * draw.expovariate(1.0)))
    return QualityScores("digest", False, tuple(found))


def test_the_same_answers_are_equivalent() -> None:
    found = compare(made(0.0, 0.0, 1), [made(0.0, 0.0, 2)])
    assert found.verdict is Closeness.EQUIVALENT
    assert found.lost is not None
    assert 0 < found.lost.high < 0.005, "no difference in 3072 tokens does not prove that there is none"


@pytest.mark.parametrize(
    ("flips", "drift", "verdict"),
    [
        (0.01, 0.01, Closeness.EQUIVALENT),
        (0.15, 0.02, Closeness.DEGRADED),
        (0.01, 0.20, Closeness.DEGRADED),
        (0.01, 0.055, Closeness.UNRESOLVED),
    ],
)
def test_verdicts(flips: float, drift: float, verdict: Closeness) -> None:
    assert compare(made(flips, drift, 3), [made(0.005, 0.005, 4)]).verdict is verdict


def test_what_the_baseline_does_to_itself_is_no_loss() -> None:
    """A noisy server is judged against its own noise."""
    noisy = [made(0.10, 0.12, seed) for seed in (5, 6)]
    found = compare(made(0.10, 0.12, 7), noisy)
    assert found.verdict is Closeness.EQUIVALENT
    assert found.excess_limit is not None
    assert found.excess_limit > 0.1
    assert compare(made(0.10, 0.12, 7), [made(0.0, 0.0, 8)]).verdict is Closeness.DEGRADED


def test_wrong_verdicts_are_rare() -> None:
    """At the limit itself, `equivalent` may be said with a probability of 2.5 % (one side of a 95 % interval)."""
    seeds = range(100, 124)
    verdicts = [compare(made(0.0, 0.05, seed), [made(0.0, 0.0, 1)]).verdict for seed in seeds]
    assert verdicts.count(Closeness.EQUIVALENT) <= 3
    assert verdicts.count(Closeness.DEGRADED) <= 3


def test_few_short_answers_prove_little() -> None:
    assert compare(made(0.0, 0.0, 1, 8, 6), [made(0.0, 0.0, 2, 8, 6)]).verdict is Closeness.UNRESOLVED


def test_agreement_counts_choices_after_equal_text() -> None:
    """Each answer up to and including its first difference: 10 + 1, 63 + 1 and 64 tokens, two of them different."""
    ours = tuple(PromptScore(64, agreed, agreed == 64, 0.0) for agreed in (10, 63, *[64] * 8))
    found = compare(QualityScores("digest", False, ours), [made(0.0, 0.0, 1, 10)])
    assert found.agreement is not None
    assert found.agreement.value == pytest.approx(1 - 2 / (11 + 64 + 8 * 64))
    assert found.exact is not None
    assert found.exact.value == 0.8


def test_without_noise_or_answers_nothing_is_concluded() -> None:
    alone = compare(made(0.0, 0.0, 1), [])
    assert (alone.verdict, alone.agreement) == (Closeness.UNRESOLVED, None)
    assert "noise is unknown" in alone.reason
    refused = compare(QualityScores("digest", False, (), refused="status 500"), [made(0.0, 0.0, 2)])
    assert refused.verdict is Closeness.UNRESOLVED
    assert "status 500" in refused.reason
    other = QualityScores("other prompts", False, made(0.0, 0.0, 1).prompts)
    assert "noise is unknown" in compare(other, [made(0.0, 0.0, 2)]).reason


def mean_of(values: Sequence[float]) -> Callable[[Sequence[int]], float]:
    return lambda chosen: sum(values[i] for i in chosen) / len(chosen)


def test_the_bootstrap_interval_covers() -> None:
    """The mean of 30 exponential values: 95 % nominal; bootstrap intervals are known to be a little short."""
    draw, hits = random.Random(1), 0
    for _ in range(200):
        values = [draw.expovariate(1.0) for _ in range(30)]
        found = bootstrap(mean_of(values), 30, resamples=400)
        hits += found.low <= 1.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99
