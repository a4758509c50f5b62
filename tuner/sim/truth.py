"""Owns the true capacity of a configuration on a scenario (no noise, pooled probes, bisection); it knows no search."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np

from tuner.records import ClassSlo, Config, Metric, RequestResult
from tuner.sim.engine import simulate
from tuner.sim.memory import plan_memory, starts
from tuner.sim.profile import resolve
from tuner.sim.scenario import MIXED, Scenario, requests

SEEDS = (101, 102, 103, 104)
WINDOW_S = 15.0
RESOLUTION = 0.005
SATURATED = 3.0  # margins beyond this are the same to the secant


@dataclass(slots=True)
class Peaks:
    """The most that any run of a capacity search used."""

    sequences: int = 0
    step_tokens: int = 0
    kv_tokens: int = 0


def true_margin(
    scenario: Scenario,
    config: Config,
    workload: str,
    rate_rps: float,
    *,
    peaks: Peaks | None = None,
    seeds: Sequence[int] = SEEDS,
) -> float:
    """Margin (worst limit: measured ÷ limit − 1) over the pooled requests of several probes without noise.

    inf where the success share is broken or the server dies.
    """
    profile = scenario.profile.quiet()
    slo = scenario.slo
    names = [load.name for load in scenario.loads] if workload == MIXED else [workload]
    ramp = max(scenario.load(name).ramp_s for name in names)
    pooled: dict[str, list[RequestResult]] = {name: [] for name in names}
    for seed in seeds:
        planned = requests(scenario, workload, rate_rps=rate_rps, duration_s=ramp + WINDOW_S, seed=seed)
        give_up = ramp + WINDOW_S + max(scenario.load(name).patience_s for name in names)
        result = simulate(profile, config, planned, seed=seed, start_seed=0, give_up_s=give_up, gaps=False)
        if peaks is not None:
            peaks.sequences = max(peaks.sequences, result.peak_running)
            peaks.step_tokens = max(peaks.step_tokens, result.peak_step_tokens)
            peaks.kv_tokens = max(peaks.kv_tokens, result.peak_kv_tokens)
        if result.failure is not None:
            return math.inf
        for row in result.requests:
            if row.scheduled_s >= ramp:
                pooled[row.class_name].append(row)
    return max(_margin(rows, slo.classes[name]) for name, rows in pooled.items())


def _margin(rows: list[RequestResult], slo: ClassSlo) -> float:
    if not rows:
        return -1.0
    if sum(row.ok for row in rows) < slo.success * len(rows):
        return math.inf
    worst = -1.0
    for limit in slo.limits:
        values = [_value(row, limit.metric) for row in rows]
        worst = max(worst, float(np.percentile(values, limit.percentile)) / limit.limit_s - 1.0)
    return worst


def _value(row: RequestResult, metric: Metric) -> float:
    value = {Metric.TTFT: row.ttft_s, Metric.TPOT: row.tpot_s, Metric.E2E: row.e2e_s}[metric] if row.ok else math.inf
    return 0.0 if value is None else value  # TPOT of a single token is undefined and breaks no limit


def true_capacity(
    scenario: Scenario,
    config: Config,
    workload: str,
    *,
    start_rps: float | None = None,
    peaks: Peaks | None = None,
    seeds: Sequence[int] = SEEDS,
    resolution: float = RESOLUTION,
) -> float:
    """Highest rate whose margin is ≤ 0, to `resolution` (of its log); 0 when the server does not start or dies."""
    if starts(scenario.profile, config) is not None:
        return 0.0
    guess = start_rps or (
        sum(load.start_rps for load in scenario.loads) if workload == MIXED else scenario.load(workload).start_rps
    )
    return capacity_of(
        lambda rate: true_margin(scenario, config, workload, rate, peaks=peaks, seeds=seeds), guess, resolution
    )


def capacity_of(margin: Callable[[float], float], guess: float, resolution: float = RESOLUTION) -> float:
    """Root of a rising margin over log rate: bracket by factors, then interpolate, never narrower than bisection."""
    low = high = guess
    below = above = margin(guess)
    while below > 0.0:
        high, above = low, below
        low /= 1.0 + min(1.0, 0.15 + 0.5 * min(below, SATURATED))
        if low < guess / 200:
            return 0.0
        below = margin(low)
    while above <= 0.0:
        low, below = high, above
        high *= 1.25 if above > -0.4 else 1.6
        if high > guess * 200:
            return high
        above = margin(high)
    while math.log(high / low) > resolution:
        share = 0.5
        if above < SATURATED:
            share = min(0.85, max(0.15, -below / (above - below)))
        middle = low * (high / low) ** share
        value = margin(middle)
        if value > 0.0:
            high, above = middle, value
        else:
            low, below = middle, value
    return math.sqrt(low * high)


class Truth:
    """True capacities and objectives of one scenario, remembered in a file.

    Configurations whose limits (budget, sequences, KV tokens) never bound in a capacity search have the same capacity
    as any other that differs in such limits only, so they are not simulated again; without noise this is exact.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path | None = None,
        *,
        seeds: Sequence[int] = SEEDS,
        resolution: float = RESOLUTION,
    ) -> None:
        """`folder` keeps one file a scenario; None remembers in memory only. Fewer `seeds` are coarser."""
        self.scenario = scenario
        self._seeds, self._resolution = tuple(seeds), resolution
        self._file = None if folder is None else folder / f"truth-{scenario.name}.json"
        self._known: dict[str, float] = {}
        self._free: dict[str, list[tuple[tuple[int, int, int], Peaks, float]]] = {}
        self._longest = max(
            load.shared_prefix_tokens + 2 * load.input_tokens + 2 * load.output_tokens for load in scenario.loads
        )
        if self._file is not None and self._file.exists():
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if stored.get("of") == self._identity():  # another definition, other truths
                self._known = stored["capacities"]

    def capacity(self, config: Config, workload: str) -> float:
        """`true_capacity`, remembered."""
        defaults = self.scenario.defaults()
        chosen = {name: value for name, value in sorted(config.items()) if value != defaults.get(name)}
        key = json.dumps([workload, chosen])
        if key not in self._known:
            self._known[key] = self._measure(chosen, workload)
        return self._known[key]

    def objective(self, config: Config) -> float:
        """Weighted geometric mean over classes of capacity ÷ capacity of the defaults; 0 where one class has none."""
        total = 0.0
        for name, promise in self.scenario.slo.classes.items():
            mine = self.capacity(config, name)
            if mine <= 0.0:
                return 0.0
            total += promise.weight * math.log(mine / self.capacity({}, name))
        return math.exp(total)

    def _measure(self, config: Config, workload: str) -> float:
        profile = self.scenario.profile
        if starts(profile, config) is not None:
            return 0.0
        # The defaults come first, whatever is asked first, so that the answers do not depend on the order.
        guess = (self.capacity({}, workload) or None) if config else None
        effective = resolve(profile, config)
        memory = plan_memory(profile, effective)
        limits = (effective.active_seqs, effective.budget, memory.kv_tokens)
        rest = replace(effective, budget=0, seqs=0, active_seqs=0, utilization=0.0, kv_bytes=None)
        key = json.dumps([workload, astuple(rest)])
        slack = self._longest + int(effective.watermark * memory.kv_tokens) + effective.block
        dies_at = memory.oom_tokens if memory.oom_tokens is not None else 1 << 40
        for other, peaks, value in self._free.get(key, []):
            if _same(limits, other, peaks, slack) and peaks.step_tokens <= dies_at:
                return value
        peaks = Peaks()
        value = true_capacity(
            self.scenario,
            config,
            workload,
            start_rps=guess,
            peaks=peaks,
            seeds=self._seeds,
            resolution=self._resolution,
        )
        if value > 0.0 and peaks.step_tokens <= dies_at:
            self._free.setdefault(key, []).append((limits, peaks, value))
        return value

    def _identity(self) -> str:
        return repr((self.scenario.identity, self._seeds, self._resolution))

    def save(self) -> None:
        """Write what is known; atomic."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_suffix(".part")
        text = json.dumps({"of": self._identity(), "capacities": self._known}, indent=0)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._file)


def _same(mine: tuple[int, int, int], other: tuple[int, int, int], peaks: Peaks, slack: int) -> bool:
    """Whether every limit is either equal or was bound in neither."""
    used = (peaks.sequences, peaks.step_tokens, peaks.kv_tokens + slack)
    return all(a == b or top < min(a, b) for a, b, top in zip(mine, other, used, strict=True))
