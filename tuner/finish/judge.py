"""From the runs of the finish to a verdict with numbers; pure judging, it measures nothing and sees no search value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner.finish.contrast import CONFIDENCE, Layout, layout
from tuner.finish.design import Removal
from tuner.records import Estimate, KnobValue

TOLERATED_LOSS = 0.02
"""A winner with fewer flags replaces the full one when it is not worse by more than this."""


class Decision(StrEnum):
    """The verdict of a study."""

    IMPROVED = "improved"
    KEEP_DEFAULTS = "keep-defaults"
    NO_FEASIBLE = "no-feasible"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the finish. A run that failed through no fault of the configuration is repeated, not passed on."""

    number: int
    round: int
    values: Mapping[str, float]  # class to capacity (or the objective's own value), positive, larger is better
    excess: Mapping[str, float]  # limit to relative excess where the class carries least; <= 0 is kept
    ran: bool = True  # False: it did not start or died, by its own fault
    at_least: frozenset[str] = frozenset()  # classes whose value is only a lower bound


@dataclass(frozen=True, slots=True)
class FlagEffect:
    """What one flag of the winner contributes: value with it ÷ value without it."""

    flag: str
    value: KnobValue | None  # None: the winner leaves out a flag of the baseline
    effect: Estimate | None  # None: the winner does not run without it
    matters: bool


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One class of the winner."""

    gain: Estimate | None  # over the baseline
    best: int  # the contender that carries most in this class
    best_gain: Estimate | None
    regret: float  # 1 − the winner's capacity ÷ the best contender's


@dataclass(frozen=True, slots=True)
class NearestMiss:
    """What came closest where nothing keeps the SLO."""

    number: int
    limit: str  # the limit that it breaks most
    excess: float  # relative


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The verdict and everything behind it. Ratios are over the baseline, with 95 % intervals."""

    decision: Decision
    winner: int | None  # number of the configuration to deploy; the baseline's for `keep-defaults`
    gain: Estimate | None  # of the objective; None where the baseline keeps the SLO at no rate
    gains: Mapping[int, Estimate]  # of every contender
    classes: Mapping[str, ClassResult]
    log_sd: float  # spread of one run's objective, pooled over all contenders
    smallest_claim: float  # relative gain that would just have been claimed
    rounds: int
    nearest: NearestMiss | None
    notes: tuple[str, ...]


def judge(
    runs: Sequence[Measured],
    baseline: int,
    weights: Mapping[str, float],
    *,
    only: int | None = None,
    out: frozenset[int] = frozenset(),
    barred: Mapping[int, str] | None = None,
    confidence: float = CONFIDENCE,
) -> Conclusion:
    """The verdict of a finish; ValueError when the baseline was never run.

    A contender counts only if every one of its runs started and kept the SLO; the baseline counts by those of its runs
    that did, which flatters it. `weights` by class sum to 1. `only`: judge this contender instead of the best one (a
    reduced winner after its verification); the interval is widened for all contenders all the same. `out`: contenders
    that failed later, in the ablation. Runs of the ablation do not belong here: each would widen it further. `barred`:
    contenders that may not win whatever they carry, with the reason; their runs tell of the noise all the same.
    `confidence`: that of the planned look (`design.Look`).
    """
    numbers = sorted({run.number for run in runs})
    if baseline not in numbers:
        raise ValueError(f"the baseline {baseline} has no run")
    broken = {run.number for run in runs if not feasible(run)}
    rounds = len({run.round for run in runs})
    notes = tuple(_why_out(number, runs) for number in numbers if number in broken)
    notes += tuple(f"trial {number} failed when its flags were examined" for number in sorted(out))
    kept = [run for run in runs if feasible(run) and (run.number == baseline or run.number not in broken | out)]
    fit = sorted({run.number for run in kept})
    barred = barred or {}
    notes += tuple(reason for number, reason in sorted(barred.items()) if number in fit)
    candidates = [n for n in fit if n != baseline and only in (None, n) and n not in barred]
    eligible = [run for run in kept if run.number not in barred]
    if not fit or (baseline not in fit and not candidates):
        return Conclusion(Decision.NO_FEASIBLE, None, None, {}, {}, math.nan, math.inf, rounds, nearest(runs), notes)
    table = layout(_objectives(kept, weights))
    ranked = sorted(candidates, key=lambda number: -table.means[table.configurations.index(number)])
    if baseline not in fit:
        winner = ranked[0]
        classes = _classes(eligible, winner, None, weights)
        return Conclusion(Decision.IMPROVED, winner, None, {}, classes, table.log_sd, math.inf, rounds, None, notes)
    comparisons = max(1, len(numbers) - 1)
    gains = {number: table.ratio(number, baseline, comparisons, confidence) for number in fit if number != baseline}
    winner = ranked[0] if ranked and gains[ranked[0]].low > 1 else baseline
    unbounded = sorted({name for run in kept if run.number == baseline for name in run.at_least})
    if unbounded and winner != baseline:
        winner = baseline
        notes += (f"the baseline's capacity in {', '.join(unbounded)} is known from below only, so no gain is claimed",)
    improved = winner != baseline
    gain = gains[ranked[0]] if ranked else None
    return Conclusion(
        decision=Decision.IMPROVED if improved else Decision.KEEP_DEFAULTS,
        winner=winner,
        gain=gain,
        gains=gains,
        classes=_classes(eligible, winner, baseline, weights),
        log_sd=table.log_sd,
        smallest_claim=math.inf if gain is None or gain.low <= 0 else gain.value / gain.low - 1,
        rounds=rounds,
        nearest=None,
        notes=notes,
    )


def effects(
    runs: Sequence[Measured], winner: int, removed: Mapping[int, Removal], weights: Mapping[str, float]
) -> tuple[FlagEffect, ...]:
    """What each flag of the winner contributes; `removed`: trial number to the flag it is without.

    A flag matters when the interval of its effect lies above one, or when nothing runs without it. Empty when the
    winner itself failed in one of these runs.
    """
    broken = {run.number for run in runs if not feasible(run)}
    if winner in broken:
        return ()
    table = layout(_objectives([run for run in runs if run.number not in broken], weights))
    found: list[FlagEffect] = []
    for number, removal in sorted(removed.items(), key=lambda item: item[1].flag):
        if number in broken:
            found.append(FlagEffect(removal.flag, removal.value, None, True))
        elif number in table.configurations:
            effect = table.ratio(winner, number)
            found.append(FlagEffect(removal.flag, removal.value, effect, effect.low > 1))
    return tuple(found)


def reduced_stands(
    runs: Sequence[Measured], baseline: int, winner: int, reduced: int, weights: Mapping[str, float]
) -> bool:
    """Whether the winner without flags that do not matter may replace it: still an improvement, and no real loss."""
    verdict = judge(runs, baseline, weights, only=reduced)
    if verdict.decision is not Decision.IMPROVED or verdict.winner != reduced:
        return False
    table = layout(_objectives([run for run in runs if feasible(run)], weights))
    return winner not in table.configurations or table.ratio(reduced, winner).value >= 1 - TOLERATED_LOSS


def nearest(runs: Sequence[Measured]) -> NearestMiss | None:
    """The contender that breaks its worst limit least; None when nothing ever ran."""
    worst: dict[int, tuple[float, str]] = {}
    for run in runs:
        if run.ran and run.excess:
            limit, excess = max(run.excess.items(), key=lambda item: item[1])
            worst[run.number] = max(worst.get(run.number, (-math.inf, "")), (excess, limit))
    if not worst:
        return None
    number, (excess, limit) = min(worst.items(), key=lambda item: item[1][0])
    return NearestMiss(number, limit, excess)


def class_winners(values: Mapping[int, Mapping[str, float]]) -> dict[str, int]:
    """Class to the configuration that carries most of it; works on values of the search as well as of the finish."""
    classes = sorted({name for by_class in values.values() for name in by_class})
    return {name: max(values, key=lambda number: values[number].get(name, 0.0)) for name in classes}


def feasible(run: Measured) -> bool:
    """Whether a run started and kept every limit."""
    return run.ran and bool(run.values) and all(excess <= 0 for excess in run.excess.values())


def _objectives(runs: Sequence[Measured], weights: Mapping[str, float]) -> dict[tuple[int, int], list[float]]:
    """Weighted geometric mean over classes, by (configuration, round); the baseline cancels in every ratio."""
    found: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        value = math.exp(sum(weight * math.log(run.values[name]) for name, weight in weights.items()))
        found.setdefault((run.number, run.round), []).append(value)
    return found


def _classes(
    runs: Sequence[Measured], winner: int, baseline: int | None, weights: Mapping[str, float]
) -> dict[str, ClassResult]:
    found: dict[str, ClassResult] = {}
    for name in weights:
        table: Layout = layout(_objectives(runs, {name: 1.0}))
        best = max(table.configurations, key=lambda number: table.means[table.configurations.index(number)])
        found[name] = ClassResult(
            gain=None if baseline is None or winner == baseline else table.ratio(winner, baseline),
            best=best,
            best_gain=None if baseline is None or best == baseline else table.ratio(best, baseline),
            regret=1 - table.ratio(winner, best).value,
        )
    return found


def _why_out(number: int, runs: Sequence[Measured]) -> str:
    mine = [run for run in runs if run.number == number]
    broken = [run for run in mine if not feasible(run)]
    reason = "did not run" if any(not run.ran for run in broken) else "missed the SLO"
    return f"trial {number} {reason} in {len(broken)} of {len(mine)} runs of the finish"
