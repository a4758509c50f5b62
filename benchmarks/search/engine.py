"""One virtual trial, measured by the tuner's own capacity search and screening; every searcher is measured by this.

Two kinds of servers stand behind it: `Events`, the event-driven simulator whose requests are scored by the tuner, and
`table.Table`, which knows the true capacity and draws the noise that `Events` was found to have. A search on the table
takes a second instead of a minute, so that hundreds of them can be compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tuner.capacity import SEARCH, ProbeSettings, Reference, find_capacity, objective, reference, screen
from tuner.metrics import overall, score
from tuner.optimizer import Advice
from tuner.records import (
    Capacity,
    ClientEvidence,
    Config,
    Failure,
    KnobValue,
    PhaseTimes,
    Probe,
    Proposal,
    Step,
    StepKind,
    TrialRecord,
    TrialState,
    Validity,
    Verdict,
)
from tuner.sim.scenario import Scenario
from tuner.sim.virtual import VirtualServer
from tuner.study.advice import advice_for

THRESHOLD = -0.03
CLIP = 0.15
NOT_LAUNCHED_S = 1.0
"""A configuration that a static rule refuses costs no start, for any searcher."""
STOP_S = 10.0
"""Stopping and settling."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one trial gave, and what it cost."""

    state: TrialState
    rates: Mapping[str, float]  # class to capacity, requests/s; predicted where screened
    capacities: Mapping[str, Capacity]
    failure: Failure | None
    effective: Mapping[str, KnobValue]
    minutes: float


class Server(Protocol):
    """One start of one configuration."""

    failure: Failure | None
    start_s: float

    def probe(self, workload: str, rate_rps: float, seed: int, purpose: str, window_s: float) -> Probe:
        """One probe; `failure` says afterwards whether the server died of it."""


class Engine(Protocol):
    """Where servers of one scenario come from."""

    @property
    def scenario(self) -> Scenario: ...

    def start(self, config: Config, seed: int) -> Server:
        """A fresh server; `seed` is the luck of its start."""

    def advice(self, config: Config, capacities: Mapping[str, Capacity]) -> Advice:
        """What the diagnosis says about a configuration that was measured."""


@dataclass(frozen=True, slots=True)
class Events:
    """The event-driven simulator."""

    scenario: Scenario

    def start(self, config: Config, seed: int) -> Server:
        return _Simulated(self.scenario, config, seed)

    def advice(self, config: Config, capacities: Mapping[str, Capacity]) -> Advice:
        return diagnosed(self.scenario, config, capacities)


def diagnosed(scenario: Scenario, config: Config, capacities: Mapping[str, Capacity]) -> Advice:
    """The diagnosis exactly as a study asks for it."""
    proposal = Proposal(0, config, Step(StepKind.USER, {}, None, ""))
    trial = Trial(TrialState.COMPLETE, {}, capacities, None, {**scenario.defaults(), **config}, 0.0)
    return advice_for(record_of(proposal, trial), scenario.slo)


def record_of(proposal: Proposal, trial: Trial) -> TrialRecord:
    """What the optimizer and the diagnosis read of a trial."""
    return TrialRecord(
        number=proposal.number,
        replicate=0,
        config=proposal.config,
        step=proposal.step,
        state=trial.state,
        capacities=trial.capacities,
        probes=(),
        failure=trial.failure,
        effective=trial.effective,
        degraded=(),
        startup={},
        phases=PhaseTimes(),
        environment="",
        command=(),
        started_at=0.0,
        ended_at=0.0,
        seed=0,
        simulated=True,
    )


class _Simulated:
    def __init__(self, scenario: Scenario, config: Config, seed: int) -> None:
        self._scenario, self._server = scenario, VirtualServer(scenario, config, seed)
        self.failure, self.start_s = self._server.failure, self._server.start_s

    def probe(self, workload: str, rate_rps: float, seed: int, purpose: str, window_s: float) -> Probe:
        ramp_s = self._scenario.load(workload).ramp_s
        requests, telemetry, wall_s = self._server.probe(workload, rate_rps, seed, window_s, ramp_s)
        self.failure = self._server.failure
        slo = self._scenario.slo.classes[workload]
        metrics = score(requests, slo, class_name=workload, window=(ramp_s, ramp_s + window_s))
        outcome, margin = overall({workload: metrics})
        return Probe(
            workload=workload,
            rate_rps=rate_rps,
            seed=seed,
            purpose=purpose,
            ramp_s=ramp_s,
            window_s=window_s,
            wall_s=wall_s,
            started_at=0.0,
            classes={workload: metrics},
            outcome=outcome,
            margin=margin,
            validity=Validity(True, (), 0.0, rate_rps, rate_rps),
            client=ClientEvidence(1, 0.1, 0.0, 0.0),
            telemetry=telemetry,
            requests_file="",
        )


class _Died(Exception):
    """The server died under load."""


class Trials:
    """Measures trials of one study; every trial sees the same requests, so that comparisons are paired."""

    def __init__(self, engine: Engine, study_seed: int, settings: ProbeSettings = SEARCH) -> None:
        self.scenario, self._engine, self._settings = engine.scenario, engine, settings
        self._requests = study_seed * 1_000_003
        self.weights = {name: promise.weight for name, promise in self.scenario.slo.classes.items()}
        self._defaults = self.scenario.defaults()

    def measure(
        self,
        config: Config,
        seed: int,
        start: Mapping[str, float],
        incumbent: Mapping[str, Capacity] | None = None,
        screen_below: float = THRESHOLD,
    ) -> Trial:
        """One fresh server. `start`: rates to begin at; `incumbent`: screen against its capacities first."""
        server = self._engine.start(config, seed)
        effective = {**self._defaults, **config}
        if server.failure is not None:
            seconds = NOT_LAUNCHED_S if server.failure.verdict is Verdict.STATIC else server.start_s
            return Trial(TrialState.INFEASIBLE, {}, {}, server.failure, effective, seconds / 60)
        spent = [server.start_s + STOP_S]

        def probe(workload: str, rate_rps: float, number: int, purpose: str, window_s: float) -> Probe:
            done = server.probe(workload, rate_rps, number, purpose, window_s)
            spent.append(done.wall_s)
            if server.failure is not None:
                raise _Died
            return done

        known: dict[str, list[Probe]] = {name: [] for name in self.weights}
        found: dict[str, Capacity] = {}
        pairs = {name: r for name, c in (incumbent or {}).items() if (r := reference(c)) is not None}
        try:
            for name, pair in pairs.items():
                window_s = self._settings.window_for(pair.rate_rps)
                known[name].append(probe(name, pair.rate_rps, pair.seed, "screen", window_s))
                probed = {n: probes[-1] for n, probes in known.items() if probes}
                verdict = screen(probed, pairs, self.weights, threshold=screen_below, clip=CLIP)
                if not verdict.proceed:
                    rates = {n: pairs[n].capacity_rps * math.exp(verdict.predicted.get(n, CLIP)) for n in pairs}
                    return Trial(TrialState.SCREENED, rates, {}, None, effective, sum(spent) / 60)
            for rank, name in enumerate(self.weights):
                found[name] = self._capacity(probe, name, rank, start[name], known[name], pairs.get(name))
        except _Died:
            return Trial(TrialState.INFEASIBLE, {}, found, server.failure, effective, sum(spent) / 60)
        rates = {name: capacity.rate_rps for name, capacity in found.items()}
        return Trial(TrialState.COMPLETE, rates, found, None, effective, sum(spent) / 60)

    def relative(self, rates: Mapping[str, float], baseline: Mapping[str, float]) -> float:
        """The objective: weighted geometric mean of capacity over the baseline's."""
        return objective(rates, baseline, self.weights)

    def _capacity(
        self,
        probe: _Probing,
        name: str,
        rank: int,
        start_rps: float,
        known: list[Probe],
        pair: Reference | None,
    ) -> Capacity:
        seeds = itertools.count(self._requests + 1000 * rank)
        if pair is None:
            return find_capacity(probe, name, start_rps=start_rps, settings=self._settings, seeds=seeds, known=known)
        return find_capacity(
            probe, name, start_rps=start_rps, settings=self._settings, seeds=seeds, known=known, slope=pair.slope
        )


class _Probing(Protocol):
    def __call__(self, workload: str, rate_rps: float, number: int, purpose: str, window_s: float, /) -> Probe: ...
