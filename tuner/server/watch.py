"""Starts a server's process and keeps account of everything that comes from it; it ends nothing.

A thread of its own does both: a signal handler that raises in the main thread can then not come between the start of
the process and the note of its pid.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuner.errors import TunerError
from tuner.ownership import Run, ServerEntry
from tuner.ownership.processes import (
    SHARED_MEMORY,
    ProcessId,
    ProcessInfo,
    Segment,
    become_subreaper,
    carries,
    command_line,
    descendants,
    look_up,
    running,
    segments_of,
    table,
)
from tuner.ownership.runs import MARKER

# Seconds between looks at the process table (70 µs a process) and glances at the names under /dev/shm (20 µs), of which
# a new one makes a look due at once: what a process has mapped must be asked before it dies.
_STARTING = (0.25, 0.05)
_SERVING = (30.0, 0.5)
_START_S = 30.0  # for fork and exec
_LOOKS = 4  # a segment is made first and mapped a moment later
_BEFORE_US = _LOOKS + 1


class Watch:
    """The account of one server: its process, every descendant, every shared-memory segment of theirs."""

    def __init__(self, entry: ServerEntry, run: Run | None) -> None:
        self._entry, self._run = entry, run
        self._lock = threading.Lock()
        self._known: set[ProcessId] = set()
        self._segments: set[Segment] = set()
        self._looks: dict[str, int] = {}  # how often our maps were searched for a name under /dev/shm
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        self._serving = False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        """Start the process and the account; OSError as from Popen."""
        become_subreaper()
        self._looks = dict.fromkeys(_shared_memory_names(), _BEFORE_US)  # what was there before us is never ours
        self._thread = threading.Thread(
            target=self._keep, args=(tuple(command), dict(environment), log_path), name="server-watch", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def launched(self) -> bool:
        """Whether a process was started; waits for the answer if `start` was interrupted half-way."""
        return self._thread is not None and self._started.wait(_START_S) and self.process is not None

    def serving(self) -> None:
        """The server is up: look less often from now on, so that a measurement is not disturbed."""
        self._serving = True

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    @property
    def processes(self) -> frozenset[ProcessId]:
        """All that were ever seen."""
        with self._lock:
            return frozenset(self._known)

    @property
    def segments(self) -> frozenset[Segment]:
        with self._lock:
            return frozenset(self._segments)

    def scan(self) -> None:
        """Look once: new descendants, new segments; enters what is new in the run file."""
        assert self.process is not None, "scan follows start"
        processes = table()
        with self._lock:
            before = (len(self._known), len(self._segments))
            self._known |= self._find(processes)
            owned = {segment.name for segment in self._segments}
            fresh = [name for name in _shared_memory_names() - owned if self._looks.get(name, 0) < _LOOKS]
            if fresh:
                before_us = {name for name, looks in self._looks.items() if looks == _BEFORE_US}
                for process in self._known:
                    if running(process):
                        self._segments |= {
                            segment for segment in segments_of(process.pid) if segment.name not in before_us
                        }
                self._looks.update((name, self._looks.get(name, 0) + 1) for name in fresh)
            changed = (len(self._known), len(self._segments)) != before
        if changed:
            self._record()

    def engines(self) -> frozenset[ProcessId]:
        """Processes without which the server cannot answer: engine cores, workers, further API servers.

        vLLM names them `VLLM::…`; where setproctitle is missing, they are the children that multiprocessing started.
        """
        assert self.process is not None, "engines follow start"
        main = self.process.pid
        alive = [info for process in self.processes if (info := running(process)) and process.pid != main]
        named = frozenset(info.id for info in alive if info.name.startswith("VLLM::"))
        own = command_line(main)
        return named or frozenset(
            info.id for info in alive if (line := command_line(info.id.pid)) == own or "spawn_main" in line
        )

    def _find(self, processes: Mapping[int, ProcessInfo]) -> set[ProcessId]:
        """Our tree, our session, what is below anything known, and orphans that came to us and carry the marker."""
        assert self.process is not None
        main, us = self.process.pid, os.getpid()
        roots = {process.pid for process in self._known if self._is(processes, process)}
        # A pid is not used again while it names a session; if another process has it, our session is empty.
        session_is_ours = main not in processes or processes[main].id in self._known
        for pid, info in processes.items():
            ours = session_is_ours and info.session == main
            orphan = info.parent == us and pid not in roots and carries(pid, MARKER, self._entry.marker)
            if ours or orphan:
                roots.add(pid)
        return {processes[pid].id for pid in descendants(processes, roots)}

    @staticmethod
    def _is(processes: Mapping[int, ProcessInfo], process: ProcessId) -> bool:
        info = processes.get(process.pid)
        return info is not None and info.id == process

    def _record(self) -> None:
        if self._run is None:
            return
        with self._lock:
            known = replace(self._entry, processes=tuple(sorted(self._known)), segments=tuple(sorted(self._segments)))
            # A disk that refuses must not end the account; the marker that is in the file finds the processes.
            with contextlib.suppress(TunerError, OSError):
                self._run.put(known)

    def _keep(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        try:
            with open(log_path, "ab") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._error = error
            self._started.set()
            return
        info = look_up(self.process.pid)
        if info is not None:
            self._known.add(info.id)
        self._started.set()
        while not self._stopping.is_set():
            with contextlib.suppress(OSError):  # no descriptors left, say: the next look may have some
                self.scan()
            self._pause()

    def _pause(self) -> None:
        """Until the next look is due, or a new name under /dev/shm makes it due."""
        look_s, glance_s = _SERVING if self._serving else _STARTING
        deadline = time.monotonic() + look_s
        while time.monotonic() < deadline and not self._stopping.wait(glance_s):
            with self._lock:
                if _shared_memory_names() - self._looks.keys():
                    return


def _shared_memory_names() -> frozenset[str]:
    return frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset()
