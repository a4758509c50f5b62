"""Which rate to probe next until the capacity of one class is known well enough; it decides, the prober measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from tuner.capacity.estimate import SLOPE, Fit, Point, bracket, fit, point
from tuner.capacity.settings import ProbeSettings
from tuner.errors import HarnessError
from tuner.metrics import outcome_of
from tuner.records import Bound, Capacity, ClassSlo, Outcome, Probe

Prober = Callable[[str, float, int, str, float], Probe]
"""(workload, rate_rps, seed, purpose, window_s) -> Probe. Whatever it raises ends the search."""

_SATURATED = 0.9  # completions ÷ arrivals; 60 Poisson arrivals over a steady ramp rarely fall below it by chance
_FAR = math.log(2.0)  # of the limit: there the curve is flat, and its slope says nothing about the way to go
_IDLE = 0.25  # requests in the server on average: slower arrivals would not make an answer faster
_MARGIN_IN_BRACKET = 0.2  # share of a bracket that a step keeps away from its ends, so that every step shrinks it
_MAX_UNUSABLE = 2  # probes that were invalid, or so slow that nothing arrived in the window


def find_capacity(
    probe: Prober,
    workload: str,
    *,
    start_rps: float,
    settings: ProbeSettings,
    seeds: Iterator[int],
    known: Sequence[Probe] = (),
    slope: float = SLOPE,
    purpose: str = "capacity",
) -> Capacity:
    """The highest rate at which `workload` keeps its SLO, requests/s.

    Starts at `start_rps` (or from the `known` probes of the same server, which are used and returned like its own),
    steps by a damped secant on log(margin + 1) over log(rate), and goes on at the estimate until its standard deviation
    is `settings.precision` or the cap is reached: a fixed-width sequential rule. `slope` is what is known of the curve
    (the incumbent's). HarnessError when no probe was valid, or when invalid ones ended the search on one side of the
    limit: a bound that the client sets says nothing about the server.
    """
    probes = list(known)
    while (rate := next_rate(probes, start_rps=start_rps, settings=settings, slope=slope)) is not None:
        probes.append(probe(workload, rate, next(seeds), purpose, settings.window_for(rate)))
    points = _points(probes)
    reasons = "; ".join(dict.fromkeys(reason for p in probes for reason in p.validity.reasons))
    if not points:
        raise HarnessError(f"no probe of {workload} was valid: {reasons or 'no request was scored'}")
    low, high = bracket(points)
    valid = [p for p in probes if p.outcome is not Outcome.INVALID]
    one_sided = low is None or high is None
    if one_sided and len(valid) < len(probes) and next_rate(valid, start_rps=start_rps, settings=settings, slope=slope):
        raise HarnessError(f"the client could not measure {workload} up to its limit: {reasons}")
    found = fit(points, slope)
    measuring = sum(p.window_s for p in probes)
    if low is not None and high is not None:
        bound = Bound.BRACKETED
    elif high is None:
        bound, found = Bound.ABOVE, Fit(max(p.x for p in points), found.log_sd, found.slope)
    else:
        bound, found = Bound.BELOW, Fit(min(p.x for p in points), found.log_sd, found.slope)
    return Capacity(
        workload=workload,
        rate_rps=math.exp(found.x),
        log_sd=found.log_sd,
        slope=found.slope,
        bound=bound,
        probes=tuple(probes),
        measuring_s=measuring,
        waiting_s=max(0.0, sum(p.wall_s for p in probes) - measuring),
    )


def next_rate(
    probes: Sequence[Probe], *, start_rps: float, settings: ProbeSettings, slope: float = SLOPE
) -> float | None:
    """The rate of the next probe, requests/s; None when the capacity is known as well as it will be."""
    points = _points(probes)
    invalid = [math.log(p.rate_rps) for p in probes if p.outcome is Outcome.INVALID]
    if not probes:
        return start_rps
    if len(probes) - len(points) >= _MAX_UNUSABLE:
        return None
    x = _next(points, settings, slope) if points else math.log(start_rps)
    if x is None:
        return None
    if invalid and x > min(invalid) - math.log(1.05):
        # The client could not carry that rate: go between it and what is known, or stop if that is close enough.
        reached = max((p.x for p in points if p.x < min(invalid)), default=min(invalid) - 2 * math.log(settings.leap))
        if min(invalid) - reached <= 2 * math.log1p(settings.resolution):
            return None
        x = (reached + min(invalid)) / 2
    return math.exp(x)


def decide(
    probe: Prober,
    workload: str,
    rate_rps: float,
    *,
    slos: Mapping[str, ClassSlo],
    seeds: Iterator[int],
    window_s: float,
    looks: int,
    purpose: str,
    least: int = 1,
) -> tuple[Outcome, tuple[Probe, ...]]:
    """Whether the SLO holds at one rate, adding windows with fresh requests until that is resolved, `looks` at most.

    `least` windows are added in any case, for whoever wants a value and not only the verdict.

    `slos` by class. Counts are pooled over the windows. Every look uses 1 − 0.05/looks, so that looking repeatedly
    keeps the error below 5 % (Bonferroni; group-sequential designs: Jennison and Turnbull (2000), chapter 2).
    """
    probes: list[Probe] = []
    outcome = Outcome.UNRESOLVED
    while len(probes) < looks and (outcome is Outcome.UNRESOLVED or len(probes) < least):
        probes.append(probe(workload, rate_rps, next(seeds), purpose, window_s))
        if probes[-1].outcome is Outcome.INVALID:
            return Outcome.INVALID, tuple(probes)
        outcome = _pooled_outcome(probes, slos, 1 - 0.05 / looks)
    return outcome, tuple(probes)


def _points(probes: Sequence[Probe]) -> list[Point]:
    return [p for p in map(point, probes) if p is not None]


def _next(points: Sequence[Point], settings: ProbeSettings, slope: float) -> float | None:
    """log(rate) of the next probe; None to stop."""
    low, high = bracket(points)
    if high is None:
        return _up(points, settings, slope)
    if low is None:
        return _down(points, settings, slope)
    found = fit(points, slope)
    half = math.log1p(settings.resolution) / 2
    settled = min(abs(p.x - found.x) for p in points) <= half or abs(high - low) <= 2 * half
    if len(points) >= settings.min_probes and settled and found.log_sd <= settings.precision:
        return None
    if len(points) >= settings.max_probes + _shifts(points):
        return None
    if high - low > 2 * half:
        guard = _MARGIN_IN_BRACKET * (high - low)
        return min(max(found.x, low + guard), high - guard)
    return found.x


def _shifts(points: Sequence[Point]) -> int:
    """Probes that only served to find the other side; they do not count towards `max_probes`."""
    first = points[0].y <= 0
    return next((i for i, p in enumerate(points) if (p.y <= 0) is not first), len(points)) - 1


def _up(points: Sequence[Point], settings: ProbeSettings, slope: float) -> float | None:
    if len(points) >= settings.max_shifts:
        return None
    top = max(points, key=lambda p: p.x)
    if top.y < -_FAR:
        return top.x + math.log(settings.leap)
    return top.x + _stride(-top.y / slope, len(points), settings)


def _down(points: Sequence[Point], settings: ProbeSettings, slope: float) -> float | None:
    bottom = min(points, key=lambda p: p.x)
    if len(points) >= settings.max_shifts or 0 < bottom.concurrency < _IDLE:
        return None
    x = bottom.x - _stride(bottom.y / slope, len(points), settings)
    if bottom.completed is not None and bottom.completed < _SATURATED:
        # More arrived than was served; what was served is a rate that the server carries at most.
        x = min(x, bottom.x + math.log(max(bottom.completed, 1 / settings.leap)))
    return x


def _stride(step: float, tries: int, settings: ProbeSettings) -> float:
    """At least the resolution, twice as long after every probe that stayed on the same side, at most one leap."""
    least = math.log1p(settings.resolution) * math.pow(2.0, tries - 1)
    return min(max(step, least), math.log(settings.leap))


def _pooled_outcome(probes: Sequence[Probe], slos: Mapping[str, ClassSlo], confidence: float) -> Outcome:
    outcomes = set()
    for name, slo in slos.items():
        scores = [probe.classes[name] for probe in probes]
        outcomes.add(outcome_of(slo, [(score.limits, score.success) for score in scores], confidence))
    if Outcome.MISSED in outcomes:
        return Outcome.MISSED
    return Outcome.MET if outcomes == {Outcome.MET} else Outcome.UNRESOLVED
