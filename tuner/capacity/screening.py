"""Predicting a candidate's objective from one probe per class, and the objective itself; it never rejects on a miss.

Missing the SLO at the incumbent's rate is no reason to drop a candidate: it may trade one class for another, and noise
alone would drop half of the equals. What is compared is the predicted objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.capacity.estimate import log_margin, point
from tuner.records import Capacity, Probe

THRESHOLD = -0.03
CLIP = 0.15


@dataclass(frozen=True, slots=True)
class Reference:
    """The incumbent's probe that a candidate repeats, request by request: same rate, seed and ramp."""

    rate_rps: float
    seed: int
    margin: float
    slope: float
    capacity_rps: float
    ramp_s: float = 0.0  # 0: not known


@dataclass(frozen=True, slots=True)
class Screening:
    """What one probe per class predicts."""

    predicted: Mapping[str, float]  # log change of capacity against the incumbent, by class probed so far
    objective: float  # relative change of the objective; classes not probed yet count at their best case
    proceed: bool


def reference(capacity: Capacity) -> Reference | None:
    """The probe nearest to the incumbent's capacity; None where none was valid."""
    valid = [probe for probe in capacity.probes if point(probe) is not None]
    if not valid:
        return None
    nearest = min(valid, key=lambda probe: abs(math.log(probe.rate_rps / capacity.rate_rps)))
    return Reference(nearest.rate_rps, nearest.seed, nearest.margin, capacity.slope, capacity.rate_rps, nearest.ramp_s)


def screen(
    probes: Mapping[str, Probe],
    incumbent: Mapping[str, Reference],
    weights: Mapping[str, float],
    *,
    threshold: float = THRESHOLD,
    clip: float = CLIP,
) -> Screening:
    """Whether a candidate is worth a full measurement, from the classes probed so far.

    Change of log(margin + 1) against the incumbent at that rate ÷ slope = predicted change of log(capacity), clipped to
    ±`clip`: a saturated class has a steep margin and would veto everything. `weights` by class sum to 1. Classes
    without a probe (or with an invalid one) count at +`clip`, so that a rejection could not be averted by them.
    """
    predicted: dict[str, float] = {}
    for name, probe in probes.items():
        if name in incumbent and point(probe) is not None:
            change = log_margin(probe.margin) - _expected(incumbent[name])
            predicted[name] = min(clip, max(-clip, -change / incumbent[name].slope))
    change = math.expm1(sum(weight * predicted.get(name, clip) for name, weight in weights.items()))
    return Screening(predicted, change, change >= threshold)


def _expected(incumbent: Reference) -> float:
    """log(margin + 1) of the incumbent at the reference's rate: halfway between its paired probe and its line.

    One probe is noisy, and the same requests explain but a part of that; the line rests on all of them.
    """
    line = incumbent.slope * math.log(incumbent.rate_rps / incumbent.capacity_rps)
    return (log_margin(incumbent.margin) + line) / 2


def objective(capacities: Mapping[str, float], baseline: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted geometric mean over classes of capacity ÷ baseline capacity; 1.0 is the baseline. Weights sum to 1."""
    return math.exp(sum(weight * math.log(capacities[name] / baseline[name]) for name, weight in weights.items()))
