"""Rules about servers that die, stall or quietly run something else, and the lines that only report another failure."""

from __future__ import annotations

import re

from tuner.failures.rule import FAMILY, WRAPPER, Case, Judgement, Rule, rule, transient_at_first
from tuner.records import Verdict

_I, _R, _T, _E, _D = Verdict.INFEASIBLE, Verdict.RUNTIME, Verdict.TRANSIENT, Verdict.ENV, Verdict.DEGRADED


def _crash(case: Case, judgement: Judgement) -> Judgement:
    """Once proves nothing; twice is the configuration's (or the model's) own."""
    return judgement.but(verdict=case.first_time_transient(_R if case.serving else _I))


def _died(case: Case, judgement: Judgement) -> Judgement:
    """The engine went without a word. In a study: try again once. From a log alone: it started, then died."""
    after = _R if case.serving else _I
    alone = _R if case.serving else _T
    retries = case.facts.retries
    return judgement.but(verdict=alone if retries is None else _T if retries == 0 else after)


RULES: tuple[Rule, ...] = (
    rule(
        "illegal-memory-access",
        _R,
        r"illegal memory access|an illegal instruction|device-side assert|misaligned address|cudaErrorIllegalAddress|"
        r"CUDA_EXCEPTION|"
        r"cudaErrorAssert",
        r"CUBLAS_STATUS_(?:EXECUTION_FAILED|NOT_INITIALIZED|INTERNAL_ERROR)|CUDNN_STATUS_(?:EXECUTION_FAILED|"
        r"INTERNAL_ERROR)|invalid configuration argument",
        explanation="A kernel touched memory that is not its own: a defect of a kernel for this shape or precision, "
        "seldom "
        "the hardware.",
        remedy="Try once more; if it repeats, avoid this configuration (other kernels, precision or batch sizes).",
        judge=_crash,
    ),
    rule(
        "step-timeout",
        _T,
        r"RPC call to \w+ timed out|execute_model timed out|Watchdog caught collective operation timeout|"
        r"EngineCore.{0,40}unresponsive",
        explanation="A worker did not answer in time: it hung or died.",
        remedy="Clean up and try once more.",
        judge=_crash,
    ),
    rule(
        "step-timeout",
        _T,
        r"No available shared memory broadcast block found in \d+ seconds",
        explanation="The engine waited for a worker that did not answer, and said nothing more.",
        remedy="Clean up and try once more.",
        weight=WRAPPER,
        judge=_crash,
    ),
    rule(
        "start-timeout",
        _T,
        r"Timed out waiting for engine core processes to start|Did not receive response from front-end process within",
        r"Engine process (?:did not|failed to) (?:start|respond) within|engine initialization timed out",
        explanation="The engine took longer to start than vLLM waits. Slow is not impossible: a cold compile cache or "
        "slow "
        "disks do it.",
        remedy="Try once more with a warm cache and a longer limit (VLLM_ENGINE_READY_TIMEOUT_S).",
        judge=transient_at_first(_I),
    ),
    rule(
        "engine-exception",
        _R,
        r"EngineCore (?:encountered a fatal error|hit an exception)|Exception in (?:worker|ASGI application)",
        explanation="The engine stopped with an exception.",
        remedy="The exception is above in the log.",
        weight=WRAPPER,
        judge=_died,
    ),
    rule(
        "engine-died",
        _R,
        r"engine core exited unexpectedly|EngineDeadError|[Ww]orker proc \S+ died unexpectedly|"
        r"RayWorkerProc rank=\d+ died|ActorDiedError|RayActorError",
        r"EngineCore encountered an issue|Engine loop (?:has died|is not running)|engine dead|MQLLMEngine|"
        r"Background loop (?:has errored|is stopped)|EngineCore died",
        explanation="A process of the engine disappeared without leaving a reason: killed from outside, by the system "
        "when "
        "main memory ran out, or by a crash below Python.",
        remedy="Look for the reason in `dmesg` (out of memory, segmentation fault); try once more.",
        weight=WRAPPER,
        judge=_died,
    ),
    rule(
        "start-failed",
        Verdict.UNKNOWN,
        r"Engine core initialization failed|WorkerProc initialization failed|(?:EngineCore|WorkerProc) failed to start|"
        r"Engine process failed to start",
        r"Failed core proc|Executor failed|Ray workers have not started",
        explanation="The engine did not start; the log names no cause that is known here.",
        remedy="Read the lines under evidence; the cause is the first exception of a Worker or EngineCore process.",
        weight=WRAPPER,
    ),
    rule(
        "killed",
        _T,
        r"^Killed\b|^\S*: line \d+:\s+\d+ Killed",
        explanation="The process was killed, most often by the system because main memory ran out.",
        remedy="Check `dmesg`, free main memory, try once more.",
        weight=FAMILY,
        judge=transient_at_first(_R),
    ),
    rule(
        "crash",
        _T,
        r"Segmentation fault|core dumped|Fatal Python error|terminate called after throwing|\*\*\* (?:SIG\w+|"
        r"Process received signal)|Bus error|\bAborted\b",
        explanation="A process crashed below Python.",
        remedy="Try once more; if it repeats, avoid this configuration.",
        weight=FAMILY,
        judge=_crash,
    ),
)

WRAPPERS = re.compile("|".join(p.pattern for r in RULES if r.weight == WRAPPER for p in r.patterns))
"""Texts that report a failure whose cause is elsewhere."""

DEATHS = re.compile(
    "|".join(p.pattern for r in RULES if r.kind == "engine-died" for p in r.patterns)
    + "|EngineCore (?:encountered a fatal error|hit an exception)"
)
"""Texts that report that an engine is gone."""


DEGRADED: tuple[Rule, ...] = (
    rule(
        "backend-replaced",
        _D,
        r"--block-size (?P<size>\d+) precluded higher-priority backend\(s\) "
        r"(?P<lost>.{1,120}?)\. Using (?P<used>\S+) instead",
        explanation="Block size {size} rules out the faster attention kernels ({lost}); {used} runs instead.",
        remedy="Leave out --block-size, unless this kernel is meant.",
        moves={"block-size": "off"},
    ),
    rule(
        "async-scheduling-off",
        _D,
        r"(?i)async(?:hronous)? scheduling (?:will be|is|was) disabled because (?P<why>.{3,160})",
        explanation="Asynchronous scheduling was asked for or is the default, and is off: {why}",
        remedy="Count the trial as one without --async-scheduling.",
        moves={"async-scheduling": "off"},
    ),
    rule(
        "prefix-caching-off",
        _D,
        r"(?i)not compatible with prefix caching .{0,120}(?:disabled)|prefix caching (?:is|will be) (?:disabled|"
        r"not supported)",
        explanation="Prefix caching does not go with this model and is off.",
        remedy="Count the trial as one without --enable-prefix-caching.",
        moves={"enable-prefix-caching": "off"},
    ),
    rule(
        "graphs-truncated",
        _D,
        r"Truncating max_cudagraph_capture_size to (?P<size>\d+)|CUDA ?[Gg]raphs? .{0,60}fall(?:ing)? back to eager",
        explanation="Fewer or smaller CUDA graphs are captured than asked for.",
        remedy="Count the trial by the sizes in the log.",
    ),
    rule(
        "block-size-replaced",
        _D,
        r"Setting attention block size to (?P<size>\d+) tokens",
        r"requires block_size=(?P<size>\d+), overriding",
        explanation="vLLM chose block size {size} itself.",
        remedy="Count the trial by that block size.",
        moves={"block-size": "off"},
    ),
    rule(
        "flag-ignored",
        _D,
        r"(?<![\w`'-])(?P<what>[\w`'-]{3,60}) (?:is|are|will be) (?:ignored|overridden|disabled) "
        r"(?:because|as|since|for|when|on) ",
        r"(?i)(?P<what>kv[_-]cache[_-]dtype|quantization|chunked prefill)\b.{0,60}(?:falling back|fallback|ignored)",
        explanation="A setting that was asked for is not in effect: {what}.",
        remedy="Compare the effective values in the log with what was asked for.",
    ),
)
