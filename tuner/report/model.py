"""What a report says, as data: every number with its interval, its count and the trial records it comes from.

Frozen dataclasses without behaviour; `tune report --format json` is exactly this. Times are seconds, rates per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.export import Rate, Wording
from tuner.quality import Comparison
from tuner.records import FORMAT_VERSION, Config, EnvironmentFacts, Estimate, KnobValue, Slo, StudyDefinition


@dataclass(frozen=True, slots=True)
class Ref:
    """One replicate's record: `trials/NNNN-R/trial.json` in the study's folder."""

    number: int
    replicate: int

    @property
    def anchor(self) -> str:
        return f"trial-{self.number}-{self.replicate}"

    @property
    def path(self) -> str:
        return f"trials/{self.number:04d}-{self.replicate}/trial.json"


@dataclass(frozen=True, slots=True)
class ClassRow:
    """SLO capacity of one workload; value, least and greatest over the replicates that count, bounds marked."""

    workload: str
    weight: float
    limits: tuple[str, ...]  # in words
    baseline: Rate | None
    best: Rate | None
    gain: Estimate | None  # best ÷ baseline, 95 % interval of this class by itself
    regret: float | None  # 1 − the winner's capacity ÷ that of the class's own best
    class_best: int | None  # the contender that carries most of this class
    baseline_refs: tuple[Ref, ...]
    best_refs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class FlagRow:
    """One flag of the configuration to deploy, or one that was dropped."""

    name: str
    before: KnobValue | None
    after: KnobValue | None  # in the configuration to deploy; None is vLLM's default
    effect: Estimate | None  # capacity with it ÷ without it
    note: str
    refs: tuple[Ref, ...]  # the runs without it
    kept: bool = True


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One probe against one limit."""

    rate_rps: float
    value_s: float  # the limit's percentile; infinite when failures decide
    low_s: float | None  # 95 % order-statistic interval, where the percentile has one
    high_s: float | None
    requests: int
    failed: int
    ref: Ref
    requests_file: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Latency over offered rate of one workload, for one limit: the baseline's probes and the winner's."""

    workload: str
    metric: str
    percentile: float
    limit_s: float
    baseline: tuple[CurvePoint, ...]
    best: tuple[CurvePoint, ...]
    baseline_rps: float | None  # capacity
    best_rps: float | None


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One replicate of the study in the order of running."""

    ref: Ref
    kind: str
    change: str  # in words: `max-num-seqs 128 → 256`
    reason: str
    state: str
    objective: Estimate | None  # over the baseline's; interval from the probes alone, without start-to-start noise
    predicted: float | None  # relative change foreseen by the screening that ended it
    rates: Mapping[str, Estimate]  # capacity by workload; interval from the probes alone
    failure: str
    config: Config
    started_at: float
    duration_s: float
    round: int | None
    simulated: bool


@dataclass(frozen=True, slots=True)
class PathStep:
    """One accepted step between the baseline and the best configuration."""

    ref: Ref
    change: str
    reason: str
    objective: Estimate | None
    factor: float | None  # objective ÷ that of the step before


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """What one trial gives in one workload at the highest rate at which a probe kept the SLO."""

    ref: Ref
    workload: str
    rate_rps: float
    output_tps: float
    ttft_p99: Estimate
    requests_file: str
    role: str  # `baseline`, `best` or ``
    front: bool  # no other trial has both more throughput and less TTFT


@dataclass(frozen=True, slots=True)
class TroubleRow:
    """One kind of failure: the part of the space that does not run, and why."""

    kind: str
    verdict: str
    cause: str
    explanation: str
    remedy: str
    configs: tuple[str, ...]
    refs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class KnobValues:
    """Which values of one knob ran and which did not, over all trials that set it."""

    knob: str
    ran: tuple[KnobValue, ...]
    failed: tuple[KnobValue, ...]  # in no trial that ran


@dataclass(frozen=True, slots=True)
class FindingRow:
    """What limits one configuration in one workload, by the rules of `tuner.diagnosis`."""

    role: str  # `baseline` or `best`
    workload: str
    rate_rps: float  # of the probe that shows it
    name: str
    confidence: float
    explanation: str
    evidence: tuple[str, ...]
    ref: Ref
    requests_file: str


@dataclass(frozen=True, slots=True)
class QualityRow:
    """The answers of one replicate against the baseline's."""

    ref: Ref
    change: str
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report shows, in its order."""

    definition: StudyDefinition
    environment: EnvironmentFacts
    slo: Slo
    status: str
    decision: str  # empty before the verdict
    wording: Wording  # of the values by class
    headline: str
    warnings: tuple[str, ...]
    gain: Estimate | None
    rounds: int
    noise: float | None  # relative spread of one run of the finish
    smallest_claim: float | None
    winner: int | None
    winner_config: Config
    classes: tuple[ClassRow, ...]
    flags: tuple[FlagRow, ...]
    curves: tuple[Curve, ...]
    findings: tuple[FindingRow, ...]
    path: tuple[PathStep, ...]
    trials: tuple[TrialRow, ...]
    pareto: tuple[ParetoPoint, ...]
    importance: Mapping[str, float]
    trouble: tuple[TroubleRow, ...]
    knobs: tuple[KnobValues, ...]
    time_s: Mapping[str, float]  # by phase, over all trials
    wall_s: float
    gpu_s: float
    notes: tuple[str, ...]
    reproduce: tuple[str, ...]  # commands
    written_at: float
    format_version: int = field(default=FORMAT_VERSION)
    quality: tuple[QualityRow, ...] = ()
