"""Owns the virtual-time run of a simulated server: arrivals in, token times and counters out; it never sleeps.

Pure: the same arguments give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tuner.records import Config, Failure, PlannedRequest, RequestResult, RequestStatus
from tuner.sim.blocks import chain
from tuner.sim.frontend import Frontend
from tuner.sim.memory import oom_under_load, plan_memory
from tuner.sim.profile import Effective, Profile, resolve
from tuner.sim.replica import Replica
from tuner.sim.scheduler import Scheduler, Sequence
from tuner.sim.steps import StepTimes


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a simulated server did with a list of requests. Always simulated: never a result about vLLM."""

    requests: tuple[RequestResult, ...]  # by position in the input
    counters: dict[str, float]  # totals, named as in docs/telemetry.md
    series: dict[str, tuple[float, ...]]  # `t_s`, `running`, `waiting`, `kv_usage`
    preemptions: tuple[int, ...]  # by request
    peak_running: int
    peak_step_tokens: int
    peak_kv_tokens: int
    end_s: float
    api_busy_s: float  # of one API server
    failure: Failure | None  # died under load


def start_factor(profile: Profile, start_seed: int) -> float:
    """How much slower than usual this start came out."""
    if not profile.start_noise:
        return 1.0
    return float(np.exp(profile.start_noise * np.random.default_rng((start_seed, 0x5EED)).standard_normal()))


def simulate(
    profile: Profile,
    config: Config,
    requests: Ordered[PlannedRequest],
    *,
    seed: int,
    start_seed: int,
    give_up_s: float | None = None,
    gaps: bool = True,
) -> SimResult:
    """Serve `requests` (open loop, by `scheduled_s`) on a server that starts with an empty cache.

    `seed` draws the noise of the steps, `start_seed` that of the start. After `give_up_s` seconds the client cancels
    what is unfinished. Prompts given as token ids share cached blocks where the ids agree; empty prompts share their
    first `shared_prefix_tokens` with the others of their class. `gaps` off leaves `gaps_us` empty, which is faster.
    """
    effective = resolve(profile, config)
    speed = start_factor(profile, start_seed)
    memory = plan_memory(profile, effective)
    order = sorted(range(len(requests)), key=lambda i: requests[i].scheduled_s or 0.0)
    longest = effective.max_len
    admitted = [i for i in order if requests[i].input_tokens + requests[i].output_tokens <= longest]
    replicas: list[Replica] = []
    owner: dict[int, tuple[Replica, int]] = {}
    for rank in range(effective.data):
        mine = admitted[rank :: effective.data]
        replica = Replica(
            Scheduler(effective, memory.kv_tokens),
            StepTimes(profile, effective, speed),
            Frontend(profile, effective, speed * effective.data),  # shared; each replica sees its part of the time
            [
                Sequence(i, requests[i].input_tokens, requests[i].output_tokens, _hashes(requests[i], effective))
                for i in mine
            ],
            [requests[i].scheduled_s or 0.0 for i in mine],
            _noise(profile, np.random.default_rng((seed, start_seed, rank))),
            oom_tokens=memory.oom_tokens,
            give_up_s=give_up_s,
        )
        owner |= {i: (replica, position) for position, i in enumerate(mine)}
        replica.run()
        replicas.append(replica)
    dead_at = min((r.died_at for r in replicas if r.died_at is not None), default=None)
    failure = None
    if dead_at is not None:
        failure = oom_under_load(profile, effective, max(r.peak_step_tokens for r in replicas))
    visible = {id(r): np.array(r.visible) for r in replicas}
    results = []
    preemptions = []
    for i, request in enumerate(requests):
        if i not in owner:
            refusal = "400: longer than max_model_len"
            results.append(_failed(request, RequestStatus.HTTP_ERROR, request.scheduled_s or 0.0, refusal))
            preemptions.append(0)
            continue
        replica, position = owner[i]
        sequence = replica.sequences[position]
        results.append(_result(request, sequence, visible[id(replica)], effective, dead_at, give_up_s, gaps))
        preemptions.append(sequence.preemptions)
    return SimResult(
        tuple(results),
        _counters(replicas, visible, results),
        _series(replicas),
        tuple(preemptions),
        max(r.peak_running for r in replicas),
        max(r.peak_step_tokens for r in replicas),
        max(r.peak_blocks for r in replicas) * effective.block,
        max(r.now for r in replicas),
        sum(r.frontend.busy_s for r in replicas) / len(replicas),
        failure,
    )


def _hashes(request: PlannedRequest, effective: Effective) -> tuple[int, ...]:
    if not effective.prefix:
        return ()
    if isinstance(request.prompt, tuple) and request.prompt:
        return chain(request.prompt, effective.block)
    shared = min(request.shared_prefix_tokens, request.input_tokens - 1) // effective.block
    group = crc32(request.class_name.encode())
    return tuple(hash((group, i)) for i in range(shared))


def _noise(profile: Profile, rng: np.random.Generator) -> list[tuple[float, float]]:
    """(factor, extra seconds) of steps; the run goes through them in a circle."""
    if not profile.step_noise and not profile.hiccup_share:
        return [(1.0, 0.0)]
    factors = np.exp(profile.step_noise * rng.standard_normal(2048))
    hiccups = (rng.random(2048) < profile.hiccup_share) * rng.exponential(profile.hiccup_s, 2048)
    return list(zip(factors.tolist(), hiccups.tolist(), strict=True))


def _failed(request: PlannedRequest, status: RequestStatus, end_s: float, error: str) -> RequestResult:
    at = request.scheduled_s or 0.0
    return RequestResult(
        index=request.index,
        class_name=request.class_name,
        status=status,
        scheduled_s=at,
        sent_s=at,
        first_s=None,
        last_s=None,
        end_s=max(at, end_s),
        input_tokens=request.input_tokens,
        output_tokens=0,
        planned_input_tokens=request.input_tokens,
        planned_output_tokens=request.output_tokens,
        usage_reported=False,
        chunks=0,
        error=error,
    )


def _result(
    request: PlannedRequest,
    sequence: Sequence,
    visible: NDArray[np.float64],
    effective: Effective,
    dead_at: float | None,
    give_up_s: float | None,
    gaps: bool,
) -> RequestResult:
    """One request as its client saw it."""
    segments = sequence.segments
    if sequence.decoding:  # cut off
        segments = [*segments, (sequence.since, len(visible) - sequence.since + 1)]
    tokens = sum(size for _, size in segments)
    status, error = RequestStatus.OK, ""
    if tokens < request.output_tokens:
        at = request.scheduled_s or 0.0
        if dead_at is None:
            status, error = RequestStatus.TIMEOUT, "the client gave up"
        elif at >= dead_at:
            status, error = RequestStatus.CONNECT_ERROR, "connection refused"
        elif tokens:
            status, error = RequestStatus.STREAM_ERROR, "EngineCore encountered an issue."
        else:
            status, error = RequestStatus.HTTP_ERROR, "500: EngineCore encountered an issue."
        if not tokens:
            return _failed(request, status, dead_at if dead_at is not None else give_up_s or at, error)
    scheduled = request.scheduled_s or 0.0
    first = float(visible[segments[0][0] - 1])
    start, size = segments[-1]
    last = float(visible[start + size - 2])
    chunks = 1 + -(-(tokens - 1) // effective.stream_interval)
    between: tuple[int, ...] = ()
    if gaps:
        times = np.concatenate([visible[start - 1 : start + size - 1] for start, size in segments])
        if effective.stream_interval > 1:
            kept = list(range(0, tokens, effective.stream_interval))
            if kept[-1] != tokens - 1:
                kept.append(tokens - 1)
            times = times[kept]
        between = tuple(np.rint(np.diff(times) * 1e6).astype(np.int64).tolist())
    return RequestResult(
        request.index,
        request.class_name,
        status,
        scheduled,
        scheduled,
        first,
        last,
        last,
        request.input_tokens,
        tokens,
        request.input_tokens,
        request.output_tokens,
        True,
        chunks,
        between,
        max(0, sequence.cached),
        error,
    )


def _counters(
    replicas: list[Replica],
    visible: dict[int, NDArray[np.float64]],
    results: list[RequestResult],
) -> dict[str, float]:
    """Totals as /metrics would have them."""
    queue = prefill = decode = ttft = 0.0
    for replica in replicas:
        seen = visible[id(replica)]
        for position, sequence in enumerate(replica.sequences):
            if sequence.cached < 0 or not sequence.segments or sequence.decoding:
                continue
            scheduled = replica.starts[sequence.first_scheduled - 1]
            ready = replica.ready[position]
            first = float(seen[sequence.segments[0][0] - 1])
            start, size = sequence.segments[-1]
            queue += scheduled - ready
            prefill += first - scheduled
            decode += float(seen[start + size - 2]) - first
            ttft += first - ready
    done = [r for r in results if r.ok]
    many = [r.tpot_s for r in done if r.tpot_s is not None]
    finished = float(len(done))
    return {
        "requests_success": finished,
        "prompt_tokens": float(sum(r.input_tokens for r in results if r.output_tokens)),
        "generation_tokens": float(sum(r.output_tokens for r in results)),
        "preemptions": float(sum(r.scheduler.counters.preemptions for r in replicas)),
        "prefix_queries": float(sum(r.scheduler.counters.prefix_queries for r in replicas)),
        "prefix_hits": float(sum(r.scheduler.counters.prefix_hits for r in replicas)),
        "iteration_tokens_sum": float(sum(r.scheduler.counters.tokens for r in replicas)),
        "iteration_tokens_count": float(sum(r.scheduler.counters.steps for r in replicas)),
        "queue_time_s_sum": queue,
        "queue_time_s_count": finished,
        "prefill_time_s_sum": prefill,
        "prefill_time_s_count": finished,
        "decode_time_s_sum": decode,
        "decode_time_s_count": finished,
        "ttft_s_sum": ttft,
        "ttft_s_count": finished,
        "tpot_s_sum": sum(many),
        "tpot_s_count": float(len(many)),
        "e2e_s_sum": queue + prefill + decode,
        "e2e_s_count": finished,
        "span_s": max(r.now for r in replicas),
    }


def _series(replicas: list[Replica]) -> dict[str, tuple[float, ...]]:
    """Of all replicas together, on the clock of the first."""
    rows = [r.series for r in replicas]
    length = min(len(row) for row in rows)
    return {
        "t_s": tuple(rows[0][i][0] for i in range(length)),
        "running": tuple(float(sum(row[i][1] for row in rows)) for i in range(length)),
        "waiting": tuple(float(sum(row[i][2] for row in rows)) for i in range(length)),
        "kv_usage": tuple(sum(row[i][3] for row in rows) / len(rows) for i in range(length)),
    }
