"""`comparison.json`: what is compared, where it stands and what came out; read and written as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Gt, Lt, MinLen

from tuner.comparison.place import Traffic
from tuner.comparison.sides import Side
from tuner.comparison.verdict import Judgement, SideRate
from tuner.errors import InputError
from tuner.finish import Run
from tuner.records import FORMAT_VERSION, Config, EnvironmentFacts, Finite, Moment, NotNegative, Rate, Speed
from tuner.store import ResultsFolder, dumps, loads, read_text, write_atomic
from tuner.study.result import require_known

FILE = "comparison.json"


@dataclass(frozen=True, slots=True)
class Definition:
    """What was asked for; fixed for the life of a comparison. Side 0 is what the others are held against."""

    name: str
    model: str
    model_revision: str
    sides: Annotated[tuple[Side, ...], MinLen(1)]
    fixed: Config  # flags that all sides share
    workloads: Annotated[tuple[str, ...], MinLen(1)]
    gpus: tuple[int, ...]
    rounds: Annotated[int, Gt(0), Lt(1000)]
    speed: Speed
    margin: Annotated[float, Gt(0), Lt(1)]
    seed: int
    slo_digest: str
    workload_digests: Mapping[str, str]
    created_at: Moment
    tuner_version: str


@dataclass(frozen=True, slots=True)
class Result:
    """What the rounds said. `against_first` holds the verdict of every further side, by its index."""

    rates: tuple[Mapping[str, SideRate], ...]  # by side
    values: tuple[tuple[Mapping[str, Rate], ...], ...]  # by side, by round: capacities of the runs that kept the SLO
    weights: Mapping[str, NotNegative]  # of each workload in the objective; they sum to 1
    failures: tuple[str, ...]  # by side: why it is out; empty where it always kept the SLO
    against_first: Mapping[int, Judgement]
    runs: int
    wall_s: Finite
    simulated: bool
    finished_at: Moment


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
    comparison = loads(Comparison, read_text(path), str(path))
    require_known(comparison.definition.workloads, comparison.definition.workload_digests, path)
    sides = len(comparison.definition.sides)
    result = comparison.result
    judged = range(1, sides) if result is None else result.against_first
    parts = [comparison.environments] + ([] if result is None else [result.rates, result.values, result.failures])
    planned = all(0 <= run.number < sides for run in comparison.plan)
    if not planned or any(len(part) != sides for part in parts) or set(judged) != set(range(1, sides)):
        raise InputError(
            where=str(path),
            field="definition.sides",
            value=[side.name for side in comparison.definition.sides],
            rule="are not the sides that were planned and measured",
            remedy="Restore the file from a backup.",
        )
    return comparison


def require_sides(comparison: Comparison, count: int, where: Path, command: str) -> None:
    """InputError where a folder is another command's: one side is a verification's, two are a comparison's."""
    sides = len(comparison.definition.sides)
    if sides != count:
        raise InputError(
            where="command line",
            field="--resume",
            value=str(where),
            rule=f"holds measurements of {sides} side{'s' if sides > 1 else ''}, and {command} has {count}",
            remedy="Name a folder of the same command (one side: `tune verify`; two: `tune compare`).",
        )


def keep_traffic(folder: ResultsFolder, traffic: Traffic) -> None:
    """Workloads and promise as used, from which the comparison goes on alone."""
    write_atomic(folder.inputs / "traffic.json", dumps(traffic))


def kept_traffic(folder: ResultsFolder) -> Traffic:
    """What `keep_traffic` wrote."""
    path: Path = folder.inputs / "traffic.json"
    return loads(Traffic, read_text(path), str(path))
