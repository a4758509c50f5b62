"""Everything that one run has started, found by a mark in its environment: processes, segments, ports, files."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path

from tuner.environment import IdleBaseline, wait_idle
from tuner.ownership.processes import (
    ProcessId,
    ProcessInfo,
    Segment,
    carries,
    command_line,
    present_segments,
    running,
    segments_of,
    table,
)
from tuner.server.command import port_free

MARK = "TUNE_CHAOS_RUN"
_PERIOD_S = 0.2
_LEFT_S = 10.0  # for what ends by itself
_PORT = re.compile(r"--port (\d+)")


class Scene:
    """A context manager that looks five times a second, so that it knows what was there once all is gone."""

    def __init__(self, mark: str, state: Path, temporary: Path, idle: IdleBaseline) -> None:
        self._mark, self._state, self._temporary, self._idle = mark, state, temporary, idle
        self._before = present_segments()
        self._segments: set[Segment] = set()
        self._ports: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="scene", daemon=True)

    def __enter__(self) -> Scene:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def processes(self) -> list[ProcessInfo]:
        """Those of this run that live."""
        marked = [info for pid, info in table().items() if carries(pid, MARK, self._mark)]
        return [info for info in marked if running(info.id)]

    def role(self, name: str, tuner: int) -> list[ProcessId]:
        """Living processes by what they are: `server`, `engine`, `worker` (of the client) or `all`."""
        alive = self.processes()
        lines = {info.id.pid: command_line(info.id.pid) for info in alive}
        workers = [info for info in alive if "tuner.client.worker" in lines[info.id.pid]]
        mains = {
            info.session: lines[info.id.pid]
            for info in alive
            if info.id.pid == info.session and _PORT.search(lines[info.id.pid]) and info.id.pid != tuner
        }
        engines = [
            info
            for info in alive
            if info.session in mains
            and info.id.pid != info.session
            and (info.name.startswith("VLLM::") or lines[info.id.pid] == mains[info.session])
        ]
        found = {
            "server": [info for info in alive if info.id.pid in mains],
            "engine": engines,
            "worker": workers,
            "all": alive,
        }
        return sorted(info.id for info in found[name])

    def left(self) -> list[str]:
        """What is still there of the run, after a moment for what ends by itself."""
        deadline = time.monotonic() + _LEFT_S
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _found(self) -> list[str]:
        processes = self.processes()
        present = present_segments()
        unused = present - self._before
        if unused:
            unused -= frozenset[Segment]().union(*(segments_of(pid) for pid in table()))
        segments = (present & self._segments) | unused
        return [
            *(f"process {info.id.pid} {command_line(info.id.pid)[:80]}" for info in processes),
            *(f"/dev/shm/{segment.name}" for segment in sorted(segments)),
            *(f"port {port}" for port in sorted(self._ports) if not port_free(port)),
            *(f"{path}" for path in sorted(self._temporary.glob("vllm-tune-*"))),
            *(f"{path}" for path in sorted(self._state.glob("vllm-tune/runs/*.json"))),
            *wait_idle(self._idle, timeout_s=0.0),
        ]

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            with contextlib.suppress(OSError):
                for info in self.processes():
                    self._segments |= segments_of(info.id.pid)
                    if match := _PORT.search(command_line(info.id.pid)):
                        self._ports.add(int(match[1]))


def private_temporary(mark: str) -> Path:
    """A TMPDIR with a path short enough for vLLM's sockets."""
    path = Path(f"/tmp/chaos-{mark}")
    path.mkdir()
    return path
