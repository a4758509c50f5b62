"""What a trial measures once its server is warm: a screening, then a capacity or a fixed rate for every class."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev

from tuner.capacity import Screening, decide, find_capacity, screen
from tuner.capacity.estimate import SLOPE
from tuner.errors import HarnessError
from tuner.records import Bound, Capacity, Decision, Outcome, Probe
from tuner.trial.context import TrialRequest, in_order, seed_for
from tuner.trial.fixed_rate import hardest_promise, window_at
from tuner.trial.probing import Probing
from tuner.trial.warm import Speed, start_rate


@dataclass
class Measured:
    """Filled while measuring, so that what was finished before a stop is kept."""

    capacities: dict[str, Capacity] = field(default_factory=dict)
    screening: Screening | None = None
    decided: dict[str, Decision] = field(default_factory=dict)


def measure(probing: Probing, request: TrialRequest, speeds: Mapping[str, Speed], into: Measured) -> None:
    """Screen against the incumbent where there is one, then measure every workload, unless screened out."""
    order = in_order(request.workloads, request.round)
    known: dict[str, Probe] = {}
    if request.incumbent:
        known = _screen(probing, request, order, into)
        if into.screening is not None and not into.screening.proceed:
            return
    for name in order:
        if name in request.fixed_rates:
            into.decided[name] = _at_fixed_rate(probing, request, name)
        elif probing.classes[name].arrivals.process == "closed":
            into.capacities[name] = _closed(probing, request, name, speeds[name].rate_rps)
        else:
            reference = (request.incumbent or {}).get(name)
            into.capacities[name] = find_capacity(
                probing,
                name,
                start_rps=start_rate(name, request, speeds),
                settings=request.settings,
                seeds=_seeds(request, name, "capacity", {known[name].seed} if name in known else set()),
                known=[known[name]] if name in known else [],
                slope=reference.slope if reference is not None else SLOPE,
            )


def _screen(probing: Probing, request: TrialRequest, order: tuple[str, ...], into: Measured) -> dict[str, Probe]:
    """One probe per class that repeats the incumbent's, heaviest class first, until the rest could not change it."""
    assert request.incumbent is not None
    known: dict[str, Probe] = {}
    for name in sorted(order, key=lambda name: -request.weights[name]):
        if name not in request.incumbent or probing.classes[name].arrivals.process == "closed":
            continue
        reference = request.incumbent[name]
        window_s = request.settings.window_for(reference.rate_rps)
        known[name] = probing(name, reference.rate_rps, reference.seed, "screen", window_s)
        into.screening = screen(known, request.incumbent, request.weights, threshold=request.screen_below)
        if not into.screening.proceed:
            break
    return known


def _at_fixed_rate(probing: Probing, request: TrialRequest, name: str) -> Decision:
    rate, slos = request.fixed_rates[name], probing.slos(name)
    percentile, needed = hardest_promise(slos, probing.classes[name].mix or {name: 1.0}, request.looks)
    outcome, windows = decide(
        probing,
        name,
        rate,
        slos=slos,
        seeds=_seeds(request, name, "fixed", set()),
        window_s=window_at(rate, needed, request.looks, request.settings),
        looks=request.looks,
        purpose="bench",
        least=request.least_looks,
    )
    scored = sum(m.requests for probe in windows for m in probe.classes.values() if m.outcome is not Outcome.INVALID)
    return Decision(outcome, rate, len(windows), scored, percentile, needed)


def _closed(probing: Probing, request: TrialRequest, name: str, rate_rps: float) -> Capacity:
    """A closed loop offers no rate: what counts is its goodput at the concurrency that the user gave."""
    settings = request.settings
    seeds = _seeds(request, name, "capacity", set())
    window_s = settings.window_for(rate_rps)
    probes = tuple(probing(name, rate_rps, next(seeds), "capacity", window_s) for _ in range(settings.min_probes))
    valid = [probe for probe in probes if probe.outcome is not Outcome.INVALID]
    if not valid:
        raise HarnessError(f"no probe of {name} was valid: {probes[-1].validity.reasons[0]}")
    # A goodput of nothing has no logarithm: at most one request of the window was good.
    logs = [math.log(max(sum(m.goodput_rps for m in p.classes.values()), 1 / p.window_s)) for p in valid]
    measuring = sum(probe.window_s for probe in probes)
    return Capacity(
        workload=name,
        rate_rps=math.exp(fmean(logs)),
        log_sd=stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf,
        slope=SLOPE,
        bound=Bound.BRACKETED if all(probe.margin <= 0 for probe in valid) else Bound.BELOW,
        probes=probes,
        measuring_s=measuring,
        waiting_s=max(0.0, sum(probe.wall_s for probe in probes) - measuring),
    )


def _seeds(request: TrialRequest, workload: str, purpose: str, used: set[int]) -> Iterator[int]:
    """Seeds by ordinal, equal in every trial; those that this trial has used already are passed over."""
    every = (seed_for(request.seed, workload, purpose, i, request.round) for i in itertools.count())
    return (seed for seed in every if seed not in used)
