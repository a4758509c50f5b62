"""The simulated engine keeps the scheduler's rules and answers every request exactly once."""

from __future__ import annotations

import pytest

from tuner.records import Config, PlannedRequest, RequestStatus
from tuner.sim.engine import simulate
from tuner.sim.memory import plan_memory, starts
from tuner.sim.profile import resolve
from tuner.sim.profiles import H200_8B
from tuner.sim.scenario import requests
from tuner.sim.scenarios import DECODE_BOUND, NOISY
from tuner.sim.scheduler import Scheduler, Sequence
from tuner.sim.virtual import VirtualServer


def burst(count: int, prompt: int, output: int, gap_s: float = 0.0) -> list[PlannedRequest]:
    return [PlannedRequest(i, "c", i * gap_s, (), prompt, output) for i in range(count)]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max-num-batched-tokens": 512, "max-num-seqs": 16},
        {"long-prefill-token-threshold": 256},
        {"enable-chunked-prefill": False, "max-num-batched-tokens": 16384},
        {"async-scheduling": False, "stream-interval": 4},
        {"gpu-memory-utilization": 0.131, "max-model-len": 4096},
        {"gpu-memory-utilization": 0.131, "max-model-len": 4096, "watermark": 0.05},
    ],
)
def test_every_request_is_answered_once_and_in_full(config: Config) -> None:
    assert starts(H200_8B, config) is None
    planned = [
        PlannedRequest(i, "c", i * 0.02, (), 40 + 37 * i % 1500, 1 + 13 * i % 300, 32 if i % 3 else 0)
        for i in range(150)
    ]
    result = simulate(H200_8B, config, planned, seed=1, start_seed=1)
    assert [row.index for row in result.requests] == list(range(150))
    for row, request in zip(result.requests, planned, strict=True):
        assert row.status is RequestStatus.OK
        assert row.output_tokens == request.output_tokens
        assert row.scheduled_s < (row.first_s or 0.0) <= (row.last_s or 0.0)
        assert row.chunks == len(row.gaps_us) + 1
        assert sum(row.gaps_us) / 1e6 == pytest.approx((row.last_s or 0.0) - (row.first_s or 0.0), abs=1e-3)
    assert result.counters["generation_tokens"] == sum(request.output_tokens for request in planned)


@pytest.mark.parametrize("kv_tokens", [3200, 6400, 100_000])
@pytest.mark.parametrize("threshold", [0, 64])
def test_no_step_breaks_a_limit(kv_tokens: int, threshold: int) -> None:
    config: Config = {
        "max-num-batched-tokens": 256,
        "max-num-seqs": 24,
        "long-prefill-token-threshold": threshold,
        "scheduler-reserve-full-isl": False,
    }
    scheduler = Scheduler(resolve(H200_8B, config), kv_tokens)
    sequences = [Sequence(i, 20 + 61 * i % 900, 1 + 17 * i % 400, (1, 2) if i % 2 else ()) for i in range(120)]
    for sequence in sequences:
        scheduler.add(sequence)
    finished = []
    while scheduler.busy:
        step = scheduler.plan()
        assert 0 < step.tokens <= 256
        assert len(scheduler.running) <= 24
        assert 0 <= scheduler.blocks.free <= scheduler.blocks.total
        assert step.decodes + len(scheduler.prefilling) == len(scheduler.running)
        finished += scheduler.commit(step)
    assert sorted(sequence.key for sequence in finished) == list(range(120))
    assert all(sequence.generated == sequence.output for sequence in sequences)
    assert scheduler.blocks.free == scheduler.blocks.total
    assert scheduler.context == scheduler.decodes == sum(scheduler.due) == 0
    assert (scheduler.counters.preemptions > 0) == (kv_tokens < 10_000)


def test_preempted_requests_compute_again() -> None:
    config: Config = {"gpu-memory-utilization": 0.125, "max-model-len": 2048, "max-num-seqs": 256}
    memory = plan_memory(H200_8B, resolve(H200_8B, config))
    count = memory.kv_tokens // 512
    result = simulate(H200_8B, config, burst(count, 500, 500), seed=1, start_seed=1)
    assert result.counters["preemptions"] > 0
    assert max(result.preemptions) > 0
    assert result.counters["iteration_tokens_sum"] > count * 999
    assert result.peak_kv_tokens <= memory.kv_tokens


def test_same_seeds_same_result_other_start_other_speed() -> None:
    planned = requests(DECODE_BOUND, "short_in_long_out", rate_rps=10.0, duration_s=5.0, seed=3)
    one, same, other = (
        simulate(H200_8B, {}, planned, seed=seed, start_seed=start) for seed, start in ((1, 1), (1, 1), (1, 2))
    )
    assert one == same
    assert one.requests != other.requests


def test_prefix_cache_spares_shared_tokens() -> None:
    planned = [PlannedRequest(i, "c", 0.3 * i, (), 2048, 16, 1024) for i in range(20)]
    with_cache = simulate(H200_8B, {}, planned, seed=1, start_seed=1)
    without = simulate(H200_8B, {"enable-prefix-caching": False}, planned, seed=1, start_seed=1)
    assert [row.cached_tokens for row in with_cache.requests] == [0] + [1024] * 19
    assert all(row.cached_tokens == 0 for row in without.requests)
    assert (with_cache.requests[5].ttft_s or 0.0) < 0.8 * (without.requests[5].ttft_s or 0.0)


def test_equal_prompts_hit_and_different_ones_do_not() -> None:
    same, other = tuple(range(200)), tuple(range(1, 201))
    planned = [PlannedRequest(i, "c", 0.3 * i, prompt, 200, 4) for i, prompt in enumerate((same, same, other))]
    result = simulate(H200_8B, {}, planned, seed=1, start_seed=1)
    assert [row.cached_tokens for row in result.requests] == [0, 192, 0]


def test_longer_than_the_context_is_refused() -> None:
    result = simulate(H200_8B, {"max-model-len": 1024}, burst(1, 1000, 100), seed=1, start_seed=1)
    assert result.requests[0].status is RequestStatus.HTTP_ERROR


def test_a_server_that_dies_under_load_says_so() -> None:
    server = VirtualServer(NOISY, {"max-num-batched-tokens": 8192}, 1)
    assert server.failure is None
    rows, _, _ = server.probe("long_in_short_out", 4.0, 1, 10.0, 0.0)
    assert server.failure is not None
    assert server.failure.kind == "oom-under-load"
    assert any(not row.ok for row in rows)
    with pytest.raises(RuntimeError, match="not running"):
        server.probe("long_in_short_out", 4.0, 1, 10.0, 0.0)


def test_same_seed_other_rate_is_the_same_requests_on_a_stretched_clock() -> None:
    slow = requests(DECODE_BOUND, "short_in_long_out", rate_rps=5.0, duration_s=10.0, seed=3)
    fast = requests(DECODE_BOUND, "short_in_long_out", rate_rps=20.0, duration_s=10.0, seed=3)
    for a, b in zip(slow, fast, strict=False):
        assert (a.input_tokens, a.output_tokens) == (b.input_tokens, b.output_tokens)
        assert (a.scheduled_s or 0.0) == pytest.approx(4.0 * (b.scheduled_s or 0.0))
