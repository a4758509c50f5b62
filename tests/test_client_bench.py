"""`tune bench --url`: the command measures a running server, prints what it found and refuses what makes no sense."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.refserver.reference import ReferenceServer
from tests.simulated_study import shared_study
from tuner.cli import main
from tuner.cli.bench_output import _estimate
from tuner.cli.bench_own import told
from tuner.errors import EnvironmentFault
from tuner.stats import percentile
from tuner.store import ResultsFolder, read_requests

ROOT = Path(__file__).resolve().parents[1]
OPEN = ["--rate", "40", "--duration", "1.5", "--input-tokens", "64", "--output-tokens", "8"]
CLOSED = ["--concurrency", "6", "--requests", "40", "--input-tokens", "64", "--output-tokens", "8"]


def tune(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuner", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)


def test_an_open_loop_in_json(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("slo: {ttft: {p99: 400}, e2e: {p95: 150}}\nclasses: {other: {weight: 1}}\n")
    raw = tmp_path / "raw.jsonl.gz"
    with ReferenceServer("--t1", "50", "--t2", "20") as server:
        ended = tune("--url", server.url, *OPEN, "--json", "--slo", str(slo), "--out", str(raw), "--ramp", "0.5")
    found = json.loads(ended.stdout)
    assert found["model"] == "reference"
    assert found["load"]["rate_rps"] == 40
    requests = read_requests(raw)
    assert len(requests) == len(server.served)
    assert found["requests"]["scored"] == sum(0.5 <= request.scheduled_s < 2.0 for request in requests)
    assert found["requests"]["failed"] == 0
    assert found["requests"]["by_status"] == {"ok": found["requests"]["scored"]}
    # What the server did: 50 ms to the first token, 20 ms between tokens.
    assert found["latency_ms"]["ttft"]["p50"]["value"] == pytest.approx(50, abs=15)
    assert found["latency_ms"]["tpot"]["p50"]["value"] == pytest.approx(20, abs=2)
    assert found["latency_ms"]["e2e"]["p50"]["value"] == pytest.approx(190, abs=25)
    first, second = found["limits"]
    assert (first["metric"], first["percentile"], first["limit_ms"]) == ("ttft", 99, 400)
    assert (second["metric"], second["share_within"]["value"]) == ("e2e", 0)
    assert found["outcome"] in ("missed", "invalid")
    assert found["attainment"]["value"] == 0
    assert set(found["validity"]) == {"valid", "reasons", "notes", "send_lag_p99_ms"}
    assert ended.returncode == (0 if found["validity"]["valid"] else 6)
    assert found["client"]["peak_rss_bytes"] < 100e6


def test_a_closed_loop_as_a_table() -> None:
    with ReferenceServer("--t1", "20", "--t2", "5", "--fail-every", "10") as server:
        ended = tune("--url", server.url, "--model", "reference", *CLOSED, "--seed", "7")
    assert ended.returncode in (0, 6), ended.stderr
    assert "reference at http://127.0.0.1" in ended.stdout
    assert "6 at a time" in ended.stdout
    assert "requests  40 scored, 12 failed (4 early-close, 4 http-error, 4 stream-error)" in ended.stdout
    assert all(name in ended.stdout for name in ("TTFT", "TPOT", "ITL", "E2E", "send lag P99"))


def test_the_same_seed_sends_the_same_requests(tmp_path: Path) -> None:
    sent = []
    for seed in ("3", "3", "4"):
        with ReferenceServer("--t1", "5", "--t2", "1") as server:
            assert main(["bench", "--url", server.url, *OPEN, "--seed", seed, "--out", str(tmp_path / "raw")]) in (0, 6)
        sent.append([request.scheduled_s for request in read_requests(tmp_path / "raw")])
    assert sent[0] == sent[1] != sent[2]


def test_a_measurement_that_is_not_valid_says_so_and_ends_with_6(tmp_path: Path, server: FakeServer) -> None:
    """The server counts twice as many prompt tokens as were sent."""
    ended = tune("--url", server.url, *OPEN, "--json")
    assert ended.returncode == 6
    found = json.loads(ended.stdout)
    assert found["outcome"] == "invalid"
    assert "prompts had another length than planned, such as 128 tokens for 64" in found["validity"]["reasons"][0]


def test_chat_sends_text_that_the_server_made_of_token_ids(server: FakeServer) -> None:
    ended = tune("--url", server.url, *OPEN, "--json", "--api", "chat")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["requests"]["failed"] == 0
    assert server.bodies
    for body in server.bodies:
        assert body["messages"][0]["content"].split() == ["word"] * 64
        assert body["max_completion_tokens"] == 8


def test_an_api_key_from_the_environment_is_sent(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "Bearer secret"
    refused = tune("--url", server.url, *OPEN)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "OPENAI_API_KEY" in refused.stderr
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert tune("--url", server.url, *OPEN, "--api", "chat").returncode == 0


BAD = {
    "no url": (OPEN, "--duration = '1.5': needs --url"),
    "no address": (["--url", "127.0.0.1:8000", *OPEN], "is no http:// address"),
    "broken address": (["--url", "http://[::1", *OPEN], "is no http:// address"),
    "https": (["--url", "https://localhost", *OPEN], "is no http:// address"),
    "bad port": (["--url", "http://localhost:99999", *OPEN], "is no http:// address"),
    "no rate": (["--url", "http://h", *OPEN[2:]], "--rate = None: is needed"),
    "no lengths": (["--url", "http://h", *OPEN[:4]], "--input-tokens = None: is needed"),
    "rate 0": (["--url", "http://h", "--rate", "0", *OPEN[2:]], "--rate = '0': must be above 0"),
    "rate nan": (["--url", "http://h", "--rate", "nan", *OPEN[2:]], "--rate = 'nan'"),
    "no number": (["--url", "http://h", *OPEN[:-1], "x"], "--output-tokens = 'x': must be a whole number"),
    "both loops": (["--url", "http://h", *OPEN, "--concurrency", "3"], "is needed"),
    "closed and rate": (["--url", "http://h", *CLOSED, "--rate", "3"], "--rate = '3': does not go with a closed loop"),
    "closed and ramp": (["--url", "http://h", *CLOSED, "--ramp", "3"], "--ramp = '3': is for an open loop"),
    "too many": (["--url", "http://h", "--rate", "1e6", "--duration", "1e6", *OPEN[4:]], "more than 10,000,000"),
    "timeout": (["--url", "http://h", *OPEN, "--timeout", "1e9"], "--timeout = '1e9': must not exceed 3600"),
    "no request": (
        ["--url", "http://h", "--rate", "0.001", "--duration", "1", *OPEN[4:]],
        "--duration = '1': gives no request to expect at --rate 0.001. Give at least 1000 s",
    ),
    "slo": (["--url", "http://h", *OPEN, "--slo", "/nowhere"], "--slo = '/nowhere': is no file"),
    "out": (["--url", "http://h", *OPEN, "--out", "/nowhere/file"], "a folder that does not exist"),
    "out is a folder": (["--url", "http://h", *OPEN, "--out", "/tmp"], "--out = '/tmp': is no regular file"),
    "empty label": (["--url", "http://..com:80", *OPEN], "is no http:// address"),
    "long label": (["--url", f"http://{'a' * 70}.com", *OPEN], "is no http:// address"),
    "blank in host": (["--url", "http://127.0.0.1 :80", *OPEN], "is no http:// address"),
    "beyond ASCII": (["--url", "http://h/sch\u00f6n", *OPEN], "is no http:// address"),
    "ramp too long": (["--url", "http://h", *OPEN, "--ramp", "1e7"], "--ramp = '1e7': gives more than 10,000,000"),
    "ramp below 0": (["--url", "http://h", *OPEN, "--ramp", "-1"], "--ramp = '-1': must be 0 or more"),
    "tokens": (["--url", "http://h", *OPEN[:5], "10000000", *OPEN[6:]], "gives more than 500,000,000 prompt tokens"),
    "tokens, closed": (
        ["--url", "http://h", *CLOSED, "--requests", "10000000"],
        "gives more than 500,000,000 prompt tokens with 10,000,000 requests",
    ),
    "own config": (["--url", "http://h", *OPEN, "--config", "max-num-seqs=4"], "--config = ['max-num-seqs=4']: has no"),
    "own speed": (["--url", "http://h", *OPEN, "--speed", "quick"], "--speed = 'quick': has no meaning with --url"),
    "length without url": (["--model", "m", *OPEN[4:]], "needs --url"),
    "fixed flags": (["--url", "http://h", *OPEN, "--", "--max-num-seqs", "4"], "has no meaning with --url"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, text = BAD[name]
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_no_server_is_3_and_another_model_is_2(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", *OPEN]) == 3
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["bench", "--url", server.url, "--model", "other", *OPEN]) == 2
    assert "It serves fake." in capsys.readouterr().err


@pytest.mark.parametrize("key", ["sk-first\r\nsk-second", "schlüssel", "钥匙"])
def test_a_key_that_no_header_can_hold_is_refused_unseen(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert main(["bench", "--url", "http://127.0.0.1:9", *OPEN]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tune: environment: OPENAI_API_KEY")
    assert not set(key.split()) & set(err.split())


def test_a_server_that_answers_no_request_was_not_measured(server: FakeServer) -> None:
    server.dead = True
    ended = tune("--url", server.url, "--rate", "20", "--duration", "0.5", *OPEN[4:], "--timeout", "0.2")
    assert ended.returncode == 3, ended.stderr
    assert "no request was answered" in ended.stderr


HOSTILE = {
    "deep": (b"[" * 100_000, 2, "does not list its models"),
    "surrogate": (b'{"data": [{"id": "\\ud800"}, {"id": "\\u001b[2J"}]}', 2, "It serves \\ud800, \\x1b[2J."),
    "endless": (b" " * 70_000, 3, "did not answer /v1/models within 0 MiB"),
}


def test_an_own_record_in_json_is_json_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """A margin decided by failures is infinite, which only Python's JSON can say."""
    record = next(record for record in ResultsFolder(shared_study()).trials() if record.capacities)
    told(replace(record, predicted=math.inf), {}, as_json=True)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["predicted"] is None


def test_what_was_measured_is_told_even_if_it_cannot_be_kept(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, requests: object) -> None:
        raise EnvironmentFault("the disk is full")

    monkeypatch.setattr("tuner.store.write_requests", full)
    words = ["--url", server.url, *OPEN, "--ramp", "0.0", "--json", "--out", str(tmp_path / "raw")]
    assert main(["bench", *words]) == 3
    assert json.loads(capsys.readouterr().out)["requests"]["failed"] == 0


def test_a_prompt_beyond_the_model_is_refused_before_it_is_made(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rate", "2", "--duration", "1", "--input-tokens", "10000000", "--output-tokens", "8"]
    began = time.monotonic()
    assert main(["bench", "--url", server.url, *words]) == 2
    assert "exceed the model length of 2048" in capsys.readouterr().err
    assert time.monotonic() - began < 5


def test_bounds_of_a_small_sample_are_as_documented() -> None:
    assert _estimate(percentile([3.0, 4.0], 50.0)) == {"value": 3.0, "low": 0.0, "high": None, "n": 2}
    text = " ".join((Path(__file__).parents[1] / "docs" / "client.md").read_text().split())
    assert "too small to bound a percentile, `low` is 0 and `high` is null" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_list_of_models_is_one_line(
    name: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models, code, text = HOSTILE[name]
    if name == "endless":
        monkeypatch.setattr("tuner.cli.bench_url._MOST_BYTES", 65536)
    assert main(["bench", "--url", server.url, *OPEN]) == code
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_an_answer_that_drips_ends_in_time(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.drip_s = 0.05
    monkeypatch.setattr("tuner.cli.bench_url._ANSWER_S", 0.3)
    assert main(["bench", "--url", server.url, *OPEN]) == 3
    assert "did not answer /v1/models within 0.3 s" in capsys.readouterr().err


def test_token_ids_beyond_every_tokenizer_are_not_taken(server: FakeServer) -> None:
    server.tokens = [*range(100, 400), 2**60]
    assert tune("--url", server.url, *OPEN, "--json").returncode in (0, 6)
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts
    assert all(isinstance(prompt, list) and 300 <= min(prompt) <= max(prompt) < 1300 for prompt in prompts)


class FakeServer(ThreadingHTTPServer):
    """Tokenizes, detokenizes, asks for a key if told to, and answers at once with twice the prompt tokens."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.key: str | None = None
        self.bodies: list[dict[str, object]] = []
        self.models = json.dumps({"data": [{"id": "fake", "max_model_len": 2048}]}).encode()
        self.tokens = list(range(100, 400))
        self.drip_s = 0.0
        self.dead = False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for byte in data if self.server.drip_s else ():
            time.sleep(self.server.drip_s)
            try:
                self.wfile.write(bytes([byte]))
            except ConnectionError:
                return
        if not self.server.drip_s:
            self.wfile.write(data)

    def do_GET(self) -> None:
        if self.server.key not in (None, self.headers["Authorization"]):
            self.answer(b'{"error": "Unauthorized"}', 401)
        else:
            self.answer(self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.key not in (None, self.headers["Authorization"]):
            self.answer(b'{"error": "Unauthorized"}', 401)
        elif self.path == "/tokenize":
            self.answer(json.dumps({"tokens": self.server.tokens}).encode())
        elif self.path == "/detokenize":
            self.answer(json.dumps({"prompt": "word " * len(body["tokens"])}).encode())
        elif self.server.dead:
            time.sleep(0.5)
        else:
            self.server.bodies.append(body)
            usage = {"prompt_tokens": 128, "completion_tokens": 8}
            choice = {"index": 0, "text": "w", "delta": {"content": "w"}, "finish_reason": "length"}
            self.answer(f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield running
        running.shutdown()
        thread.join()
