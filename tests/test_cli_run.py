"""`tune run` from the command line against the HTTP simulator: real processes, real signals, real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tuner.store import ResultsFolder

ROOT = Path(__file__).resolve().parents[1]
SPACE = ["--space", "max-num-seqs=2,16,64"]


@pytest.fixture
def simulator(tmp_path: Path) -> Path:
    """The `vllm-sim` executable, wherever the tests run from."""
    path = tmp_path / "vllm-sim"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m tuner.sim.http "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment of its own: no lock, cache or run file of the user is touched."""
    names = {"XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state", "VLLM_TUNE_LOCKS": "locks"}
    own = {name: str(tmp_path / folder) for name, folder in names.items()}
    return {**os.environ, **own, "PYTHONPATH": str(ROOT), "VLLM_SIM_PROFILE": "cpu2-small", "VLLM_SIM_START_S": "0.2"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    """One small class, so that a trial takes seconds."""
    folder = tmp_path / "workloads"
    folder.mkdir()
    text = "input_tokens: {distribution: constant, value: 16}\noutput_tokens: {distribution: constant, value: 8}\n"
    (folder / "short.yaml").write_text(text)
    return folder


@pytest.fixture
def slo(tmp_path: Path) -> Path:
    path = tmp_path / "slo.yaml"
    path.write_text("slo: {ttft: {p95: 600}, tpot: {p95: 400}, success: 0.9}\n")
    return path


@pytest.fixture
def command(simulator: Path, model: Path, workloads: Path, slo: Path, tmp_path: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "tuner", "run", "--yes", "--out", str(tmp_path / "study")),
        *("--vllm", str(simulator), "--model", str(model), "--slo", str(slo), "--workloads", str(workloads)),
        *("--speed", "quick", "--baseline", "max-num-seqs=2", "--trials", "2", "--finish-rounds", "2", *SPACE),
    ]


def servers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "tuner.sim.http" in (process.info["cmdline"] or []) and "serve" in (process.info["cmdline"] or []):
            found.append(process)
    return found


def ours(home: dict[str, str]) -> list[psutil.Process]:
    """Servers of this test: they carry its environment."""
    found = []
    for process in servers():
        try:
            if process.environ().get("XDG_STATE_HOME") == home["XDG_STATE_HOME"]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_kill_9_in_a_trial_then_resume_removes_the_orphan_first_and_loses_nothing(
    command: list[str], home: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "first.log"
    with log.open("w") as out:
        tuner = subprocess.Popen(command, env=home, stdout=out, stderr=subprocess.STDOUT)
        folder = ResultsFolder(tmp_path / "study")
        wait_for(lambda: len(folder.trials()) >= 1, 240.0)
        wait_for(lambda: len(ours(home)) >= 1)
        tuner.kill()
        tuner.wait()
    orphans = ours(home)
    assert orphans, "the server died with the tuner, so there is nothing to remove"
    before = folder.trials()
    resume = [*command[:4], "--yes", "--resume", str(tmp_path / "study")]
    done = subprocess.run(resume, env=home, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "removed what an earlier run had left" in done.stdout
    assert done.stdout.index("removed what an earlier run") < done.stdout.index("\n  trial ")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in orphans)
    kept = [
        record
        for record in folder.trials()
        if (record.number, record.replicate) in {(r.number, r.replicate) for r in before}
    ]
    assert tuple(kept) == before
    assert ours(home) == []
    assert "Verdict:" in done.stdout
    assert "SIMULATED" in done.stdout
    assert {"best.yaml", "best.sh", "study.json", "optuna.db"} <= {path.name for path in folder.root.iterdir()}
    assert "simulated" in (folder.root / "best.yaml").read_text().lower()
    again = subprocess.run(command, env=home, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "holds a study already" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_once_or_twice_leaves_no_process(
    command: list[str], home: dict[str, str], tmp_path: Path, presses: int
) -> None:
    tuner = subprocess.Popen(command, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(ours(home)) >= 1, 120.0)
    time.sleep(2.0)
    for _ in range(presses):
        tuner.send_signal(signal.SIGINT)
        time.sleep(0.5)
    out, err = tuner.communicate(timeout=120)
    assert tuner.returncode == 130, out + err
    assert "--resume" in err
    assert "Traceback" not in out + err
    assert ours(home) == []


@pytest.mark.parametrize("rate", [[], ["--rate", "40"]], ids=["capacity", "rate"])
def test_bench_starts_a_server_of_its_own(
    command: list[str], home: dict[str, str], tmp_path: Path, rate: list[str]
) -> None:
    asked = command[command.index("--vllm") : command.index("--baseline")]
    words = [*command[:3], "bench", *asked, *rate, "--json", "--config", "max-num-seqs=16"]
    words += ["--out", str(tmp_path / "b"), "--", "--max-model-len", "1024"]
    done = subprocess.run(words, env=home, capture_output=True, text=True)
    assert done.returncode in (0, 6), done.stdout + done.stderr  # 6: a disturbed machine, and it says so
    record = json.loads(done.stdout)
    assert record["config"] == {"max-num-seqs": 16}
    assert record["simulated"]
    if rate:
        assert "bench" in {probe["purpose"] for probe in record["probes"]}
    else:
        assert record["capacities"]["short"]["rate_rps"] > 0
    assert len(ResultsFolder(tmp_path / "b").trials()) == 1
    assert ours(home) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_before_anything_was_started_leaves_nothing(
    command: list[str], home: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    slow = tmp_path / "vllm-sim"
    asked = tmp_path / "asked"
    slow.write_text(f"#!/bin/sh\necho $$ >> {asked}\nexec sleep 100\n")
    tuner = subprocess.Popen(command, env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: asked.exists() and len(asked.read_text().split()) == 2)
    tuner.send_signal(number)
    out, err = tuner.communicate(timeout=30)
    assert (tuner.returncode, out) == (130, "")
    assert err == f"tune: interrupted by {number.name}\n"
    for pid in asked.read_text().split():
        wait_for(lambda pid=int(pid): not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 5.0)


def test_json_goes_to_standard_output_alone(command: list[str], home: dict[str, str]) -> None:
    done = subprocess.run([*command[:3], "plan", *command[7:], "--json"], env=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["knobs"] == {"max-num-seqs": [2, 16, 64]}
    assert plan["slo"]["short"].startswith("TTFT P95 ≤ 600 ms")
