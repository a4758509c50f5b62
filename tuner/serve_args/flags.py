"""What the installed `vllm serve` understands, read from its `--help=all`; it runs nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tuner.documents import suggestion
from tuner.records import KnobValue

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_INVOCATION = re.compile(r"^  (-{1,2}[A-Za-z].*?)(?:\s{2,}(\S.*))?$")
_GROUP = re.compile(r"^([A-Za-z][\w ]*):$")
_OPTION = re.compile(r"(-{1,2}[A-Za-z][\w-]*)(?: (.+))?")
_CHOICES = re.compile(r"\{([^{}]*)\}")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class Takes(StrEnum):
    """What follows the flag on the command line."""

    NOTHING = "nothing"  # present or absent
    BOOLEAN = "boolean"  # nothing either, but there is a flag for the opposite
    VALUE = "value"
    OPTIONAL = "optional"  # a value that may be left out
    LIST = "list"  # one or more values


@dataclass(frozen=True, slots=True)
class Flag:
    """One entry of the help. `name` is the long spelling without dashes, and the knob's name everywhere else."""

    name: str
    takes: Takes
    spellings: tuple[str, ...]  # every spelling with dashes that means the flag itself
    negation: str | None  # spelling with dashes of the opposite
    choices: tuple[str, ...]  # closed choice; empty where anything may be given
    default: KnobValue | None  # as the help prints it; None also where vLLM decides later
    group: str
    help: str
    json: bool = False  # a JSON object, also as `--name.key value`

    @property
    def boolean(self) -> bool:
        return self.takes in (Takes.NOTHING, Takes.BOOLEAN)


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """Every flag of one vLLM version by name."""

    version: str
    flags: Mapping[str, Flag]
    spellings: Mapping[str, str] = field(default_factory=dict)  # spelling with dashes -> name

    def __contains__(self, knob: str) -> bool:
        """Whether this version has the knob; `name.key` is there where `name` takes JSON."""
        name, dot, _ = knob.partition(".")
        flag = self.flags.get(name)
        return flag is not None and (not dot or flag.json)

    def get(self, knob: str) -> Flag | None:
        return self.flags.get(knob.partition(".")[0]) if knob in self else None


def parse_help(text: str, version: str) -> ServeFlags:
    """The flags in the text of `vllm serve --help=all`; none where the text is something else."""
    flags: dict[str, Flag] = {}
    group = ""
    invocation: str | None = None
    lines: list[str] = []
    for raw in [*_ANSI.sub("", text).splitlines(), "end:"]:
        entry, heading = _INVOCATION.match(raw), _GROUP.match(raw)
        if (entry or heading) and invocation is not None:
            flag = _flag(invocation, _joined(lines), group)
            if flag is not None:
                flags[flag.name] = flag
            invocation = None
        if heading:
            group = heading[1]
        elif entry:
            invocation, lines = entry[1], [entry[2]] if entry[2] else []
        elif raw.startswith("   "):
            lines.append(raw.strip())
    spellings = {word: flag.name for flag in flags.values() for word in (*flag.spellings, flag.negation) if word}
    return ServeFlags(version, flags, spellings)


def unknown_flag(spelling: str, flags: ServeFlags) -> str:
    """The remedy for a spelling that this version does not have."""
    name = spelling.lstrip("-").partition(".")[0].replace("_", "-")
    if name in REMOVED:
        return REMOVED[name]
    bare = re.sub(r"^(?:no-)?(?:enable-|disable-)?", "", name)
    for candidate in (bare, f"enable-{bare}", f"disable-{bare}"):
        flag = flags.flags.get(candidate)
        if flag is not None and flag.boolean:
            return f"vLLM {flags.version} spells it {' or '.join((flag.spellings[0], flag.negation or 'nothing'))}."
    known = [f"--{known}" for known in flags.flags]
    return f"{suggestion(f'--{name}', known)} `vllm serve --help=all` lists them."


REMOVED: Mapping[str, str] = {
    "disable-log-requests": "It was removed: request logging is off by default; `--no-enable-log-requests` says so.",
    "swap-space": "It was removed with vLLM's V0 engine and did nothing since; leave it out.",
    "num-scheduler-steps": "It was removed with the V0 engine; `--async-scheduling` does what it was for.",
    "multi-step-stream-outputs": "It was removed with the V0 engine; leave it out.",
    "enable-reasoning": "It was removed; `--reasoning-parser NAME` alone switches reasoning on.",
    "preemption-mode": "It was removed with the V0 engine; preempted requests are always recomputed.",
    "use-v2-block-manager": "It was removed; leave it out.",
    "max-seq-len-to-capture": "It was removed; use `--max-cudagraph-capture-size` (a batch size, not a length).",
    "max-num-partial-prefills": "It was removed after vLLM 0.30; use `--long-prefill-token-threshold`.",
    "max-long-partial-prefills": "It was removed after vLLM 0.30; use `--long-prefill-token-threshold`.",
    "calculate-kv-scales": "It was removed after vLLM 0.26; leave it out.",
    "guided-decoding-backend": "It was removed; use `--structured-outputs-config.backend NAME`.",
    "task": "It was removed; use `--runner` and `--convert`.",
    "device": "It was removed; the installed build decides the device.",
}
"""Flags of earlier versions (CASES A30) and what to do instead; asked only where the installed version lacks them."""


def version_tuple(version: str) -> tuple[int, int, int]:
    """`0.32.0rc1+cpu` → (0, 32, 0); an unreadable version counts as newer than any."""
    match = _VERSION.search(version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (9999, 0, 0)


def _flag(invocation: str, text: str, group: str) -> Flag | None:
    """None for a line that only looks like the beginning of an entry."""
    spellings: list[str] = []
    metavar = ""
    # Python below 3.13 repeats the placeholder after every spelling, later versions print it once at the end.
    for part in re.split(r", (?=-)", invocation):
        option = _OPTION.fullmatch(part.strip())
        if option is not None:
            spellings.append(option[1])
            metavar = option[2] or metavar
    if not spellings:
        return None
    main = next((word for word in spellings if word.startswith("--")), spellings[0])
    negation = next((word for word in spellings if _negates(word, main)), None)
    match = _CHOICES.fullmatch(metavar) or _CHOICES.match(metavar if metavar.endswith("...]") else "")
    body, default = _split_default(text)
    return Flag(
        name=main.lstrip("-"),
        takes=_takes(metavar, negation),
        spellings=tuple(word for word in spellings if word != negation),
        negation=negation,
        choices=tuple(match[1].split(",")) if match else (),
        default=default,
        group=group,
        help=body,
        json="valid JSON string" in text or "JSON keys" in text or str(default).startswith("{"),
    )


def _negates(word: str, main: str) -> bool:
    name = main.removeprefix("--")
    opposites = {f"--no-{name}"}
    for prefix, other in (("enable-", "disable-"), ("disable-", "enable-")):
        if name.startswith(prefix):
            opposites.add(f"--{other}{name.removeprefix(prefix)}")
    return word in opposites


def _takes(metavar: str, negation: str | None) -> Takes:
    if not metavar:
        return Takes.BOOLEAN if negation else Takes.NOTHING
    if metavar.endswith("...]"):
        return Takes.LIST
    return Takes.OPTIONAL if metavar.startswith("[") and "," not in metavar and "'" not in metavar else Takes.VALUE


def _joined(lines: list[str]) -> str:
    """Undoes the wrapping: the formatter breaks after hyphens inside words as well as at spaces."""
    text = ""
    for line in lines:
        glued = text.endswith("-") and not text.endswith(" -")
        text = line if not text else text + line if glued else f"{text} {line}"
    return text


def _split_default(text: str) -> tuple[str, KnobValue | None]:
    start = text.rfind("(default: ")
    if start < 0 or not text.endswith(")"):
        return text, None
    return text[:start].strip(), plain_value(text[start + len("(default: ") : -1])


def plain_value(text: str) -> KnobValue | None:
    """A word as Python prints it: None, True, a number; anything else stays text."""
    if text == "None":
        return None
    if text in ("True", "False"):
        return text == "True"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
