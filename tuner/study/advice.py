"""What the incumbent's own metrics suggest to try next, over all classes; the judging itself is `diagnosis`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.capacity import point
from tuner.diagnosis import diagnose, from_probe, suggested_moves
from tuner.records import Capacity, Probe, Slo, TrialRecord
from tuner.study.values import windows_of

ABOVE = 1.35  # times the capacity: beyond, everything is full
_OPPOSITE = {"up": "down", "down": "up", "on": "off", "off": "on"}


def advice_for(record: TrialRecord, slo: Slo) -> dict[str, tuple[str, float]]:
    """Knob to (direction, weight 0..1). Classes vote by weight; a knob that is pulled both ways keeps the rest."""
    votes: dict[str, dict[str, float]] = {}
    near = [probe for capacity in record.capacities.values() if (probe := _telling(capacity)) is not None]
    near += [windows[-1] for windows in windows_of(record).values()]  # of an objective at a given rate
    for probe in near:
        for name, limits in slo.classes.items():
            if name not in probe.classes:
                continue
            findings = diagnose(from_probe(probe, record.effective, limits))
            for knob, (direction, weight) in suggested_moves(findings).items():
                by_direction = votes.setdefault(knob, {})
                by_direction[direction] = by_direction.get(direction, 0.0) + weight * limits.weight
    return {knob: settled for knob, by_direction in votes.items() if (settled := _settled(by_direction))[1] > 0}


def _settled(by_direction: Mapping[str, float]) -> tuple[str, float]:
    direction, weight = max(by_direction.items(), key=lambda item: item[1])
    return direction, min(1.0, weight - by_direction.get(_OPPOSITE.get(direction, ""), 0.0))


def _telling(capacity: Capacity) -> Probe | None:
    """The probe that shows best what limits a class: the one that just missed, else the one nearest to the capacity.

    Just below its capacity a server often shows nothing yet; a tenth above it, queue, cache or processor is full.
    """
    valid = [probe for probe in capacity.probes if point(probe) is not None]
    missed = [p for p in valid if p.margin > 0 and capacity.rate_rps <= p.rate_rps <= ABOVE * capacity.rate_rps]
    if missed:
        return min(missed, key=lambda probe: probe.rate_rps)
    return min(valid, key=lambda probe: abs(math.log(probe.rate_rps / capacity.rate_rps)), default=None)
