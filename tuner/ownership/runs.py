"""The run file – everything that a tuner has started – and the removal of what an earlier, dead tuner left.

It removes only what a run file of this user, this boot and this pid namespace names, or what carries its marker.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tuner.ownership.processes import (
    ProcessId,
    Segment,
    carries,
    command_line,
    machine,
    reap,
    remove_segments,
    running,
    segments_of,
    send,
    table,
    this_process,
)
from tuner.store.files import user_folder, write_atomic

FORMAT_VERSION = 1
MARKER = "VLLM_TUNE_SERVER"
"""Environment variable of every server; its children inherit it, so they are recognised wherever they went."""

_TEMPORARY_PREFIX = "vllm-tune-"
_KILL_S = 10.0  # a killed process can need this long to give back tens of GiB of GPU memory


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """One server and all that it has made."""

    marker: str
    port: int
    gpus: tuple[int, ...]
    temporary: str  # its private TMPDIR
    processes: tuple[ProcessId, ...] = ()
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Content of run.json."""

    study: str
    machine: str
    host: str
    tuner: ProcessId
    started_at: float
    servers: tuple[ServerEntry, ...] = ()
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Removed:
    """What was left of one dead run and is gone now; `stuck` is what would not go."""

    study: str
    processes: tuple[str, ...]
    segments: tuple[str, ...]
    temporaries: tuple[str, ...]
    stuck: tuple[str, ...]

    def __str__(self) -> str:
        gone = [
            f"{len(things)} {noun} ({', '.join(things)})"
            for noun, things in (("processes", self.processes), ("shared-memory segments", self.segments))
            if things
        ]
        text = f"left by an earlier run ({self.study}) that did not end by itself: removed {' and '.join(gone)}"
        return text + (f"; still there: {', '.join(self.stuck)}" if self.stuck else "")

    @property
    def anything(self) -> bool:
        return bool(self.processes or self.segments or self.stuck)


def runs_folder() -> Path:
    """Where this user's run files lie, whatever the results folder."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "vllm-tune" / "runs"


def new_temporary() -> Path:
    """A private TMPDIR for one server: sockets and rendezvous files that vLLM forgets when killed go with it.

    Its path is short, because a Unix socket's may not exceed 107 bytes (unix(7)).
    """
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=_temporaries()))


def _temporaries() -> str:
    base = tempfile.gettempdir()
    return base if len(base) <= 40 else "/tmp"


class Run:
    """This tuner's own run file, in the user's registry and, where there is one, in the study's folder.

    Thread-safe. Every change is on disk before the call returns.
    """

    def __init__(self, study: str, folder: Path | None = None, registry: Path | None = None) -> None:
        self._lock, self._closed = threading.Lock(), False
        tuner = this_process()
        self._record = RunRecord(study, machine(), socket.gethostname(), tuner, time.time())
        name = f"{tuner.pid}-{tuner.start_ticks}-{uuid.uuid4().hex[:8]}.json"
        self._paths = [(registry or runs_folder()) / name, *([folder / "run.json"] if folder else [])]
        self._write()

    def put(self, entry: ServerEntry) -> None:
        """Enter a server, or replace what was known of it."""
        with self._lock:
            others = tuple(server for server in self._record.servers if server.marker != entry.marker)
            self._record = replace(self._record, servers=(*others, entry))
            self._write()

    def forget(self, marker: str) -> None:
        """The server is gone, with everything that it made."""
        with self._lock:
            kept = tuple(server for server in self._record.servers if server.marker != marker)
            self._record = replace(self._record, servers=kept)
            self._write()

    def close(self) -> None:
        """The tuner is done: what a server that would not end has left goes, and the files once none is entered."""
        with self._lock:
            if self._record.servers and not _remove(self._record).stuck:
                self._record = replace(self._record, servers=())
            self._closed = True
            self._write()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self) -> None:
        content = TypeAdapter(RunRecord).dump_json(self._record, indent=1)
        for path in self._paths:
            if self._closed and not self._record.servers:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, content)


def read_run(path: Path) -> RunRecord | None:
    """None where the file is gone or is no run file that we can read."""
    try:
        return TypeAdapter(RunRecord).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def dead_runs(folders: Sequence[Path] = (), registry: Path | None = None) -> dict[Path, RunRecord]:
    """Run files of this boot and pid namespace whose tuner has ended; `folders` are results folders to search too."""
    paths = [*sorted((registry or runs_folder()).glob("*.json")), *(folder / "run.json" for folder in folders)]
    here = machine()
    records = {path: record for path in paths if (record := read_run(path)) is not None}
    return {path: record for path, record in records.items() if record.machine == here and not running(record.tuner)}


def remove_dead_runs(folders: Sequence[Path] = (), registry: Path | None = None) -> tuple[Removed, ...]:
    """Kill and unlink what dead runs left, then drop their files; a run with something stuck keeps its file."""
    reports: dict[ProcessId, Removed] = {}
    for path, record in dead_runs(folders, registry).items():
        if record.tuner not in reports:
            reports[record.tuner] = _remove(record)
        if not reports[record.tuner].stuck:
            path.unlink(missing_ok=True)
    return tuple(report for report in reports.values() if report.anything)


def kill_all(
    processes: Iterable[ProcessId], markers: Iterable[str], *, reap_except: int | None = None
) -> tuple[set[ProcessId], set[ProcessId]]:
    """SIGKILL the processes and all that carry a marker, until none is left or 10 s have passed.

    Returns (killed, still running). `reap_except` collects orphans that became our children, but not this pid, whose
    exit code somebody waits for; None collects none.
    """
    known, markers = set(processes), tuple(markers)
    killed: set[ProcessId] = set()
    deadline = time.monotonic() + _KILL_S
    while True:
        known |= marked(markers)
        alive = {process for process in known if running(process)}
        if reap_except is not None:
            reap(process for process in known - alive if process.pid != reap_except)
        if not alive or time.monotonic() > deadline:
            return killed, alive
        killed |= {process for process in alive if send(process, signal.SIGKILL)}
        time.sleep(0.02)


def marked(markers: Sequence[str]) -> set[ProcessId]:
    """Every process that was started, directly or not, by a server with one of these markers."""
    return {
        info.id for pid, info in table().items() if any(carries(pid, MARKER, marker) for marker in markers if marker)
    }


def remove_temporary(path: str) -> bool:
    """Delete a server's private TMPDIR, and nothing that is not one; True when it is gone."""
    folder = Path(path)
    made_so = re.fullmatch(rf"{_TEMPORARY_PREFIX}[a-z0-9_]{{8}}", folder.name)  # as tempfile.mkdtemp names folders
    if not made_so or folder.is_symlink() or folder.parent.resolve() != Path(_temporaries()).resolve():
        return True
    with contextlib.suppress(OSError):
        if folder.is_dir() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder)
    return not folder.exists()


def _remove(record: RunRecord) -> Removed:
    markers = [server.marker for server in record.servers]
    recorded = {process for server in record.servers for process in server.processes}
    alive = {process for process in recorded if running(process)} | marked(markers)
    segments = {segment for server in record.servers for segment in server.segments}
    segments.update(*(segments_of(process.pid) for process in alive))
    names = {process: f"{process.pid} {command_line(process.pid)[:60]}".strip() for process in alive}
    killed, stuck = kill_all(alive, markers)
    return Removed(
        study=record.study,
        processes=tuple(names.get(process, str(process.pid)) for process in sorted(killed - stuck)),
        segments=remove_segments(segments),
        temporaries=tuple(
            server.temporary
            for server in record.servers
            if Path(server.temporary).exists() and remove_temporary(server.temporary)
        ),
        stuck=tuple(names.get(process, str(process.pid)) for process in sorted(stuck)),
    )
