"""The HTTP face: real processes that speak, log, fail and end as vLLM's do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tuner.client import LoadRequest, run_load
from tuner.failures import FailureFacts, classify
from tuner.records import PlannedRequest, RequestResult
from tuner.serve_args import effective_values, parse_help, startup_facts, to_argv
from tuner.sim.crashes import START_CRASHES
from tuner.sim.engine import simulate
from tuner.sim.memory import starts
from tuner.sim.profiles import CPU2_SMALL, H200_8B
from tuner.sim.scenario import Load, Scenario, requests

MODULE = [sys.executable, "-m", "tuner.sim.http"]


@dataclass
class Running:
    """A simulated server under test."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=5.0)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=10.0)

    def stream(self, tokens: int = 8, **more: object) -> list[str]:
        """The `data:` payloads of one streamed completion."""
        body = {"prompt": list(range(20)), "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=10.0) as response:
            return [line.removeprefix("data: ") for line in response.iter_lines() if line]

    def wait(self, timeout_s: float = 10.0) -> int:
        return self.process.wait(timeout_s)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def launched(tmp_path: Path, *flags: str, ready: bool = True, **variables: str) -> Iterator[Running]:
    port = free_port()
    log = tmp_path / "server.log"
    environment = {**os.environ, "VLLM_SIM_START_S": "0.2", "VLLM_SIM_SEED": "1", **variables}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*MODULE, "serve", "/models/some", "--host", "127.0.0.1", "--port", str(port), *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    running = Running(process, f"http://127.0.0.1:{port}", log)
    try:
        until = time.monotonic() + 20.0
        while ready:
            assert process.poll() is None, running.log
            assert time.monotonic() < until, running.log
            try:
                if running.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        yield running
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def test_version_and_help_are_vllms() -> None:
    version = subprocess.run([*MODULE, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.strip() == "0.32.0+simulated"
    text = subprocess.run([*MODULE, "serve", "--help=all"], capture_output=True, text=True, check=True).stdout
    flags = parse_help(text, version.strip())
    config = {
        "max-num-seqs": 64,
        "enable-prefix-caching": False,
        "gpu-memory-utilization": 0.9,
        "performance-mode": "throughput",
        "async-scheduling": True,
        "api-server-count": 2,
    }
    assert set(config) <= set(flags.flags)
    assert flags.flags["max-num-seqs"].group == "SchedulerConfig"
    assert flags.flags["kv-cache-dtype"].choices[0] == "auto"
    assert "--no-enable-prefix-caching" in to_argv(config, flags)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--no-such-flag", "3"], "vllm: error: unrecognized arguments: --no-such-flag 3"),
        (["--max-num-seqs", "many"], "vllm serve: error: argument --max-num-seqs: invalid int value: 'many'"),
        (["--performance-mode", "fast"], "argument --performance-mode: invalid choice"),
    ],
)
def test_wrong_flags_exit_2(words: list[str], complaint: str) -> None:
    result = subprocess.run([*MODULE, "serve", "m", *words], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert complaint in result.stderr


def test_wrong_environment_is_explained() -> None:
    environment = {**os.environ, "VLLM_SIM_FAULT": "explode"}
    result = subprocess.run([*MODULE, "serve", "m"], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    assert "VLLM_SIM_FAULT" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_whole_life(tmp_path: Path) -> None:
    flags = ("--max-model-len", "4096", "--max_num_batched_tokens=2k", "--max-num-seqs", "64", "--no-async-scheduling")
    with launched(tmp_path, *flags, VLLM_SERVER_DEV_MODE="1") as server:
        engine = psutil.Process(server.process.pid).children()
        assert [child.name() for child in engine] == ["VLLM::EngineCor"]
        assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
        assert "simulated" in server.get("/version").json()["version"]
        tokens = server.post("/tokenize", {"prompt": "w5 w77 hello"}).json()["tokens"]
        assert tokens[:2] == [5, 77]
        assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"].startswith("w5 w77 ")
        payloads = server.stream(5, stream_options={"include_usage": True})
        assert payloads[-1] == "[DONE]"
        chunks = [json.loads(payload) for payload in payloads[:-1]]
        texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
        assert len(texts) == 5
        assert all(texts)
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        assert chunks[-1]["usage"]["prompt_tokens"] == 20
        whole = server.post("/v1/completions", {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True}).json()
        assert whole["usage"]["total_tokens"] == 6
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
        assert server.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
        assert server.post("/reset_prefix_cache", {}).status_code == 200
        metrics = server.get("/metrics").text
        assert 'vllm:generation_tokens_total{engine="0",model_name="/models/some"} 11.0' in metrics
        assert 'finished_reason="length",model_name="/models/some"} 3.0' in metrics
        some = server.get("/metrics/?name[]=vllm:num_requests_running").text
        assert "vllm:num_requests_running" in some
        assert "vllm:generation_tokens" not in some
        assert server.post("/v1/completions", {"model": "other", "prompt": "a"}).status_code == 404
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 5000}).status_code == 400
        for wrong in ({"prompt": [10**9]}, {"prompt": [1], "max_tokens": "x"}, {"prompt": {}}, [], {"prompt": ""}):
            assert server.post("/v1/completions", wrong).status_code == 400
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not any(child.is_running() for child in engine)
    values = effective_values(server.log)
    assert values["max-num-batched-tokens"] == 2000
    assert values["max-model-len"] == 4096
    assert values["max-num-seqs"] == 64
    assert values["async-scheduling"] is False
    assert values["enable-prefix-caching"] is True
    facts = startup_facts(server.log)
    assert facts["weights_gib"] == 15.0
    assert 110 < facts["kv_gib"] < 114
    assert 900_000 < facts["kv_tokens"] < 940_000
    assert "SIMULATED" in server.log


def test_a_prompt_seen_before_is_cached(tmp_path: Path) -> None:
    with launched(tmp_path, "--enable-prompt-tokens-details", VLLM_SERVER_DEV_MODE="1") as server:
        body = {"prompt": list(range(100)), "max_tokens": 2, "ignore_eos": True}

        def cached() -> int:
            details = server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]
            return 0 if details is None else int(details["cached_tokens"])

        assert cached() == 0
        assert cached() == 96
        server.post("/reset_prefix_cache", {})
        assert cached() == 0


def test_an_early_client_frees_its_place(tmp_path: Path) -> None:
    with launched(tmp_path, "--max-num-seqs", "1", VLLM_SIM_TIME_SCALE="5") as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 16000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            next(response.iter_lines())
        assert len(server.stream(2)) == 3  # would wait for minutes behind the first one
        until = time.monotonic() + 5.0
        while 'vllm:num_requests_running{engine="0",model_name="/models/some"} 0.0' not in server.get("/metrics").text:
            assert time.monotonic() < until
        assert 'finished_reason="abort",model_name="/models/some"} 1.0' in server.get("/metrics").text


@pytest.mark.parametrize("kind", sorted(START_CRASHES))
def test_every_way_of_not_starting(kind: str, tmp_path: Path) -> None:
    crash = START_CRASHES[kind]
    with launched(tmp_path, ready=False, VLLM_SIM_FAULT=f"start:{kind}", VLLM_SIM_START_S="0.05") as server:
        assert server.wait() == crash.exit_code
        assert crash.error.splitlines()[-1].strip() in server.log
        facts = FailureFacts(idle_free_gib=139.29, device_gib=139.8)
        judged = classify(server.log, exit_code=crash.exit_code, phase="launch", facts=facts)
        assert judged.kind == kind.removesuffix("-old")
        if crash.process == "engine":
            assert server.log.rstrip().splitlines()[-1].endswith("Failed core proc(s): {}")


@pytest.mark.parametrize(
    ("flag", "value", "text", "kind"),
    [
        ("max-num-batched-tokens", 448, "max_num_batched_tokens (448) must be greater", "budget-below-seqs"),
        ("max-model-len", 99999, "is greater than the derived max_model_len", "length-beyond-model"),
        ("tensor-parallel-size", 2, "please ensure that world_size (2)", "gpus-missing"),
        ("gpu-memory-utilization", 0.1, "No available memory for the cache blocks", "kv-cache-none"),
        ("gpu-memory-utilization", 0.999, "on startup is less than desired", "memory-utilization-too-high"),
        ("gpu-memory-utilization", 0.99, "CUDA out of memory", "oom-graph-capture"),
        ("gpu-memory-utilization", 0.125, "the estimated maximum model length is", "kv-cache-below-length"),
    ],
)
def test_what_memory_or_rules_forbid_does_not_start(
    flag: str, value: float, text: str, kind: str, tmp_path: Path
) -> None:
    failure = starts(H200_8B, {flag: value})
    assert failure is not None
    assert failure.kind == kind
    with launched(tmp_path, f"--{flag}", str(value), ready=False) as server:
        assert server.wait() == 1
        assert text in server.log
        facts = FailureFacts(idle_free_gib=139.29, device_gib=139.8)
        judged = classify(server.log, exit_code=1, phase="launch", facts=facts)
    assert (judged.kind, judged.verdict) == (kind, failure.verdict)


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = subprocess.run(
            [*MODULE, "serve", "m", "--host", "127.0.0.1", "--port", str(port)],
            capture_output=True,
            text=True,
            env={**os.environ, "VLLM_SIM_START_S": "0.2"},
            check=False,
        )
    assert result.returncode == 1
    assert "[Errno 98] Address already in use" in result.stdout


def test_hang_at_start(tmp_path: Path) -> None:
    with launched(tmp_path, ready=False, VLLM_SIM_FAULT="hang-at-start") as server:
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(1.5)
        with pytest.raises(httpx.TransportError):
            server.get("/health")


def test_slow_start_is_slow_but_comes(tmp_path: Path) -> None:
    begun = time.monotonic()
    with launched(tmp_path, VLLM_SIM_FAULT="slow-start:1.5"):
        assert time.monotonic() - begun > 1.5


@pytest.mark.parametrize(("fault", "text"), [("oom-under-load:3", "torch.OutOfMemoryError"), ("engine-killed:3", "")])
def test_death_under_load_exits_0_and_fails_what_runs(fault: str, text: str, tmp_path: Path) -> None:
    with launched(tmp_path, VLLM_SIM_FAULT=fault) as server:
        assert server.stream()[-1] == "[DONE]"
        assert server.stream()[-1] == "[DONE]"
        payloads = server.stream(200)
        assert "EngineCore encountered an issue" in payloads[-2]
        assert payloads[-1] == "[DONE]"
        assert server.wait() == 0
        assert text in server.log
        assert "EngineDeadError" in server.log
        judged = classify(server.log, exit_code=0, phase="measure", facts=FailureFacts())
    assert judged.kind == ("oom-under-load" if text else "engine-died")


def test_a_condition_decides_whether_a_fault_applies(tmp_path: Path) -> None:
    fault = "oom-under-load:1 if max-num-seqs>=256 and enable-prefix-caching==true"
    with launched(tmp_path, "--max-num-seqs", "128", VLLM_SIM_FAULT=fault) as server:
        assert server.stream()[-1] == "[DONE]"
        assert server.process.poll() is None
    with launched(tmp_path, "--max-num-seqs", "256", VLLM_SIM_FAULT=fault) as server:
        assert "error" in server.stream()[0]


def test_health_says_200_while_the_engine_is_dead(tmp_path: Path) -> None:
    with launched(tmp_path, VLLM_SIM_FAULT="dead-health:1") as server:
        body = {"prompt": [1, 2], "max_tokens": 4}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=body, timeout=1.0)
        assert server.get("/health").status_code == 200
        assert server.process.poll() is None
        assert [c for c in psutil.Process(server.process.pid).children() if c.status() != "zombie"] == []


def test_stuck_makes_no_token(tmp_path: Path) -> None:
    with launched(tmp_path, VLLM_SIM_FAULT="stuck:2") as server:
        server.stream()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={"prompt": [1], "max_tokens": 4}, timeout=1.0)
        assert server.get("/health").status_code == 200


def test_faults_of_single_requests(tmp_path: Path) -> None:
    with launched(tmp_path, VLLM_SIM_FAULT="stream-error:2; http-500:3; short-output:5; early-close:7") as server:
        assert server.stream()[-1] == "[DONE]"  # 1
        assert '"error"' in server.stream()[-2]  # 2
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 4}).status_code == 500  # 3
        assert '"error"' in server.stream()[-2]  # 4
        short = server.stream(8)  # 5
        assert len(short) == 8
        assert '"length"' in short[-2]
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 4}).status_code == 500  # 6
        with pytest.raises(httpx.RemoteProtocolError):
            server.stream()  # 7


@pytest.mark.parametrize(("fault", "needed"), [("swallow-sigterm", 2), ("ignore-sigterm", None)])
def test_sigterm_that_does_not_work(fault: str, needed: int | None, tmp_path: Path) -> None:
    with launched(tmp_path, VLLM_SIM_FAULT=fault) as server:
        for _ in range(needed or 3):
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.4)
        if needed is None:
            assert server.process.poll() is None
        else:
            assert server.wait() == 0


def test_an_engine_outlives_its_killed_server_only_when_asked_to(tmp_path: Path) -> None:
    for fault, survives in (("", False), ("engine-survives", True)):
        with launched(tmp_path, VLLM_SIM_FAULT=fault) as server:
            engine = psutil.Process(server.process.pid).children()[0]
            server.process.kill()
            server.wait()
            time.sleep(0.5)
            alive = engine.is_running() and engine.status() != "zombie"
            assert alive is survives
            if alive:
                engine.kill()


def test_orphan_stays_in_its_own_session(tmp_path: Path) -> None:
    with launched(tmp_path, VLLM_SIM_FAULT="orphan") as server:
        children = psutil.Process(server.process.pid).children()
        orphan = next(child for child in children if child.name() != "VLLM::EngineCor")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert orphan.is_running()
        assert os.getsid(orphan.pid) == orphan.pid
        segments = [Path(row.path) for row in orphan.memory_maps() if row.path.startswith("/dev/shm/")]
        assert len(segments) == 1
        orphan.terminate()
        orphan.wait(5.0)
        assert segments[0].exists()  # nobody else would remove it
        segments[0].unlink()


def test_sigterm_during_the_start_ends_engine_too(tmp_path: Path) -> None:
    with launched(tmp_path, ready=False, VLLM_SIM_START_S="20") as server:
        until = time.monotonic() + 10.0
        while not (engines := psutil.Process(server.process.pid).children()) and time.monotonic() < until:
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
        assert all(not engine.is_running() or engine.status() == "zombie" for engine in engines) or _gone(engines)


def _gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=3.0)
    return not alive


def over_http(url: str, planned: Sequence[PlannedRequest]) -> tuple[RequestResult, ...]:
    """Send planned requests with random prompts through the tuner's own client."""
    rng = np.random.default_rng(1)
    sent = []
    for request in planned:
        prompt = rng.integers(0, 4000, request.input_tokens).tolist()
        body = {
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent.append(
            LoadRequest(
                request.index,
                request.class_name,
                request.scheduled_s,
                json.dumps(body).encode(),
                "/v1/completions",
                request.input_tokens,
                request.output_tokens,
                True,
            )
        )
    return run_load(url, sent, workers=1, timeout_s=30.0, drain_s=30.0).requests


def test_every_token_arrives_while_many_stream(tmp_path: Path) -> None:
    load = Load("c", 128, 48, ttft_ms=1000, tpot_ms=100)
    planned = requests(Scenario("busy", H200_8B, (load,), {}, "", ""), "c", rate_rps=60.0, duration_s=2.0, seed=7)
    with launched(tmp_path, "--disable-uvicorn-access-log") as server:
        rows = over_http(server.url, planned)
    assert [row.status.value for row in rows] == ["ok"] * len(planned)
    assert [row.output_tokens for row in rows] == [request.output_tokens for request in planned]
    assert all(row.chunks == row.output_tokens for row in rows)


def test_both_faces_agree(tmp_path: Path) -> None:
    """The same requests over HTTP in real time and in virtual time."""
    load = Load("c", 128, 32, ttft_ms=1000, tpot_ms=100)
    scenario = Scenario("faces", CPU2_SMALL, (load,), {}, "", "")
    planned = requests(scenario, "c", rate_rps=5.0, duration_s=8.0, seed=7)
    virtual = simulate(CPU2_SMALL, {}, planned, seed=1, start_seed=1)
    with launched(tmp_path, VLLM_SIM_PROFILE="cpu2-small") as server:
        real = over_http(server.url, planned)
    assert all(row.ok for row in real)
    for name in ("ttft_s", "tpot_s"):
        ours = np.median([getattr(row, name) for row in real])
        theirs = np.median([getattr(row, name) for row in virtual.requests])
        assert ours == pytest.approx(theirs, rel=0.15), name


def test_bench_says_that_the_prefix_cache_answered_repeated_prompts(tmp_path: Path) -> None:
    words = ["--rate", "4", "--duration", "2", "--input-tokens", "1000", "--output-tokens", "4", "--seed", "3"]
    words += ["--workers", "1", "--json"]
    with launched(tmp_path, "--max-model-len", "4096") as server:
        command = [sys.executable, "-m", "tuner", "bench", "--url", server.url, *words]
        first, again = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert again.returncode == 6  # it sends what the first has sent
    assert "prefix cache" in " ".join(json.loads(again.stdout)["validity"]["reasons"])
