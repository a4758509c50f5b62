"""Owns the virtual face: a server of a scenario that starts and is probed in simulated seconds; it scores nothing."""

from __future__ import annotations

from tuner.records import Config, Failure, RequestResult, TelemetrySummary
from tuner.sim.engine import SimResult, simulate
from tuner.sim.memory import starts
from tuner.sim.scenario import MIXED, SERVER_START_S, Scenario, requests

FAILED_START_S = 45.0
"""A start that fails, fails before compilation and graph capture are through."""


class VirtualServer:
    """One start of one configuration. All its measurements carry the luck of that start (`start_seed`)."""

    simulated = True

    def __init__(self, scenario: Scenario, config: Config, start_seed: int) -> None:
        self.scenario, self.config, self.start_seed = scenario, config, start_seed
        self.failure: Failure | None = starts(scenario.profile, config)
        self.start_s = SERVER_START_S if self.failure is None else FAILED_START_S

    def probe(
        self, workload: str, rate_rps: float, seed: int, window_s: float, ramp_s: float, *, gaps: bool = False
    ) -> tuple[tuple[RequestResult, ...], TelemetrySummary, float]:
        """Offer `workload` for `ramp_s + window_s` seconds; what is scheduled before `ramp_s` is ramp.

        Returns the requests, what the server said (over ramp and window), and the simulated seconds until the last
        answer. A server that dies says so in `failure` from then on. RuntimeError when it is not running.
        """
        if self.failure is not None:
            raise RuntimeError(f"the simulated server is not running: {self.failure.cause}")
        duration = ramp_s + window_s
        patience = max(load.patience_s for load in self.scenario.loads if workload in (load.name, MIXED))
        planned = requests(self.scenario, workload, rate_rps=rate_rps, duration_s=duration, seed=seed)
        result = simulate(
            self.scenario.profile,
            self.config,
            planned,
            seed=seed,
            start_seed=self.start_seed,
            give_up_s=duration + patience,
            gaps=gaps,
        )
        self.failure = result.failure
        return result.requests, summary(result, ramp_s), max(duration, result.end_s)


def summary(result: SimResult, from_s: float = 0.0) -> TelemetrySummary:
    """Counters and series as the telemetry of a real server would give them; gauges from `from_s` on."""
    clock = result.series["t_s"]
    gauges = {}
    for name in ("running", "waiting", "kv_usage"):
        values = [value for at, value in zip(clock, result.series[name], strict=True) if at >= from_s] or [0.0]
        gauges[f"{name}_mean"] = sum(values) / len(values)
        gauges[f"{name}_max"] = max(values)
    held = [a + b for a, b in zip(result.series["running"], result.series["waiting"], strict=True)]
    gauges["concurrency_max"] = max(held, default=0.0)
    gauges["api_cpu_mean"] = result.api_busy_s / max(result.end_s, 1e-9)
    return TelemetrySummary(result.series, result.counters, gauges, ("nvml", "host"))
