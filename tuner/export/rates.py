"""The capacities that a study stands for, as its verdict counted them; everything that quotes them reads them here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tuner.records import Bound, Capacity, Estimate, TrialRecord, TrialState
from tuner.study.result import StudyFile
from tuner.study.values import Objective, values

POINT_ESTIMATES = (
    "A capacity is the rate at which the SLO is just kept, as estimated from the probes around it; it is no proof "
    "that the SLO holds at exactly that rate."
)
"""What has to stand beside every capacity."""

_AT_A_RATE = "Measured at {rate:g} requests/s offered to each class, not at the highest rate that keeps the SLO."

ALONE = "Each class by itself: these intervals do not hold for all classes at once."
"""What has to stand beside the gains of classes."""

_ENDED = (TrialState.COMPLETE, TrialState.SCREENED, TrialState.INFEASIBLE)
_MARKS = {Bound.BRACKETED: "", Bound.BELOW: "≤ ", Bound.ABOVE: "≥ "}


class Wording(NamedTuple):
    """What the values of a study are, for whoever prints them."""

    noun: str
    unit: str
    about: str  # what has to stand beside them

    @property
    def short(self) -> str:
        """The noun where it is clear that the SLO is meant."""
        return self.noun.removeprefix("SLO ")


def wording(objective: str, rate_rps: float | None) -> Wording:
    """`rate_rps`: the offered rate of the objectives that are measured at one."""
    about = _AT_A_RATE.format(rate=rate_rps or 0.0)
    match objective:
        case Objective.CAPACITY:
            return Wording("SLO capacity", "requests/s", POINT_ESTIMATES)
        case Objective.LATENCY:
            meaning = "Limit ÷ observed value, of the limit that is closest to being broken; the SLO is kept from 1 up."
            return Wording("latency headroom", "limit ÷ observed", f"{meaning} {about}")
        case _:
            return Wording(objective, "requests/s", about)


@dataclass(frozen=True, slots=True)
class Rate(Estimate):
    """What one class is worth (`wording`): geometric mean, least and greatest over the runs that count."""

    bound: Bound | None = Bound.BRACKETED  # None: some runs bound it from below, others from above

    @property
    def mark(self) -> str:
        """What stands before the number: `≥ ` where the SLO was kept, `≤ ` where it was missed, at every rate."""
        return "≈ " if self.bound is None else _MARKS[self.bound]


@dataclass(frozen=True, slots=True)
class RatePair:
    """One class of the baseline and of the configuration that is written about."""

    baseline: Rate | None
    best: Rate | None
    gain: Estimate | None  # best ÷ baseline with its 95 % interval; known for the winner of a finish only


def rate_pairs(study: StudyFile, trials: Sequence[TrialRecord], number: int | None) -> dict[str, RatePair]:
    """By class, for trial `number`: of the winner exactly what the verdict says, of any other what its records say."""
    before, after = standing(study, trials, number)
    result, objective = study.result, study.definition.objective
    found = {}
    for name in study.definition.workloads:
        pair = RatePair(_rate(before, name, objective), _rate(after, name, objective), None)
        if result is not None and number == result.conclusion.winner and name in result.rates:
            said = result.rates[name]
            best = None if number is None else _with_value(pair.best, said.best_rps)
            pair = RatePair(_with_value(pair.baseline, said.baseline_rps), best, said.gain)
        found[name] = pair
    return found


def standing(
    study: StudyFile, trials: Sequence[TrialRecord], number: int | None
) -> tuple[tuple[TrialRecord, ...], tuple[TrialRecord, ...]]:
    """Complete records that stand for the baseline and for trial `number`.

    After the verdict those that it counted; for what the finish did not measure, and before the verdict, those of the
    search.
    """
    complete = [record for record in trials if record.state is TrialState.COMPLETE]
    counted = [record for record in _counted(study, trials) if record.state is TrialState.COMPLETE]
    reference = dict(study.definition.baseline)
    if any(record.number == number for record in counted) or (number is None and counted):
        pool = counted
    else:
        pool = [record for record in complete if record.round is None]
    before = tuple(record for record in pool if dict(record.config) == reference)
    return before, tuple(record for record in pool if record.number == number)


def _counted(study: StudyFile, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Runs of the finish behind the verdict: whole rounds on one machine, from the plan's first round on."""
    if study.result is None or study.plan is None or not study.plan.runs:
        return []
    planned: dict[int, set[int]] = {}
    for run in study.plan.runs:
        planned.setdefault(run.round, set()).add(run.number)
    ran = sorted((r for r in trials if r.state in _ENDED), key=lambda r: (r.started_at, r.number, r.replicate))
    rounds = sorted({r.round for r in ran if r.round is not None and r.round >= min(planned)})
    found: list[TrialRecord] = []
    for turn in rounds:
        here = [record for record in ran if record.round == turn]
        asked = planned.get(turn, {record.number for record in here})
        for machine in dict.fromkeys(record.machine for record in here):
            first = {record.number: record for record in reversed(here) if record.machine == machine}
            if asked <= set(first):
                found += first.values()
                break
    return found


def _rate(records: Sequence[TrialRecord], workload: str, objective: str) -> Rate | None:
    found = [value for record in records if (value := values(record, objective).get(workload)) is not None]
    if not found:
        return None
    mean = math.exp(sum(map(math.log, found)) / len(found))
    capacities = [record.capacities[workload] for record in records if workload in record.capacities]
    return Rate(mean, min(found), max(found), len(found), _bound(capacities))


def _bound(capacities: Sequence[Capacity]) -> Bound | None:
    """Of a mean: one lower bound among bracketed values makes it a lower bound, and so for upper ones."""
    bounds = {capacity.bound for capacity in capacities} - {Bound.BRACKETED}
    if len(bounds) > 1:
        return None
    return next(iter(bounds), Bound.BRACKETED)


def _with_value(rate: Rate | None, value: float | None) -> Rate | None:
    if value is None:
        return None
    if rate is None:
        return Rate(value, value, value, 0)
    return Rate(value, min(rate.low, value), max(rate.high, value), rate.n, rate.bound)
