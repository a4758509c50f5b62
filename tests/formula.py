"""An executor whose servers are a formula, for tests of the study loop: nothing is started and nothing sleeps."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.synthetic import CLIENT
from tuner.records import (
    Bound,
    Capacity,
    Config,
    EnvironmentFacts,
    Failure,
    Outcome,
    PhaseTimes,
    Probe,
    TrialRecord,
    TrialState,
    Validity,
    Verdict,
)
from tuner.trial import TrialRequest

_CLOCK = itertools.count(1)

Formula = Callable[[Config], Mapping[str, float] | None]
"""Configuration to the true capacity of each class; None where it does not start."""

FACTS = EnvironmentFacts(
    "0.32.0", "3.12", "Linux", "cpu", 8, 2**34, ("GPU",), "580.1", "13.0", "host-a", "kind", "machine-a"
)


@dataclass
class FormulaExecutor:
    """Measures `formula` with log-normal noise per start; `events` may raise or change a record, by call number."""

    formula: Formula
    noise: float = 0.02
    machine: str = "machine-a"
    events: Mapping[int, Callable[[TrialRecord], TrialRecord]] = field(default_factory=dict)
    asked: list[TrialRequest] = field(default_factory=list)

    def run(self, request: TrialRequest) -> TrialRecord:
        self.asked.append(request)
        call = len(self.asked)
        now = 1000.0 * next(_CLOCK)
        rates = self.formula(request.proposal.config)
        draw = random.Random(f"{self.machine}/{request.proposal.number}/{request.replicate}/{request.seed}")
        start = math.exp(draw.gauss(0.0, self.noise))
        capacities = {} if rates is None else {n: capacity(n, rates[n] * start) for n in request.workloads}
        record = TrialRecord(
            number=request.proposal.number,
            replicate=request.replicate,
            config=request.proposal.config,
            step=request.proposal.step,
            state=TrialState.COMPLETE if rates is not None else TrialState.INFEASIBLE,
            capacities=capacities,
            probes=(),
            failure=None if rates is not None else crash(),
            effective={"max-num-seqs": 128, "max-num-batched-tokens": 2048} | dict(request.proposal.config),
            degraded=(),
            startup={},
            phases=PhaseTimes(launch_s=40.0, measure_s=60.0),
            environment=FACTS.digest,
            command=("vllm", "serve"),
            started_at=now,
            ended_at=now + 100.0,
            seed=request.seed,
            simulated=True,
            round=request.round,
            machine=self.machine,
        )
        return self.events[call](record) if call in self.events else record


def capacity(name: str, rate_rps: float) -> Capacity:
    probe = Probe(
        workload=name,
        rate_rps=rate_rps,
        seed=1,
        purpose="capacity",
        ramp_s=1.0,
        window_s=15.0,
        wall_s=16.0,
        started_at=0.0,
        classes={},
        outcome=Outcome.MET,
        margin=-0.01,
        validity=Validity(True, (), 0.0, rate_rps, rate_rps),
        client=CLIENT,
        telemetry=None,
        requests_file="probes/p.jsonl.gz",
    )
    return Capacity(name, rate_rps, 0.03, 1.5, Bound.BRACKETED, (probe,), 16.0, 1.0)


def crash() -> Failure:
    return Failure(
        Verdict.INFEASIBLE, "kv-cache-none", "launch", "No available memory", "does not fit", "less", violation=0.3
    )


def fault(verdict: Verdict = Verdict.ENV) -> Failure:
    return Failure(verdict, "gpu-taken", "launch", "another process holds the GPU", "not ours", "Free the GPU.")
