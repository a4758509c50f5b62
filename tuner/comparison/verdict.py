"""Better, worse, the same or unresolved: what interleaved rounds say about two sides; pure judging, nothing is run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner.finish import Layout, Measured, feasible, layout
from tuner.records import Estimate, Rate
from tuner.stats import equivalent

MARGIN = 0.05
"""Relative difference of capacity below which two sides count as the same, unless the user says otherwise."""

EQUIVALENCE = 0.90
"""Confidence of the interval that must lie within the margin: two one-sided tests at 5 % (Schuirmann (1987))."""


class Standing(StrEnum):
    """How our side stands against the other."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, slots=True)
class Contrast:
    """Our side ÷ the other, with its 95 % interval; None where one of them kept the SLO at no rate."""

    standing: Standing
    ratio: Estimate | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SideRate:
    """SLO capacity of one class on one side: geometric mean, least and greatest run."""

    value: Rate
    low: Rate
    high: Rate
    n: int
    at_least: bool  # some run kept the SLO at every rate probed


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a comparison. Each class stands by itself; `overall` is the weighted geometric mean."""

    overall: Contrast
    classes: Mapping[str, Contrast]
    margin: float
    log_sd: float  # spread of one run's objective within a round; NaN with a single round
    rounds: int


def contrast(
    runs: Sequence[Measured], ours: int, other: int, weights: Mapping[str, float], margin: float = MARGIN
) -> Judgement:
    """`ours` against `other` from their runs in the same rounds; runs of further numbers are left out.

    A side that did not run, or kept its SLO at no rate, in any of its runs loses to one that always did. A difference
    that is shown to lie within ±`margin` is `same`, also where it is not zero.
    """
    both = [run for run in runs if run.number in (ours, other)]
    failed = {number: failure(both, number) for number in (ours, other)}
    rounds = len({run.round for run in both})
    if any(failed.values()) or not both:
        whole = _by_failure(failed[ours], failed[other])
        return Judgement(whole, dict.fromkeys(weights, whole), margin, math.nan, rounds)
    table = layout(_objectives(both, weights))
    at_least = {number: _bounded(both, number, weights) for number in (ours, other)}
    classes = {}
    for name in weights:
        alone = layout(_objectives(both, {name: 1.0}))
        bounded = {number: name in at_least[number] for number in (ours, other)}
        classes[name] = _judge(alone, ours, other, bounded[ours], bounded[other], margin)
    overall = _judge(table, ours, other, bool(at_least[ours]), bool(at_least[other]), margin)
    return Judgement(overall, classes, margin, table.log_sd, rounds)


def failure(runs: Sequence[Measured], number: int) -> str:
    """Why a side is out; empty where every run of it kept the SLO."""
    mine = [run for run in runs if run.number == number]
    broken = [run for run in mine if not feasible(run)]
    if not mine:
        return "was never measured"
    if not broken:
        return ""
    reason = "did not run" if any(not run.ran for run in broken) else "kept the SLO at no rate"
    return f"{reason} in {len(broken)} of {len(mine)} rounds"


def side_rates(runs: Sequence[Measured], number: int, workloads: Sequence[str]) -> dict[str, SideRate]:
    """Capacities of one side over its runs that kept the SLO; a class that never did is missing."""
    kept = [run for run in runs if run.number == number and feasible(run)]
    found = {}
    for name in workloads:
        values = [run.values[name] for run in kept if name in run.values]
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            found[name] = SideRate(mean, min(values), max(values), len(values), any(name in r.at_least for r in kept))
    return found


def kept_values(runs: Sequence[Measured], number: int) -> tuple[Mapping[str, float], ...]:
    """Capacities by class of each run of a side that kept the SLO, by round."""
    kept = sorted((run for run in runs if run.number == number and feasible(run)), key=lambda run: run.round)
    return tuple(run.values for run in kept)


def objective(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted geometric mean over classes."""
    return math.exp(sum(weight * math.log(values[name]) for name, weight in weights.items()))


def _judge(table: Layout, ours: int, other: int, ours_at_least: bool, other_at_least: bool, margin: float) -> Contrast:
    ratio = table.ratio(ours, other)
    if ours_at_least or other_at_least:
        if ratio.low > 1 and not other_at_least:
            return Contrast(Standing.BETTER, ratio, "at least this much: one side kept the SLO at every rate probed")
        if ratio.high < 1 and not ours_at_least:
            return Contrast(Standing.WORSE, ratio, "at least this much: one side kept the SLO at every rate probed")
        return Contrast(Standing.UNRESOLVED, ratio, "the SLO was kept at every rate probed, so no limit is known")
    if table.df > 0 and equivalent(table.ratio(ours, other, confidence=EQUIVALENCE), margin):
        return Contrast(Standing.SAME, ratio)
    if ratio.low > 1:
        return Contrast(Standing.BETTER, ratio)
    if ratio.high < 1:
        return Contrast(Standing.WORSE, ratio)
    return Contrast(Standing.UNRESOLVED, ratio, "the interval holds both no difference and one beyond the margin")


def _by_failure(ours: str, other: str) -> Contrast:
    if ours and other:
        return Contrast(Standing.UNRESOLVED, None, f"neither side can be used: {ours}; the other {other}")
    if ours:
        return Contrast(Standing.WORSE, None, ours)
    return Contrast(Standing.BETTER, None, f"the other {other}")


def _bounded(runs: Sequence[Measured], number: int, weights: Mapping[str, float]) -> set[str]:
    return {name for run in runs if run.number == number for name in run.at_least if name in weights}


def _objectives(runs: Sequence[Measured], weights: Mapping[str, float]) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        found.setdefault((run.number, run.round), []).append(objective(run.values, weights))
    return found
