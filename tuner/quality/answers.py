"""What vLLM's completions API is asked about a prompt, and the reading of what it says; it sends nothing.

Two requests a prompt. The first lets the model answer greedily. The second gives it prompt and *reference answer* as
one prompt and asks how likely each token of it was (`prompt_logprobs`, vLLM's own extension; token ids are strings in
its JSON). Everything is token ids, so that no tokenizer stands between two servers. vLLM does not read the prefix cache
for `prompt_logprobs` (vllm#13949), and its log-probabilities are those before any sampling parameter. The rank that it
gives counts ties as better, and in bfloat16 three tokens of a hundred are tied for the first place: it is not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.records import FORMAT_VERSION

FLOOR = -20.0
"""Log-probabilities below it (2e-9) count as this: both are impossible, and one of them must not outweigh all others.
vLLM itself writes -9999 for minus infinity."""

DIGITS = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt on one server."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of `tokens`, as they were generated; nats
    forced: tuple[float, ...]  # of the reference's tokens, given prompt and reference; nats


@dataclass(frozen=True, slots=True)
class Answers:
    """Every prompt on one server: the raw data of a comparison, one file a trial."""

    prompts_digest: str
    answers: tuple[Answer, ...]
    format_version: int = FORMAT_VERSION


def generation_body(model: str, prompt: Sequence[int], answer_tokens: int) -> dict[str, object]:
    """A greedy answer. The repetition penalty is stated because a model's generation_config.json may set another."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }


def forcing_body(model: str, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, object]:
    """How likely `answer` is after `prompt`; one token has to be generated all the same."""
    return {
        "model": model,
        "prompt": [*prompt, *answer],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }


def read_generation(document: Mapping[str, object]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and their log-probabilities; ValueError where the answer does not hold them."""
    choice = _choice(document)
    tokens, logprobs = choice.get("token_ids"), choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, Mapping) else None
    if not isinstance(tokens, list) or not tokens or not isinstance(values, list) or len(values) != len(tokens):
        raise ValueError("the server answers without token ids and their log-probabilities")
    return tuple(_token(token) for token in tokens), tuple(_logprob(value) for value in values)


def read_forced(document: Mapping[str, object], prompt_tokens: int, answer: Sequence[int]) -> tuple[float, ...]:
    """Log-probabilities of `answer`; ValueError where the server does not tell them."""
    entries = _choice(document).get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != prompt_tokens + len(answer):
        raise ValueError("the server answers without the log-probabilities of the prompt (`prompt_logprobs`)")
    logprobs = []
    for entry, token in zip(entries[prompt_tokens:], answer, strict=True):
        found = entry.get(str(token)) if isinstance(entry, Mapping) else None
        if not isinstance(found, Mapping):
            raise ValueError(f"the server's `prompt_logprobs` do not hold token {token}")
        logprobs.append(_logprob(found.get("logprob")))
    return tuple(logprobs)


def _choice(document: Mapping[str, object]) -> Mapping[str, object]:
    choices = document.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise ValueError("the server's answer holds no choice")
    return choices[0]


def _token(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no token id")
    return value


def _logprob(value: object) -> float:
    if not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{value!r} is no log-probability")
    return round(max(FLOOR, float(value)), DIGITS)
