"""What a study is doing now, from its files alone: works in another shell, over SSH, and on finished studies."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

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
        return tuple((str(path), path.stat().st_mtime_ns) for path in paths if path.exists())

    def _current(self) -> Current | None:
        open_ = [
            (path.stat().st_mtime, path, match)
            for path in self._folder.root.glob("trials/*")
            if (match := _FOLDER.fullmatch(path.name)) and not (path / "trial.json").exists()
        ]
        if not open_:
            return None
        _, path, match = max(open_, key=lambda entry: entry[0])
        probes = sorted(path.glob("probes/*.jsonl.gz"))
        log = path / "server.log"
        began = min((entry.stat().st_mtime for entry in path.iterdir()), default=path.stat().st_mtime)
        return Current(
            number=int(match[1]),
            replicate=int(match[2]),
            since_s=max(0.0, time.time() - began),
            probes=tuple(probe.name.removesuffix(".jsonl.gz") for probe in probes),
            log_line=_last_line(log) if log.is_file() else "",
        )

    def _alive(self) -> bool | None:
        run = read_run(self._folder.run_file)
        if run is None:
            return False
        return running(run.tuner) is not None if run.machine == machine() else None


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
