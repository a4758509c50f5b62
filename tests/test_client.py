"""The load generator tells the truth about a server whose timing is known, loses nothing and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

import tuner.client.load as load_module
from tests.refserver.faults import FaultServer
from tests.refserver.reference import ReferenceServer, Served
from tuner.client import LoadRequest, run_load
from tuner.client.load import workers_needed
from tuner.errors import EnvironmentFault, HarnessError
from tuner.records import LoadResult, RequestStatus

ROOT = Path(__file__).resolve().parents[1]


def requests_at(
    times: Sequence[float], *, tokens: int = 10, prompt: int = 20, path: str = "/v1/completions"
) -> list[LoadRequest]:
    """One request at each time; its index is the reference server's `user`."""
    requests = []
    for index, at_s in enumerate(times):
        body = {"user": index, "prompt": [7] * prompt, "max_tokens": tokens, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        requests.append(LoadRequest(index, "c", at_s, json.dumps(body).encode(), path, prompt, tokens, True))
    return requests


def poisson(rate_rps: float, count: int, seed: int = 1) -> list[float]:
    rng, at_s, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at_s)
        at_s += rng.expovariate(rate_rps)
    return times


def rank(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def peak_concurrency(served: Sequence[Served]) -> int:
    changes = [(one.arrival_s, 1) for one in served]
    changes += [(one.arrival_s + one.written_s[-1], -1) for one in served]
    level = peak = 0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak


def worst_difference_s(load: LoadResult, served: dict[int, Served]) -> dict[str, float]:
    """Ours minus the server's own, at P50, P95 and P99 of each metric; the largest."""
    pairs: dict[str, tuple[list[float], list[float]]] = {
        "ttft": ([r.ttft_sent_s or 0 for r in load.requests], [one.ttft_s for one in served.values()]),
        "tpot": ([r.tpot_s or 0 for r in load.requests], [one.tpot_s for one in served.values()]),
        "itl": (
            [gap / 1e6 for r in load.requests for gap in r.gaps_us],
            [gap for one in served.values() for gap in one.gaps_s],
        ),
    }
    return {
        name: max(abs(rank(ours, share) - rank(theirs, share)) for share in (0.5, 0.95, 0.99))
        for name, (ours, theirs) in pairs.items()
    }


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """Server and client go before whatever else runs on this machine, where we may ask for that."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield
        return
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_percentiles_equal_the_servers_truth_within_a_millisecond(path: str) -> None:
    # Another process on this machine can only make the difference larger: the best of five runs counts.
    differences = []
    for attempt in range(5):
        with ReferenceServer("--t1", "40", "--t2", "10") as server:
            load = run_load(
                server.url, requests_at(poisson(60, 120, attempt), tokens=20, path=path), timeout_s=20, drain_s=20
            )
        served = server.by_user()
        assert len(served) == len(load.requests) == 120
        assert {result.status for result in load.requests} == {RequestStatus.OK}
        assert {result.chunks for result in load.requests} == {result.output_tokens for result in load.requests} == {20}
        differences.append(worst_difference_s(load, served))
        if max(differences[-1].values()) < 0.001:
            return
    pytest.fail(f"differences in seconds: {differences}")


def test_the_reference_servers_faults_are_counted_exactly() -> None:
    with ReferenceServer("--t1", "20", "--t2", "5", "--fail-every", "10") as server:
        load = run_load(server.url, requests_at(poisson(200, 200)), timeout_s=20, drain_s=20)
    assert Counter(result.status.value for result in load.requests) == Counter(one.kind for one in server.served)
    assert Counter(one.kind for one in server.served)["stream-error"] == 20


@pytest.mark.usefixtures("undisturbed")
def test_a_stall_of_the_server_shows_at_its_true_size() -> None:
    """Coordinated omission: requests that were due during the stall waited from their scheduled time."""
    times = [k / 50 for k in range(200)]
    with ReferenceServer("--t1", "20", "--t2", "5", "--stall-after", "1", "--stall-for", "2") as server:
        load = run_load(server.url, requests_at(times, tokens=4), timeout_s=20, drain_s=20)
    ttfts_s = [result.ttft_s or 0 for result in load.requests]
    assert len(ttfts_s) == 200
    assert rank(ttfts_s, 0.99) == pytest.approx(1.98, abs=0.06)
    assert max(ttfts_s) == pytest.approx(2.01, abs=0.06)
    # A request that was due in the middle of the stall waited for its second half.
    assert ttfts_s[100] == pytest.approx(1.02, abs=0.06)
    assert rank(ttfts_s, 0.4) < 0.05
    assert rank([result.send_lag_s for result in load.requests], 0.99) < 0.05


def test_two_thousand_streams_at_once() -> None:
    with ReferenceServer("--t1", "2500", "--t2", "100") as server:
        load = run_load(server.url, requests_at([k / 1500 for k in range(2000)], tokens=8), timeout_s=30, drain_s=30)
    assert Counter(result.status for result in load.requests) == {RequestStatus.OK: 2000}
    assert peak_concurrency(server.served) == 2000
    assert load.client.peak_rss_bytes < 100e6


def test_prompts_of_a_hundred_thousand_tokens_arrive_whole() -> None:
    requests = requests_at([k / 5 for k in range(8)], prompt=100_000)
    with ReferenceServer("--t1", "50", "--t2", "5") as server:
        load = run_load(server.url, requests, timeout_s=30, drain_s=30)
    assert {result.status for result in load.requests} == {RequestStatus.OK}
    assert {one.user: one.body_bytes for one in server.served} == {r.index: len(r.body) for r in requests}
    assert load.client.peak_rss_bytes < 100e6


def test_several_workers_share_one_clock_and_one_schedule() -> None:
    times = poisson(200, 300)
    with ReferenceServer("--t1", "30", "--t2", "5") as server:
        load = run_load(server.url, requests_at(times), workers=3, timeout_s=20, drain_s=20)
    assert load.client.workers == 3
    assert [result.scheduled_s for result in load.requests] == times
    served = server.by_user()
    zero_s = min(served[k].arrival_s - load.requests[k].sent_s for k in range(300))
    apart_s = [served[k].arrival_s - load.requests[k].sent_s - zero_s for k in range(300)]
    assert rank(apart_s, 0.5) < 0.005, "the workers' clocks differ"


def test_a_closed_loop_fills_its_slots_and_no_more() -> None:
    with ReferenceServer("--t1", "30", "--t2", "5") as server:
        load = run_load(server.url, requests_at([0.0] * 120), workers=2, concurrency=7, timeout_s=20, drain_s=20)
    assert {result.status for result in load.requests} == {RequestStatus.OK}
    assert peak_concurrency(server.served) == 7
    # A slot's next request is scheduled when the one before it has ended.
    ends = sorted(result.end_s for result in load.requests)
    starts = sorted(result.scheduled_s for result in load.requests)
    assert starts[:7] == [0.0] * 7
    assert starts[7:] == pytest.approx(ends[:-7], abs=1e-6)


def test_results_come_in_order_and_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    requests = requests_at([0.3, 0.1, 0.2, 0.0])
    with ReferenceServer("--t1", "20", "--t2", "5") as server:
        load = run_load(
            server.url, requests, timeout_s=20, drain_s=20, progress=lambda done, total: seen.append((done, total))
        )
    assert [result.index for result in load.requests] == [0, 1, 2, 3]
    assert [result.scheduled_s for result in load.requests] == [0.3, 0.1, 0.2, 0.0]
    assert seen[-1] == (4, 4)
    assert load.duration_s == pytest.approx(0.3 + 0.02 + 9 * 0.005, abs=0.1)
    assert load.client.cpu_share > 0


@pytest.fixture
def fault_server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


def hanging(count: int, every_s: float = 0.0) -> list[LoadRequest]:
    body = json.dumps({"user": "hang-in-stream", "max_tokens": 4}).encode()
    return [LoadRequest(k, "c", k * every_s, body, "/v1/completions", 1, 4, True) for k in range(count)]


@pytest.mark.parametrize("concurrency", [None, 10])
def test_what_is_not_finished_after_the_drain_is_cancelled(fault_server: FaultServer, concurrency: int | None) -> None:
    begun_s = time.monotonic()
    load = run_load(fault_server.url, hanging(10, 0.02), timeout_s=20, drain_s=0.5, concurrency=concurrency)
    assert time.monotonic() - begun_s < 5
    assert Counter(result.status for result in load.requests) == {RequestStatus.CANCELLED: 10}
    assert {result.chunks for result in load.requests} == {3}
    assert all("not finished 0.5 s after" in result.error for result in load.requests)


@pytest.mark.parametrize("concurrency", [None, 3])
def test_stop_cancels_what_is_under_way_and_reports_what_was_not_sent(
    fault_server: FaultServer, concurrency: int | None
) -> None:
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    begun_s = time.monotonic()
    load = run_load(
        fault_server.url, hanging(40, 0.1), timeout_s=20, drain_s=20, stop=stop, concurrency=concurrency, workers=2
    )
    assert time.monotonic() - begun_s < 5
    assert Counter(result.status for result in load.requests) == {RequestStatus.CANCELLED: 40}
    unsent = [result for result in load.requests if result.error.startswith("not sent")]
    assert len(unsent) == 40 - (3 if concurrency else fault_server.requests)
    assert all(result.sent_s >= result.scheduled_s - 1e-6 for result in load.requests)


def workers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "tuner.client.worker" in " ".join(child.cmdline())]


def in_background(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except HarnessError as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    return thread, errors


def wait_for(condition: Callable[[], object], limit_s: float = 10) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "ended with code -9"), (signal.SIGSTOP, "has been silent for")]
)
def test_a_dead_or_silent_worker_is_an_error_and_never_a_silent_loss(
    fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, message: str
) -> None:
    monkeypatch.setattr(load_module, "_ANSWER_S", 3.0)
    thread, errors = in_background(lambda: run_load(fault_server.url, hanging(20), timeout_s=20, drain_s=20, workers=2))
    wait_for(lambda: fault_server.requests == 20)
    workers = workers_of(os.getpid())
    assert len(workers) == 2
    workers[0].send_signal(number)
    thread.join(15)
    assert len(errors) == 1
    assert message in str(errors[0])
    wait_for(lambda: not workers_of(os.getpid()))


def test_workers_end_with_their_parent(fault_server: FaultServer) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.test_client import hanging\nfrom tuner.client import run_load\n"
        "run_load(sys.argv[1], hanging(4), timeout_s=60, drain_s=60, workers=2)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, fault_server.url, str(ROOT)])
    wait_for(lambda: fault_server.requests == 4, 20)
    workers = workers_of(parent.pid)
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))


def test_a_worker_without_files_says_so(fault_server: FaultServer, tmp_path: Path) -> None:
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.test_client import hanging\nfrom tuner.client import run_load\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "run_load(sys.argv[1], hanging(100), timeout_s=60, drain_s=60, workers=1)\n"
    )
    words = [sys.executable, "-c", code, fault_server.url, str(ROOT)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert "HarnessError: a worker of the load generator ended with code 1: " in ended.stderr
    assert "Too many open files" in ended.stderr


def test_a_host_without_address_is_the_machines_fault() -> None:
    with pytest.raises(EnvironmentFault, match="check the host name"):
        run_load("http://no-such-host.invalid:1", requests_at([0.0]), timeout_s=5, drain_s=5)


def test_the_number_of_workers_follows_the_offered_tokens_and_the_cores() -> None:
    def needed(rate_rps: float, tokens: int, cores: int, concurrency: int | None = None) -> int:
        body = b"x" * 2000
        requests = [
            LoadRequest(k, "c", k / rate_rps, body, "/v1/completions", 300, tokens, True)
            for k in range(int(rate_rps * 10))
        ]
        return workers_needed(requests, concurrency=concurrency, cores=cores)

    assert needed(40, 256, 16) == 1
    assert needed(400, 256, 16) > 1
    assert needed(4000, 256, 16) == 15
    assert needed(4000, 256, 2) == needed(4000, 256, 1) == 1
    assert needed(40, 256, 16, concurrency=4000) > needed(40, 256, 16, concurrency=100) == 1
