"""Which fault hits which run, and when: drawn from a seed. It hits processes of its own run only."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.scene import Scene
from tuner.ownership.processes import ProcessId, running, send

KINDS = (
    "tuner killed",
    "tuner ended",  # SIGTERM, SIGHUP, or Ctrl-C once or twice
    "tuner paused",
    "server killed",
    "server ended",
    "server stopped",
    "server paused",
    "engine killed",
    "engine stopped",
    "worker killed",
    "worker stopped",
    "all killed",  # the tuner and everything that came from it, at once
    "disk full",
    "files limited",  # RLIMIT_FSIZE: a disk that refuses, without any privilege
)
CONTROL = "none"
_EARLY_SHARE = 0.2  # of the faults of the tuner itself, in its first seconds
_EARLY_S = 2.5
_POLL_S = 0.02
DISK_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What the same study is when nothing happens to it."""

    duration_s: float
    trials: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and when it comes."""

    kind: str
    share: float  # of the study, counted in trials
    early_s: float | None  # after the start, instead
    signals: tuple[signal.Signals, ...]
    lasts_s: float  # of a pause, and between two signals
    later_s: float  # after the process that is meant has appeared

    def moment(self, whole: Undisturbed) -> tuple[int, float]:
        """How many trials are finished before it, and how many seconds later it comes."""
        if self.early_s is not None:
            return 0, self.early_s
        finished, rest = divmod(self.share * whole.trials, 1.0)
        return int(finished), rest * whole.duration_s / whole.trials


def draw(seed: int, index: int, kinds: tuple[str, ...], stride: int = 1) -> Fault:
    """The fault of run `index`: every kind in turn, the rest at random; the same for the same seed."""
    chance = random.Random(f"{seed}/{index}")
    kind = kinds[index * stride % len(kinds)]
    early = kind in ("tuner killed", "tuner ended") and chance.random() < _EARLY_SHARE
    ends = ((signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT,), (signal.SIGINT, signal.SIGINT))
    return Fault(
        kind=kind,
        share=chance.random(),
        early_s=chance.uniform(0.0, _EARLY_S) if early else None,
        signals=chance.choice(ends) if kind == "tuner ended" else (),
        lasts_s=chance.uniform(1.0, 4.0),
        later_s=chance.choice((0.0, chance.uniform(0.0, 1.0))),
    )


@dataclass(frozen=True, slots=True)
class Hit:
    """What was done, in words, and how to undo it once the tuner has ended; None where nothing was there to hit."""

    words: str
    undo: Callable[[], None] | None = None


def hit(fault: Fault, scene: Scene, tuner: ProcessId, study: Path) -> Hit | None:
    """Commit the fault, waiting for its victim if need be; None when the tuner ended first."""
    if fault.kind == "disk full":
        filler = study / "filler"
        return Hit(f"{_fill(filler)} bytes of filler", lambda: filler.unlink(missing_ok=True))
    if fault.kind == "files limited":
        return _limit(tuner)
    if fault.kind.startswith("tuner"):
        return _hit_tuner(fault, tuner)
    victims = _victims(fault, scene, tuner)
    if not victims:
        return None
    number = {"ended": signal.SIGTERM, "stopped": signal.SIGSTOP, "paused": signal.SIGSTOP}.get(
        fault.kind.split()[1], signal.SIGKILL
    )
    for victim in victims:
        send(victim, number)
    if fault.kind == "server paused":
        time.sleep(fault.lasts_s)
        for victim in victims:
            send(victim, signal.SIGCONT)
    return Hit(f"{number.name} to {', '.join(str(victim.pid) for victim in victims)}")


def _hit_tuner(fault: Fault, tuner: ProcessId) -> Hit | None:
    if fault.kind == "tuner paused":
        done = send(tuner, signal.SIGSTOP)
        time.sleep(fault.lasts_s)
        send(tuner, signal.SIGCONT)
        return Hit(f"SIGSTOP for {fault.lasts_s:.1f} s") if done else None
    numbers = fault.signals or (signal.SIGKILL,)
    done = send(tuner, numbers[0])
    for number in numbers[1:]:
        time.sleep(fault.lasts_s / 4)
        send(tuner, number)
    return Hit(" and ".join(number.name for number in numbers)) if done else None


def _victims(fault: Fault, scene: Scene, tuner: ProcessId) -> list[ProcessId]:
    role = fault.kind.split()[0]
    waited = False
    while running(tuner):
        found = scene.role(role, tuner.pid)
        if found:
            if waited:
                time.sleep(fault.later_s)
                found = [process for process in found if running(process)]
            if role == "engine":
                found = found[:1]
            if found:
                return found
        waited = True
        time.sleep(_POLL_S)
    return []


def _fill(path: Path) -> int:
    """Until the disk refuses one more byte."""
    written = 0
    block = bytes(1 << 16)
    with open(path, "ab", buffering=0) as file:
        while block:
            try:
                written += file.write(block)
            except OSError:
                block = block[: len(block) // 2]
    return written


def _limit(tuner: ProcessId) -> Hit | None:
    """No file may grow beyond 4 KiB: for the tuner, and for what it starts from now on."""
    before = resource.prlimit(tuner.pid, resource.RLIMIT_FSIZE)
    if not running(tuner):
        return None
    resource.prlimit(tuner.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
    return Hit("RLIMIT_FSIZE 4096")


def small_disk(path: Path) -> Callable[[], None] | None:
    """A file system of its own at `path`; how to take it away, or None where that is not allowed."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    path.mkdir(parents=True, exist_ok=True)
    if libc.mount(b"chaos", os.fsencode(path), b"tmpfs", 0, f"size={DISK_BYTES}".encode()) != 0:
        return None
    return lambda: libc.umount2(os.fsencode(path), 2)  # MNT_DETACH
