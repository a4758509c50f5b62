"""Judges load generators by the reference server: ours and others in one run, interleaved, on one core each.

    python benchmarks/bench_client.py [--rounds 3] [--vllm PATH --tokenizer DIR] [--guidellm PATH] [--aiperf PATH]

The server (tests/refserver) writes every token at a known time and logs when it truly did; an error is what a load
generator reports minus what the server logged. Client and server have a core of their own where there are two. Every
figure is the median of the rounds, with their range. Results are kept in a JSON file; a later run adds its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.client_contenders import AiPerf, Contender, GuideLlm, Load, Ours, Reported, VllmBench
from benchmarks.client_report import report
from tests.refserver.reference import ReferenceServer, Served

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.25
T1_MS, T2_MS = 50, 20
BURST = 256
RATES_RPS = (20, 100, 300)
RATE_S = 6
STREAMS = [round(40 * 1.1**step) for step in range(55)]
"""Streams at 50 tokens/s each, in steps of 10 %."""
FIRST_STREAMS = {"tune": 1750, "vllm bench serve": 600, "guidellm": 160, "aiperf": 110}
ITL_TOLERANCE = 0.05
LONG_PROMPT_BYTES = 100_000

Values = dict[str, float]


@dataclass(frozen=True)
class Run:
    """One load by one load generator, with the server's truth and what the client's processes used."""

    reported: Reported
    served: list[Served]
    spawned_s: float
    cpu: list[tuple[float, float]]  # (CLOCK_MONOTONIC, CPU seconds of the process tree so far)
    peak_process_bytes: int
    peak_total_bytes: int


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes started inside run on `core` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Bench:
    """Runs loads on cores of their own."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.client_core, self.server_core = cores[0], cores[-1]
        os.sched_setaffinity(0, {self.server_core})

    def run(self, contender: Contender, load: Load, *, t1_ms: float = T1_MS, options: Sequence[str] = ()) -> Run:
        """RuntimeError where the load generator fails or leaves no result."""
        timing = ("--t1", str(t1_ms), "--t2", str(T2_MS))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with ReferenceServer(*timing, *options) as server, (folder / "output").open("w") as output:
                command = contender.command(server.url, load, folder)
                spawned_s = time.monotonic()
                with on_core(self.client_core):
                    process = psutil.Popen(
                        command, stdout=output, stderr=output, env={**os.environ, **contender.environment}
                    )
                cpu, peaks = _watch(process)
            if process.returncode != 0:
                raise RuntimeError(f"{contender.name} failed: {(folder / 'output').read_text()[-2000:]}")
            reported = contender.read(folder)
        return Run(reported, server.served, spawned_s, cpu, max(peaks.values(), default=0), sum(peaks.values()))


def _watch(process: psutil.Popen) -> tuple[list[tuple[float, float]], dict[int, int]]:
    """CPU over time and peak memory by process, until the command ends."""
    cpu: list[tuple[float, float]] = []
    peaks: dict[int, int] = {}
    ended: dict[int, float] = {}
    while process.poll() is None:
        for one in [process, *process.children(recursive=True)]:
            try:
                times = one.cpu_times()
                ended[one.pid] = times.user + times.system
                peaks[one.pid] = max(peaks.get(one.pid, 0), one.memory_info().rss)
            except psutil.Error:
                continue
        cpu.append((time.monotonic(), sum(ended.values())))
        time.sleep(SAMPLE_S)
    return cpu, peaks


# --- the measures ---


def rank(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ttft_errors_ms(run: Run) -> Values:
    ours, true = run.reported.ttft_s, [one.ttft_s for one in run.served if one.kind == "ok"]
    found = {
        "ttft_error_mean_ms": (statistics.fmean(ours) - statistics.fmean(true)) * 1e3,
        "ttft_error_p99_ms": (rank(ours, 0.99) - rank(true, 0.99)) * 1e3,
    }
    if run.reported.ttft_sent_s:
        found["ttft_sent_error_p99_ms"] = (rank(run.reported.ttft_sent_s, 0.99) - rank(true, 0.99)) * 1e3
    return found


def itl_ratio(run: Run, average: Callable[[Sequence[float]], float] = statistics.fmean) -> float:
    """Reported ÷ true."""
    return average(run.reported.itl_s) / average([gap for one in run.served for gap in one.gaps_s])


def moderate(bench: Bench, contender: Contender) -> Values:
    """50 streams, started together."""
    run = bench.run(contender, Load(50, 100))
    start_s = min(one.first_byte_s for one in run.served) - run.spawned_s
    return {**ttft_errors_ms(run), "itl_error_percent": (itl_ratio(run) - 1) * 100, "start_s": start_s}


def open_loop(bench: Bench, contender: Contender) -> Values:
    """Evenly spaced requests; the lag is that of the arrivals behind an even spacing from the earliest."""
    found: Values = {}
    for rate in RATES_RPS:
        run = bench.run(contender, Load(rate * RATE_S, 20, rate_rps=rate))
        arrivals = sorted(one.first_byte_s for one in run.served)
        late = [at_s - index / rate for index, at_s in enumerate(arrivals)]
        errors = ttft_errors_ms(run)
        found[f"{rate}_achieved_rps"] = (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
        found[f"{rate}_lag_p99_ms"] = (rank(late, 0.99) - min(late)) * 1e3
        found[f"{rate}_ttft_error_p99_ms"] = errors["ttft_error_p99_ms"]
        if run.reported.send_lag_s:
            found[f"{rate}_own_lag_p99_ms"] = rank(run.reported.send_lag_s, 0.99) * 1e3
    return found


def burst(bench: Bench, contender: Contender) -> Values:
    """256 requests at once."""
    run = bench.run(contender, Load(BURST, 20), t1_ms=1000)
    return {**ttft_errors_ms(run), "requests": len(run.served)}


def sustained(bench: Bench, contender: Contender) -> Values:
    """The most chunks per second at which mean and median gap are reported within 5 %, and their CPU time there.

    The median tells: a client that falls behind reads several chunks of a stream at once, whose gaps are then 0 and one
    long one; their mean stays right for as long as the sockets hold what was not read. All streams must be open at
    once by the server's log: a client that is slow to start them never carries that many.
    """
    step = bisect_left(STREAMS, FIRST_STREAMS[contender.name])
    best: tuple[int, Run] | None = None
    failed_at = len(STREAMS)
    while 0 <= step < failed_at:
        run = bench.run(contender, Load(STREAMS[step], 150), t1_ms=2000)
        gaps = [gap for one in run.served for gap in one.gaps_s]
        server_kept_up = statistics.fmean(gaps) <= 1.02 * T2_MS / 1e3
        wrong = max(abs(itl_ratio(run, average) - 1) for average in (statistics.fmean, statistics.median))
        whole = run.reported.succeeded == STREAMS[step] and _at_once(run)
        kept_up = whole and wrong <= ITL_TOLERANCE and server_kept_up
        if kept_up:
            best = (step, run)
            step += 1 if failed_at < len(STREAMS) else 2
        else:
            failed_at = step
            step = step - 2 if best is None else best[0] + 1
    if best is None:
        return {}
    run = best[1]
    cpu_s, chunks = _steady(run)
    return {
        "chunks_per_s": STREAMS[best[0]] * 1000 / T2_MS,
        "cpu_s_per_1000_chunks": cpu_s / chunks * 1000,
        "peak_process_mb": run.peak_process_bytes / 1e6,
        "peak_total_mb": run.peak_total_bytes / 1e6,
    }


def _at_once(run: Run) -> bool:
    """Whether all streams were open together, for more than the second that `_steady` leaves out."""
    start, end = _overlap(run)
    return end - start > 1.0


def _overlap(run: Run) -> tuple[float, float]:
    """From the last first chunk to the first last one."""
    start = max(one.arrival_s + one.written_s[0] for one in run.served)
    return start, min(one.arrival_s + one.written_s[-1] for one in run.served)


def _steady(run: Run) -> tuple[float, int]:
    """CPU time and chunks while all streams run, but for half a second at either end."""
    first, last = _overlap(run)
    start, end = first + 0.5, last - 0.5
    chunks = sum(start <= one.arrival_s + at_s < end for one in run.served for at_s in one.written_s)

    def cpu_at(moment: float) -> float:
        at = bisect_left(run.cpu, (moment, 0.0))
        (t0, c0), (t1, c1) = run.cpu[at - 1], run.cpu[at]
        return c0 + (c1 - c0) * (moment - t0) / (t1 - t0)

    return cpu_at(end) - cpu_at(start), chunks


def long_prompts(bench: Bench, contender: Contender) -> Values:
    """What 100 KB of prompt add to the reported TTFT, at 10 requests/s."""
    errors, sizes = [], []
    lengths = [100, 2000]
    for number in range(3):
        run = bench.run(contender, Load(60 if number != 1 else 5, 5, prompt_tokens=lengths[number], rate_rps=10))
        true = [one.ttft_s for one in run.served]
        errors.append(statistics.median(run.reported.ttft_s) - statistics.median(true))
        sizes.append(statistics.median(one.body_bytes for one in run.served))
        if number == 1:
            # Every load generator makes its prompts in its own way: two lengths say how long a token is.
            token_bytes = (sizes[1] - sizes[0]) / (lengths[1] - lengths[0])
            lengths.append(round(LONG_PROMPT_BYTES / token_bytes))
    return {"added_ms": (errors[2] - errors[0]) * 1e3, "body_kb": sizes[2] / 1e3}


def failures(bench: Bench, contender: Contender) -> Values:
    """30 of 100 requests fail: HTTP 500, a closed connection, an error inside a 200, ten of each."""
    run = bench.run(contender, Load(100, 10, rate_rps=50), options=("--fail-every", "10"))
    true = sum(one.kind != "ok" for one in run.served)
    return {"injected": true, "requests": len(run.served), "reported": run.reported.failed}


def first_request(bench: Bench, contender: Contender) -> Values:
    """From the start of `tune bench` to its first request at the server; for ours alone."""
    if contender.name != "tune":
        return {}
    load = ["--rate", "20", "--duration", "0.5", "--input-tokens", "100", "--output-tokens", "5"]
    # Bytecode is written by the first start, as on any machine where that is not forbidden; the second one counts.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):
        with ReferenceServer("--t1", "5", "--t2", "1") as server:
            spawned_s = time.monotonic()
            with on_core(bench.client_core):
                command = [sys.executable, "-m", "tuner", "bench", "--url", server.url, *load]
                ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if not server.served:
        raise RuntimeError(f"tune bench sent nothing: {ended.stderr}")
    return {"cli_start_s": min(one.first_byte_s for one in server.served) - spawned_s}


MEASURES: dict[str, Callable[[Bench, Contender], Values]] = {
    function.__name__: function
    for function in (moderate, open_loop, burst, sustained, long_prompts, failures, first_request)
}


# --- the run ---


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Ours, and those of the others that are there."""
    found: list[Contender] = [Ours()]
    kinds: dict[str, Callable[[str, str], Contender]] = {"vllm": VllmBench, "guidellm": GuideLlm, "aiperf": AiPerf}
    for name, kind in kinds.items():
        executable = shutil.which(getattr(arguments, name))
        if executable is None or not arguments.tokenizer:
            print(f"{name} is left out: {'no such program' if executable is None else 'it needs --tokenizer'}")
        else:
            found.append(kind(executable, arguments.tokenizer))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", default=os.environ.get("TUNE_TEST_VLLM", "vllm"), help="executable")
    parser.add_argument("--guidellm", default="guidellm", help="executable")
    parser.add_argument("--aiperf", default="aiperf", help="executable")
    parser.add_argument(
        "--tokenizer", default=os.environ.get("TUNE_TEST_TINY_MODEL", ""), help="folder; others need one"
    )
    parser.add_argument("--measures", default=",".join(MEASURES), help="comma-separated")
    parser.add_argument("--only", default="", help="only these load generators, comma-separated")
    parser.add_argument("--results", type=Path, default=ROOT / ".cache" / "bench-client.json", help="added to")
    parser.add_argument("--report", type=Path, help="write the table here, as Markdown")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else []
    chosen = [one for one in contenders(arguments) if not arguments.only or one.name in arguments.only.split(",")]
    bench = Bench()
    for number in range(arguments.rounds):
        for measure in arguments.measures.split(","):
            for contender in chosen:
                try:
                    values = MEASURES[measure](bench, contender)
                except RuntimeError as error:
                    print(f"{measure}, {contender.name}: {error}", file=sys.stderr)
                    continue
                shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
                print(f"round {number + 1}  {measure:14} {contender.name:17} {shown}", flush=True)
                results.append({"measure": measure, "contender": contender.name, "values": values})
                arguments.results.parent.mkdir(parents=True, exist_ok=True)
                arguments.results.write_text(json.dumps(results, indent=1))
    text = report(results, machine=f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
