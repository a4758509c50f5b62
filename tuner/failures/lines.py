"""Which lines of a log may name a cause, and which of them say most; knows no rule about what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tuner.failures.log import Line, Log, shown
from tuner.failures.running import WRAPPERS

_WORDS = re.compile(
    r"(?i)\berror\b|error[:(]|exception|\bfatal\b|fail(?:ed|ure)|killed|aborted|core dumped|terminate called|illegal|"
    r"segmentation|bus error|out of memory|no space left|nccl|\bxid\b|trust_remote_code|value error|input should be|"
    r"invalid|placement group|precluded|timed out|unexpectedly|not found|denied|cannot |can't "
)
_PARTS = (
    *("error", "exception", "fatal", "fail", "killed", "aborted", "core dumped", "terminate called", "illegal"),
    *("segmentation", "out of memory", "no space left", "nccl", "xid", "trust_remote_code", "input should be"),
    *("invalid", "placement group", "precluded", "timed out", "unexpectedly", "not found", "denied"),
    *("cannot ", "can't "),
)
"""One of them is in whatever `_WORDS` finds; looking for them takes a fiftieth of the time."""
_LOUD = re.compile(
    r"(?:exited|died) unexpectedly|exceeds available GPUs|creating a placement group|broadcast block found"
)
"""Warnings and notices that name a cause although they are not written as errors."""
_NOISE = re.compile(
    r'HTTP/1\.[01]"? [1-5]\d\d|^usage: |^#|Warning: |\wWarning\b|^\s*warnings\.warn|For further information visit|'
    r"^Traceback \(most recent call last\)|During handling of the above|The above exception was the direct cause|"
    r"ValidationError: \d+ validation error|^Process \w[\w.-]*:$|non-default args|Initializing a V1 LLM engine|"
    r"destroy_process_group|leaked (?:shared_memory|semaphore)"
)
_DUMPS = ("dump_input",)
"""Sources that print the whole state of the engine as errors when it dies."""
_MAX_LINES, _MAX_CHARACTERS = 4000, 2_000_000
ENGINE_PROCESSES = ("EngineCore", "Worker", "VllmWorker", "Ray")


def candidates(log: Log) -> Iterator[Line]:
    """Lines that may name a cause, without repeats, in order.

    What was logged before the server became ready did not keep it from becoming ready, and what follows a request to
    stop is the noise of stopping.
    """
    seen: set[str] = set()
    characters = 0
    for line in log.lines[log.ready or 0 : log.stopping]:
        if line.frame or line.text in seen or line.source.startswith(_DUMPS):
            continue
        worth = _LOUD.search(line.text) if line.quiet else line.level or line.exception or _says(line.text)
        if worth and not _NOISE.search(line.text):
            seen.add(line.text)
            yield line
            characters += len(line.text)
            if len(seen) == _MAX_LINES or characters > _MAX_CHARACTERS:
                return


def most_informative(lines: Sequence[Line]) -> list[Line]:
    """Most informative first; the earlier among equals."""
    return sorted(lines, key=lambda line: (-_score(line), line.index))


def evidence(lines: Sequence[Line], cause: Line | None, count: int = 8) -> tuple[str, ...]:
    """The most informative lines in the order of the log, the cause among them, fit to be stored."""
    chosen = {line.index: line for line in most_informative(lines)[: count - 1]}
    if cause is not None:
        chosen[cause.index] = cause
    return tuple(dict.fromkeys(shown(chosen[index].text) for index in sorted(chosen)))


def last_words(log: Log) -> Line | None:
    """The last line that says anything."""
    return next((line for line in reversed(log.lines) if line.text.strip() and not line.text.startswith("#")), None)


def _says(text: str) -> bool:
    lowered = text.lower()
    return any(part in lowered for part in _PARTS) and _WORDS.search(text) is not None


def _score(line: Line) -> int:
    score = 5 * line.exception + 3 * (line.level in ("ERROR", "CRITICAL", "FATAL")) + 2 * _says(line.text)
    score += line.process.startswith(ENGINE_PROCESSES)
    return score - 6 * bool(WRAPPERS.search(line.text))
