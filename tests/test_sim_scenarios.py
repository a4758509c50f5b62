"""Scenarios are well-formed tuning problems with exact truths; the virtual server measures them with noise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sim_truth import FILE, optimum
from tuner.metrics import score
from tuner.records import Config
from tuner.sim import truth as truths
from tuner.sim.engine import simulate, start_factor
from tuner.sim.held_out import HELD_OUT
from tuner.sim.memory import starts
from tuner.sim.scenario import MIXED, Scenario, is_default, requests
from tuner.sim.scenarios import API_SERVER_BOUND, DECODE_BOUND, KV_BOUND, NARROW, NOISY, QUEUEING, SCENARIOS
from tuner.sim.truth import Truth, capacity_of, true_margin
from tuner.sim.virtual import FAILED_START_S, VirtualServer
from tuner.telemetry.names import COUNTERS, GAUGES

ALL = (*SCENARIOS, *HELD_OUT)
COARSE = {"seeds": (101,), "resolution": 0.05}


def test_enough_of_them_and_none_twice() -> None:
    assert len(SCENARIOS) >= 8
    assert len(HELD_OUT) >= 6
    assert len({scenario.name for scenario in ALL}) == len(ALL)
    assert len({scenario.identity for scenario in ALL}) == len(ALL)


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_the_defaults_start_and_are_on_the_grid(scenario: Scenario) -> None:
    assert starts(scenario.profile, {}) is None
    for name, value in scenario.defaults().items():
        assert value in scenario.knobs[name], (name, value)
    configs = scenario.configs()
    assert configs[0] == {}
    assert len(configs) == math.prod(len(values) for values in scenario.knobs.values()) <= 3000
    assert is_default(scenario, scenario.defaults())
    assert not is_default(scenario, configs[-1])
    assert sum(promise.weight for promise in scenario.slo.classes.values()) == pytest.approx(1.0)


def test_known_optima_are_current() -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))
    for scenario in ALL:
        if scenario.name in known:
            config, objective = optimum(scenario)
            assert starts(scenario.profile, config) is None
            assert objective >= 1.0


def test_what_limits_the_defaults_shows_in_what_the_server_says() -> None:
    """At a tenth above the capacity of the defaults."""

    def said(scenario: Scenario) -> tuple[dict[str, float], dict[str, float]]:
        load = scenario.loads[0]
        rate = 1.1 * Truth(scenario, **COARSE).capacity({}, load.name)
        _, telemetry, _ = VirtualServer(scenario, {}, 1).probe(load.name, rate, 5, 15.0, load.ramp_s)
        return dict(telemetry.gauges), dict(telemetry.counters)

    gauges, counters = said(KV_BOUND)
    assert gauges["kv_usage_max"] > 0.99
    assert counters["preemptions"] > 0
    gauges, counters = said(QUEUEING)
    assert gauges["running_max"] == 256
    assert gauges["kv_usage_max"] < 0.5
    assert counters["queue_time_s_sum"] > 0.7 * counters["ttft_s_sum"]
    gauges, counters = said(API_SERVER_BOUND)
    assert gauges["api_cpu_mean"] > 0.85
    assert counters["queue_time_s_sum"] < 0.5 * counters["ttft_s_sum"]
    gauges, counters = said(DECODE_BOUND)
    assert gauges["kv_usage_max"] < 0.5
    assert gauges["running_max"] < 1024
    assert counters["preemptions"] == 0


def test_virtual_telemetry_uses_the_names_of_the_real_one() -> None:
    _, telemetry, seconds = VirtualServer(NOISY, {}, 1).probe("long_in_short_out", 1.0, 1, 5.0, 2.0)
    assert seconds >= 7.0
    assert set(COUNTERS) <= set(telemetry.counters)
    assert {f"{name}_mean" for name in GAUGES} <= set(telemetry.gauges)
    assert {"t_s", *GAUGES} == set(telemetry.series)
    assert telemetry.counters["requests_success"] == telemetry.counters["ttft_s_count"]


def test_a_failed_start_costs_time_and_says_why() -> None:
    server = VirtualServer(NARROW, {"max-num-seqs": 1024}, 1)
    assert server.failure is not None
    assert server.failure.kind == "oom-sampler"
    assert server.start_s == FAILED_START_S


def test_mixed_is_all_classes_at_their_shares() -> None:
    planned = requests(DECODE_BOUND, MIXED, rate_rps=30.0, duration_s=40.0, seed=1)
    longs = sum(request.class_name == "short_in_long_out" for request in planned)
    assert longs / len(planned) == pytest.approx(2 / 3, abs=0.05)
    assert [request.index for request in planned] == list(range(len(planned)))
    assert [r.scheduled_s for r in planned] == sorted(r.scheduled_s or 0.0 for r in planned)
    assert true_margin(DECODE_BOUND, {}, MIXED, 1.0, seeds=(101,)) < 0


def test_margin_is_that_of_the_metrics_room() -> None:
    """The truths use the same definition of a kept promise as the tuner."""
    load = QUEUEING.loads[0]
    mine = true_margin(QUEUEING, {}, load.name, 21.0, seeds=(101,))
    duration = load.ramp_s + truths.WINDOW_S
    planned = requests(QUEUEING, load.name, rate_rps=21.0, duration_s=duration, seed=101)
    result = simulate(QUEUEING.profile.quiet(), {}, planned, seed=101, start_seed=0)
    theirs = score(result.requests, load.slo, class_name=load.name, window=(load.ramp_s, duration))
    assert mine == pytest.approx(theirs.margin, rel=0.02)


def test_capacity_of_a_known_curve() -> None:
    for root in (0.3, 7.0, 40.0):
        assert capacity_of(lambda rate, root=root: (rate / root) ** 3 - 1.0, 5.0) == pytest.approx(root, rel=0.004)
    assert capacity_of(lambda rate: math.inf, 5.0) == 0.0


def test_configurations_whose_limits_never_bind_share_a_truth() -> None:
    shared = Truth(DECODE_BOUND, **COARSE)
    name = "short_in_short_out"
    first = shared.capacity({}, name)
    for config in ({"max-num-batched-tokens": 16384}, {"max-num-seqs": 512}):
        assert shared.capacity(config, name) == Truth(DECODE_BOUND, **COARSE).capacity(config, name) == first
    bound = shared.capacity({"max-num-seqs": 128}, name)
    assert bound == Truth(DECODE_BOUND, **COARSE).capacity({"max-num-seqs": 128}, name) < first


def test_truths_are_kept_on_disk_and_dropped_with_another_scenario(tmp_path: Path) -> None:
    first = Truth(NOISY, tmp_path, **COARSE)
    value = first.objective({"max-num-batched-tokens": 512})
    assert value > 1.05
    first.save()
    again = Truth(NOISY, tmp_path, **COARSE)
    assert again._known == first._known
    assert again.objective({"max-num-batched-tokens": 512}) == value
    changed = replace(NOISY, loads=NOISY.loads[:1])
    assert Truth(changed, tmp_path, **COARSE)._known == {}
    assert Truth(replace(NOISY, note="reworded"), tmp_path, **COARSE)._known == first._known


def test_what_does_not_start_or_dies_has_no_capacity() -> None:
    known = Truth(NOISY, **COARSE)
    assert known.capacity({"gpu-memory-utilization": 0.94}, "long_in_short_out") == 0.0  # graph capture
    assert known.objective({"max-num-batched-tokens": 8192}) == 0.0  # under load


def test_starts_differ_as_much_as_the_profile_says() -> None:
    factors = [math.log(start_factor(NOISY.profile, seed)) for seed in range(300)]
    mean = sum(factors) / 300
    spread = math.sqrt(sum((factor - mean) ** 2 for factor in factors) / 299)
    assert spread == pytest.approx(0.06, rel=0.15)
    assert abs(mean) < 0.01
    assert start_factor(NOISY.profile.quiet(), 7) == 1.0


@pytest.mark.parametrize("config", [{}, {"max-num-batched-tokens": 512}])
def test_a_probe_repeats_exactly(config: Config) -> None:
    one, two = (VirtualServer(NOISY, config, 3).probe("long_in_long_out", 1.5, 9, 10.0, 5.0) for _ in range(2))
    assert one == two
