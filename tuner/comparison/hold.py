"""Whether a configuration still carries what its lock records; pure judging of runs against recorded capacities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner.comparison.drift import Drift, Weight
from tuner.comparison.lock import Lock
from tuner.comparison.verdict import SideRate, objective
from tuner.records import Estimate
from tuner.stats import log_ratio_interval

TOLERANCE = 0.10
"""Loss of capacity that still counts as holding, unless the user says otherwise: days differ by a few percent."""


class Held(StrEnum):
    """The verdict of `tune verify`."""

    HOLDS = "holds"
    HOLDS_NOT = "holds-not"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, slots=True)
class ClassHold:
    """One class: measured ÷ recorded capacity. `ratio` is None where nothing is recorded or nothing was kept."""

    held: Held
    recorded_rps: float | None
    measured: SideRate | None
    ratio: Estimate | None


@dataclass(frozen=True, slots=True)
class Verified:
    """Everything that `tune verify` says. Intervals of classes hold for all classes at once (Bonferroni)."""

    held: Held
    ratio: Estimate | None  # of the weighted geometric mean over classes
    classes: Mapping[str, ClassHold]
    drift: tuple[Drift, ...]
    tolerance: float
    reason: str


def hold(
    lock: Lock,
    measured: Sequence[Mapping[str, float]],
    rates: Mapping[str, SideRate],
    failure: str,
    weights: Mapping[str, float],
    drift: tuple[Drift, ...],
    tolerance: float = TOLERANCE,
) -> Verified:
    """`measured`: capacity by workload of each run that kept the SLO; `failure`: why some run did not, else empty.

    Holds when a loss beyond `tolerance` is excluded at 95 %, holds not when a loss is shown and is beyond it, or when
    the configuration did not run or keep its SLO every time. Unresolved otherwise, and where what was recorded is a
    capacity of something else.
    """
    recorded = _recorded(lock, weights)
    classes = {name: _of_class(name, recorded, measured, rates, len(weights), tolerance) for name in weights}
    if failure:
        return Verified(Held.HOLDS_NOT, None, classes, drift, tolerance, failure)
    forbidden = [item.what for item in drift if item.weight is Weight.FORBIDS]
    if forbidden or not recorded:
        reason = f"{', '.join(forbidden)} changed" if forbidden else "the lock records no capacity of these workloads"
        kept = "the SLO is kept at the rates shown, but what was recorded cannot be held against them: "
        return Verified(Held.UNRESOLVED, None, classes, drift, tolerance, kept + reason)
    ratio = log_ratio_interval(
        [objective(run, weights) for run in measured], [objective(run, weights) for run in recorded]
    )
    overall = _held(ratio, tolerance, any(rate.at_least for rate in rates.values()))
    lost = [name for name, one in classes.items() if one.held is Held.HOLDS_NOT]
    if lost:
        return Verified(Held.HOLDS_NOT, ratio, classes, drift, tolerance, f"capacity was lost in {', '.join(lost)}")
    reasons = {Held.HOLDS_NOT: "capacity was lost over all classes", Held.HOLDS: ""}
    reason = reasons.get(
        overall, "more rounds would tell: the interval holds both no loss and one beyond the tolerance"
    )
    return Verified(overall, ratio, classes, drift, tolerance, reason)


def _of_class(
    name: str,
    recorded: Sequence[Mapping[str, float]],
    measured: Sequence[Mapping[str, float]],
    rates: Mapping[str, SideRate],
    classes: int,
    tolerance: float,
) -> ClassHold:
    before = [run[name] for run in recorded]
    now = [run[name] for run in measured if name in run]
    value = math.exp(sum(map(math.log, before)) / len(before)) if before else None
    if not before or not now:
        return ClassHold(Held.UNRESOLVED, value, rates.get(name), None)
    ratio = log_ratio_interval(now, before, confidence=1 - 0.05 / classes)
    return ClassHold(_held(ratio, tolerance, rates[name].at_least), value, rates[name], ratio)


def _held(ratio: Estimate, tolerance: float, at_least: bool) -> Held:
    if ratio.low >= 1 - tolerance:
        return Held.HOLDS
    lost = ratio.high < 1 and ratio.value < 1 - tolerance
    return Held.HOLDS_NOT if lost and not at_least else Held.UNRESOLVED


def _recorded(lock: Lock, weights: Mapping[str, float]) -> list[Mapping[str, float]]:
    """The runs behind the lock; one run at its mean capacities where an older lock does not list them."""
    runs = [run for run in lock.runs_rps if set(weights) <= set(run)]
    if runs:
        return list(runs)
    best = {name: rates.best for name, rates in lock.capacity_rps.items() if name in weights and rates.best is not None}
    mean = {name: rate.value for name, rate in best.items() if rate is not None}
    return [mean] if set(mean) == set(weights) else []
