"""Whether answers are as close to the baseline's as the baseline's own are; pure judging with stated tolerances."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist, fmean

from tuner.records import Estimate, PromptScore, QualityScores
from tuner.stats import wilson

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may be lost beyond the baseline's own noise: this much, or `noise` times that noise where it is more.

    docs/quality.md tells what rounding alone does, and what a change of the model does.
    """

    agreement: float = 0.05  # share of greedy choices that fall differently
    drift: float = 0.05  # nats
    noise: float = 1.0


class Closeness(StrEnum):
    """The verdict on one configuration's answers."""

    EQUIVALENT = "equivalent"  # shown to lie within both tolerances
    DEGRADED = "degraded"  # shown to lie outside one of them
    UNRESOLVED = "unresolved"  # neither; or the answers could not be had


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers of one configuration against the baseline's; 95 % intervals over prompts.

    `own_…`: the baseline on further servers against itself. `lost` and `excess` are paired by prompt with it.
    """

    verdict: Closeness
    reason: str  # in words, with the numbers that decided
    prompts: int
    tokens: int  # of the baseline's answers
    prompts_digest: str = ""
    agreement: Estimate | None = None  # share of tokens that are chosen equally after equal text
    own_agreement: float | None = None
    exact: Estimate | None = None  # share of answers that are equal to the end; Wilson
    own_exact: float | None = None
    drift: Estimate | None = None  # nats
    own_drift: float | None = None
    lost: Estimate | None = None  # own agreement − agreement
    lost_limit: float | None = None
    excess: Estimate | None = None  # drift − own drift
    excess_limit: float | None = None


def compare(scores: QualityScores, repeats: Sequence[QualityScores], tolerance: Tolerance | None = None) -> Comparison:
    """The verdict on `scores`; `repeats` are the baseline's own on fresh servers, against the same reference.

    Each limit is a test of non-inferiority: equivalent when the interval of what is lost lies below it, degraded when
    it lies above (one side of Schuirmann (1987), J. Pharmacokinet. Biopharm. 15, 657). The unit of observation is the
    prompt: tokens of one answer are anything but independent.
    """
    tolerance = tolerance or Tolerance()
    ours, count, digest = scores.prompts, len(scores.prompts), scores.prompts_digest
    tokens = sum(score.tokens for score in ours)
    own = [repeat.prompts for repeat in repeats if repeat.prompts_digest == digest and len(repeat.prompts) == count]
    if not ours:
        return Comparison(Closeness.UNRESOLVED, f"its answers could not be had: {scores.refused}", 0, 0, digest)
    if not own:
        reason = "the baseline was not recorded on a second server, so its own noise is unknown"
        return Comparison(Closeness.UNRESOLVED, reason, count, tokens, digest)

    here, itself = _Sums([ours]), _Sums(own)
    same, drift = itself.agreement(range(count)), itself.drift(range(count))
    lost = bootstrap(lambda chosen: itself.agreement(chosen) - here.agreement(chosen), count)
    # Where hardly anything differs, resampling finds hardly anything; so many tokens do not prove more than they can.
    differing = wilson(sum(score.agreed < score.tokens for score in ours), sum(here.choices))
    lost = replace(lost, high=max(lost.high, differing.high - (1 - same)))
    excess = bootstrap(lambda chosen: here.drift(chosen) - itself.drift(chosen), count)
    lost_limit = max(tolerance.agreement, tolerance.noise * (1 - same))
    excess_limit = max(tolerance.drift, tolerance.noise * drift)
    verdict, reason = _judged(lost, lost_limit, excess, excess_limit)
    return Comparison(
        verdict=verdict,
        reason=reason,
        prompts=count,
        tokens=tokens,
        prompts_digest=digest,
        agreement=bootstrap(here.agreement, count),
        own_agreement=same,
        exact=wilson(sum(score.exact for score in ours), count),
        own_exact=fmean(score.exact for repeat in own for score in repeat),
        drift=bootstrap(here.drift, count),
        own_drift=drift,
        lost=lost,
        lost_limit=lost_limit,
        excess=excess,
        excess_limit=excess_limit,
    )


class _Sums:
    """One or more servers' scores by prompt, ready to be resampled."""

    def __init__(self, servers: Sequence[Sequence[PromptScore]]) -> None:
        prompts: list[tuple[PromptScore, ...]] = list(zip(*servers, strict=True))
        self.agreed = [sum(score.agreed for score in prompt) for prompt in prompts]
        self.choices = [sum(map(_choices, prompt)) for prompt in prompts]
        self.drifts = [fmean(score.drift for score in prompt) for prompt in prompts]

    def agreement(self, chosen: Sequence[int]) -> float:
        """Of the tokens that were chosen after equal text, the share that was chosen equally.

        An answer contributes its tokens up to and including the first difference; what follows continues another text.
        So the share does not depend on how long answers may become, as the share of equal answers does.
        """
        return sum([self.agreed[i] for i in chosen]) / sum([self.choices[i] for i in chosen])

    def drift(self, chosen: Sequence[int]) -> float:
        return sum([self.drifts[i] for i in chosen]) / len(chosen)


def bootstrap(statistic: Callable[[Sequence[int]], float], n: int, resamples: int = RESAMPLES) -> Estimate:
    """A statistic of `n` prompts, called with their indices, and its BCa bootstrap interval.

    Efron and Tibshirani (1993), An Introduction to the Bootstrap, 14.3: percentiles of the resampled values, corrected
    for bias and, by the jackknife, for skewness. Most prompts lose nothing and a few lose much; plain percentiles would
    end too low. The draws are the same every time.
    """
    draw, indices, normal = random.Random(n), range(n), NormalDist()
    value = statistic(indices)
    found = sorted(statistic(draw.choices(indices, k=n)) for _ in range(resamples))
    below = sum(one < value for one in found) + sum(one == value for one in found) / 2
    bias = normal.inv_cdf(min(max(below, 0.5), resamples - 0.5) / resamples)
    left_out = [statistic([i for i in indices if i != gone]) for gone in indices]
    differences = [fmean(left_out) - one for one in left_out]
    spread = math.sqrt(sum(d**2 for d in differences)) ** 3
    skewness = sum(d**3 for d in differences) / (6 * spread) if spread > 0 else 0.0

    def end(level: float) -> float:
        z = bias + normal.inv_cdf(level)
        share = normal.cdf(bias + z / (1 - skewness * z))
        return found[min(resamples - 1, int(share * resamples))]

    tail = (1 - CONFIDENCE) / 2
    return Estimate(value, end(tail), end(1 - tail), n)


def _judged(lost: Estimate, lost_limit: float, excess: Estimate, excess_limit: float) -> tuple[Closeness, str]:
    choices = f"{_interval(lost, 100, 1)} of 100 tokens are chosen differently"
    drift = f"log-probabilities drift by {_interval(excess, 1, 3)} nats"
    pairs = (
        (choices, lost, lost_limit, f"{lost_limit * 100:.1f}"),
        (drift, excess, excess_limit, f"{excess_limit:.3f}"),
    )
    above = [f"{told} (limit {shown})" for told, found, limit, shown in pairs if found.low > limit]
    if above:
        return Closeness.DEGRADED, f"beyond the baseline's own noise, {' and '.join(above)}"
    near = [f"{told} (limit {shown})" for told, found, limit, shown in pairs if found.high > limit]
    if near:
        reason = f"beyond the baseline's own noise, {' and '.join(near)}: too close to tell with these prompts"
        return Closeness.UNRESOLVED, reason
    return Closeness.EQUIVALENT, f"beyond the baseline's own noise, {choices} and {drift}, within the limits"


def _interval(estimate: Estimate, scale: float, digits: int) -> str:
    value, low, high = (f"{scale * x + 0.0:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def _choices(score: PromptScore) -> int:
    """Tokens that were chosen after equal text."""
    return score.agreed + (score.agreed < score.tokens)
