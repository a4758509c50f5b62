"""Reads a vLLM log into lines that know their process and level; judges nothing.

The same message reaches a file in many dresses: `(EngineCore pid=7) ERROR 11-30 13:46:17 [core.py:1330] …`, colours,
journal or container prefixes, `[rank0]:`, progress bars that redraw one line with carriage returns. All of that is
undressed here, once, so that the rules can speak about the text alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tuner.secrecy import without_secrets

MAX_LINE = 2000
"""Characters of a line that are looked at; the rest of a longer one is noise (dumped configurations, tensors)."""

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|ESC\[[0-9;]*m")

_CONTROL = re.compile(
    r"""
      \x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)   # strings that a terminal takes: titles, links, clipboard
    | (?:\x1b\[|\x9b)[0-?]*[\x20-/]*[@-~]          # colours, moves of the cursor
    | \x1b[\x20-/]*[0-~]                            # the other sequences of ECMA-48
    | [\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]
    """,
    re.VERBOSE,
)

_PREFIX = re.compile(
    r"""
      \(\s?(?P<tag>[A-Za-z_][\w:.\- ]{0,60}?\s(?:pid|rank)=\d+[^)\n]{0,60})\)\ ?         # (EngineCore_DP0 pid=7)
    | (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)[ ]\d\d-\d\d[ ]\d\d:\d\d:\d\d(?:[.,]\d+)?[ ]
        (?:\[(?P<source>[^\]\n]{0,160})\]|[\w./-]{1,120}:\d+\])\ ?                           # vLLM's header, V1 and V0
    | \[?(?P<letter>[DIWEF])\d{4}[ ]\d\d:\d\d:\d\d[.\d]*\s+(?:\d+\s+)?[\w./-]{1,120}:\d+\]\ ?       # torch, glog
    | (?P<word>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL):[ ]{2,10}                                  # uvicorn
    | \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?\ *(?:(?:stdout|stderr)\s+[FP]\s)?
        (?:[|-]?\s*(?P<plain>DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b\s*(?:[|:-]\s*)?)?          # containers, loggers
    | \[(?:Info|Warning|Error|Debug)\]\ (?:\(\w+\)\ )?                                            # process managers
    | [A-Z][a-z]{2}\s+\d{1,2}\s\d\d:\d\d:\d\d\s[\w.-]{1,60}\s[\w./@-]{1,60}(?:\[\d+\])?:\ ?        # journal
    | \[rank\s?\d+\]:\ ?
    | \[\d+,\d+\]<std(?:err|out)>:\ ?
    | [\w.-]{1,60}\ +\|\                                                                           # docker compose
    | >\                                                                                           # quoted in mail
    """,
    re.VERBOSE,
)
_LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "FATAL"}

_EXCEPTION = re.compile(
    r"^(?:(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|OutOfResources)"
    r"|(?:[a-z_]\w*\.)+[A-Z]\w{2,40}|Exception)(?:\([\w.]{1,80}\))?(?::\s|$)"
)
_FRAME = re.compile(r'^\s*(?:File "|\^|~)|^\s{4,}|^\s*$')
_ARGS = re.compile(r"non-default args: (\{.{0,4000}?\})\s*$")
_EXIT = re.compile(r"^#\s*exit code:?\s*(-?\d{1,4})\b")
_VERSION = re.compile(r"(?:version|engine \(v|vLLM API server version)\s*v?(\d+\.\d+[.\w+]*)")
_READY = ("Application startup complete", "Uvicorn running on ")
_STOP = re.compile(
    r"shutdown triggered|[Rr]eceived signal(?: |=)?(?:SIG)?(?:TERM|INT|15|2)\b|[Rr]eceived SIG(?:TERM|INT)"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its dress. `text` keeps its own indentation, because that tells frames from messages."""

    index: int
    process: str  # `EngineCore pid=7`, or empty
    level: str  # `ERROR`, …, or empty where the line carries none
    source: str  # `core.py:1330`, or empty
    text: str

    @property
    def frame(self) -> bool:
        """A stack frame, a line of its source, an underline or nothing at all."""
        return _FRAME.match(self.text) is not None

    @property
    def exception(self) -> bool:
        """The line that ends a traceback: `ValueError: …`."""
        return _EXCEPTION.match(self.text) is not None

    @property
    def quiet(self) -> bool:
        """Not written as an error."""
        return self.level in ("DEBUG", "INFO", "WARNING")


@dataclass(frozen=True)
class Log:
    """A parsed log. All searches are linear in its length."""

    lines: tuple[Line, ...]

    @cached_property
    def text(self) -> str:
        """The undressed lines again, for patterns that look at any level."""
        return "\n".join(line.text for line in self.lines)

    @cached_property
    def exit_code(self) -> int | None:
        """From a closing `# exit code N` line, where whoever recorded the log left one."""
        for line in self.lines[:-6:-1]:
            if match := _EXIT.match(line.text):
                return int(match[1])
        return None

    @cached_property
    def version(self) -> str | None:
        for line in self.lines[:400]:
            if match := _VERSION.search(line.text):
                return match[1].rstrip(").")
        return None

    @cached_property
    def arguments(self) -> Mapping[str, object]:
        """vLLM's own `non-default args`, by Python name (`max_num_seqs`)."""
        for line in self.lines:
            if "non-default args" in line.text and (match := _ARGS.search(line.text)):
                return _literal(match[1])
        return {}

    @cached_property
    def ready(self) -> int | None:
        """Index of the line at which the server was ready to serve."""
        return self._first(*_READY)

    @cached_property
    def stopping(self) -> int | None:
        """Index of the line at which a signal asked the server to stop."""
        for line in self.lines:
            if ("shutdown triggered" in line.text or "eceived" in line.text) and _STOP.search(line.text):
                return line.index
        return None

    def _first(self, *needles: str) -> int | None:
        for line in self.lines:
            if any(needle in line.text for needle in needles):
                return line.index
        return None

    def frames(self, line: Line) -> str:
        """The files of the traceback that ends in `line`, newest last, joined by newlines."""
        files: list[str] = []
        for earlier in reversed(self.lines[max(0, line.index - 400) : line.index]):
            if earlier.process != line.process:
                continue
            if earlier.text.startswith("Traceback (most recent call last)"):
                break
            stripped = earlier.text.lstrip()
            if stripped.startswith('File "'):
                files.append(stripped[:300])
        return "\n".join(reversed(files))


def parse(text: str) -> Log:
    """Split and undress; never raises, whatever the bytes were."""
    return Log(tuple(_lines(_COLOUR.sub("", text) if "\x1b" in text or "ESC[" in text else text)))


def was_ready(text: str) -> bool:
    """Whether the server in this log had been ready to serve."""
    return any(marker in text for marker in _READY)


def plain(text: str) -> str:
    """The text without escape sequences and control characters; line ends and tabs stay."""
    return _CONTROL.sub("", text)


def shown(text: str, width: int = 400) -> str:
    """A line as it may be stored and printed: trimmed, shortened, without secrets and without what a terminal obeys."""
    text = without_secrets(" ".join(plain(text).split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def _lines(text: str) -> Iterator[Line]:
    for index, raw in enumerate(text.splitlines()):
        line = raw if len(raw) <= MAX_LINE else raw[:MAX_LINE]
        process = level = source = ""
        position = 0
        for _ in range(8):  # prefixes nest: journal, process, rank, header
            match = _PREFIX.match(line, position)
            if match is None or match.end() == position:
                break
            position = match.end()
            process, source = match["tag"] or process, match["source"] or source
            level = (
                match["level"] or match["word"] or match["plain"] or _LETTERS.get(match["letter"] or "", "") or level
            )
        yield Line(index, process, level, source, line[position:].rstrip())


def _literal(source: str) -> Mapping[str, object]:
    try:
        value = ast.literal_eval(source)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}  # e.g. an enum member among the values: the numbers that we need are then unknown
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}
