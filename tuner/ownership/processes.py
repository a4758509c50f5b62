"""What the kernel says about processes and their shared memory, and how one is ended without ever hitting another.

A process is named by (pid, start ticks since boot): pids are used again, the pair is not, and unlike a wall-clock start
time it does not move when the clock is set.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ (\d+)\s+/dev/shm/", re.MULTILINE)  # the inode in /proc/PID/maps, proc(5)
_ENDED_STATES = ("Z", "X", "x")  # zombie, dead: without other threads they hold no memory, port or GPU


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process for as long as this machine is up."""

    pid: int
    start_ticks: int  # /proc/PID/stat, field 22: clock ticks since boot


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One line of the process table."""

    id: ProcessId
    parent: int
    group: int
    session: int
    state: str  # R, S, D, T (suspended), Z (zombie), …
    threads: int
    name: str  # at most 15 characters; `VLLM::EngineCor` is an engine


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One file under /dev/shm; the inode tells a later file of the same name apart."""

    name: str
    inode: int


def parse_stat(text: str) -> ProcessInfo:
    """One /proc/PID/stat; the name stands in parentheses and may hold spaces and parentheses itself (proc(5))."""
    opening, closing = text.index("("), text.rindex(")")
    fields = text[closing + 2 :].split()
    return ProcessInfo(
        id=ProcessId(int(text[:opening]), int(fields[19])),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        state=fields[0],
        threads=int(fields[17]),
        name=text[opening + 1 : closing],
    )


def look_up(pid: int) -> ProcessInfo | None:
    """The process that has this pid now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return parse_stat(text) if text else None


def table() -> dict[int, ProcessInfo]:
    """Every process that is visible, by pid."""
    found = (look_up(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {info.id.pid: info for info in found if info is not None}


def running(process: ProcessId) -> ProcessInfo | None:
    """The table's line of exactly this process, None when it has ended (a zombie has, once its last thread has)."""
    info = look_up(process.pid)
    if info is None or info.id != process or (info.state in _ENDED_STATES and info.threads <= 1):
        return None
    return info


def descendants(processes: Mapping[int, ProcessInfo], roots: Iterable[int]) -> set[int]:
    """Pids of `roots` and everything below them, as far as they are in the table."""
    children: dict[int, list[int]] = {}
    for pid, info in processes.items():
        children.setdefault(info.parent, []).append(pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def carries(pid: int, variable: str, value: str) -> bool:
    """Whether the process was started with this environment variable; False where we may not look."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{variable}={value}".encode() in environment.split(b"\0")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def this_process() -> ProcessId:
    info = look_up(os.getpid())
    assert info is not None, "a running process is in the process table"
    return info.id


def machine() -> str:
    """This boot and this pid namespace: where a recorded ProcessId means something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def become_subreaper() -> None:
    """Orphaned grandchildren become our children instead of init's, so that they can be found and reaped.

    Where the kernel refuses, the marker in their environment still finds them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# --- ending ------------------------------------------------------------------------------------------------------


def send(process: ProcessId, number: int) -> bool:
    """Signal exactly this process; False when it has ended or is not ours to signal.

    The pidfd is opened before the identity is checked, so the pid cannot be used again in between.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel or sandbox without pidfd: the check alone must do
        if running(process) is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
            return True
        return False
    try:
        if running(process) is None:
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)


def reap(processes: Iterable[ProcessId]) -> None:
    """Collect those that ended and were re-parented to us; never a child that somebody else waits for."""
    for process in processes:
        info = look_up(process.pid)
        if info is not None and info.id == process and info.state == "Z" and info.parent == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


# --- shared memory -----------------------------------------------------------------------------------------------


def segments_of(pid: int) -> frozenset[Segment]:
    """This user's files under /dev/shm that the process has mapped or open.

    By inode: glibc makes a semaphore under a passing name and links it to its own, so that the maker's map shows the
    former, deleted one (sem_open).
    """
    inodes: set[int] = set()
    try:
        inodes.update(map(int, _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))))
        for handle in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{handle}"
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith("/dev/shm/"):
                    inodes.add(os.stat(link).st_ino)
    except OSError:
        pass
    return frozenset(segment for segment in present_segments() if segment.inode in inodes)


def present_segments() -> frozenset[Segment]:
    """This user's files under /dev/shm."""
    found = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(Segment(entry.name, entry.inode()))
    return frozenset(found)


def remove_segments(segments: Iterable[Segment]) -> tuple[str, ...]:
    """Unlink those that no live process uses any more; returns the names removed."""
    present = present_segments() & frozenset(segments)
    if not present:
        return ()
    in_use = frozenset[Segment]().union(*(segments_of(pid) for pid in table()))
    removed = []
    for segment in sorted(present - in_use):
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / segment.name).unlink()
            removed.append(segment.name)
    return tuple(removed)
