"""What a dead tuner left is found and removed, and nothing else ever is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import EnvironmentFault
from tuner.ownership import DeviceLocks, ProcessId, Run, Segment, ServerEntry, dead_runs, holders, remove_dead_runs
from tuner.ownership.processes import (
    SHARED_MEMORY,
    descendants,
    look_up,
    machine,
    parse_stat,
    present_segments,
    remove_segments,
    running,
    segments_of,
    send,
    table,
    this_process,
)
from tuner.ownership.runs import MARKER, new_temporary, read_run, remove_temporary

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER, env={**os.environ, MARKER: "m1"})
    yield process
    process.kill()
    process.wait()


def identity(pid: int) -> ProcessId:
    info = look_up(pid)
    assert info is not None
    return info.id


def finished() -> ProcessId:
    """A process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    known = identity(process.pid)
    process.kill()
    process.wait()
    return known


def leave_behind(registry: Path, entry: ServerEntry, **changes: object) -> Path:
    """A run file of a tuner that is dead."""
    run = Run("night-7", registry=registry)
    run.put(entry)
    (path,) = registry.glob("*.json")
    document = json.loads(path.read_text())
    gone = finished()
    document["tuner"] = {"pid": gone.pid, "start_ticks": gone.start_ticks}
    path.write_text(json.dumps(document | changes))
    return path


# --- processes -----------------------------------------------------------------------------------------------------


def test_parse_stat_with_an_evil_name() -> None:
    text = "42 (a) b (c) S 1 42 41 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 2 3"
    info = parse_stat(text)
    assert (info.id, info.name, info.state) == (ProcessId(42, 987654), "a) b (c", "S")
    assert (info.parent, info.group, info.session, info.threads) == (1, 42, 41, 1)


@given(name=st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), max_size=15))
def test_any_name_is_parsed(name: str) -> None:
    assert parse_stat(f"7 ({name}) R 1 2 3" + " 0" * 13 + " 1 0 99 0").name == name


def test_identity_is_not_the_pid_alone(sleeper: subprocess.Popen[bytes]) -> None:
    known = identity(sleeper.pid)
    other = replace(known, start_ticks=known.start_ticks - 1)
    assert running(known)
    assert running(other) is None
    assert not send(other, signal.SIGKILL), "the pid was used by another process before"
    assert sleeper.poll() is None
    assert send(known, signal.SIGKILL)
    sleeper.wait()
    assert not send(known, signal.SIGKILL)


def test_a_zombie_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    known = identity(sleeper.pid)
    sleeper.kill()
    deadline = time.monotonic() + 10
    while running(known) and time.monotonic() < deadline:
        time.sleep(0.01)
    info = look_up(sleeper.pid)
    assert info is not None
    assert info.state == "Z"
    assert running(known) is None


def test_descendants(sleeper: subprocess.Popen[bytes]) -> None:
    found = descendants(table(), [os.getpid()])
    assert {os.getpid(), sleeper.pid} <= found
    assert descendants(table(), [sleeper.pid]) == {sleeper.pid}


# --- shared memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHARED_MEMORY / f"psm_test{os.getpid()}"
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink(missing_ok=True)


def named(name: str) -> Segment:
    (found,) = (segment for segment in present_segments() if segment.name == name)
    return found


def test_a_semaphore_is_known_by_its_inode() -> None:
    code = (
        "import multiprocessing as m; lock = m.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        name = f"sem.{maker.stdout.readline().strip().removeprefix('/')}"
        assert named(name) in segments_of(maker.pid)
        maker.communicate("\n")


def test_segments_in_use_or_replaced_stay(segment: Path) -> None:
    known = named(segment.name)
    with open(segment, "rb"):
        assert known in segments_of(os.getpid())
        assert remove_segments([known]) == (), "a live process has it open"
    assert remove_segments([replace(known, inode=known.inode + 1)]) == (), "another file of that name"
    assert remove_segments([replace(known, name=f"../shm/{known.name}")]) == ()
    assert segment.exists()
    assert remove_segments([known]) == (known.name,)
    assert not segment.exists()


# --- run files -----------------------------------------------------------------------------------------------------


def test_run_file_while_alive_and_after(tmp_path: Path) -> None:
    registry, study = tmp_path / "registry", tmp_path / "study"
    entry = ServerEntry("m1", 12345, (0,), "/tmp/vllm-tune-x", (ProcessId(1, 2),))
    with Run("night-7", study, registry) as run:
        run.put(entry)
        record = read_run(study / "run.json")
        assert record is not None
        assert (record.servers, record.tuner, record.machine) == ((entry,), this_process(), machine())
        assert dead_runs([study], registry) == {}, "we are alive"
        run.put(replace(entry, port=12346))
        run.forget("m1")
    assert list(registry.iterdir()) == []
    assert not (study / "run.json").exists()


def test_dead_run_is_removed(sleeper: subprocess.Popen[bytes], tmp_path: Path, segment: Path) -> None:
    known = named(segment.name)
    temporary = new_temporary()
    (temporary / "socket").touch()
    path = leave_behind(tmp_path, ServerEntry("m-other", 1, (), str(temporary), (identity(sleeper.pid),), (known,)))
    (report,) = remove_dead_runs(registry=tmp_path)
    assert sleeper.wait(5) == -signal.SIGKILL
    assert report.segments == (segment.name,)
    assert report.temporaries == (str(temporary),)
    assert "night-7" in str(report)
    assert str(sleeper.pid) in str(report)
    assert not path.exists()
    assert not temporary.exists()
    assert remove_dead_runs(registry=tmp_path) == ()


def test_marked_process_is_found_without_being_recorded(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The tuner was killed between the start of the server and the note of its pid."""
    leave_behind(tmp_path, ServerEntry("m1", 1, (), ""))
    (report,) = remove_dead_runs(registry=tmp_path)
    assert sleeper.wait(5) == -signal.SIGKILL
    assert len(report.processes) == 1


@pytest.mark.parametrize("change", ["machine", "ticks", "torn"])
def test_what_is_not_provably_ours_stays(sleeper: subprocess.Popen[bytes], tmp_path: Path, change: str) -> None:
    known = identity(sleeper.pid)
    if change == "ticks":
        known = replace(known, start_ticks=known.start_ticks - 100)
    other = {"machine": "other-boot/pid:[1]"} if change == "machine" else {}
    path = leave_behind(tmp_path, ServerEntry("m-other", 1, (), "", (known,)), **other)
    if change == "torn":
        path.write_text(path.read_text()[:-40])
    assert remove_dead_runs(registry=tmp_path) == ()
    assert sleeper.poll() is None


def test_only_a_private_temporary_is_removed(tmp_path: Path) -> None:
    precious = tmp_path / "results"
    precious.mkdir()
    link = tmp_path / "vllm-tune-link"
    link.symlink_to(precious)
    own = [tmp_path / "vllm-tune-abcdefgh", Path(tempfile.mkdtemp(prefix="vllm-tune-")) / "vllm-tune-abcdefgh"]
    named = Path(tempfile.gettempdir()) / f"vllm-tune-results-{uuid.uuid4().hex}"
    for folder in (*own, named):
        folder.mkdir()
    for path in (precious, link, Path("/tmp/vllm-tune-x/../.."), *own, named):
        remove_temporary(str(path))
    assert precious.is_dir()
    assert all(folder.is_dir() for folder in (*own, named)), "nothing but what mkdtemp made where we make them"
    named.rmdir()
    remove_temporary(str(own[1].parent))
    assert not own[1].exists()
    assert Path("/tmp").is_dir()


# --- locks ---------------------------------------------------------------------------------------------------------


def test_one_study_per_device(tmp_path: Path) -> None:
    with DeviceLocks(["gpu-a", "gpu-b"], study="first", folder=tmp_path):
        assert [holder.device for holder in holders(tmp_path)] == ["gpu-a", "gpu-b"]
        with pytest.raises(EnvironmentFault, match=rf"gpu-b is in use .* pid {os.getpid()}, first, since"):
            DeviceLocks(["gpu-b", "gpu-c"], study="second", folder=tmp_path).__enter__()
        with DeviceLocks(["gpu-c"], study="third", folder=tmp_path):
            pass
    assert holders(tmp_path) == ()
    with DeviceLocks(["gpu-b"], study="second", folder=tmp_path):
        pass


def test_locks_are_taken_all_or_none(tmp_path: Path) -> None:
    with DeviceLocks(["gpu-b"], study="first", folder=tmp_path):
        with pytest.raises(EnvironmentFault):
            DeviceLocks(["gpu-a", "gpu-b"], study="second", folder=tmp_path).__enter__()
        assert [holder.device for holder in holders(tmp_path)] == ["gpu-b"]


def test_death_frees_the_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; from tuner.ownership import DeviceLocks; from pathlib import Path\n"
        "with DeviceLocks(['cpu'], study='dying', folder=Path(sys.argv[1])):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert "dying" in holders(tmp_path)[0].text
        process.kill()
    with DeviceLocks(["cpu"], study="next", folder=tmp_path):
        pass


def test_lock_folder_that_cannot_be_used(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(EnvironmentFault, match="cannot be opened"):
        DeviceLocks(["cpu"], study="s", folder=blocked).__enter__()


def test_leaving_a_run_removes_what_a_server_that_would_not_end_has_left(tmp_path: Path) -> None:
    child = subprocess.Popen(SLEEPER, start_new_session=True)
    with Run("s", None, registry=tmp_path) as run:
        run.put(ServerEntry("m-left", 1, (), str(tmp_path / "none"), (identity(child.pid),)))
    assert child.wait(timeout=10) != 0
    assert list(tmp_path.glob("*.json")) == []
