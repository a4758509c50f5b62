"""From a log, an exit code and the state of the machine to one judged failure; collects nothing and acts on nothing.

How the cause is found. Lines that could be a cause (exceptions, errors; not frames, not warnings, not access logs) are
matched against the tables. A known text beats a family of texts, which beats a line that only reports that something
else failed; among equals the first in the log wins, because what follows a failure is its echo. Where no text decides,
the facts do (a deadline, a foreign port owner, a signal), and where they do not either, the answer is `unknown` with
the most informative lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuner.failures import configuration, environment, memory, running, surroundings
from tuner.failures.lines import ENGINE_PROCESSES, candidates, evidence
from tuner.failures.log import Line, Log, parse, shown
from tuner.failures.rule import FAMILY, KNOWN, Case, FailureFacts, Judgement, Rule
from tuner.failures.surroundings import Judged, Scene
from tuner.records import Failure, Verdict

TABLE: tuple[Rule, ...] = (*memory.RULES, *environment.RULES, *configuration.RULES, *running.RULES)
"""Within one line and one weight the first row that matches wins."""

_STARTS = frozenset(
    {
        *("model-access", "model-not-found", "model-not-downloaded", "weights-missing", "weights-corrupt"),
        *("weights-mismatch", "architecture-unknown", "tokenizer", "model-files", "trust-remote-code", "bad-address"),
    }
)
"""What only a start can find out. A server that serves says the same about a request: an image that is not there, tool
arguments that are no JSON."""
_REFUSALS = frozenset({"os-error", "broken-install", "permission", *(row.kind for row in configuration.RULES)})
"""What the front end of a server that serves says about one request, too: nothing died of it."""

_SORTED = tuple(sorted(TABLE, key=lambda row: -row.weight))

_ACCIDENTS = re.compile(
    r"not enough values to unpack|too many values to unpack|invalid literal for|could not convert|is not in list|"
    r"math domain error|object is not|unsupported operand|I/O operation on closed"
)
"""Texts that Python itself writes: nobody refused anything, something broke."""
_REFUSAL = re.compile(r"(?:ValueError|AssertionError|NotImplementedError): .")


def classify(log_text: str, *, exit_code: int | None, phase: str, facts: FailureFacts) -> Failure:
    """Judge one failed server.

    `log_text` is stdout and stderr together; `exit_code` is as of `subprocess` (negative: a signal), None while it
    runs; `phase` is `prepare`, `launch`, `warm-up`, `measure` or `stop`. Never raises: a log that says nothing gives
    `unknown`.
    """
    log = parse(log_text)
    scene = Scene(
        log=log,
        lines=tuple(candidates(log)),
        phase=phase,
        serving=phase in ("warm-up", "measure", "stop") or log.ready is not None,
        exit_code=log.exit_code if exit_code is None else exit_code,
        facts=facts,
    )
    judgement, line = _judge(scene, _best(scene))
    judgement = _reconcile(judgement, scene)
    return Failure(
        verdict=judgement.verdict,
        kind=judgement.kind,
        phase=phase,
        cause=shown(line.text) if line is not None else judgement.kind,
        explanation=shown(judgement.explanation, 2000),  # it may quote the log
        remedy=judgement.remedy,
        moves=dict(judgement.moves),
        violation=judgement.violation,
        exit_code=scene.exit_code,
        evidence=evidence(scene.lines, line),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    rule: Rule
    case: Case


def _best(scene: Scene) -> _Found | None:
    """The heaviest match, the first among equals."""
    best: _Found | None = None
    died = max((line.index for line in scene.lines if running.DEATHS.search(line.text)), default=-1)
    for line in scene.lines:
        engines = line.process.startswith(ENGINE_PROCESSES)
        for row in _SORTED:
            if best is not None and row.weight <= best.rule.weight:
                break
            if row is configuration.RESEMBLING and (scene.serving or not _refuses(line)):
                continue  # a request may be refused, or a choice be explained, in the same words
            if scene.serving and (row.kind in _STARTS or (row.kind in _REFUSALS and line.index > died and not engines)):
                continue
            if match := row.search(line.text):
                best = _Found(row, Case(match, line, scene.log, scene.serving, scene.facts))
                break
    return best


def _judge(scene: Scene, found: _Found | None) -> Judged:
    """In order: a known text, a stop, the machine, a resembling text, a deadline, a signal, an echo, silence."""
    if found is not None and found.rule.weight >= KNOWN:
        return found.rule.judgement(found.case), found.case.line
    judged = surroundings.stopped(scene) or surroundings.from_machine(scene)
    if judged is None and found is not None and found.rule.weight == FAMILY:
        judged = _family(found), found.case.line
    if judged is None and not scene.serving:
        judged = _unfamiliar(scene)
    judged = judged or surroundings.from_deadline(scene) or surroundings.from_signal(scene)
    if judged is not None:
        return judged
    if found is not None:
        return surroundings.behind_echo(scene, found.rule.judgement(found.case), found.case.line)
    return surroundings.silent(scene)


def _family(found: _Found) -> Judgement:
    """A text that resembles others: what it says, and where in the code it was said, decide."""
    judgement, line, log = found.rule.judgement(found.case), found.case.line, found.case.log
    if found.rule is not configuration.RESEMBLING:
        return judgement
    judgement = judgement.but(
        explanation=f"{judgement.explanation} It says: {_words(line)}", moves=configuration.named_settings(line, log)
    )
    if _while_reading(line, log):
        return judgement.but(kind="configuration-refused", verdict=Verdict.STATIC)
    return judgement


def _unfamiliar(scene: Scene) -> tuple[Judgement, Line] | None:
    """An exception of unknown text: out of the compiler, or raised on purpose against a configuration or model."""
    for line in scene.lines:
        if running.WRAPPERS.search(line.text):
            continue
        if line.exception and environment.is_compiler_frame(scene.log.frames(line)):
            why = f"{environment.COMPILER.explanation} It says: {_words(line)}"
            return environment.COMPILER.but(explanation=why), line
        reading = _refuses(line) and _while_reading(line, scene.log)
        if not reading and (not _REFUSAL.match(line.text) or _ACCIDENTS.search(line.text)):
            continue
        kind, verdict, when = (
            ("configuration-refused", Verdict.STATIC, "vLLM refused the configuration before it touched a device")
            if reading
            else ("engine-refused", Verdict.INFEASIBLE, "The engine refused to start with this model and configuration")
        )
        remedy = "Return the setting that the message names to its default."
        moves = configuration.named_settings(line, scene.log)
        return Judgement(kind, verdict, f"{when}: {_words(line)}", remedy, moves), line
    return None


def _refuses(line: Line) -> bool:
    """An exception, bare or inside pydantic's, that Python did not write itself."""
    return (line.exception or "Value error" in line.text) and not _ACCIDENTS.search(line.text)


def _while_reading(line: Line, log: Log) -> bool:
    """Raised while vLLM read its configuration, before it touched a device."""
    wrapped = "[type=value_error" in line.text or "[type=assertion_error" in line.text
    return wrapped or configuration.is_configuration_frame(log.frames(line))


def _words(line: Line) -> str:
    return shown(configuration.complaint(line.text), 240)


def _reconcile(judgement: Judgement, scene: Scene) -> Judgement:
    """A configuration that has started before is not impossible: the machine has changed."""
    facts, unexplained = scene.facts, judgement.kind == "unknown" and not scene.serving
    if not facts.known_good or not (unexplained or judgement.verdict in (Verdict.INFEASIBLE, Verdict.STATIC)):
        return judgement
    return judgement.but(
        verdict=Verdict.ENV if (facts.retries or 0) >= 2 else Verdict.TRANSIENT,
        explanation=f"{judgement.explanation} But this very configuration has started before in this study, so the "
        "machine has changed, not the configuration.",
        remedy=f"Wait until the machine is as it was and try again. {judgement.remedy}",
    )
