"""How far one server's answers are from the reference's, prompt by prompt; it judges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tuner.quality.answers import Answer
from tuner.records import PromptScore


def score(reference: Answer, answer: Answer) -> PromptScore:
    """One prompt. `answer.forced` must hold the log-probabilities of the reference's tokens.

    *Agreed* are the tokens before the first difference. *Drift* is the mean of |log p(token) − log p_reference(token)|
    over the reference's tokens, in nats: how much more or less likely each of them is. Equal accuracy on a benchmark
    hides changed answers that such distances reveal (Dutta et al. (2024), Accuracy is Not All You Need, arXiv
    2407.09141). It is taken twice, with the reference's answer read as a prompt and, up to the first difference, as it
    was generated, and the larger counts: a KV cache in low precision shows in a prompt only where the kernels read it
    back from there.
    """
    agreed = common(reference.tokens, answer.tokens)
    return PromptScore(
        tokens=len(reference.tokens),
        agreed=agreed,
        exact=reference.tokens == answer.tokens,
        drift=max(drift(reference.forced, answer.forced), drift(reference.logprobs[:agreed], answer.logprobs[:agreed])),
    )


def scores(references: Sequence[Answer], answers: Sequence[Answer]) -> tuple[PromptScore, ...]:
    """Every prompt; ValueError when these are not the same prompts."""
    if [one.prompt for one in references] != [one.prompt for one in answers]:
        raise ValueError("the answers belong to other prompts than the reference's")
    return tuple(score(reference, answer) for reference, answer in zip(references, answers, strict=True))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that are the same before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def drift(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference; 0 of nothing."""
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True)) if one else 0.0
