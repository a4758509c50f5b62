"""A probe is invalid when the client, the load or something between bent it, with the numbers that show it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.refserver.reference import ReferenceServer
from tests.test_client import ROOT, requests_at
from tuner.cli.bench_url import Endpoint, _evidence
from tuner.client import run_load
from tuner.records import ClientEvidence, Limit, LoadResult, Metric, RequestResult, RequestStatus, Validity
from tuner.validity import ServerEvidence, allowed_lag_s, judge_validity, typical_peak_concurrency

LIMITS = (Limit(Metric.TTFT, 99, 0.5), Limit(Metric.TPOT, 99, 0.04))
CLIENT = ClientEvidence(workers=1, cpu_share=0.1, loop_lag_p99_s=0.001, loop_lag_max_s=0.002)
BUSY = replace(CLIENT, cpu_share=0.8)


def answered(index: int, scheduled_s: float, *, lag_s: float = 0.001, ttft_s: float = 0.1) -> RequestResult:
    sent_s = scheduled_s + lag_s
    return RequestResult(
        index=index,
        class_name="c",
        status=RequestStatus.OK,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        first_s=sent_s + ttft_s,
        last_s=sent_s + ttft_s + 0.19,
        end_s=sent_s + ttft_s + 0.19,
        input_tokens=100,
        output_tokens=20,
        planned_input_tokens=100,
        planned_output_tokens=20,
        usage_reported=True,
        chunks=20,
        gaps_us=(10_000,) * 19,
    )


GOOD = [answered(k, k / 10) for k in range(200)]


def judge(
    requests: Sequence[RequestResult] = GOOD,
    client: ClientEvidence = CLIENT,
    server: ServerEvidence | None = None,
    *,
    limits: Sequence[Limit] = LIMITS,
    offered_rps: float = 10.0,
    shared_prefix_share: float = 0.0,
) -> Validity:
    return judge_validity(
        LoadResult(tuple(requests), client, 20.0, 0.0),
        offered_rps=offered_rps,
        window=(2.0, 20.0),
        limits=limits,
        server=server,
        shared_prefix_share=shared_prefix_share,
    )


def test_answers_longer_than_asked_for_are_another_load() -> None:
    assert judge([replace(request, output_tokens=21) for request in GOOD]).valid  # within the tolerance of a count
    found = judge([replace(request, output_tokens=80) for request in GOOD])
    assert found.reasons == ("180 of 180 answers were longer than asked for, such as 80 tokens for 20",)


def test_a_sound_probe_is_valid() -> None:
    server = ServerEvidence(4, (0.08, 0.1), 200, 20_000, 100)
    validity = judge(server=server)
    assert (validity.valid, validity.reasons, validity.notes) == (True, (), ())
    assert validity.send_lag_p99_s == pytest.approx(0.001)
    assert validity.achieved_rps == pytest.approx(10, abs=0.1)
    assert validity.server_ttft_p50_s == pytest.approx(0.09)


def late(lag_s: float) -> list[RequestResult]:
    return [answered(k, k / 10, lag_s=lag_s if k % 20 == 0 else 0.001) for k in range(200)]


def slow_down() -> list[RequestResult]:
    """Every request leaves 4 % later than planned, as with sleeps that add up."""
    return [answered(k, k / 10, lag_s=k / 10 * 0.06) for k in range(200)]


def changed(share: float, **fields: Any) -> list[RequestResult]:
    every = round(1 / share)
    return [replace(one, **fields) if k % every == 0 else one for k, one in enumerate(GOOD)]


short = {"status": RequestStatus.SHORT_OUTPUT, "output_tokens": 12, "error": "12 of 20 tokens; finish_reason: stop"}
INVALID = {
    "send lag": (judge(late(0.03)), "send lag P99 30.0 ms, allowed 25.0 ms"),
    "loop lag": (judge(client=replace(CLIENT, loop_lag_p99_s=0.04)), "event loop lag P99 40.0 ms, allowed 25.0 ms"),
    "client CPU": (judge(client=replace(CLIENT, cpu_share=0.97)), "used 97% of a core"),
    "rate": (judge(slow_down()), "requests/s where 10.00 were planned"),
    "prompt length": (judge(changed(0.05, input_tokens=512)), "such as 512 tokens for 100"),
    "short outputs": (judge(changed(0.05, **short)), "ended early although end tokens are ignored: 12 of 20"),
    "no usage": (judge(changed(0.5, usage_reported=False)), "no usage for 90 of 180"),
    "bursts": (judge([replace(one, gaps_us=(20,) * 18 + (180_000,)) for one in GOOD]), "chunks arrive in bursts"),
    "prefix cache": (judge(server=ServerEvidence(prefix_queries=100, prefix_hits=40)), "answered 40% of the prompt"),
    "cached tokens": (judge([replace(one, cached_tokens=30) for one in GOOD]), "answered 30% of the prompt"),
    "other traffic": (judge(server=ServerEvidence(requests=300)), "only 200 were ours"),
    "TTFT": (judge(client=BUSY, server=ServerEvidence(ttft_median_bucket_s=(0.01, 0.02))), "at most 20.0 ms at the"),
    "TTFT too short": (judge(client=BUSY, server=ServerEvidence(ttft_median_bucket_s=(1, 2))), "at least 1000.0 ms"),
}


@pytest.mark.parametrize("name", INVALID)
def test_each_kind_of_distortion_is_named_with_its_number(name: str) -> None:
    validity, text = INVALID[name]
    assert not validity.valid
    # Sleeps that add up are late sends, too.
    assert len(validity.reasons) == (2 if name == "rate" else 1), validity.reasons
    assert text in validity.reasons[-1]


def test_a_cap_on_connections_is_seen_at_the_server() -> None:
    crowd = [answered(k, 2 + k / 100, ttft_s=5.0) for k in range(800)]
    assert typical_peak_concurrency(crowd) > 500
    validity = judge(crowd, BUSY, ServerEvidence(peak_concurrency=100), offered_rps=100)
    assert any("the server saw at most 100 requests at once" in reason for reason in validity.reasons)


def test_a_slow_front_end_is_the_servers_own_fault() -> None:
    """The client is idle, so what lies between its clock and the engine's belongs to the server."""
    validity = judge(server=ServerEvidence(ttft_median_bucket_s=(0.01, 0.02)))
    assert validity.valid
    assert "the server's front end is slow" in validity.notes[0]


def test_what_the_server_can_be_blamed_for_is_valid() -> None:
    """Failures, a stall of seconds in mid-stream, a queue that never drains: all are measurements."""
    failed = changed(0.3, status=RequestStatus.EARLY_CLOSE, usage_reported=False, first_s=None, last_s=None)
    stalled = [replace(one, gaps_us=(10_000,) * 18 + (5_000_000,)) for one in GOOD]
    slow = [answered(k, k / 10, ttft_s=5 + k / 10) for k in range(200)]
    for requests in (failed, stalled, slow):
        assert judge(requests).valid


def test_little_of_it_is_no_distortion() -> None:
    assert judge(late(0.02)).valid
    assert judge(changed(0.005, **short)).valid
    assert judge([replace(one, input_tokens=101) for one in GOOD]).valid
    assert judge([replace(one, planned_input_tokens=0) for one in GOOD]).valid  # text: only the server knows
    shared = ServerEvidence(prefix_queries=100, prefix_hits=40)
    assert judge(server=shared, shared_prefix_share=0.4).valid


def test_the_allowed_lag_follows_the_tightest_limit() -> None:
    assert allowed_lag_s(LIMITS) == pytest.approx(0.025)
    assert allowed_lag_s([Limit(Metric.TTFT, 99, 2.0), Limit(Metric.ITL, 99, 0.1)]) == pytest.approx(0.01)
    assert allowed_lag_s([Limit(Metric.TTFT, 99, 0.02)]) == pytest.approx(0.005)
    assert allowed_lag_s([]) == pytest.approx(0.025)


def test_requests_that_a_stop_kept_from_being_sent_prove_nothing() -> None:
    unsent = [
        replace(one, status=RequestStatus.CANCELLED, sent_s=one.scheduled_s, end_s=one.scheduled_s, first_s=None)
        for one in GOOD[100:]
    ]
    assert judge([*GOOD[:100], *unsent]).reasons == ()


HOGS = """
import os, sys
from tuner.client.worker import ask_for_priority
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        ask_for_priority()
        os.write(1, b"%d\\n" % os.getpid())
        os.read(0, 1)
        while True:
            pass
while True:
    os.wait()
"""


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Processes that want all of this core, as urgently as the workers and like them each in a session of its own."""
    words = [sys.executable, "-c", HOGS, str(count)]
    parent = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    pids: list[int] = []
    try:
        pids += [int(parent.stdout.readline()) for _ in range(count)]  # before that one is no match for a worker
        parent.stdin.close()  # they wait for this, lest the first ones keep the others from starting
        yield
    finally:
        parent.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()


def test_a_starved_client_is_found_out() -> None:
    """The worker wants a tenth of a core and gets a twenty-fifth; the server has another core, where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    times = [k / 300 for k in range(300)]
    with ReferenceServer("--t1", "500", "--t2", "10") as server:
        os.sched_setaffinity(server.process.pid, cores[1:] or cores)
        os.sched_setaffinity(0, cores[:1])
        try:
            with hogs(24):
                load = run_load(server.url, requests_at(times, tokens=100), timeout_s=60, drain_s=60, workers=1)
        finally:
            os.sched_setaffinity(0, cores)
    validity = judge_validity(load, offered_rps=300, window=(0, 1), limits=LIMITS)
    assert not validity.valid
    assert any("the client read late: event loop lag P99" in reason for reason in validity.reasons)


def metrics_text(requests: int, hits: int) -> str:
    bounds = {"0.1": 0, "0.25": requests, "+Inf": requests}
    lines = [f'vllm:time_to_first_token_seconds_bucket{{le="{le}"}} {count}' for le, count in bounds.items()]
    lines += [f"vllm:time_to_first_token_seconds_count {requests}", f"vllm:time_to_first_token_seconds_sum {requests}"]
    lines += [f"vllm:prefix_cache_queries_total {100 * requests}", f"vllm:prefix_cache_hits_total {hits}"]
    return "\n".join(lines) + "\n"


def test_two_readings_of_the_metrics_are_the_servers_evidence() -> None:
    evidence = _evidence(metrics_text(50, 0), metrics_text(250, 5000))
    assert evidence == ServerEvidence(None, (0.1, 0.25), 200, 20_000, 5_000)
    assert not judge(server=evidence).valid  # a quarter of the prompts came from the cache
    foreign = judge(server=_evidence(metrics_text(50, 0), metrics_text(1050, 0)))
    assert any("it has other traffic" in reason for reason in foreign.reasons)
    assert _evidence("", metrics_text(50, 0)) is None


class _Closing(BaseHTTPRequestHandler):
    """Keeps a connection open only until the next request on it, which then fails, as after an idle time."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        text = metrics_text(50, 0).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        self.close_connection = True  # without having said so

    def log_message(self, *_: object) -> None:
        """Silent."""


def test_metrics_are_read_again_from_a_server_that_closes_idle_connections() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Closing) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}")
        assert endpoint.metrics() == endpoint.metrics() == metrics_text(50, 0)
        server.shutdown()
