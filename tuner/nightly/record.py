"""What a night leaves: one record, written once, and the CSV over all of them; it decides nothing."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen, Predicate

from tuner.comparison import Contrast
from tuner.errors import InputError
from tuner.nightly.level import Change, objectives
from tuner.records import FORMAT_VERSION, Config, EnvironmentFacts, Finite, Index, Moment, NotNegative, Rate
from tuner.store import dumps, loads, read_text, write_atomic


def _is_search(folder: str) -> bool:
    if not re.fullmatch(r"searches/[0-9a-f]+", folder):
        raise ValueError("is no folder of a search (searches/KEY)")
    return True


SearchFolder = Annotated[str, Predicate(_is_search)]
"""Below the results folder. What lies there is deleted one day (rotate), so a record may name nothing else."""


class State(StrEnum):
    """How the incumbent stands after a night."""

    QUIET = "quiet"  # nothing is wrong
    SUSPECTED = "suspected"  # a loss that is not yet beyond doubt
    REGRESSED = "regressed"  # a loss was reported and is still there


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a hook may be called for."""

    kind: str  # `regression`, `recovery`, `promotion`, `version`
    text: str
    since: int | None = None  # night from which it holds, where that is not this one


@dataclass(frozen=True, slots=True)
class SideRuns:
    """What one side did tonight."""

    name: str  # `incumbent`, `defaults` or `incumbent on vLLM …`
    vllm_version: str
    values: tuple[Mapping[str, Rate], ...]  # capacities of each run that kept the SLO
    at_least: tuple[str, ...]  # classes that kept it at every rate probed
    failure: str


@dataclass(frozen=True, slots=True)
class Searched:
    """What a continued search came to."""

    reasons: tuple[str, ...]
    folder: SearchFolder
    verdict: str
    trials: int


@dataclass(frozen=True, slots=True)
class Promoted:
    """A candidate that was set against the incumbent."""

    config: Config
    promoted: bool
    contrast: Contrast
    number: int | None  # of the incumbent that it became


@dataclass(frozen=True, slots=True)
class Night:
    """One night. `incumbent` counts promotions: 0 is what the profile names, or vLLM's defaults."""

    number: Index
    series: str  # nights of one series are comparable: same machine, workloads, SLO, speed and fixed flags
    incumbent: Index
    config: Config  # of the incumbent, without the flags that every server has
    given: Config  # of the incumbent that the profile names
    started_at: Moment
    ended_at: Moment
    environment: EnvironmentFacts
    model_revision: str
    weights: Annotated[Mapping[str, NotNegative], MinLen(1)]
    sides: Annotated[tuple[SideRuns, ...], MinLen(1)]  # the incumbent first
    changes: Mapping[str, Change]  # of the incumbent: `overall` and each class; and `defaults`
    state: State
    events: tuple[Event, ...] = ()
    drift: tuple[str, ...] = ()  # what changed since the night before
    version: Contrast | None = None  # the incumbent on the second vLLM against the first
    searched: Searched | None = None
    candidate: Promoted | None = None
    accepted: bool = False  # the user took this night's level as the new reference
    simulated: bool = False
    wall_s: Finite = 0.0
    notes: tuple[str, ...] = field(default=())
    format_version: int = FORMAT_VERSION

    @property
    def runs(self) -> tuple[Mapping[str, float], ...]:
        return self.sides[0].values

    @property
    def standing_incumbent(self) -> int:
        """The incumbent with which the next night begins."""
        promoted = self.candidate
        return promoted.number if promoted is not None and promoted.number is not None else self.incumbent


class History:
    """The results folder of a profile. Each night's record is written once; everything else follows from them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, number: int) -> Path:
        return self.root / "nights" / f"{number:04d}"

    def nights(self) -> tuple[Night, ...]:
        """Every night that ended, by number."""
        files = sorted(
            path for path in self.root.glob("nights/*/night.json") if re.fullmatch(r"\d{4,}", path.parent.name)
        )
        return tuple(_read(path) for path in files)

    def write(self, night: Night) -> None:
        """The night's record, then the CSV, which is rebuilt from all records and so cannot disagree with them."""
        write_atomic(self.folder(night.number) / "night.json", dumps(night))
        self.write_csv()

    def write_csv(self) -> None:
        nights = [night for night in self.nights() if night.runs]
        if nights:
            text, columns = as_csv(nights)
            write_atomic(self.root / "history.csv", text)
            write_atomic(self.root / "otava.yaml", otava_config(columns))


def _read(path: Path) -> Night:
    night = loads(Night, read_text(path), str(path))
    for side in night.sides:
        for run in side.values:
            for name in night.weights:
                if name not in run:
                    raise InputError(
                        where=str(path),
                        field="sides",
                        value=sorted(run),
                        rule=f"holds a run of {side.name} without a capacity of {name}",
                        remedy="Restore the file from a backup.",
                    )
    return night


def as_csv(nights: Sequence[Night]) -> tuple[str, tuple[str, ...]]:
    """One row a night of the latest series, in the form that Otava reads; and the names of the metrics.

    Otava needs a number in every cell, so a column stands only where every night has a value.
    """
    latest = [night for night in nights if night.series == nights[-1].series]
    rows = [_row(night) for night in latest]
    columns = tuple(name for name in rows[0] if all(name in row for row in rows))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("time", "night", "vllm", "incumbent", *columns))
    for night, row in zip(latest, rows, strict=True):
        time = datetime.fromtimestamp(night.started_at, UTC).isoformat(timespec="seconds")
        writer.writerow(
            (time, night.number, night.environment.vllm_version, night.incumbent, *(f"{row[n]:.6g}" for n in columns))
        )
    return out.getvalue(), columns


def otava_config(columns: Sequence[str]) -> str:
    """So that `otava analyze nightly --config otava.yaml`, run in the results folder, reads the CSV."""
    metrics = "\n".join(f"      {name}: {{column: {name}, direction: 1}}" for name in columns)
    return (
        "tests:\n  nightly:\n    type: csv\n    file: history.csv\n    time_column: time\n"
        f"    attributes: [night, vllm, incumbent]\n    metrics:\n{metrics}\n"
    )


def _row(night: Night) -> dict[str, float]:
    """Geometric means, requests/s."""
    row = {"capacity": _mean(objectives(night.runs, night.weights))}
    row |= {f"capacity_{name}": _mean([run[name] for run in night.runs]) for name in night.weights}
    defaults = next((side for side in night.sides if side.name == "defaults"), None)
    if defaults is not None and defaults.values:
        row["defaults"] = _mean(objectives(defaults.values, night.weights))
        row["advantage"] = row["capacity"] / row["defaults"]
    return row


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
