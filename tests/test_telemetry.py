"""Telemetry: known metrics in, exact summaries out; any text is survived; a real HTTP endpoint is sampled."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app
from prometheus_client import Histogram as Observed

from tuner.records import TelemetrySummary
from tuner.store import dumps, loads
from tuner.telemetry import Histogram, Sample, Snapshot, Telemetry, histogram, parse, summarize
from tuner.telemetry.devices import DeviceReading, Devices
from tuner.telemetry.host import HostCpu
from tuner.telemetry.summary import SERIES_SAMPLES

RECORDED = Path(__file__).parent / "recorded"


# --- text to snapshot ---------------------------------------------------------------------------------------------


def test_recorded_metrics_of_two_versions_read_the_same_way() -> None:
    old = parse((RECORDED / "h200-0.26.0" / "metrics.txt").read_text())
    new = parse((RECORDED / "cpu-0.32.0" / "metrics_preempt.txt").read_text())
    assert old.counters["generation_tokens"] == 25600
    assert old.counters["prefix_hits"] == 35392
    assert old.counters["requests_success"] == 200
    assert new.counters["preemptions"] == 26
    assert new.histograms["queue_time_s"].sum == 35.10651694800208
    assert new.histograms["iteration_tokens"].count == 1532
    assert old.gauges.keys() == new.gauges.keys() == {"running", "waiting", "kv_usage"}
    assert old.counters.keys() == new.counters.keys()
    assert old.histograms.keys() == new.histograms.keys()


def test_engines_add_up_and_the_fullest_kv_cache_counts() -> None:
    text = """
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5"} 1
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 2
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.5"} 3
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf"} 3
vllm:time_to_first_token_seconds_count{engine="0"} 2
vllm:time_to_first_token_seconds_count{engine="1"} 3
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
vllm:time_to_first_token_seconds_sum{engine="1"} 0.5
vllm:request_success_total{engine="0",finished_reason="length"} 5
vllm:request_success_total{engine="0",finished_reason="stop"} 1
vllm:request_success_total{engine="0",finished_reason="abort"} 7
"""
    snapshot = parse(text)
    assert snapshot.gauges == {"running": 7.0, "kv_usage": 0.75}
    assert snapshot.counters == {"requests_success": 6.0}
    assert snapshot.histograms["ttft_s"] == Histogram((0.5, math.inf), (4.0, 5.0), 2.0, 5.0)


def test_older_spellings_are_understood() -> None:
    text = (
        "vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_hits_total 12\nvllm:time_per_output_token_seconds_count 3"
    )
    snapshot = parse(text)
    assert (snapshot.gauges["kv_usage"], snapshot.counters["prefix_hits"]) == (0.5, 12.0)
    assert snapshot.histograms["itl_s"].count == 3


def test_a_torn_line_loses_only_itself() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="0'
    assert parse(text).gauges == {"running": 3.0}


def test_values_that_are_no_numbers_are_no_readings() -> None:
    text = f"vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc {'9' * 400}"
    assert parse(text).empty


_NAMES = st.sampled_from(
    ["vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket", "vllm:request_success_total", "# TYPE"]
)
_FRAGMENTS = st.one_of(
    _NAMES, st.text(max_size=12), st.sampled_from(['{le="', '"}', "{", "}", " ", "=", ",", "\\", "\n"])
)


@given(st.lists(_FRAGMENTS, max_size=40).map("".join))
def test_any_text_is_survived(text: str) -> None:
    parse(text)


@given(st.integers(0, 50_000), st.integers(0, 200), st.text(max_size=20))
def test_damaged_metrics_are_survived(at: int, cut: int, inserted: str) -> None:
    text = (RECORDED / "cpu-0.32.0" / "metrics.txt").read_text()
    damaged = parse(text[:at] + inserted + text[at + cut :])
    assert damaged.counters.keys() <= parse(text).counters.keys()


# --- histograms ---------------------------------------------------------------------------------------------------


def test_difference_and_quantiles_of_a_histogram() -> None:
    earlier = Histogram((1.0, 2.0, math.inf), (5.0, 5.0, 5.0), 2.0, 5.0)
    later = Histogram((1.0, 2.0, math.inf), (7.0, 13.0, 15.0), 20.0, 15.0)
    window = later.minus(earlier)
    assert window == Histogram((1.0, 2.0, math.inf), (2.0, 8.0, 10.0), 18.0, 10.0)
    assert window.mean == 1.8
    assert window.quantile(0.5) == pytest.approx(1.5)  # 5th of 10: the 3rd of 6 in (1, 2]
    assert window.bucket_width(0.5) == 1.0
    assert (window.quantile(0.99), window.bucket_width(0.99)) == (2.0, math.inf)


def test_a_histogram_that_was_reset_counts_from_zero() -> None:
    earlier = Histogram((1.0, math.inf), (5.0, 9.0), 8.0, 9.0)
    later = Histogram((1.0, math.inf), (2.0, 2.0), 1.0, 2.0)
    assert later.minus(earlier) == later


def test_nothing_observed_has_no_quantile() -> None:
    empty = Histogram((1.0, math.inf), (0.0, 0.0), 0.0, 0.0)
    assert (empty.mean, empty.quantile(0.5), empty.bucket_width(0.5)) == (None, None, None)
    assert Histogram((), (), 3.0, 2.0).quantile(0.5) is None


@given(st.lists(st.floats(0.0, 50.0), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_is_never_further_from_the_truth_than_its_bucket(values: list[float], q: float) -> None:
    bounds = (0.5, 1.0, 5.0, 20.0, math.inf)
    cumulative = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    observed = Histogram(bounds, cumulative, sum(values), float(len(values)))
    truth = sorted(values)[math.ceil(q * len(values) - 1e-9) - 1]
    estimate, width = observed.quantile(q), observed.bucket_width(q)
    assert estimate is not None
    assert width is not None
    assert abs(estimate - truth) <= width + 1e-9


# --- samples to summary -------------------------------------------------------------------------------------------


def _sample(t_s: float, *, running: float, tokens: float, complete: bool = False) -> Sample:
    metrics = Snapshot(
        gauges={"running": running, "waiting": 2 * running, "kv_usage": running / 100},
        counters={"generation_tokens": tokens},
    )
    text = f"""
vllm:generation_tokens_total {tokens}
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} {tokens / 2}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {tokens}
vllm:time_to_first_token_seconds_count {tokens}
vllm:time_to_first_token_seconds_sum {tokens * 0.2}
"""
    return Sample(t_s, metrics, text if complete else None, cpu={"engine": 0.5})


def test_a_window_is_cut_from_the_samples_that_lie_in_it() -> None:
    samples = [_sample(t, running=t, tokens=10 * t, complete=t % 2 == 0) for t in map(float, range(11))]
    summary = summarize(samples, (4.0, 8.0))
    assert summary.series["t_s"] == (4.0, 5.0, 6.0, 7.0, 8.0)
    assert summary.series["running"] == summary.series["t_s"]
    assert summary.gauges["running_mean"] == 6.0
    assert summary.gauges["running_max"] == 8.0
    assert summary.gauges["concurrency_max"] == 24.0
    assert summary.gauges["engine_cpu_mean"] == 0.5
    assert summary.counters["span_s"] == 4.0
    assert summary.counters["generation_tokens"] == 40.0
    assert histogram(summary, "ttft_s") == Histogram((0.1, math.inf), (20.0, 40.0), 8.0, 40.0)
    assert histogram(summary, "tpot_s") is None


def test_counters_use_the_complete_readings_nearest_to_the_window() -> None:
    samples = [_sample(t, running=1, tokens=10 * t, complete=t in (0.0, 5.0, 10.0)) for t in map(float, range(11))]
    summary = summarize(samples, (4.0, 9.0))
    assert (summary.counters["span_s"], summary.counters["generation_tokens"]) == (5.0, 50.0)


def test_a_window_without_two_complete_readings_has_no_counters() -> None:
    samples = [_sample(t, running=1, tokens=t, complete=t == 0.0) for t in map(float, range(5))]
    assert summarize(samples).counters == {}


def test_a_missing_reading_is_a_gap_in_the_series_and_not_in_the_mean() -> None:
    samples = [_sample(0.0, running=2, tokens=0), Sample(1.0), _sample(2.0, running=4, tokens=0)]
    summary = summarize(samples)
    assert summary.gauges["running_mean"] == 3.0
    assert math.isnan(summary.series["running"][1])
    assert "gpu_util" not in summary.series
    restored = loads(TelemetrySummary, dumps(summary), "summary")
    assert math.isnan(restored.series["running"][1])


def test_long_probes_are_thinned_but_keep_their_maximum() -> None:
    samples = [_sample(float(t), running=100.0 if t == 1001 else 1.0, tokens=0) for t in range(5000)]
    summary = summarize(samples)
    assert {len(column) for column in summary.series.values()} == {len(summary.series["t_s"])}
    assert SERIES_SAMPLES / 2 < len(summary.series["t_s"]) <= SERIES_SAMPLES
    assert summary.gauges["running_max"] == 100.0


def test_device_readings_become_means_shares_and_maxima() -> None:
    reading = DeviceReading(0.5, 1e9, 300.0, 1500.0, 60.0, throttled=True, power_capped=False)
    cooler = DeviceReading(1.0, 2e9, 500.0, 1000.0, 70.0, throttled=False, power_capped=False)
    gauges = summarize([Sample(0.0, device=reading), Sample(1.0, device=cooler)]).gauges
    assert gauges == {
        "gpu_util_mean": 0.75,
        "power_w_mean": 400.0,
        "sm_clock_mhz_mean": 1250.0,
        "throttled_share": 0.5,
        "power_capped_share": 0.0,
        "mem_used_bytes_max": 2e9,
        "temperature_c_max": 70.0,
    }


# --- sources ------------------------------------------------------------------------------------------------------


@dataclass
class FakeVllm:
    """Prometheus' own application on a port, with vLLM's names; `selective` as vLLM's with one API server."""

    running: Gauge
    tokens: Counter
    ttft: Observed
    url: str
    asked: list[str]


@contextmanager
def fake_vllm(*, selective: bool = True) -> Iterator[FakeVllm]:
    registry = CollectorRegistry()
    app = make_wsgi_app(registry)
    asked: list[str] = []

    def route(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        asked.append(environ["PATH_INFO"])
        if environ["QUERY_STRING"] and not selective:
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [b""]
        return app(environ, start_response)

    class Quiet(WSGIRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    server = make_server("127.0.0.1", 0, route, WSGIServer, Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    labels = ["engine"]
    try:
        yield FakeVllm(
            Gauge("vllm:num_requests_running", "-", labels, registry=registry).labels("0"),
            Counter("vllm:generation_tokens", "-", labels, registry=registry).labels("0"),
            Observed("vllm:time_to_first_token_seconds", "-", labels, buckets=(0.1, 1.0), registry=registry).labels(
                "0"
            ),
            f"http://127.0.0.1:{server.server_port}/metrics",
            asked,
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("selective", [True, False])
def test_counters_are_differenced_over_a_live_endpoint(selective: bool) -> None:
    with fake_vllm(selective=selective) as vllm:
        vllm.tokens.inc(1000)
        vllm.ttft.observe(0.5)
        telemetry = Telemetry(vllm.url, lambda: {"api": [os.getppid()]}, (), period_s=0.02)
        telemetry.start()
        vllm.running.set(5)
        vllm.tokens.inc(42)
        vllm.ttft.observe(0.05)
        vllm.ttft.observe(0.06)
        time.sleep(0.5)
        summary = telemetry.stop()
        assert summary.counters["generation_tokens"] == 42
        assert histogram(summary, "ttft_s") == Histogram(
            (0.1, 1.0, math.inf), (2.0, 2.0, 2.0), pytest.approx(0.11), 2.0
        )
        assert summary.gauges["running_max"] == 5
        assert set(vllm.asked) == ({"/metrics/"} if selective else {"/metrics/", "/metrics"})
        assert telemetry.own_cpu_s > 0
    assert [source.partition(" ")[0] for source in summary.absent] == ["device", "engine_cpu", "worker_cpu"]


def test_a_server_that_answers_nothing_is_absent_not_an_error() -> None:
    telemetry = Telemetry("http://127.0.0.1:9/metrics", dict, (), period_s=0.01)
    telemetry.start()
    time.sleep(0.03)
    assert telemetry.stalled_s > 0
    summary = telemetry.stop()
    assert summary.counters == {}
    assert "server (/metrics did not answer)" in summary.absent


def test_requests_without_tokens_are_a_stall_and_an_idle_server_is_not() -> None:
    with fake_vllm() as vllm:
        telemetry = Telemetry(vllm.url, dict, (), period_s=0.01)
        telemetry.start()
        time.sleep(0.05)
        assert telemetry.stalled_s == 0
        vllm.running.set(1)
        time.sleep(0.2)
        stalled = telemetry.stalled_s
        vllm.tokens.inc()
        time.sleep(0.05)
        assert telemetry.stalled_s < stalled
        telemetry.stop()


def test_cpu_is_read_by_role_and_a_process_that_ended_is_left_out() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        host = HostCpu(lambda: {"engine": [busy.pid], "api": [idle.pid], "worker": [2**22 + 1]})
        host.refresh()
        assert host.read() == {}
        time.sleep(0.3)
        shares = host.read()
        assert shares["engine"] > 0.1
        assert shares["engine"] > shares["api"]
        assert "worker" not in shares
        assert "client" in shares
        assert host.read() == {}  # at once again: nothing but rounding
        time.sleep(0.25)
        busy.kill()
        busy.wait()
        host.refresh()
        assert "engine" not in host.read()
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()


def test_gpus_of_one_server_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Util:
        gpu: int

    @dataclass
    class Memory:
        used: int

    readings = {
        "nvmlDeviceGetUtilizationRates": {0: Util(40), 1: Util(60)},
        "nvmlDeviceGetMemoryInfo": {0: Memory(10), 1: Memory(30)},
        "nvmlDeviceGetPowerUsage": {0: 300_000, 1: 400_000},
        "nvmlDeviceGetTemperature": {0: 50, 1: 55},
        "nvmlDeviceGetClockInfo": {0: 1980, 1: 1200},
        "nvmlDeviceGetCurrentClocksThrottleReasons": {0: 0x4, 1: 0x20},
        "nvmlDeviceGetHandleByIndex": {0: 0, 1: 1},
    }
    for name, answers in readings.items():
        monkeypatch.setattr(pynvml, name, lambda gpu, *_, answers=answers: answers[gpu])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    devices = Devices((0, 1))
    assert devices.open() is None
    assert devices.read() == DeviceReading(0.5, 30.0, 700.0, 1200.0, 55.0, throttled=True, power_capped=True)
    devices.close()
    assert devices.read() is None


def test_without_a_gpu_library_the_device_is_absent() -> None:
    devices = Devices((0,))
    reason = devices.open()
    if reason is not None:  # on a machine with an NVIDIA driver there is nothing to be absent
        assert "NVML" in reason
        assert devices.read() is None
    devices.close()
