"""Owns what a simulated tuning problem is (machine, loads, knobs) and the requests of its probes; no results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from tuner.records import ClassSlo, Config, KnobValue, Limit, Metric, PlannedRequest, Slo
from tuner.sim.memory import starts
from tuner.sim.profile import Profile, knob_values, resolve

MIXED = "mixed"
SERVER_START_S = 90.0
"""What one start costs in every scenario, as in the prototype that docs/simulator.md names."""


@dataclass(frozen=True, slots=True)
class Load:
    """One workload class of a scenario: log-normal lengths, Poisson arrivals."""

    name: str
    input_tokens: int  # median
    output_tokens: int
    ttft_ms: float  # p99
    tpot_ms: float  # p99
    weight: float = 1.0
    sigma: float = 0.12  # of the log of both lengths
    shared_prefix_tokens: int = 0
    start_rps: float = 1.0  # a first guess at the capacity under the defaults

    @property
    def slo(self) -> ClassSlo:
        limits = (Limit(Metric.TTFT, 99.0, self.ttft_ms / 1e3), Limit(Metric.TPOT, 99.0, self.tpot_ms / 1e3))
        return ClassSlo(limits, 0.99, self.weight)

    @property
    def ramp_s(self) -> float:
        """About one end-to-end time near the capacity."""
        return max(3.0, 0.7 * self.output_tokens * self.tpot_ms / 1e3)

    @property
    def patience_s(self) -> float:
        """How long after the last arrival answers are waited for: twice what an answer may take."""
        return 10.0 + 2.0 * (self.ttft_ms + self.output_tokens * self.tpot_ms) / 1e3


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine × model × loads, with an exhaustive grid of knobs and what is known about it beforehand."""

    name: str
    profile: Profile
    loads: tuple[Load, ...]
    knobs: Mapping[str, tuple[KnobValue, ...]]  # ordered values; every knob's default is among them
    limiter: str  # what limits the defaults, in the words of the diagnosis
    note: str

    @property
    def slo(self) -> Slo:
        total = sum(load.weight for load in self.loads)
        classes = {load.name: ClassSlo(load.slo.limits, load.slo.success, load.weight / total) for load in self.loads}
        return Slo(classes, f"scenario-{self.name}")

    @property
    def identity(self) -> str:
        """Everything that a result depends on."""
        return repr((self.profile, self.loads, dict(self.knobs)))

    def load(self, name: str) -> Load:
        """The class of that name; KeyError where there is none."""
        for load in self.loads:
            if load.name == name:
                return load
        raise KeyError(name)

    def defaults(self) -> dict[str, KnobValue]:
        """The value that each knob has when it is not given."""
        values = knob_values(resolve(self.profile, {}))
        return {name: values[name] for name in self.knobs}

    def configs(self) -> list[dict[str, KnobValue]]:
        """Every configuration of the grid as overrides over the defaults, the defaults first."""
        defaults = self.defaults()
        found = []
        for values in product(*self.knobs.values()):
            chosen = dict(zip(self.knobs, values, strict=True))
            found.append({name: value for name, value in chosen.items() if value != defaults[name]})
        return sorted(found, key=len)

    def feasible(self) -> list[dict[str, KnobValue]]:
        """Those that start."""
        return [config for config in self.configs() if starts(self.profile, config) is None]


def is_default(scenario: Scenario, config: Config) -> bool:
    """Whether a configuration is the defaults, spelled out or not."""
    defaults = scenario.defaults()
    return all(value == defaults.get(name) for name, value in config.items())


def requests(
    scenario: Scenario, workload: str, *, rate_rps: float, duration_s: float, seed: int
) -> tuple[PlannedRequest, ...]:
    """The requests of one probe. Same seed and another rate: the same requests on a stretched clock.

    `mixed` is all classes at once, each at its share of the rate. Prompts are empty: only lengths and shared prefixes
    matter to the simulator.
    """
    if workload != MIXED:
        return _plan(scenario.load(workload), rate_rps, duration_s, seed, 0)
    slo = scenario.slo
    parts = [
        _plan(load, rate_rps * slo.classes[load.name].weight, duration_s, seed, rank)
        for rank, load in enumerate(scenario.loads)
    ]
    merged = sorted((request for part in parts for request in part), key=lambda r: r.scheduled_s or 0.0)
    return tuple(
        PlannedRequest(
            i, r.class_name, r.scheduled_s, r.prompt, r.input_tokens, r.output_tokens, r.shared_prefix_tokens
        )
        for i, r in enumerate(merged)
    )


def _plan(load: Load, rate_rps: float, duration_s: float, seed: int, rank: int) -> tuple[PlannedRequest, ...]:
    count = int(rate_rps * duration_s + 6.0 * np.sqrt(rate_rps * duration_s) + 10)
    arrivals, inputs, outputs = _draws(seed, rank, 1 << (count - 1).bit_length(), load.sigma)
    times = arrivals[:count] / rate_rps
    inside = int(np.searchsorted(times, duration_s))
    prompt = np.maximum(np.rint(inputs[:inside] * load.input_tokens), 2).astype(int) + load.shared_prefix_tokens
    answer = np.maximum(np.rint(outputs[:inside] * load.output_tokens), 1).astype(int)
    return tuple(
        PlannedRequest(i, load.name, at, (), size, tokens, load.shared_prefix_tokens)
        for i, (at, size, tokens) in enumerate(
            zip(times[:inside].tolist(), prompt.tolist(), answer.tolist(), strict=True)
        )
    )


Draws = tuple["np.ndarray[tuple[int], np.dtype[np.float64]]", ...]


@lru_cache(maxsize=512)
def _draws(seed: int, rank: int, count: int, sigma: float) -> Draws:
    """Arrivals at unit rate and relative lengths; each from its own stream, so that a longer draw begins the same."""
    streams = np.random.SeedSequence((seed, rank)).spawn(3)
    gaps, inputs, outputs = (np.random.default_rng(stream) for stream in streams)
    return (
        np.cumsum(gaps.exponential(1.0, count)),
        np.exp(sigma * np.clip(inputs.standard_normal(count), -2.5, 2.5)),
        np.exp(sigma * np.clip(outputs.standard_normal(count), -2.5, 2.5)),
    )
