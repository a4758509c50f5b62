"""The symptom table: each constructed situation is named, with its numbers and the direction of the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.diagnosis import Evidence, Finding, combine, diagnose, from_probe, suggested_moves
from tuner.metrics import score
from tuner.records import ClassSlo, ClientEvidence, Limit, Metric, Probe, TelemetrySummary, Validity
from tuner.sim.profile import knob_values, resolve
from tuner.sim.scenario import Scenario
from tuner.sim.scenarios import API_SERVER_BOUND, DECODE_BOUND, KV_BOUND, PREFILL_INTERFERENCE, QUEUEING
from tuner.sim.virtual import VirtualServer

LIMITS = {Metric.TTFT: 1.0, Metric.TPOT: 0.05}
CALM = Evidence(
    margins={Metric.TTFT: -0.2, Metric.TPOT: -0.2},
    limits_s=LIMITS,
    mean_s={Metric.TTFT: 0.2, Metric.TPOT: 0.02, Metric.ITL: 0.02},
    p50_s={Metric.TTFT: 0.2, Metric.TPOT: 0.02, Metric.ITL: 0.02},
    p99_s={Metric.TTFT: 0.8, Metric.TPOT: 0.025, Metric.ITL: 0.03},
    requests=300.0,
    input_tokens=200.0,
    output_tokens=200.0,
    running_mean=60.0,
    running_max=90.0,
    waiting_mean=0.0,
    waiting_max=0.0,
    kv_usage_mean=0.2,
    kv_usage_max=0.3,
    preemptions=0.0,
    tokens_per_step=200.0,
    queue_s=0.001,
    prefill_s=0.15,
    decode_s=4.0,
    max_num_seqs=256.0,
    budget=8192.0,
    api_cpu=0.2,
    engine_cpu=0.4,
    client_cpu=0.1,
    client_lag_s=0.001,
    gpu_util=0.95,
    throttled_share=0.0,
)

SITUATIONS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (
        "queueing",
        {
            "margins": {Metric.TTFT: 1.5, Metric.TPOT: -0.3},
            "running_mean": 250.0,
            "running_max": 256.0,
            "waiting_mean": 40.0,
            "queue_s": 1.5,
        },
        {"max-num-seqs": "up"},
    ),
    (
        "kv-bound",
        {
            "margins": {Metric.TTFT: 4.0, Metric.TPOT: 0.1},
            "running_max": 72.0,
            "waiting_mean": 120.0,
            "queue_s": 20.0,
            "kv_usage_max": 0.99,
            "preemptions": 480.0,
        },
        {"gpu-memory-utilization": "up", "max-num-seqs": "down"},
    ),
    (
        "kv-bound",  # requests wait for blocks without being thrown out
        {"margins": {Metric.TTFT: 2.0}, "running_max": 60.0, "waiting_mean": 9.0, "queue_s": 2.0, "kv_usage_max": 0.96},
        {"gpu-memory-utilization": "up"},
    ),
    (
        "prefill-interference",  # H200, 4096/64 at 8/s: TPOT p50 30 ms, p99 96 ms
        {
            "margins": {Metric.TTFT: -0.1, Metric.TPOT: 0.9},
            "p50_s": {Metric.TPOT: 0.030, Metric.ITL: 0.012},
            "p99_s": {Metric.TPOT: 0.096, Metric.ITL: 0.25},
            "mean_s": {Metric.TPOT: 0.032, Metric.ITL: 0.032},
            "input_tokens": 4096.0,
            "output_tokens": 64.0,
        },
        {"max-num-batched-tokens": "down", "long-prefill-token-threshold": "on"},
    ),
    (
        "prefill-bound",
        {
            "margins": {Metric.TTFT: 0.6, Metric.TPOT: -0.5},
            "input_tokens": 4096.0,
            "output_tokens": 16.0,
            "tokens_per_step": 1900.0,
            "budget": 2048.0,
            "waiting_mean": 6.0,
            "queue_s": 0.5,
            "prefill_s": 0.9,
        },
        {"max-num-batched-tokens": "up"},
    ),
    (
        "decode-bound",
        {
            "margins": {Metric.TTFT: -0.6, Metric.TPOT: 0.1},
            "p50_s": {Metric.TPOT: 0.049, Metric.ITL: 0.048},
            "p99_s": {Metric.TPOT: 0.055, Metric.ITL: 0.06},
            "mean_s": {Metric.TPOT: 0.049, Metric.ITL: 0.049},
            "running_mean": 240.0,
        },
        {"max-num-seqs": "down"},
    ),
    (
        "api-server-bound",
        {
            "margins": {Metric.TTFT: 0.8, Metric.TPOT: -0.2},
            "mean_s": {Metric.TTFT: 0.9, Metric.TPOT: 0.02, Metric.ITL: 0.02},
            "api_cpu": 0.99,
            "prefill_s": 0.04,
        },
        {"api-server-count": "up"},
    ),
    ("client-bound", {"client_cpu": 0.99}, {}),
    ("client-bound", {"client_lag_s": 0.4}, {}),
    ("host-bound", {"engine_cpu": 1.0, "gpu_util": 0.4}, {"async-scheduling": "on", "enforce-eager": "off"}),
    ("throttled", {"throttled_share": 0.6}, {}),
    ("idle", {"margins": {Metric.TTFT: -0.9, Metric.TPOT: -0.8}, "gpu_util": 0.2, "running_mean": 2.0}, {}),
    (
        "long-outputs",
        {
            "margins": {Metric.TTFT: -0.5, Metric.TPOT: -0.4, Metric.E2E: 0.3},
            "limits_s": {**LIMITS, Metric.E2E: 10.0},
            "decode_s": 12.0,
        },
        {"max-num-seqs": "down"},
    ),
]


@pytest.mark.parametrize(("kind", "changes", "moves"), SITUATIONS)
def test_a_situation_is_named_first(kind: str, changes: dict[str, Any], moves: dict[str, str]) -> None:
    findings = diagnose(replace(CALM, **changes))
    assert findings, "nothing found"
    assert findings[0].kind == kind
    assert findings[0].confidence >= 0.5
    assert findings[0].evidence
    assert findings[0].explanation
    assert moves.items() <= findings[0].moves.items()


def test_a_server_within_its_promise_has_no_strong_finding() -> None:
    assert all(finding.confidence < 0.5 for finding in diagnose(CALM))


def test_short_prompts_are_not_blamed_for_uneven_tokens() -> None:
    uneven: dict[str, Any] = {
        "p50_s": {Metric.TPOT: 0.02, Metric.ITL: 0.01},
        "mean_s": {Metric.TPOT: 0.03, Metric.ITL: 0.03},
    }
    findings = diagnose(replace(CALM, margins={Metric.TPOT: 0.2}, input_tokens=100.0, **uneven))
    assert "prefill-interference" not in {finding.kind for finding in findings}


def test_queueing_that_breaks_no_promise_is_left_to_what_does() -> None:
    decode = next(changes for kind, changes, _ in SITUATIONS if kind == "decode-bound")
    crowded = {**decode, "running_mean": 150.0, "running_max": 256.0, "waiting_mean": 3.0, "queue_s": 0.2}
    assert diagnose(replace(CALM, **crowded))[0].kind == "decode-bound"


def test_without_evidence_nothing_is_claimed() -> None:
    assert diagnose(Evidence()) == ()


def test_a_set_threshold_moves_down_instead_of_on() -> None:
    changes = next(changes for kind, changes, _ in SITUATIONS if kind == "prefill-interference")
    finding = diagnose(replace(CALM, **changes, long_prefill_threshold=2048.0))[0]
    assert finding.moves["long-prefill-token-threshold"] == "down"


def test_moves_are_weighed_by_confidence_and_opposites_cancel() -> None:
    up = Finding("a", 0.9, (), "", {"max-num-seqs": "up", "async-scheduling": "on"})
    down = Finding("b", 0.85, (), "", {"max-num-seqs": "down", "enforce-eager": "off"})
    moves = suggested_moves([up, down])
    assert "max-num-seqs" not in moves
    assert {knob: direction for knob, (direction, _) in moves.items()} == {
        "async-scheduling": "on",
        "enforce-eager": "off",
    }
    assert [weight for _, weight in moves.values()] == pytest.approx([0.72, 0.68])
    assert suggested_moves([up])["max-num-seqs"] == ("up", 0.9)
    assert suggested_moves([]) == {}


def test_findings_of_classes_are_weighed_by_their_traffic() -> None:
    queueing, decode = Finding("queueing", 1.0, ("x",), ""), Finding("decode-bound", 0.6, ("y",), "")
    merged = combine({"short": [queueing], "long": [decode]}, {"short": 0.25, "long": 0.75})
    assert [(finding.kind, round(finding.confidence, 3)) for finding in merged] == [
        ("decode-bound", 0.45),
        ("queueing", 0.25),
    ]
    assert merged[1].evidence == ("short: x",)
    both = combine({"short": [queueing], "long": [queueing]}, {"short": 0.25, "long": 0.75})
    assert both[0].confidence == pytest.approx(1.0)
    assert combine({}, {}) == ()


# --- from a probe ----------------------------------------------------------------------------------------------------


def probe_of(scenario: Scenario, load: str, rate_rps: float, seed: int = 5) -> Probe:
    """A probe of the scenario's defaults in simulated time."""
    window_s, ramp_s = 15.0, scenario.load(load).ramp_s
    server = VirtualServer(scenario, {}, 0)
    requests, telemetry, wall_s = server.probe(load, rate_rps, seed, window_s, ramp_s, gaps=True)
    metrics = score(requests, scenario.slo.classes[load], class_name=load, window=(ramp_s, ramp_s + window_s))
    return Probe(
        workload=load,
        rate_rps=rate_rps,
        seed=seed,
        purpose="capacity",
        ramp_s=ramp_s,
        window_s=window_s,
        wall_s=wall_s,
        started_at=0.0,
        classes={load: metrics},
        outcome=metrics.outcome,
        margin=metrics.margin,
        validity=Validity(True, (), 0.002, rate_rps, rate_rps),
        client=ClientEvidence(1, 0.1, 0.001, 0.002),
        telemetry=telemetry,
        requests_file="x",
    )


@pytest.mark.parametrize(
    ("scenario", "load", "rate_rps"),
    [
        (KV_BOUND, "short_in_long_out", 3.0),
        (PREFILL_INTERFERENCE, "long_in_short_out", 7.2),
        (DECODE_BOUND, "short_in_long_out", 23.0),
        (API_SERVER_BOUND, "short_in_short_out", 205.0),
        (QUEUEING, "short_in_long_out", 22.5),
    ],
    ids=lambda value: value.name if isinstance(value, Scenario) else str(value),
)
def test_the_known_limiter_of_a_simulated_server(scenario: Scenario, load: str, rate_rps: float) -> None:
    effective = knob_values(resolve(scenario.profile, {}))
    named = [
        diagnose(from_probe(probe_of(scenario, load, rate_rps, seed), effective, scenario.slo.classes[load]))[0].kind
        for seed in (5, 6)
    ]
    assert named == [scenario.limiter] * 2


def test_numbers_arrive_where_they_belong() -> None:
    probe = probe_of(QUEUEING, "short_in_short_out", 20.0)
    assert probe.telemetry is not None
    effective = {"max-num-seqs": 64, "data-parallel-size": 2, "max-num-batched-tokens": 2048, "async-scheduling": True}
    evidence = from_probe(probe, effective, QUEUEING.slo.classes["short_in_short_out"])
    assert evidence.max_num_seqs == 128
    assert evidence.budget == 2048
    assert evidence.running_max == probe.telemetry.gauges["running_max"]
    assert evidence.output_tokens == pytest.approx(100, rel=0.1)
    assert evidence.client_lag_s == 0.002
    assert evidence.limits_s == {Metric.TTFT: 0.8, Metric.TPOT: 0.05}
    assert set(evidence.margins) == {Metric.TTFT, Metric.TPOT}
    assert evidence.gpu_util is None
    assert evidence.engine_cpu is None


def test_without_telemetry_the_client_still_speaks() -> None:
    probe = replace(probe_of(QUEUEING, "short_in_short_out", 20.0), telemetry=None)
    evidence = from_probe(probe, {}, QUEUEING.slo.classes["short_in_short_out"])
    assert evidence.running_max is None
    assert evidence.p50_s[Metric.TTFT] > 0
    diagnose(evidence)


def test_of_a_mix_the_worst_class_speaks() -> None:
    one = probe_of(QUEUEING, "short_in_short_out", 20.0)
    other = probe_of(QUEUEING, "short_in_long_out", 26.0)
    mixed = replace(one, workload="mixed", classes={**one.classes, **other.classes})
    evidence = from_probe(mixed, {}, QUEUEING.slo.classes["short_in_long_out"])
    assert evidence.worst_margin == pytest.approx(other.margin)


def test_limits_that_were_not_judged_are_taken_from_the_recorded_percentiles() -> None:
    probe = probe_of(QUEUEING, "short_in_short_out", 20.0)
    slo = ClassSlo((Limit(Metric.E2E, 95.0, 1.0),), 0.99, 1.0)
    evidence = from_probe(probe, {}, slo)
    e2e = probe.classes["short_in_short_out"].latency["e2e"]
    assert evidence.margins[Metric.E2E] == pytest.approx(e2e.p95.value / 1.0 - 1)


numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True)
tables = st.dictionaries(st.sampled_from(Metric), st.floats(allow_nan=True), max_size=4)
FIELDS = {
    name: tables if name.endswith(("margins", "limits_s", "mean_s", "p50_s", "p99_s")) else numbers
    for name in Evidence.__dataclass_fields__
    if name != "failed"
}


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_no_number_upsets_the_rules(values: dict[str, Any]) -> None:
    findings = diagnose(replace(CALM, **values))
    assert all(0 <= finding.confidence <= 1 for finding in findings)
    assert all(0 < weight <= 1 for _, weight in suggested_moves(findings).values())


def test_a_summary_without_series_is_enough() -> None:
    summary = TelemetrySummary({}, {}, {"running_max": 4.0}, ())
    probe = replace(probe_of(QUEUEING, "short_in_short_out", 20.0), telemetry=summary)
    assert from_probe(probe, {}, QUEUEING.slo.classes["short_in_short_out"]).running_max == 4.0


def test_prompts_have_their_length_where_few_answers_end_within_the_window() -> None:
    counters = {"prompt_tokens": 40_000.0, "generation_tokens": 1500.0, "requests_success": 2.0, "ttft_s_count": 20.0}
    summary = TelemetrySummary({}, counters, {}, ())
    probe = replace(probe_of(QUEUEING, "short_in_short_out", 20.0), telemetry=summary)
    assert from_probe(probe, {}, QUEUEING.slo.classes["short_in_short_out"]).input_tokens == 2000
