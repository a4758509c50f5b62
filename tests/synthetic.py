"""Servers that exist only as arithmetic, for tests of the capacity search; nothing sleeps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tuner.metrics import overall, score_all
from tuner.records import (
    ClassSlo,
    ClientEvidence,
    Limit,
    Metric,
    Probe,
    RequestResult,
    RequestStatus,
    Validity,
)

CLIENT = ClientEvidence(workers=1, cpu_share=0.1, loop_lag_p99_s=0.0, loop_lag_max_s=0.0)
Serve = Callable[[Sequence[float], random.Random], list[RequestResult]]


def slo(success: float = 0.999, weight: float = 1.0, **limits: tuple[float, float]) -> ClassSlo:
    """slo(ttft=(99, 0.5)): percentile and limit in seconds."""
    return ClassSlo(tuple(Limit(Metric(name), q, limit) for name, (q, limit) in limits.items()), success, weight)


def result(index: int, at: float, first: float, last: float, tokens: int, **changes: Any) -> RequestResult:
    """A successful request whose tokens arrive evenly between its first and last."""
    gap = round((last - first) / max(1, tokens - 1) * 1e6)
    base = RequestResult(
        index=index,
        class_name="c",
        status=RequestStatus.OK,
        scheduled_s=at,
        sent_s=at,
        first_s=first,
        last_s=last,
        end_s=last,
        input_tokens=100,
        output_tokens=tokens,
        planned_input_tokens=100,
        planned_output_tokens=tokens,
        usage_reported=True,
        chunks=tokens,
        gaps_us=(gap,) * (tokens - 1),
    )
    return replace(base, **changes)


def arrivals(rate: float, duration: float, rng: random.Random) -> list[float]:
    """Poisson; the same generator state at another rate gives the same pattern on a stretched clock."""
    at, times = 0.0, []
    while (at := at + rng.expovariate(1.0) / rate) < duration:
        times.append(at)
    return times


def queue(service_s: float) -> Serve:
    """M/D/1: one server, first come first served, TTFT = wait + service."""

    def serve(times: Sequence[float], rng: random.Random) -> list[RequestResult]:
        free, results = 0.0, []
        for index, at in enumerate(times):
            free = max(free, at) + service_s
            results.append(result(index, at, free, free, 1))
        return results

    return serve


def batching(seats: int, step_s: float, per_seat_s: float, tokens: int) -> Serve:
    """Continuous batching: a step lasts step + per_seat × running and gives every running request one token."""

    def serve(times: Sequence[float], rng: random.Random) -> list[RequestResult]:
        now, waiting, running, results = 0.0, list(enumerate(times)), [], []
        while waiting or running:
            if not running:
                now = max(now, waiting[0][1])
            while waiting and len(running) < seats and waiting[0][1] <= now:
                index, at = waiting.pop(0)
                running.append([index, at, math.nan, 0])
            now += step_s + per_seat_s * len(running)
            for entry in running:
                entry[3] += 1
                entry[2] = now if entry[3] == 1 else entry[2]
            results += [result(int(i), at, first, now, tokens) for i, at, first, n in running if n == tokens]
            running = [entry for entry in running if entry[3] < tokens]
        return results

    return serve


def prober(
    serve: Serve, promise: ClassSlo, *, ramp_s: float = 2.0, drift: float = 0.0, server: int = 0
) -> Callable[..., Probe]:
    """A prober over a synthetic server. `drift`: log sd of the speed of this server start."""
    speed = math.exp(random.Random(server).gauss(0, drift))

    def probe(workload: str, rate: float, seed: int, purpose: str, window_s: float) -> Probe:
        rng = random.Random(seed)
        times = [at * speed for at in arrivals(rate, ramp_s + window_s, rng)]
        results = [
            result(
                r.index,
                r.scheduled_s / speed,
                r.first_s / speed,
                r.last_s / speed,
                r.output_tokens,
                class_name=workload,
            )
            for r in serve(times, rng)
            if r.first_s is not None and r.last_s is not None
        ]
        return as_probe(results, promise, workload, rate, seed, purpose, ramp_s, window_s)

    return probe


def as_probe(
    results: Sequence[RequestResult],
    promise: ClassSlo,
    workload: str,
    rate: float,
    seed: int,
    purpose: str,
    ramp_s: float,
    window_s: float,
) -> Probe:
    classes = score_all(results, {workload: promise}, window=(ramp_s, ramp_s + window_s))
    outcome, margin = overall(classes)
    return Probe(
        workload=workload,
        rate_rps=rate,
        seed=seed,
        purpose=purpose,
        ramp_s=ramp_s,
        window_s=window_s,
        wall_s=ramp_s + window_s + 1.0,
        started_at=0.0,
        classes=classes,
        outcome=outcome,
        margin=margin,
        validity=Validity(True, (), 0.0, rate, rate),
        client=CLIENT,
        telemetry=None,
        requests_file="",
    )
