"""Owns the scripted faults of a simulated server: their names, arguments and conditions; it commits none.

`VLLM_SIM_FAULT='oom-under-load:20 if max-num-seqs>=256; ignore-sigterm'`: faults are separated by `;`, an argument
follows `:`, conditions on the effective configuration follow `if` and are joined by `and`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuner.errors import InputError
from tuner.records import KnobValue
from tuner.sim.crashes import START_CRASHES

FAULTS: Mapping[str, str] = {
    "start": "start:KIND – does not start, in the words and with the exit code of a real one (docs/simulator.md)",
    "hang-at-start": "stops in the middle of the start; the log does not advance",
    "slow-start": "slow-start:SECONDS – that much longer, with the log advancing",
    "oom-under-load": "oom-under-load:N – the engine runs out of memory at request N; the server exits with 0",
    "engine-killed": "engine-killed:N – the engine kills itself at request N; the server exits with 0",
    "dead-health": "dead-health:N – the engine dies at request N, the server stays: /health 200, no tokens",
    "stuck": "stuck:N – from request N on no token comes, everything else looks alive",
    "stream-error": "stream-error:N – every Nth request gets an error object inside its 200 stream",
    "http-500": "http-500:N – every Nth request is answered 500",
    "early-close": "early-close:N – the connection of every Nth request closes in mid-stream",
    "short-output": "short-output:N – every Nth request ends one token early, with finish_reason `length`",
    "ignore-sigterm": "SIGTERM does nothing",
    "swallow-sigterm": "the first SIGTERM does nothing",
    "orphan": "leaves a process in its own session that holds a shared-memory segment and a port",
    "engine-survives": "the engine does not end with its API server",
}

_ONE = re.compile(r"(?P<name>[a-z0-9-]+)(?::(?P<argument>[\w.-]+))?(?: if (?P<conditions>.+))?")
_CONDITION = re.compile(r"(?P<knob>[a-z-]+) *(?P<compare>>=|<=|==|!=|>|<) *(?P<value>\S+)")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One scripted fault; `argument` is a count, seconds or a kind, as its name says."""

    name: str
    argument: str
    conditions: tuple[tuple[str, str, str], ...]  # knob, comparison, value

    @property
    def number(self) -> float:
        return float(self.argument or 1)

    def applies(self, values: Mapping[str, KnobValue]) -> bool:
        """Whether all conditions hold for the effective configuration."""
        return all(_holds(values.get(knob), compare, value) for knob, compare, value in self.conditions)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """InputError for a fault that is not known or not written as above."""
    return tuple(_fault(part.strip()) for part in text.split(";") if part.strip())


def _fault(text: str) -> Fault:
    match = _ONE.fullmatch(text)
    if match is None or match["name"] not in FAULTS:
        raise _wrong(text, "not a fault", f"Known: {', '.join(FAULTS)}.")
    name, argument = match["name"], match["argument"] or ""
    if name == "start" and argument not in START_CRASHES:
        raise _wrong(text, "not a way of not starting", f"Known: {', '.join(START_CRASHES)}.")
    if name != "start" and argument and not re.fullmatch(r"\d+(\.\d+)?", argument):
        raise _wrong(text, "the argument must be a number", f"Write {FAULTS[name]}.")
    conditions = []
    for part in (match["conditions"] or "").split(" and "):
        if not part.strip():
            continue
        condition = _CONDITION.fullmatch(part.strip())
        if condition is None:
            raise _wrong(text, "not a condition", "Write `if KNOB>=VALUE [and …]`.")
        conditions.append((condition["knob"], condition["compare"], condition["value"]))
    return Fault(name, argument, tuple(conditions))


def _wrong(text: str, rule: str, remedy: str) -> InputError:
    return InputError(where="environment", field="VLLM_SIM_FAULT", value=text, rule=rule, remedy=remedy)


def _holds(have: KnobValue | None, compare: str, want: str) -> bool:
    if have is None or isinstance(have, bool | str):
        return (str(have).lower() == want.lower()) == (compare == "==")
    return _COMPARE[compare](float(have), float(want))
