"""Learning what an executable is: asked once, believed only when it looks like vLLM, clear when it is not."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.errors import EnvironmentFault, InputError
from tuner.ownership.runs import runs_folder
from tuner.server import find_vllm
from tuner.server.install import cache_home, parse_version

FAKE = Path(__file__).parent / "fakes" / "fake_vllm.py"


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    """The fake in an environment of its own; `asked` counts how often it was run."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "lib" / "python3.12" / "site-packages" / "vllm").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.4\n")
    script = folder / "bin" / "vllm"
    script.write_text(f'#!/bin/sh\necho "$*" >> "{tmp_path}/asked"\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return script


def asked(executable: Path) -> list[str]:
    return (executable.parents[2] / "asked").read_text().splitlines()


def test_asks_once_until_something_is_replaced(executable: Path, tmp_path: Path) -> None:
    first = find_vllm(str(executable), cache=tmp_path / "cache")
    assert (first.version, first.device, first.simulated) == ("0.32.0+cpu", "cpu", False)
    assert first.python_version == "3.12.4"
    assert "max-num-seqs" in first.flags.flags
    assert sorted(asked(executable)) == ["--version", "serve --help=all"]
    assert find_vllm(str(executable), cache=tmp_path / "cache") == first
    assert len(asked(executable)) == 2
    time.sleep(0.01)
    (executable.parents[1] / "lib" / "python3.12" / "site-packages" / "vllm" / "new.py").touch()
    find_vllm(str(executable), cache=tmp_path / "cache")
    assert len(asked(executable)) == 4, "another package lies beside it: ask again"


def test_torn_or_foreign_cache_is_ignored(executable: Path, tmp_path: Path) -> None:
    find_vllm(str(executable), cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").glob("*.json")
    for content in ("{", "[]", json.dumps({"version": 3, "help": None})):
        entry.write_text(content)
        assert find_vllm(str(executable), cache=tmp_path / "cache").version == "0.32.0+cpu"
    assert len(asked(executable)) == 8


def test_cache_that_cannot_be_written_costs_only_time(executable: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert find_vllm(str(executable), cache=tmp_path / "cache").version == "0.32.0+cpu"


@pytest.mark.parametrize(
    ("version", "device", "simulated"),
    [("0.26.0", "cuda", False), ("0.33.0+cu130", "cuda", False), ("vllm-sim 0.32.0 (simulated)", "cuda", True)],
)
def test_device_and_simulation_by_version(
    executable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, device: str, simulated: bool
) -> None:
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"version": version}))
    install = find_vllm(str(executable), cache=tmp_path / "cache")
    assert (install.device, install.simulated) == (device, simulated)


def test_named_executable_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--vllm = '.*missing': is no executable file"):
        find_vllm(str(tmp_path / "missing"))
    (tmp_path / "plain").touch()
    with pytest.raises(InputError, match="is not executable"):
        find_vllm(str(tmp_path / "plain"))


def test_the_home_of_an_unknown_user_and_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no executable file"):
        find_vllm("~no-such-user/vllm", cache=tmp_path)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    private = tmp_path / f"vllm-tune-{os.getuid()}"
    assert cache_home() == private / ".cache" / "vllm-tune"
    assert runs_folder().is_relative_to(private)
    assert private.stat().st_mode & 0o777 == 0o700
    somebody = os.getuid() + 1
    private.rename(tmp_path / f"vllm-tune-{somebody}")
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with pytest.raises(EnvironmentFault, match="somebody else"):
        cache_home()


def test_no_vllm_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EnvironmentFault, match="no `vllm` on PATH"):
        find_vllm()


def test_found_beside_our_own_python(executable: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(executable.parent / "python"))
    assert find_vllm(cache=tmp_path / "cache").path == str(executable)


def test_broken_install_says_why(executable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", '{"help_code": 1}')
    with pytest.raises(EnvironmentFault, match=r"exit code 1.*(?s:.*)libcudart\.so\.13"):
        find_vllm(str(executable), cache=tmp_path / "cache")


def test_another_program(tmp_path: Path) -> None:
    other = tmp_path / "vllm"
    other.write_text("#!/bin/sh\necho 1.2.3\n")
    other.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="does not look like vLLM's"):
        find_vllm(str(other), cache=tmp_path / "cache")


def test_not_a_program(tmp_path: Path) -> None:
    broken = tmp_path / "vllm"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="cannot be run"):
        find_vllm(str(broken), cache=tmp_path / "cache")


def test_no_answer_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.server.install._ASK_S", 0.5)
    hanging = tmp_path / "vllm"
    hanging.write_text(f'#!/bin/sh\nsleep 300 & echo $! >> "{tmp_path}/pids"\nwait\n')
    hanging.chmod(0o755)
    assert hanging.stat().st_mode & stat.S_IXUSR
    with pytest.raises(EnvironmentFault, match="no answer within"):
        find_vllm(str(hanging), cache=tmp_path / "cache")
    for pid in (tmp_path / "pids").read_text().split():
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}"):
            time.sleep(0.01)
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
        assert state.strip()[:1] in ("", "Z")


def test_version_among_warnings() -> None:
    assert parse_version("W1130 torch/_library/triton.py:53] Triton 3.6\n0.32.0+cpu\n", Path("vllm")) == "0.32.0+cpu"
    with pytest.raises(EnvironmentFault, match="names no version"):
        parse_version("hello", Path("vllm"))
