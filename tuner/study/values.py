"""What a complete trial is worth in each class, by the study's objective; it knows no baseline and no weights.

`capacity` is the highest rate that keeps the promise. The others are measured at one rate that the user gives:
`goodput` (answers within every limit, a second), `throughput` (answers, a second, as long as the promise is kept) and
`latency` (limit ÷ observed, of the limit that is closest to being broken, as long as the promise is kept).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from tuner.records import Bound, Outcome, Probe, TrialRecord

WORST_EXCESS = 10.0  # a constraint is finite: ten times over the limit stands for anything worse
WINDOWS = 3  # at a given rate, always: stopping at a good one would flatter
FULL = 0.98  # of the offered load; what reaches it could only be told apart at a higher one


class Objective(StrEnum):
    """What a study makes larger."""

    CAPACITY = "capacity"
    GOODPUT = "goodput"
    THROUGHPUT = "throughput"
    LATENCY = "latency"


def values(record: TrialRecord, objective: str) -> dict[str, float]:
    """Value by class, positive, larger is better; classes that were not measured are left out."""
    if objective == Objective.CAPACITY:
        return {name: capacity.rate_rps for name, capacity in record.capacities.items()}
    return {name: _value(windows, objective) for name, windows in windows_of(record).items()}


def excess(record: TrialRecord, workload: str, objective: str) -> float:
    """How far the promise is from being kept, relative and finite; ≤ 0 is kept.

    Of a capacity: at the most lenient rate that was probed. At a given rate: over all windows; goodput counts only what
    keeps the limits, so it breaks none.
    """
    if objective == Objective.GOODPUT:
        return -1.0
    if objective != Objective.CAPACITY:
        return min(WORST_EXCESS, _margin(windows_of(record)[workload]))
    capacity = record.capacities[workload]
    margins = [probe.margin for probe in capacity.probes if probe.outcome is not Outcome.INVALID]
    least = min(margins, default=WORST_EXCESS)
    if capacity.bound is Bound.BELOW:
        return min(WORST_EXCESS, max(least, 1e-3))
    return min(0.0, least)


def bounded_below(record: TrialRecord, workload: str, objective: str) -> bool:
    """Whether a value is only known to be at least that much."""
    return objective == Objective.CAPACITY and record.capacities[workload].bound is Bound.ABOVE


def saturated(record: TrialRecord, objective: str) -> tuple[str, ...]:
    """Classes that carry all of the offered load, so that nothing can be better there."""
    if objective not in (Objective.GOODPUT, Objective.THROUGHPUT):
        return ()
    offered = {name: windows[0].rate_rps for name, windows in windows_of(record).items()}
    return tuple(name for name, value in values(record, objective).items() if value >= FULL * offered[name])


def saturation_note(record: TrialRecord, objective: str) -> str | None:
    """What to tell the user where the offered load is too small to tell configurations apart; None where it is not."""
    full = saturated(record, objective)
    if not full:
        return None
    return (
        f"{', '.join(full)}: the baseline carries all of the offered load, so {objective} cannot rise there. "
        "Give a higher --rate, or leave --objective out to compare capacities"
    )


def windows_of(record: TrialRecord) -> dict[str, list[Probe]]:
    """Valid windows at the given rate, by class."""
    found: dict[str, list[Probe]] = {}
    for probe in record.probes:
        if probe.workload in record.decided and probe.purpose == "bench" and probe.outcome is not Outcome.INVALID:
            found.setdefault(probe.workload, []).append(probe)
    return found


def window_values(record: TrialRecord, workload: str, objective: str) -> tuple[float, ...]:
    """The value of each window by itself."""
    return tuple(_value([window], objective) for window in windows_of(record).get(workload, ()))


def _value(windows: Sequence[Probe], objective: str) -> float:
    if objective == Objective.LATENCY:
        return 1.0 / (1.0 + max(-0.999, min(WORST_EXCESS, _margin(windows))))
    seconds = sum(probe.window_s for probe in windows)
    rates: Mapping[str, list[float]] = {
        Objective.GOODPUT: [sum(m.goodput_rps for m in probe.classes.values()) for probe in windows],
        Objective.THROUGHPUT: [sum(m.throughput_rps for m in probe.classes.values()) for probe in windows],
    }
    answers = sum(rate * probe.window_s for rate, probe in zip(rates[objective], windows, strict=True))
    return max(answers, 0.5) / seconds  # nothing at all has no logarithm


def _margin(windows: Sequence[Probe]) -> float:
    """Mean of log(margin + 1) over windows, as a margin; a window in which failures decide counts as ten times over."""
    logs = [math.log1p(max(-0.999, min(WORST_EXCESS, probe.margin))) for probe in windows]
    return math.expm1(sum(logs) / len(logs))
