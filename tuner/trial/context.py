"""What a trial is asked and what it is given: plain data, and the seeds that make trials comparable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from tuner.capacity import THRESHOLD, ProbeSettings, Reference
from tuner.environment import IdleBaseline
from tuner.feasibility import Calibration, ModelShape
from tuner.ownership import Run
from tuner.records import Config, EnvironmentFacts, KnobValue, Proposal, Slo, TrialRecord
from tuner.serve_args import merged
from tuner.server import ReadyLimits, VllmInstall
from tuner.store import ResultsFolder
from tuner.trial.examine import Examination
from tuner.workload import Trace, Vocabulary, Workload


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """One replicate to be run.

    `seed` is the study's: every trial derives the same seeds from it, so that the n-th probe of a class sends the same
    requests in every trial. Of the finish, `round` changes them.
    """

    proposal: Proposal
    replicate: int
    seed: int
    workloads: tuple[str, ...]  # what is measured; mixes too
    weights: Mapping[str, float]  # by workload, summing to 1
    settings: ProbeSettings
    start_rates: Mapping[str, float] = field(default_factory=dict)  # by workload; others start from the warm-up
    incumbent: Mapping[str, Reference] | None = None  # screen against it
    incumbent_number: int | None = None
    screen_below: float = THRESHOLD  # predicted relative change at which it stops there
    ramps: Mapping[str, float] = field(default_factory=dict)  # by workload, seconds; others from measured times
    fixed_rates: Mapping[str, float] = field(default_factory=dict)  # measure these at this rate, without a search
    looks: int = 4  # windows at a fixed rate, while it is unresolved
    least_looks: int = 1  # and so many in any case
    round: int | None = None
    quality: Examination | None = None  # compare the answers, too


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Something to show while a trial runs. `phase` is a word of DESIGN: `launch`, `warm-up`, `probe`, …"""

    phase: str
    trial: int
    replicate: int
    workload: str = ""
    rate_rps: float | None = None
    probe: int | None = None  # counted over the trial
    message: str = ""


@dataclass
class Learned:
    """What servers have told during this study and need not tell again; every trial adds to it."""

    vocabulary: Vocabulary | None = None
    defaults: dict[str, KnobValue] = field(default_factory=dict)  # in effect without any override
    calibration: Calibration = field(default_factory=Calibration)  # memory of every start
    traces: dict[str, Trace] = field(default_factory=dict)  # by workload digest, texts resolved to token ids

    @classmethod
    def of(cls, records: Iterable[TrialRecord], fixed: Config) -> Learned:
        """What the earlier trials of a study have told, in the order in which they ran: for a study that goes on."""
        learned = cls()
        for record in sorted(records, key=lambda record: record.started_at):
            if record.effective:
                learned.learn(merged({**fixed, **record.config}), record.effective, record.startup)
        return learned

    def learn(self, config: Config, effective: Mapping[str, KnobValue], startup: Mapping[str, float]) -> None:
        """From one start. `config`: everything asked for, the user's fixed flags included."""
        if not config:
            self.defaults = dict(effective)
        self.calibration = self.calibration.learn({**self.defaults, **config, **effective}, startup)


@dataclass(frozen=True, slots=True)
class TrialContext:
    """Everything that the trials of a study share."""

    install: VllmInstall
    model: str
    fixed: Config
    gpus: tuple[int, ...]
    workloads: Mapping[str, Workload]  # also the classes that a mix is made of
    slo: Slo
    folder: ResultsFolder
    environment: EnvironmentFacts
    idle: IdleBaseline
    vocabulary: Vocabulary | None = None  # None: learned from the first server's /tokenize
    shape: ModelShape | None = None  # None: not local, so nothing is ruled out before launch by its shape
    run: Run | None = None
    ready_limits: ReadyLimits = field(default_factory=ReadyLimits)
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)  # end after the current probe
    abort: threading.Event = field(default_factory=threading.Event)  # end now
    progress: Callable[[ProgressEvent], None] = lambda event: None
    learned: Learned = field(default_factory=Learned)


def seed_for(study_seed: int, workload: str, purpose: str, ordinal: int, round_: int | None = None) -> int:
    """Seed of the n-th probe of a class for a purpose; equal in every trial, different for everything else."""
    text = f"{study_seed}/{round_}/{workload}/{purpose}/{ordinal}"
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big")


def in_order(workloads: tuple[str, ...], round_: int | None) -> tuple[str, ...]:
    """The order in which classes are measured.

    The same in all trials of the search, because what an earlier class leaves behind (fragmented memory, a warm device)
    then is the same for all; rotated from round to round of the finish, so that it averages out of the verdict.
    """
    shift = (round_ or 0) % max(1, len(workloads))
    return workloads[shift:] + workloads[:shift]
