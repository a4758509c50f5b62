"""`comparison.json`: what is compared, where it stands and what came out; read and written as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.comparison.place import Traffic
from tuner.comparison.sides import Side
from tuner.comparison.verdict import Judgement, SideRate
from tuner.errors import InputError
from tuner.finish import Run
from tuner.records import FORMAT_VERSION, Config, EnvironmentFacts
from tuner.store import ResultsFolder, dumps, loads, read_text, write_atomic

FILE = "comparison.json"


@dataclass(frozen=True, slots=True)
class Definition:
    """What was asked for; fixed for the life of a comparison. Side 0 is what the others are held against."""

    name: str
    model: str
    model_revision: str
    sides: tuple[Side, ...]
    fixed: Config  # flags that all sides share
    workloads: tuple[str, ...]
    gpus: tuple[int, ...]
    rounds: int
    speed: str
    margin: float
    seed: int
    slo_digest: str
    workload_digests: Mapping[str, str]
    created_at: float
    tuner_version: str


@dataclass(frozen=True, slots=True)
class Result:
    """What the rounds said. `against_first` holds the verdict of every further side, by its index."""

    rates: tuple[Mapping[str, SideRate], ...]  # by side
    values: tuple[tuple[Mapping[str, float], ...], ...]  # by side, by round: capacities of the runs that kept the SLO
    weights: Mapping[str, float]  # of each workload in the objective; they sum to 1
    failures: tuple[str, ...]  # by side: why it is out; empty where it always kept the SLO
    against_first: Mapping[int, Judgement]
    runs: int
    wall_s: float
    simulated: bool
    finished_at: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The content of `comparison.json`."""

    definition: Definition
    environments: tuple[EnvironmentFacts, ...]  # by side
    plan: tuple[Run, ...]
    result: Result | None = None
    notes: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION


def write_comparison(folder: ResultsFolder, comparison: Comparison) -> None:
    write_atomic(folder.root / FILE, dumps(comparison))


def read_comparison(folder: ResultsFolder) -> Comparison:
    """The comparison in a folder; InputError where there is none."""
    path = folder.root / FILE
    if not path.is_file():
        raise InputError(
            where=str(folder.root),
            field="comparison",
            value=str(folder.root),
            rule=f"holds no {FILE}",
            remedy="Name the folder of a comparison, such as results/compare-20260101-030000.",
        )
    return loads(Comparison, read_text(path), str(path))


def keep_traffic(folder: ResultsFolder, traffic: Traffic) -> None:
    """Workloads and promise as used, from which the comparison goes on alone."""
    write_atomic(folder.inputs / "traffic.json", dumps(traffic))


def kept_traffic(folder: ResultsFolder) -> Traffic:
    """What `keep_traffic` wrote."""
    path: Path = folder.inputs / "traffic.json"
    return loads(Traffic, read_text(path), str(path))
