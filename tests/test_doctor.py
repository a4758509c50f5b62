"""`tune doctor`: every check has evidence, a failing one a remedy and exit code 3."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

from tuner.cli import doctor
from tuner.environment import checkup
from tuner.environment.checkup import Status
from tuner.errors import InputError
from tuner.ownership import DeviceLocks, ServerEntry
from tuner.serve_args import ServeFlags
from tuner.server import VllmInstall

FAKE = Path(__file__).parent / "fakes" / "fake_vllm.py"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of the user's own state is looked at."""
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "VLLM_TUNE_LOCKS", "HF_HUB_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    return tmp_path


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    script = tmp_path / "vllm"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.register(parser.add_subparsers(dest="command"))
    arguments = parser.parse_args(["doctor", *words])
    code: int = arguments.handler(arguments)
    return code


def test_a_good_machine(vllm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--vllm", vllm, "--out", str(tmp_path / "results")) == 0
    output = capsys.readouterr().out
    for name in (
        "vllm",
        "locks",
        "earlier runs",
        "ulimits",
        "port",
        "disk",
        "shared memory",
        "client",
        "clock",
        "name",
    ):
        assert f"  {name} " in output
    assert "A study can run here" in output
    assert not (tmp_path / "results").exists(), "it changes nothing"


def test_json(vllm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--vllm", str(tmp_path / "missing"), "--model", str(tmp_path), "--json") == 3
    document = json.loads(capsys.readouterr().out)
    failed = [check for check in document["checks"] if check["status"] == "fail"]
    assert not document["ok"]
    assert {check["name"] for check in failed} == {"vllm", "model"}
    assert all(check["evidence"] and check["remedy"] for check in failed)
    assert any(check["name"] == "clock" for check in document["checks"]), "the rest is checked all the same"


def test_a_file_where_results_would_go(vllm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        assert run("--vllm", vllm, "--out", str(tmp_path / out), "--json") == 3
        failed = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["status"] == "fail"]
        assert [(check["name"], "is a file" in check["evidence"]) for check in failed] == [("disk", True)]


def test_gpus_of_a_cpu_build(vllm: str) -> None:
    with pytest.raises(InputError, match="--gpus"):
        run("--vllm", vllm, "--gpus", "0")


@pytest.mark.parametrize(
    ("version", "simulated", "status"),
    [("0.32.0", False, "ok"), ("0.25.1", False, "warn"), ("0.34.0", False, "warn"), ("0.32.0", True, "warn")],
)
def test_vllm_versions(version: str, simulated: bool, status: str) -> None:
    install = VllmInstall("/v", version, ServeFlags(version, {}), "cuda", simulated)
    assert checkup.check_vllm(install).status == status


def test_models(tmp_path: Path, home: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").touch()
    assert checkup.check_model(str(tmp_path / "good")).status is Status.OK
    assert checkup.check_model(str(tmp_path)).status is Status.FAIL
    assert checkup.check_model("./missing").status is Status.FAIL
    assert checkup.check_model("org/name").status is Status.WARN
    assert checkup.check_model("gpt2").status is Status.WARN
    (home / "HF_HUB_CACHE" / "models--org--name" / "snapshots").mkdir(parents=True)
    assert checkup.check_model("org/name").status is Status.OK


def test_device_held_by_another_study() -> None:
    assert checkup.check_locks(()).status is Status.OK
    with DeviceLocks(["cpu"], study="night-7"):
        check = checkup.check_locks(())
    assert check.status is Status.FAIL
    assert "night-7" in check.evidence


def test_dead_runs_are_told(tmp_path: Path) -> None:
    from tests.test_ownership import leave_behind
    from tuner.ownership.runs import runs_folder

    leave_behind(runs_folder(), ServerEntry("m", 1, (), ""))
    check = checkup.check_earlier_runs(tmp_path)
    assert check.status is Status.WARN
    assert "night-7 (1 servers)" in check.evidence


def test_full_or_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {check.status for check in checkup.check_disk(tmp_path / "a" / "b")} <= {Status.OK, Status.WARN}
    monkeypatch.setattr(checkup, "_DISK_FAIL", 1 << 60)
    monkeypatch.setattr(checkup, "_DISK_WARN", 1 << 61)
    assert {check.status for check in checkup.check_disk(tmp_path)} == {Status.FAIL}


def test_another_tune_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, content in (("ray", "from ray.tune.cli import main"), ("ours", "from tuner.cli import main")):
        (tmp_path / folder).mkdir()
        script = tmp_path / folder / "tune"
        script.write_text(f"#!/usr/bin/env python3\n{content}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/ray:{tmp_path}/ours")
    shadowed = checkup.check_name()
    assert shadowed.status is Status.WARN
    assert "vllm-tune" in shadowed.remedy
    assert str(tmp_path / "ray" / "tune") in shadowed.evidence
    monkeypatch.setenv("PATH", f"{tmp_path}/ours:{tmp_path}/ray")
    assert checkup.check_name().status is Status.OK


def test_client_headroom_is_measured() -> None:
    started = time.monotonic()
    check = checkup.check_client(sample_s=0.2)
    assert 0.2 <= time.monotonic() - started < 5
    assert "cores idle" in check.evidence
