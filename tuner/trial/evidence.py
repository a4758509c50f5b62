"""From whatever ended a trial early to one judged failure: it gathers the evidence, `failures` knows the rules."""

from __future__ import annotations

import shutil
import traceback
from dataclasses import replace
from pathlib import Path

from tuner.environment import gpu_processes, gpus
from tuner.errors import EnvironmentFault, HarnessError, InputError
from tuner.failures import FailureFacts, classify
from tuner.records import Failure, StepKind, TrialState, Verdict
from tuner.server import FailureReason, Liveness, Server, ServerFailure
from tuner.trial.broken import Broken
from tuner.trial.context import TrialContext, TrialRequest

_TAIL_LINES = 12
GIB = 2**30


def judge_server(
    error: ServerFailure | Broken,
    server: Server,
    *,
    phase: str,
    retries: int,
    launch_free_gib: float | None,
    request: TrialRequest,
    context: TrialContext,
) -> Failure:
    """A server that did not start, died, or is stuck; call it before the server is stopped."""
    reason = error.reason if isinstance(error, ServerFailure) else None
    liveness = server.liveness()
    unresponsive = reason is FailureReason.CONTROL and liveness is Liveness.ALIVE
    ours = frozenset(server.pids)
    facts = FailureFacts(
        idle_free_gib=min((free / GIB for free in context.idle.free_bytes.values()), default=None),
        launch_free_gib=launch_free_gib,
        device_gib=min((gpu.total_bytes / GIB for gpu in gpus(context.gpus)), default=None),
        other_processes=tuple(p.pid for p in gpu_processes(context.gpus, ours) if not p.ours),
        timed_out=reason in (FailureReason.SILENT, FailureReason.TIMEOUT),
        log_silent=reason is FailureReason.SILENT,
        no_progress=unresponsive or (isinstance(error, Broken) and error.no_progress),
        process_dead=liveness in (Liveness.MAIN_DEAD, Liveness.ENGINE_DEAD),
        port_owner=str(error) if reason is FailureReason.FOREIGN else None,
        disk_free_bytes=shutil.disk_usage(context.folder.root).free,
        retries=retries,
        known_good=started_before(request, context),
        searched=searched(request),
    )
    failure = classify(log_text(server.log_path), exit_code=server.exit_code, phase=phase, facts=facts)
    if failure.verdict not in (Verdict.UNKNOWN, Verdict.DEGRADED):
        return failure
    if isinstance(error, Broken) and error.refuses:
        return _refusing(failure, error)
    return _unexplained(failure, error) if failure.verdict is Verdict.DEGRADED or failure.kind == "started" else failure


def _unexplained(failure: Failure, error: ServerFailure | Broken) -> Failure:
    """The log is that of a server that runs, perhaps with other settings than asked; that is not what ended it."""
    return replace(
        failure,
        verdict=Verdict.UNKNOWN,
        kind="unknown",
        cause=str(error),
        explanation="The server failed, and nothing in its log is a failure.",
        remedy="Try once more; look at the end of its log.",
        moves={},
    )


def _refusing(failure: Failure, error: Broken) -> Failure:
    """The log says nothing of why; that the server fails at what it must be able to do is certain all the same."""
    return replace(
        failure,
        verdict=Verdict.RUNTIME,
        kind="longest-refused",
        cause=str(error),
        explanation="The server runs, but answers the longest requests of the workloads with errors.",
        remedy="Read the server's log at the time of the memory proof.",
        violation=1.0,
    )


def judge_fault(error: Exception, phase: str, log_path: Path | None) -> Failure:
    """What is no fault of the server: the machine's, the user's input, or our own."""
    verdict = Verdict.ENV if isinstance(error, EnvironmentFault) else Verdict.HARNESS
    kind = {EnvironmentFault: "environment", HarnessError: "measurement", InputError: "input"}.get(
        type(error), "defect"
    )
    explanation = {
        "environment": "The machine is not in a state in which a measurement would mean anything.",
        "measurement": "The measurement cannot be trusted, so nothing is concluded from it.",
        "input": "Something given by the user does not go with this model or server.",
        "defect": "The tuner itself failed.",
    }[kind]
    remedy = "Please report this with the trial's folder." if kind == "defect" else "The cause says what to mend."
    where = traceback.format_exception(error)[-_TAIL_LINES:] if kind == "defect" else []
    tail = log_text(log_path).splitlines()[-_TAIL_LINES:] if log_path is not None else []
    return Failure(
        verdict=verdict,
        kind=kind,
        phase=phase,
        cause=f"{type(error).__name__}: {error}" if kind == "defect" else str(error),
        explanation=explanation,
        remedy=remedy,
        evidence=(*(line.rstrip() for line in where), *tail),
    )


def state_of(failure: Failure, retries: int, request: TrialRequest) -> TrialState:
    """What a final failure makes of the trial.

    Unknown causes are given the benefit of the doubt once. When the same configuration fails again it is the
    configuration, if it differs from the baseline: told as a fault, it would be proposed again for ever.
    """
    if failure.verdict in (Verdict.STATIC, Verdict.INFEASIBLE, Verdict.RUNTIME):
        return TrialState.INFEASIBLE
    if failure.verdict is Verdict.UNKNOWN and retries > 0 and searched(request):
        return TrialState.INFEASIBLE
    return TrialState.FAULT


def searched(request: TrialRequest) -> frozenset[str]:
    """Knobs that the search chose; those of the baseline are the user's."""
    baseline = request.proposal.step.kind in (StepKind.BASELINE, StepKind.USER)
    return frozenset() if baseline else frozenset(request.proposal.config)


def started_before(request: TrialRequest, context: TrialContext) -> bool:
    """Whether this very configuration has served in an earlier trial of the study."""
    config = dict(request.proposal.config)
    return any(
        record.state in (TrialState.COMPLETE, TrialState.SCREENED) and dict(record.config) == config
        for record in context.folder.trials()
    )


def log_text(path: Path) -> str:
    """What the server has written; nothing where it never began."""
    return path.read_text(errors="replace") if path.is_file() else ""
