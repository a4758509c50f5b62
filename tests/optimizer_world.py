"""An analytic server for the optimizer's tests: capacity, crashes and noise as formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tuner.optimizer import Optimizer, Told
from tuner.records import (
    Config,
    Failure,
    KnobValue,
    PhaseTimes,
    Proposal,
    TrialRecord,
    TrialState,
    Verdict,
)
from tuner.space import Kind, Knob, Scale, Space, make_space

DEFAULTS: dict[str, KnobValue] = {
    "gpu-memory-utilization": 0.92,
    "max-num-batched-tokens": 8192,
    "max-num-seqs": 256,
    "enable-prefix-caching": True,
    "performance-mode": "balanced",
}


def knob(name: str, values: tuple[KnobValue, ...], stage: int, coupled: tuple[str, ...] = ()) -> Knob:
    words = any(isinstance(value, str) for value in values)
    kind = Kind.CHOICE if words else Kind.BOOL if isinstance(values[0], bool) else Kind.FLOAT
    return Knob(name, kind, values, Scale.LIST if words else Scale.ORDERED, stage, coupled)


SPACE: Space = make_space(
    "toy",
    [
        knob("gpu-memory-utilization", (0.8, 0.84, 0.88, 0.92, 0.94, 0.96), 0),
        knob("max-num-batched-tokens", (512, 1024, 2048, 4096, 16384, 32768), 1, ("max-num-seqs",)),
        knob("max-num-seqs", (32, 64, 128, 512, 1024), 2, ("max-num-batched-tokens",)),
        knob("enable-prefix-caching", (False, True), 3),
        knob("performance-mode", ("balanced", "throughput", "interactivity"), 5),
    ],
)


def effective(config: Config) -> dict[str, KnobValue]:
    return {**DEFAULTS, **config}


def number(values: dict[str, KnobValue], name: str) -> float:
    value = values[name]
    assert not isinstance(value, str)
    return float(value)


def truth(config: Config) -> float:
    """Best at 2048 tokens, 512 sequences and `throughput`: 1.21 of the defaults."""
    own = effective(config)
    budget, seqs = math.log2(number(own, "max-num-batched-tokens")), math.log2(number(own, "max-num-seqs"))
    gain = -0.03 * ((budget - 11) ** 2 - 4) - 0.04 * ((seqs - 9) ** 2 - 1)
    return math.exp(gain + (0.03 if own["performance-mode"] == "throughput" else 0.0))


def fits(config: Config, limit: float = 0.955) -> bool:
    """Memory: utilisation, and what budget and sequences need beside it."""
    own = effective(config)
    budget, seqs = math.log2(number(own, "max-num-batched-tokens")), math.log2(number(own, "max-num-seqs"))
    return number(own, "gpu-memory-utilization") + 0.01 * (budget - 13) + 0.02 * (seqs - 8) <= limit


OUT_OF_MEMORY = Failure(
    Verdict.INFEASIBLE,
    "oom",
    "launch",
    "CUDA out of memory",
    "nothing left beside the KV cache",
    "lower one of them",
    moves={"gpu-memory-utilization": "down", "max-num-seqs": "down", "max-num-batched-tokens": "down"},
    violation=0.2,
)


def record(
    proposal: Proposal,
    state: TrialState,
    *,
    failure: Failure | None = None,
    replicate: int = 0,
    reported: dict[str, KnobValue] | None = None,
) -> TrialRecord:
    return TrialRecord(
        number=proposal.number,
        replicate=replicate,
        config=proposal.config,
        step=proposal.step,
        state=state,
        capacities={},
        probes=(),
        failure=failure,
        effective=effective(proposal.config) if reported is None else reported,
        degraded=(),
        startup={},
        phases=PhaseTimes(),
        environment="test",
        command=(),
        started_at=0.0,
        ended_at=0.0,
        seed=0,
        simulated=True,
    )


@dataclass
class World:
    """Answers proposals, and keeps what it answered."""

    seed: int = 0
    noise: float = 0.03
    limit: float = 0.955
    faults: Callable[[Proposal], bool] = lambda proposal: False
    history: list[Told] = field(default_factory=list)

    def answer(self, proposal: Proposal) -> Told:
        draw = random.Random(f"{self.seed}/{proposal.number}")
        if self.faults(proposal):
            told = Told(record(proposal, TrialState.FAULT), None, {})
        elif not fits(proposal.config, self.limit):
            told = Told(record(proposal, TrialState.INFEASIBLE, failure=OUT_OF_MEMORY), None, {"runs": 0.2})
        else:
            value = truth(proposal.config) * math.exp(draw.gauss(0.0, self.noise))
            told = Told(record(proposal, TrialState.COMPLETE), value, {"runs": -1.0, "slo.chat": -0.1})
        self.history.append(told)
        return told

    def search(self, optimizer: Optimizer, trials: int) -> list[Proposal]:
        """That many trials, or fewer where the optimizer has nothing left."""
        found: list[Proposal] = []
        while len(found) < trials and (proposal := optimizer.ask()) is not None:
            found.append(proposal)
            told = self.answer(proposal)
            optimizer.tell(told.record, told.objective, told.constraints)
        return found


def optimizer(seed: int = 0, **more: object) -> Optimizer:
    return Optimizer(SPACE, name="toy", seed=seed, **more)  # type: ignore[arg-type]
