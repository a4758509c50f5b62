"""On a real vLLM the load generator and the server's own metrics tell the same story."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.test_client import poisson
from tuner.cli import main
from tuner.client import LoadRequest, run_load
from tuner.records import Limit, LoadResult, Metric, RequestStatus, TelemetrySummary, Validity
from tuner.server import ReadyLimits, Server, find_vllm
from tuner.telemetry import Telemetry, histogram
from tuner.validity import ServerEvidence, judge_validity

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--load-format", "dummy", "--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes", "64M")
REQUESTS, RATE_RPS, OUTPUT_TOKENS = 60, 4.0, 32


@pytest.fixture(scope="module")
def server(vllm_executable: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    made = Server(find_vllm(str(vllm_executable)), model=str(tiny_model), flags=FLAGS, log_path=log)
    made.launch()
    try:
        made.wait_ready(ReadyLimits(silent_s=120, cap_s=240))
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def measured(server: Server, tiny_model: Path) -> tuple[LoadResult, TelemetrySummary]:
    """Sampled, not greedy: so that the ignored end token does come up now and then, as an empty text."""
    requests = []
    for index, at_s in enumerate(poisson(RATE_RPS, REQUESTS)):
        body = {
            "model": str(tiny_model),
            "prompt": [(index * 131 + k * 7) % 900 + 100 for k in range(96)],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        requests.append(
            LoadRequest(index, "c", at_s, json.dumps(body).encode(), "/v1/completions", 96, OUTPUT_TOKENS, True)
        )
    run_load(server.base_url, requests[:4], timeout_s=120, drain_s=120)  # warm-up
    for _ in range(3):
        server.control.reset_prefix_cache()
        telemetry = Telemetry(f"{server.base_url}/metrics", lambda: {"api": server.pids[:1]}, ())
        telemetry.start()
        load = run_load(server.base_url, requests, timeout_s=120, drain_s=120)
        summary = telemetry.stop()
        if judged(load, summary).valid:
            break  # else something else wanted the machine: as in a trial, measure again
    return load, summary


def judged(load: LoadResult, summary: TelemetrySummary) -> Validity:
    ttft = histogram(summary, "ttft_s")
    assert ttft is not None
    evidence = ServerEvidence(
        peak_concurrency=summary.gauges["concurrency_max"],
        ttft_median_bucket_s=ttft.bracket(0.5),
        requests=ttft.count,
        prefix_queries=summary.counters["prefix_queries"],
        prefix_hits=summary.counters["prefix_hits"],
    )
    window = (0.0, REQUESTS / RATE_RPS)
    limits = [Limit(Metric.TTFT, 99, 1.0)]
    return judge_validity(load, offered_rps=RATE_RPS, window=window, limits=limits, server=evidence)


def test_every_request_is_answered_in_full(measured: tuple[LoadResult, TelemetrySummary]) -> None:
    load, summary = measured
    assert {result.status for result in load.requests} == {RequestStatus.OK}, [
        r.error for r in load.requests if r.error
    ]
    assert {result.input_tokens for result in load.requests} == {96}
    assert {result.output_tokens for result in load.requests} == {OUTPUT_TOKENS}
    assert all(0 < result.chunks <= OUTPUT_TOKENS for result in load.requests)
    assert summary.counters["generation_tokens"] == REQUESTS * OUTPUT_TOKENS


def test_latencies_agree_with_the_servers_histograms(measured: tuple[LoadResult, TelemetrySummary]) -> None:
    load, summary = measured
    ours = {
        "ttft_s": [result.ttft_sent_s or 0.0 for result in load.requests],
        "tpot_s": [result.tpot_s or 0.0 for result in load.requests],
    }
    for name, values in ours.items():
        theirs = histogram(summary, name)
        assert theirs is not None
        assert theirs.count == REQUESTS
        quantile, width = theirs.quantile(0.5), theirs.bucket_width(0.5)
        assert quantile is not None
        assert width is not None
        assert abs(median(values) - quantile) <= width, (name, median(values), quantile, width)


def test_the_probe_is_valid_by_the_servers_evidence(measured: tuple[LoadResult, TelemetrySummary]) -> None:
    assert judged(*measured).reasons == ()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_bench_measures_a_running_vllm(
    server: Server, tiny_model: Path, capsys: pytest.CaptureFixture[str], api: str
) -> None:
    words = ["--rate", "4", "--duration", "4", "--input-tokens", "64", "--output-tokens", "16", "--json"]
    code = main(["bench", "--url", server.base_url, "--model", str(tiny_model), "--api", api, *words])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["requests"]["failed"] == 0, captured.err
    assert found["notes"] == []
    assert code == (0 if found["validity"]["valid"] else 6)
    assert found["latency_ms"]["ttft"]["p50"]["value"] < found["latency_ms"]["e2e"]["p50"]["value"]
