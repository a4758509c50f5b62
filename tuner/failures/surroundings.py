"""What the machine, a deadline, a signal or silence says where no line of the log does."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.failures import running
from tuner.failures.lines import last_words, most_informative
from tuner.failures.log import Line, Log, shown
from tuner.failures.rule import Case, FailureFacts, Judgement
from tuner.records import Verdict

Judged = tuple[Judgement, Line | None]

DISK_FLOOR_BYTES = 200 * 2**20
"""Less than this free, and any write may have been the one that failed."""

_AGAIN = "Clean up and try once more; a second time counts against the configuration."
_AVOID = "Try once more; if it repeats, avoid this configuration."
_UNKNOWN = "Read the lines under evidence; a report of them would help to make this known."
_THROUGHPUT = re.compile(
    r"prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, Running: (\d+) reqs, "
    r"Waiting: (\d+) reqs"
)


@dataclass(frozen=True, slots=True)
class Scene:
    """One failed server as everything in this room sees it."""

    log: Log
    lines: Sequence[Line]  # candidates for a cause
    phase: str
    serving: bool
    exit_code: int | None
    facts: FailureFacts

    def once_then_runtime(self) -> Verdict:
        return Verdict.RUNTIME if self.facts.retries else Verdict.TRANSIENT


def from_machine(scene: Scene) -> Judged | None:
    """What makes every other reading of an unclear log meaningless."""
    owner, free = scene.facts.port_owner, scene.facts.disk_free_bytes
    if owner is not None:
        why = f"Another server answers on our port: {owner}. Whatever it says is not about this configuration."
        remedy = "Take another free port and start again."
        return Judgement("foreign-server", Verdict.TRANSIENT, why, remedy), last_words(scene.log)
    if free is not None and free < DISK_FLOOR_BYTES:
        why = f"Only {free / 2**20:.0f} MiB are free on a disk in use."
        remedy = "Free space in the results folder, the model cache and the compile cache; the study resumes then."
        return Judgement("disk-full", Verdict.ENV, why, remedy), last_words(scene.log)
    return None


def from_deadline(scene: Scene) -> Judged | None:
    """A deadline passed, or the engine produced nothing; neither proves anything against a configuration at first."""
    facts, last = scene.facts, last_words(scene.log)
    if facts.no_progress or (facts.timed_out and scene.serving and scene.phase != "stop"):
        why = (
            "The server answers /health but produces no tokens: its engine is dead or stuck behind a living front end."
            if facts.no_progress
            else "The server was up and then did not finish its work in time."
        )
        return Judgement("no-progress", scene.once_then_runtime(), why, _AGAIN), last
    if not facts.timed_out:
        return None
    if scene.phase == "stop":
        why = "The server did not end in time after it was asked to."
        remedy = "End its whole process group and every recorded descendant; wait until the GPU is free again."
        return Judgement("slow-stop", Verdict.TRANSIENT, why, remedy), last
    return _slow_start(facts), last


def _slow_start(facts: FailureFacts) -> Judgement:
    kind = "start-hang" if facts.log_silent else "start-timeout"
    what = "hung: its log had stopped growing" if facts.log_silent else "was still working when the limit passed"
    why = f"The server did not become ready in time; it {what}."
    if not facts.retries:
        remedy = "Try once more with a warm compile cache and a longer limit."
        return Judgement(kind, Verdict.TRANSIENT, f"{why} Slow is not impossible.", remedy)
    return Judgement(
        kind,
        Verdict.INFEASIBLE,
        f"{why} It was tried again with a longer limit, with the same result.",
        "Leave this configuration out, or raise the start-up limit.",
    )


_SIGNALS: dict[int, Judgement] = {
    signal.SIGKILL: Judgement(
        "killed",
        Verdict.TRANSIENT,
        "It was killed (SIGKILL): most often by the system because main memory ran out, otherwise by somebody.",
        "Check `dmesg` for `Out of memory`; free main memory; try once more.",
    ),
    signal.SIGILL: Judgement(
        "cpu-too-old",
        Verdict.ENV,
        "It executed an instruction that this processor does not have.",
        "Use a build of vLLM for this processor.",
    ),
    signal.SIGBUS: Judgement(
        "shared-memory-full",
        Verdict.ENV,
        "It touched memory that could not be provided (SIGBUS): usually /dev/shm is full.",
        "Remove leftovers in /dev/shm, or give the container more (`--shm-size 16g`).",
    ),
    signal.SIGSEGV: Judgement("crash", Verdict.TRANSIENT, "It crashed below Python (SIGSEGV).", _AVOID),
    signal.SIGABRT: Judgement("crash", Verdict.TRANSIENT, "It aborted below Python (SIGABRT).", _AVOID),
    **{
        number: Judgement(
            "stopped-from-outside",
            Verdict.TRANSIENT,
            f"Somebody else stopped it ({number.name}).",
            "Find out who; then try again.",
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    },
}


def from_signal(scene: Scene) -> Judged | None:
    """A process that a signal ended; shells report 128 + n, `subprocess` −n."""
    code = scene.exit_code
    if code is None or not (code < 0 or code > 128):
        return None
    judgement = _SIGNALS.get(-code if code < 0 else code - 128)
    if judgement is None:
        return None
    if scene.facts.retries and judgement.kind in ("killed", "crash"):
        judgement = judgement.but(verdict=Verdict.RUNTIME if scene.serving else Verdict.INFEASIBLE)
    return judgement, scene.lines[-1] if scene.lines else last_words(scene.log)


def stopped(scene: Scene) -> Judged | None:
    """Asked to stop, by the tuner or by somebody; not when the log shows a start that was asked for nothing."""
    log = scene.log
    line = log.lines[log.stopping] if log.stopping is not None else last_words(log)
    if scene.facts.stop_requested:
        why = "The server ended because the tuner stopped it."
        return Judgement("stopped", Verdict.TRANSIENT, why, "Nothing to do."), line
    if log.stopping is None or log.ready is None:
        return None
    why = "The server had started and was stopped by a signal; nothing in its log is a failure."
    remedy = "Where nobody stopped it on purpose, find out who did; then try again."
    return Judgement("stopped-from-outside", Verdict.TRANSIENT, why, remedy), line


def behind_echo(scene: Scene, echo: Judgement, line: Line) -> Judged:
    """Only reports of another failure: name the first exception that is none itself, if there is one."""
    cause = next((other for other in scene.lines if other.exception and not running.WRAPPERS.search(other.text)), None)
    if cause is None:
        ended = " The server shut down and exited with 0 all the same." if scene.exit_code == 0 else ""
        return echo.but(explanation=echo.explanation + ended), line
    words = shown(cause.text, 240)
    if not scene.serving:
        why = f"The engine did not start. Its first exception is not one that is known here: {words}"
        return Judgement("unknown", Verdict.UNKNOWN, why, _UNKNOWN), cause
    why = f"The engine stopped with an exception under load: {words}"
    return echo.but(kind="engine-exception", explanation=why, remedy=_AVOID), cause


def silent(scene: Scene) -> Judged:
    """No line matched anything."""
    log, facts, last = scene.log, scene.facts, last_words(scene.log)
    if log.ready is not None and scene.exit_code is None:
        if facts.process_dead:
            why = "A process of the server has ended, and its log does not say why."
            return Judgement("engine-died", scene.once_then_runtime(), why, _AGAIN), last
        if (degraded := next(degradations(log), None)) is not None:
            return degraded
        if (stuck := _stuck(log)) is not None:
            why = "The last report of the engine shows requests that wait and not a single token: it is stuck or dead."
            return Judgement("no-progress", scene.once_then_runtime(), why, _AGAIN), stuck
        why = "The server started; nothing in the log is a failure."
        return Judgement("started", Verdict.UNKNOWN, why, "Nothing to do."), log.lines[log.ready]
    if scene.serving and scene.exit_code is not None:
        verdict = Verdict.TRANSIENT if facts.retries == 0 else Verdict.RUNTIME
        why = f"The server ended by itself with exit code {scene.exit_code} and gave no reason. An end that nobody "
        why += "asked for is a failure, whatever the code."
        return Judgement("exit-without-reason", verdict, why, "Try once more; look for the reason in `dmesg`."), last
    foreign = bool(log.lines) and not any(line.level or line.process for line in log.lines)
    unexcepted = not any(line.exception for line in scene.lines)
    if scene.exit_code is None and last is not None and unexcepted and not foreign:
        verdict = Verdict.UNKNOWN if facts.retries else Verdict.TRANSIENT
        why = "The log ends in the middle of a start, without an error: the server was still starting, hung, or was "
        why += "stopped."
        remedy = "Try once more with a longer limit. A signal during a start can be lost: send it twice."
        return Judgement("start-incomplete", verdict, why, remedy), last
    why = "The log names no cause that is known here." if log.lines else "There is no log."
    why = "Nothing in it looks like a line of vLLM's log." if foreign and unexcepted else why
    scored = most_informative(scene.lines)
    return Judgement("unknown", Verdict.UNKNOWN, why, _UNKNOWN), scored[0] if scored else last


def _stuck(log: Log) -> Line | None:
    """The newest throughput report, if it shows work and no tokens."""
    for line in reversed(log.lines):
        if match := _THROUGHPUT.search(line.text):
            idle = float(match[1]) == 0 and float(match[2]) == 0
            return line if idle and (int(match[3]) or int(match[4])) else None
    return None


def degradations(log: Log) -> Iterator[tuple[Judgement, Line]]:
    """Quiet lines of a running server that say that it runs something else than asked."""
    asked_off = log.arguments.get("enable_chunked_prefill") is False
    for line in log.lines[: log.ready]:
        if not line.quiet or line.frame:
            continue
        if asked_off and line.text.startswith("Chunked prefill is enabled"):
            why = "--no-enable-chunked-prefill was asked for, and chunked prefill is on."
            remedy = "Count the trial as one with chunked prefill."
            yield Judgement("flag-ignored", Verdict.DEGRADED, why, remedy, {"enable-chunked-prefill": "on"}), line
            continue
        for row in running.DEGRADED:
            if match := row.search(line.text):
                yield row.judgement(Case(match, line, log, False, FailureFacts())), line
                break
