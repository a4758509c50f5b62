"""What a study is doing now, from its files alone: works in another shell, over SSH, and on finished studies."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from tuner.failures import plain
from tuner.ownership.processes import machine, running
from tuner.ownership.runs import read_run
from tuner.report.build import Material, build
from tuner.report.model import Report
from tuner.report.study import in_order
from tuner.store import ResultsFolder
from tuner.study.inputs import kept
from tuner.study.result import read_study

_FOLDER = re.compile(r"(\d+)-(\d+)")
_LOG_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Current:
    """The trial that has no record yet."""

    number: int
    replicate: int
    since_s: float
    probes: tuple[str, ...]  # names of those stored so far
    log_line: str  # last line of the server's log


@dataclass(frozen=True, slots=True)
class View:
    """One look at a study."""

    report: Report
    current: Current | None
    alive: bool | None  # whether the tuner runs; None where that cannot be seen from here


class Watcher:
    """Looks at a study again and again; records are read anew only when one has come."""

    def __init__(self, folder: ResultsFolder) -> None:
        self._folder = folder
        self._seen: tuple[tuple[str, int], ...] | None = None
        self._report: Report | None = None

    def look(self) -> View:
        """InputError where the folder holds no study."""
        seen = self._stamps()
        if self._report is None or seen != self._seen:
            file = read_study(self._folder)
            material = Material(file, kept(self._folder).slo, in_order(self._folder.trials()), {})
            self._report, self._seen = build(material), seen
        return View(self._report, self._current(), self._alive())

    def _stamps(self) -> tuple[tuple[str, int], ...]:
        paths = [self._folder.study_file, *sorted(self._folder.root.glob("trials/*/trial.json"))]
        return tuple((str(path), changed) for path in paths if (changed := _changed_ns(path)) is not None)

    def _current(self) -> Current | None:
        open_ = [
            (changed, path, match)
            for path in self._folder.root.glob("trials/*")
            if (match := _FOLDER.fullmatch(path.name))
            and path.is_dir()
            and not (path / "trial.json").exists()
            and (changed := _changed_ns(path)) is not None
        ]
        if not open_:
            return None
        newest_ns, path, match = max(open_, key=lambda entry: entry[0])
        probes = sorted(path.glob("probes/*.jsonl.gz"))
        began_ns = min((at for entry in path.glob("*") if (at := _changed_ns(entry)) is not None), default=newest_ns)
        return Current(
            number=int(match[1]),
            replicate=int(match[2]),
            since_s=max(0.0, time.time() - began_ns / 1e9),
            probes=tuple(probe.name.removesuffix(".jsonl.gz") for probe in probes),
            log_line=_last_line(path / "server.log"),
        )

    def _alive(self) -> bool | None:
        run = read_run(self._folder.run_file)
        if run is None:
            return False
        return running(run.tuner) is not None if run.machine == machine() else None


def _changed_ns(path: Path) -> int | None:
    """None where it is not there any more: the study that is watched moves and replaces its files meanwhile."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def _last_line(path: Path) -> str:
    """As a terminal may show it; empty while there is none."""
    tail = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
        tail = file.read()
    lines = plain(tail.decode(errors="replace")).strip().splitlines()
    return lines[-1].strip() if lines else ""
