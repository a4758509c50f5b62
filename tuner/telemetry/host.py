"""CPU time of the processes in play, by role; it reads only the processes it is told about and its own children."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

ROLES = ("api", "engine", "worker", "client")

LEAST_ELAPSED_S = 0.2
"""The kernel counts CPU time in steps of 10 ms; over less than this a share would be mostly rounding."""

Pids = Callable[[], Mapping[str, Sequence[int]]]


class HostCpu:
    """Cores used by the busiest process of each role since the reading before; 1.0 is one full core.

    The busiest, because one Python process that reaches 1.0 is a limit however idle its siblings are. `client` is this
    process and its direct children without the server's, unless `pids` names it.
    """

    def __init__(self, pids: Pids) -> None:
        self._pids = pids
        self._processes: dict[int, psutil.Process] = {}
        self._roles: Mapping[str, Sequence[int]] = {}
        self._before: dict[int, float] = {}
        self._before_at = -math.inf

    def refresh(self) -> None:
        """Ask anew which processes there are: engines and load workers come and go."""
        roles = dict(self._pids())
        if "client" not in roles:
            server = {pid for pids in roles.values() for pid in pids}
            roles["client"] = [pid for pid in (os.getpid(), *_children()) if pid not in server]
        self._roles = roles
        wanted = {pid for pids in roles.values() for pid in pids}
        self._processes = {pid: process for pid, process in self._processes.items() if pid in wanted}
        for pid in wanted - self._processes.keys():
            with contextlib.suppress(psutil.Error):
                self._processes[pid] = psutil.Process(pid)

    def read(self) -> Mapping[str, float]:
        """Role to cores; a role whose processes are new or gone is left out, and all when called again at once."""
        now = time.monotonic()
        elapsed = now - self._before_at
        if elapsed < LEAST_ELAPSED_S:
            return {}
        spent = {pid: seconds for pid, process in self._processes.items() if (seconds := _cpu_s(process)) is not None}
        shares = {pid: (seconds - self._before[pid]) / elapsed for pid, seconds in spent.items() if pid in self._before}
        self._before, self._before_at = spent, now
        return {
            role: max(known)
            for role, pids in self._roles.items()
            if (known := [shares[pid] for pid in pids if pid in shares])
        }


def _cpu_s(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def _children() -> Iterable[int]:
    """Direct children of this process, from the kernel's own list; walking all of /proc would cost too much."""
    for tasks in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, tasks.read_text().split())
