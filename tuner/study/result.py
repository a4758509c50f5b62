"""`study.json`: what was asked, where it stands and what came out; frozen dataclasses, read and written as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tuner.errors import InputError
from tuner.finish import Conclusion, Contender, FlagEffect, Run
from tuner.quality import Comparison
from tuner.records import FORMAT_VERSION, Config, EnvironmentFacts, Estimate, StudyDefinition
from tuner.store import ResultsFolder, dumps, loads, read_text, write_atomic


class Status(StrEnum):
    """Where a study stands."""

    SEARCHING = "searching"
    FINISHING = "finishing"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class FinishPlan:
    """Who is measured again, fixed before the first run of the finish."""

    baseline: int
    contenders: tuple[Contender, ...]  # the baseline first
    runs: tuple[Run, ...]
    later_rounds: int  # of the ablation and of a reduced winner's verification
    more_runs: tuple[Run, ...] = ()  # made where `runs` leave a gain open (finish.worth_more)


@dataclass(frozen=True, slots=True)
class ClassRates:
    """Values of one workload: geometric means over the runs of the finish.

    Requests a second; for the objective `latency`, limit ÷ observed.
    """

    baseline_rps: float | None
    best_rps: float | None
    gain: Estimate | None


@dataclass(frozen=True, slots=True)
class ClassBest:
    """What carried most of one class in the search. Values of the search are too good; only their order means much."""

    number: int
    config: Config
    gain: float  # its value in the class ÷ that of the best compromise
    regret: float  # 1 − its objective ÷ that of the best compromise


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The verdict of a study. Nothing in it comes from the search alone."""

    conclusion: Conclusion
    config: Config  # to deploy, without the user's fixed flags; the baseline's where nothing is better
    rates: Mapping[str, ClassRates]
    effects: tuple[FlagEffect, ...]
    dropped: tuple[str, ...]  # flags of the search's best that did not matter
    search_trials: int
    runs: int
    wall_s: float
    gpu_s: float
    simulated: bool
    finished_at: float
    notes: tuple[str, ...] = ()
    mixed: Mapping[str, ClassRates] = field(default_factory=dict)  # all classes at once; no part of the verdict
    class_bests: Mapping[str, ClassBest] = field(default_factory=dict)
    quality: Mapping[int, Comparison] = field(default_factory=dict)  # of contenders that change a lossy knob


@dataclass(frozen=True, slots=True)
class StudyFile:
    """The content of `study.json`."""

    definition: StudyDefinition
    environment: EnvironmentFacts
    status: Status = Status.SEARCHING
    plan: FinishPlan | None = None
    result: StudyResult | None = None
    machines: tuple[str, ...] = ()  # EnvironmentFacts.machine of every machine that has contributed, in order
    notes: tuple[str, ...] = field(default=())
    earlier: tuple[StudyResult, ...] = ()  # verdicts before the budget was raised
    format_version: int = FORMAT_VERSION


def write_study(folder: ResultsFolder, study: StudyFile) -> None:
    write_atomic(folder.study_file, dumps(study))


def read_study(folder: ResultsFolder) -> StudyFile:
    """The study in a results folder; InputError where there is none."""
    path: Path = folder.study_file
    if not path.is_file():
        raise InputError(
            where=str(folder.root),
            field="study",
            value=str(folder.root),
            rule="holds no study.json",
            remedy="Name the folder of a study, such as results/NAME.",
        )
    file = loads(StudyFile, read_text(path), str(path))
    require_known(file.definition.workloads, file.definition.workload_digests, path)
    return file


def require_known(workloads: Sequence[str], known: Mapping[str, str], where: Path) -> None:
    """InputError where a record measures a workload that it was not prepared with: somebody has edited it."""
    for name in workloads:
        if known and name not in known:
            raise InputError(
                where=str(where),
                field="definition.workloads",
                value=name,
                rule=f"is none of the workloads that this was prepared with ({', '.join(known)})",
                remedy="Restore the file from a backup.",
            )
