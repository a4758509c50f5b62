"""What telemetry costs: CPU of the sampling thread, and TTFT of one server with and without it, in turns.

    python -m benchmarks.telemetry_cost --vllm PATH --model DIR [-- FLAGS FOR VLLM]

Every turn offers the same kind of load (Poisson, fresh prompts) to the same server; turns alternate in random order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tuner.client import LoadRequest, run_load
from tuner.telemetry import Telemetry

INPUT_TOKENS, OUTPUT_TOKENS, VOCABULARY = 64, 16, 1000
READY_S = 300.0


@dataclass(frozen=True)
class Turn:
    telemetry: bool
    ttft_p50_ms: float
    ttft_p99_ms: float
    api_cpu: float  # cores of the server's main process
    own_cpu: float  # cores of the sampling thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, default=10.0, help="requests/s")
    parser.add_argument("--window", type=float, default=12.0, help="seconds a turn")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [arguments.vllm, "serve", arguments.model, "--host", "127.0.0.1", "--port", str(port)]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(
                [*command, *arguments.flags], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            _wait(port, server)
            report(measure(arguments, f"http://127.0.0.1:{port}", server.pid))
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def measure(arguments: argparse.Namespace, url: str, pid: int) -> list[Turn]:
    rng = random.Random(1)
    turn(arguments, url, pid, rng, telemetry=False)  # warms the server
    turns = []
    for _ in range(arguments.pairs):
        for telemetry in rng.sample([True, False], 2):
            turns.append(turn(arguments, url, pid, rng, telemetry=telemetry))
            print(turns[-1], file=sys.stderr)
    return turns


def turn(arguments: argparse.Namespace, url: str, pid: int, rng: random.Random, *, telemetry: bool) -> Turn:
    requests, at = [], 0.0
    while (at := at + rng.expovariate(arguments.rate)) < arguments.window:
        body = {
            "model": arguments.model,
            "prompt": [rng.randrange(10, VOCABULARY) for _ in range(INPUT_TOKENS)],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        requests.append(
            LoadRequest(
                index=len(requests),
                class_name="load",
                scheduled_s=at,
                body=json.dumps(body).encode(),
                path="/v1/completions",
                planned_input_tokens=INPUT_TOKENS,
                planned_output_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
            )
        )
    sampler = Telemetry(f"{url}/metrics", lambda: {"api": [pid]}, ()) if telemetry else None
    before, began = psutil.Process(pid).cpu_times(), time.monotonic()
    if sampler:
        sampler.start()
    results = run_load(url, requests, timeout_s=60, drain_s=30).requests
    if sampler:
        sampler.stop()
    after, wall_s = psutil.Process(pid).cpu_times(), time.monotonic() - began
    ttft = [result.ttft_s * 1000 for result in results if result.ok and result.ttft_s is not None]
    return Turn(
        telemetry=telemetry,
        ttft_p50_ms=float(np.percentile(ttft, 50)),
        ttft_p99_ms=float(np.percentile(ttft, 99)),
        api_cpu=(after.user + after.system - before.user - before.system) / wall_s,
        own_cpu=sampler.own_cpu_s / wall_s if sampler else 0.0,
    )


def report(turns: list[Turn]) -> None:
    print("turns with and without telemetry: median (least to greatest)")
    for name in ("ttft_p50_ms", "ttft_p99_ms", "api_cpu", "own_cpu"):
        for telemetry in (False, True):
            values = sorted(getattr(turn, name) for turn in turns if turn.telemetry is telemetry)
            label = "with" if telemetry else "without"
            print(f"{name:12} {label:8} {statistics.median(values):8.4g} ({values[0]:.4g} to {values[-1]:.4g})")


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
