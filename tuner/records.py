"""The frozen dataclasses that cross rooms; no behaviour beyond what follows from their own fields.

Times are seconds (`_s`), rates are per second (`_rps`, `_tps`), shares lie in 0..1. Offsets called `*_s` inside a probe
count from the probe's own start on one monotonic clock; `*_at` are wall-clock Unix seconds and only for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Gt, Lt, MinLen, Predicate

FORMAT_VERSION = 1
"""Version of every file in a results folder; readers accept this and older ones."""

KnobValue = bool | int | float | str
Config = Mapping[str, KnobValue]
"""Overrides over vLLM's defaults: long flag name without dashes (`max-num-seqs`) to value. `{}` is vLLM's defaults."""

# --- what a number can be; checked where a record is read (store.loads), because files are edited by hand -----------

Finite = Annotated[float, Gt(-math.inf), Lt(math.inf)]
NotNegative = Annotated[float, Ge(0), Lt(math.inf)]
Rate = Annotated[float, Gt(0), Lt(1e9)]  # whatever its logarithm is taken of
Moment = Annotated[float, Ge(0), Lt(1e11)]  # what a calendar can show
Index = Annotated[int, Ge(0), Lt(2**63)]  # `bench` numbers its replicates by the clock

SPEED_NAMES = ("quick", "fast", "normal", "careful")
"""The measuring presets, shortest first (`tuner.study.speeds`)."""


def _is_speed(name: str) -> bool:
    if name not in SPEED_NAMES:
        raise ValueError(f"is none of {', '.join(SPEED_NAMES)}")
    return True


Speed = Annotated[str, Predicate(_is_speed)]


# --- the promise -------------------------------------------------------------------------------------------------


class Metric(StrEnum):
    """Latency metrics, by vLLM's definitions (DESIGN: Words)."""

    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class Limit:
    """`percentile` of `metric` must not exceed `limit_s`; equal to: at least that share of requests stays within it."""

    metric: Metric
    percentile: float  # 0 < percentile <= 100
    limit_s: float


@dataclass(frozen=True, slots=True)
class ClassSlo:
    """The promise for one workload class."""

    limits: tuple[Limit, ...]
    success: float  # least share of requests answered completely
    weight: float  # share of this class in the user's traffic; weights of a study sum to 1


@dataclass(frozen=True, slots=True)
class Slo:
    """The promise for every class of a study."""

    classes: Mapping[str, ClassSlo]
    digest: str


# --- the load ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request before it is sent. `prompt` is what the server receives as token ids."""

    index: int
    class_name: str
    scheduled_s: float | None  # None: closed loop, sent when a slot becomes free
    prompt: tuple[int, ...] | str  # token ids, or text where the source is text
    input_tokens: int  # planned; 0 where only the server knows (text)
    output_tokens: int
    shared_prefix_tokens: int = 0  # leading tokens that other requests of the probe share on purpose


class RequestStatus(StrEnum):
    """Why a request counts or does not. Everything but OK misses the SLO."""

    OK = "ok"
    HTTP_ERROR = "http-error"  # status other than 200
    STREAM_ERROR = "stream-error"  # an `error` object inside a 200
    EARLY_CLOSE = "early-close"  # the stream ended without finish_reason or [DONE]
    NO_TOKEN = "no-token"  # finished without a single non-empty token
    SHORT_OUTPUT = "short-output"  # finished, but with fewer tokens than asked for with ignore_eos
    CONNECT_ERROR = "connect-error"
    TIMEOUT = "timeout"
    PROTOCOL_ERROR = "protocol-error"  # bytes that are not HTTP, SSE or JSON
    CANCELLED = "cancelled"  # the client stopped the probe before the answer was complete


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What happened to one request; the raw row from which every number recomputes."""

    index: int
    class_name: str
    status: RequestStatus
    scheduled_s: float  # closed loop: when its slot became free
    sent_s: float  # given to the kernel: before connecting, or before writing to an idle connection
    first_s: float | None  # arrival of the bytes that hold the first non-empty token
    last_s: float | None  # arrival of the bytes that hold the last non-empty token
    end_s: float  # stream finished, failed or given up
    input_tokens: int  # the server's usage count; planned where it reported none
    output_tokens: int  # the server's usage count; chunks where it reported none
    planned_input_tokens: int
    planned_output_tokens: int
    usage_reported: bool
    chunks: int  # chunks that carried a non-empty token
    gaps_us: tuple[int, ...] = ()  # between those chunks, microseconds
    cached_tokens: int | None = None  # usage.prompt_tokens_details.cached_tokens
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status is RequestStatus.OK

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled time (coordinated omission is counted), to the first token."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def ttft_sent_s(self) -> float | None:
        """From the actual send; the difference to `ttft_s` is the client's own lag."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(last − first) / (output tokens − 1), as `vllm bench serve` defines it; undefined for one token."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.scheduled_s

    @property
    def send_lag_s(self) -> float:
        return self.sent_s - self.scheduled_s


@dataclass(frozen=True, slots=True)
class ClientEvidence:
    """What the load generator knows about itself during a probe."""

    workers: int
    cpu_share: float  # of one core, by the busiest worker in the busiest tenth of the seconds
    loop_lag_p99_s: float  # how late the busiest worker's event loop woke up
    loop_lag_max_s: float
    start_s: float = 0.0  # probe clock zero minus the moment the client was asked to start
    peak_rss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything that one run of the load generator returns."""

    requests: tuple[RequestResult, ...]  # by index
    client: ClientEvidence
    duration_s: float  # first scheduled request to last end
    started_at: float


# --- what was measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval and the count behind it."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; intervals are distribution-free order-statistic intervals at 95 %."""

    mean: float
    p50: Estimate
    p95: Estimate
    p99: Estimate
    n: int


@dataclass(frozen=True, slots=True)
class LimitOutcome:
    """One limit of the SLO against one probe."""

    limit: Limit
    observed_s: float  # the percentile with failures counted as infinite
    share_within: Estimate  # of the scored requests for which it is defined (all but TPOT of one token); Wilson


class Outcome(StrEnum):
    """How a probe stands against the SLO."""

    MET = "met"
    MISSED = "missed"
    UNRESOLVED = "unresolved"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether a probe measured the server rather than the client; every reason names its evidence."""

    valid: bool
    reasons: tuple[str, ...]
    send_lag_p99_s: float
    achieved_rps: float
    offered_rps: float
    server_peak_concurrency: float | None = None
    server_ttft_p50_s: float | None = None
    notes: tuple[str, ...] = ()  # odd, but not the client's doing


@dataclass(frozen=True, slots=True)
class TelemetrySummary:
    """What server, device and host said during the window of one probe; None where the source is absent."""

    series: Mapping[str, tuple[float, ...]]  # a few hundred samples at most, `t_s` is their common clock
    counters: Mapping[str, float]  # difference over the window, names as in docs/telemetry.md
    gauges: Mapping[str, float]  # mean and maximum over the window (`running_mean`, `running_max`, …)
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """The scores of one class in one probe, over scored requests only (after the ramp)."""

    class_name: str
    requests: int
    failed: int
    success: Estimate
    attainment: Estimate  # share that met every per-request limit; failed = missed
    limits: tuple[LimitOutcome, ...]
    margin: float  # max over limits of observed ÷ limit − 1; ≤ 0 is kept; inf when failures decide
    latency: Mapping[str, Percentiles]  # by Metric value; successful requests
    goodput_rps: float
    throughput_rps: float  # completed inside the window, whenever scheduled; so are the token rates
    output_tps: float
    input_tps: float
    statuses: Mapping[str, int]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Probe:
    """One (class, rate, seed) measured on one server."""

    workload: str  # class name, or `mixed`
    rate_rps: NotNegative  # 0: a burst
    seed: int
    purpose: str  # `warm-up`, `memory-proof`, `screen`, `capacity`, `verify`, `bench`
    ramp_s: Finite
    window_s: Finite
    wall_s: Finite
    started_at: Moment
    classes: Mapping[str, ClassMetrics]  # one entry, several for `mixed`
    outcome: Outcome
    margin: float  # worst class
    validity: Validity
    client: ClientEvidence
    telemetry: TelemetrySummary | None
    requests_file: str  # relative to the trial's folder
    attempt: int = 0
    notes: tuple[str, ...] = ()


class Bound(StrEnum):
    """How a capacity was closed in."""

    BRACKETED = "bracketed"
    BELOW = "below"  # missed at every rate probed: the value is an upper bound
    ABOVE = "above"  # met at every rate probed: the value is a lower bound


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the SLO holds at one given rate, from the counts of all its windows together."""

    outcome: Outcome
    rate_rps: float
    windows: int
    requests: int  # scored, over all windows
    percentile: float | None  # the promise that takes most requests to prove; None: the SLO has no limit
    needed: int | None  # requests that prove it when all of them keep it; None: no number does (P100)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest offered rate at which one class keeps its SLO."""

    workload: str
    rate_rps: Rate
    log_sd: float  # standard deviation of log(rate) from the probes alone
    slope: float  # d log(margin + 1) / d log(rate) near the capacity
    bound: Bound
    probes: tuple[Probe, ...]
    measuring_s: Finite
    waiting_s: Finite


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one trial by phase."""

    prepare_s: Finite = 0.0
    launch_s: Finite = 0.0  # launch to ready
    warm_up_s: Finite = 0.0
    measure_s: Finite = 0.0
    stop_s: Finite = 0.0
    settle_s: Finite = 0.0
    quality_s: Finite = 0.0

    @property
    def total_s(self) -> float:
        before = self.prepare_s + self.launch_s + self.warm_up_s
        return before + self.measure_s + self.quality_s + self.stop_s + self.settle_s


# --- what went wrong ---------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What a failure means for the search (docs/failures.md)."""

    STATIC = "STATIC"  # infeasible, provable before launch
    INFEASIBLE = "INFEASIBLE"  # deterministic for this model, GPU and version
    RUNTIME = "RUNTIME"  # started, then died or degraded under load
    TRANSIENT = "TRANSIENT"  # clean up, retry
    ENV = "ENV"  # pause the study, do not tell the sampler
    HARNESS = "HARNESS"  # our bug or the user's fixed flags, abort, do not tell the sampler
    DEGRADED = "DEGRADED"  # runs, with another effective configuration than asked
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Failure:
    """A judged failure: what happened, what it means, what to do."""

    verdict: Verdict
    kind: str  # stable identifier, e.g. `kv-cache-none`
    phase: str  # `prepare`, `launch`, `warm-up`, `measure`, `stop`
    cause: str  # the first causal line of the log, or the broken rule
    explanation: str
    remedy: str
    moves: Mapping[str, str] = field(default_factory=dict)  # knob -> `up` | `down` | `off` | `on`
    violation: float = 1.0  # relative size (need ÷ have − 1) where known, > 0
    exit_code: int | None = None
    evidence: tuple[str, ...] = ()  # the most informative log lines


# --- the search --------------------------------------------------------------------------------------------------


class StepKind(StrEnum):
    """What a trial is to the search."""

    BASELINE = "baseline"
    ONE = "one"  # one knob of the incumbent changed
    COUPLED = "coupled"  # one knob and those that a declared rule couples to it
    REPAIR = "repair"  # a crashed step tried again with less memory utilisation
    COMBINE = "combine"  # small winners together
    CONFIRM = "confirm"  # measured before, once more on a fresh server
    FREE = "free"  # proposed by TPE
    USER = "user"  # enqueued by the user
    FINALIST = "finalist"  # re-measurement in the finish
    ABLATION = "ablation"  # the winner without one of its flags


@dataclass(frozen=True, slots=True)
class Step:
    """How a configuration came about."""

    kind: StepKind
    changed: Mapping[str, tuple[KnobValue | None, KnobValue | None]]  # knob -> (from, to); None = vLLM's default
    from_trial: int | None  # the incumbent it starts from
    reason: str  # plain words: why this knob, why this value


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration to be measured."""

    number: int
    config: Config
    step: Step


class TrialState(StrEnum):
    """How a trial ended."""

    COMPLETE = "complete"
    SCREENED = "screened"  # predicted clearly worse after one probe per class; told PRUNED
    INFEASIBLE = "infeasible"  # the configuration's own fault; told PRUNED with constraints > 0
    FAULT = "fault"  # not the configuration's fault; told FAIL, retried
    INTERRUPTED = "interrupted"  # stopped half-way; not told


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """The machine and software that a result belongs to. Records belong to one study only when `digest` agrees."""

    vllm_version: str
    python_version: str
    platform: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    gpus: tuple[str, ...]  # name and memory, one a GPU in use
    driver: str
    cuda: str
    host: str
    digest: str  # of the kind of machine (environment.kind_digest): what must agree within a study
    machine: str = ""  # digest that tells this machine from others of its kind: GPU UUIDs, else host and machine id


@dataclass(frozen=True, slots=True)
class PromptScore:
    """One server's answer to one prompt against the reference's (docs/quality.md)."""

    tokens: int  # of the reference's answer
    agreed: int  # of them, before the first difference
    exact: bool  # the whole answer is the same
    drift: float  # mean absolute difference of the log-probabilities of the reference's tokens, nats


@dataclass(frozen=True, slots=True)
class QualityScores:
    """The answers of one server against the reference's; `reference`: they are the reference."""

    prompts_digest: str
    reference: bool
    prompts: tuple[PromptScore, ...]  # empty where refused
    answers_file: str = ""  # raw answers, relative to the trial's folder
    refused: str = ""  # why there are none
    left_out: int = 0  # prompts that are too long for this server


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One replicate: one configuration on one fresh server. Truth on disk."""

    number: Index
    replicate: Index
    config: Config
    step: Step
    state: TrialState
    capacities: Mapping[str, Capacity]  # by workload; what was measured before a stop is kept
    probes: tuple[Probe, ...]  # warm-up, memory proof, screening and whatever is no part of a capacity
    failure: Failure | None
    effective: Mapping[str, KnobValue]  # read back from the start-up log
    degraded: tuple[str, ...]  # asked for, but not in effect
    startup: Mapping[str, float]  # KV tokens, KV GiB, weights GiB, activation GiB, compile seconds, …
    phases: PhaseTimes
    environment: str  # EnvironmentFacts.digest
    command: tuple[str, ...]
    started_at: Moment
    ended_at: Moment
    seed: int
    simulated: bool
    round: Index | None = None  # of the finish
    machine: str = ""  # EnvironmentFacts.machine; capacities are compared within one machine only
    screened_against: int | None = None  # number of the incumbent that a screening compared with
    predicted: float | None = None  # relative change of the objective against it, as screened
    decided: Mapping[str, Decision] = field(default_factory=dict)  # by workload, those measured at a given rate
    quality: QualityScores | None = None  # of the studies that search lossy knobs
    format_version: int = FORMAT_VERSION


# --- the study ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """What a study may spend; the first limit that is reached ends the search. The finish is reserved beforehand."""

    trials: int | None = None  # configurations tried in the search, the baseline included; exact
    wall_s: float | None = None
    gpu_s: float | None = None  # wall time × GPUs in use


@dataclass(frozen=True, slots=True)
class StudyDefinition:
    """What was asked for. Everything here is fixed for the life of a study, except the budget, which may be raised."""

    name: str
    model: str
    vllm: str  # executable as given
    objective: str  # `capacity`, `goodput`, `throughput` or `latency`
    workloads: Annotated[tuple[str, ...], MinLen(1)]
    fixed: Config  # the user's flags after `--`: in every trial, never searched
    baseline: Config  # what the study starts from and compares with; `{}` = vLLM's defaults
    gpus: tuple[int, ...]
    budget: Budget
    finish_rounds: Index
    speed: Speed
    lossy_allowed: bool
    seed: int
    slo_digest: str
    workload_digests: Mapping[str, str]
    space_digest: str
    created_at: Moment
    tuner_version: str
    rate_rps: Rate | None = None  # for the objectives that are measured at a given rate
    model_revision: str = ""  # environment.model_revision at the start; empty: not told
    most_finish_rounds: int = 0  # that a gain which is not proved after `finish_rounds` may take; 0: no more than those
    format_version: int = FORMAT_VERSION
