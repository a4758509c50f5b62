"""From a trial's values to what the optimizer is told: the objective over the baseline, and the constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.capacity import objective as geometric_objective
from tuner.records import Slo, TrialRecord, TrialState
from tuner.study.values import WORST_EXCESS, Objective, excess, values


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one replicate is worth to the search. `objective` is None where nothing was measured."""

    objective: float | None
    constraints: Mapping[str, float]


def weights_of(slo: Slo, workloads: Sequence[str]) -> dict[str, float]:
    """Weight of each measured workload in the objective; they sum to 1.

    A mix carries all classes at once, so it counts as much as all of them together.
    """
    mixes = [name for name in workloads if name not in slo.classes]
    single = sum(slo.classes[name].weight for name in workloads if name in slo.classes)
    shares = {name: slo.classes[name].weight for name in workloads if name in slo.classes}
    shares |= dict.fromkeys(mixes, single or 1.0)
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


def reference_rates(
    replicates: Sequence[TrialRecord], workloads: Sequence[str], objective: str = Objective.CAPACITY
) -> dict[str, float] | None:
    """Geometric mean value of each workload over complete replicates; None where one was never measured."""
    measured = [values(record, objective) for record in replicates if _measured(record)]
    rates: dict[str, float] = {}
    for name in workloads:
        found = [math.log(by_class[name]) for by_class in measured if name in by_class]
        if not found:
            return None
        rates[name] = math.exp(sum(found) / len(found))
    return rates


def evaluate(
    record: TrialRecord,
    reference: Mapping[str, float] | None,
    weights: Mapping[str, float],
    objective: str = Objective.CAPACITY,
) -> Evaluation:
    """Objective and constraints of a complete trial; constraints alone of one that could not run.

    A constraint is the relative excess over the worst limit (`values.excess`): > 0 says that the promise is not kept. A
    trial that was screened out, or stopped, has neither.
    """
    if record.state is TrialState.INFEASIBLE:
        violation = record.failure.violation if record.failure else 1.0
        return Evaluation(None, {"runs": min(WORST_EXCESS, max(violation, 1e-3))})
    if not _measured(record) or reference is None:
        return Evaluation(None, {})
    rates = {name: value for name, value in values(record, objective).items() if name in weights}
    if set(rates) != set(weights):
        return Evaluation(None, {})
    constraints = {"runs": -1.0} | {f"slo.{name}": excess(record, name, objective) for name in weights}
    return Evaluation(geometric_objective(rates, reference, weights), constraints)


def _measured(record: TrialRecord) -> bool:
    return record.state is TrialState.COMPLETE
