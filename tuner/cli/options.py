"""Arguments that several commands share, and the reading of their values."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from tuner.errors import InputError
from tuner.records import SPEED_NAMES

MOST_S = 366 * 86400.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)([smhd]))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")


def refuse(field: str, value: object, rule: str, remedy: str) -> InputError:
    return InputError(where="command line", field=field, value=value, rule=rule, remedy=remedy)


def duration_s(field: str, text: str) -> float:
    """`90s`, `45m`, `2h`, `1h30m` as seconds; InputError otherwise."""
    if not _DURATION.fullmatch(text):
        raise refuse(field, text, "is not a duration", "Write for example 45m, 2h or 1h30m.")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if not 0 < seconds <= MOST_S:
        raise refuse(
            field, text, "must be longer than nothing and at most a year", "Write for example 45m, 2h or 1h30m."
        )
    return seconds


def whole(field: str, text: str, *, at_least: int, at_most: int) -> int:
    """A whole number within bounds; InputError otherwise."""
    try:
        value = int(text)
    except ValueError:
        raise refuse(field, text, "must be a whole number", f"Give one from {at_least} to {at_most}.") from None
    if not at_least <= value <= at_most:
        raise refuse(field, text, f"must lie from {at_least} to {at_most}", "Choose one of these.")
    return value


def positive(field: str, text: str, *, or_zero: bool = False) -> float:
    """A finite number above zero, or zero itself where that is asked for; InputError otherwise."""
    remedy = f"Give a number {'of 0 or more' if or_zero else 'above 0'}."
    try:
        value = float(text)
    except ValueError:
        raise refuse(field, text, "must be a number", remedy) from None
    if not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        raise refuse(field, text, f"must be {'0 or more' if or_zero else 'above 0'} and finite", remedy)
    return value


def gpu_list(field: str, text: str) -> tuple[int, ...]:
    """`0`, `0,2,3` or `0-3` as indices; InputError otherwise."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low = whole(field, first, at_least=0, at_most=1023)
        high = whole(field, last, at_least=0, at_most=1023) if dash else low
        found += range(low, high + 1)
    if len(set(found)) != len(found) or not found:
        raise refuse(field, text, "must name each GPU once", "Write for example 0 or 0,1.")
    return tuple(found)


def existing_file(field: str, text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise refuse(field, text, "is no file", "Check the path.")
    return path


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` and `plan` have in common."""
    parser.set_defaults(takes_fixed=True)
    asked = parser.add_argument_group("what is tuned")
    asked.add_argument("--model", metavar="MODEL", help="folder or hub name, as for `vllm serve`")
    asked.add_argument("--slo", metavar="FILE", help="the promise (docs/inputs.md)")
    asked.add_argument(
        "--workloads", metavar="DIR|FILE", help="workload classes (default: the four that come with the tuner)"
    )
    asked.add_argument(
        "--space",
        metavar="NAME|FILE|KNOB=V1,V2,…",
        action="append",
        help="search space: default, conservative, throughput, latency, a file, or single knobs; may be repeated",
    )
    asked.add_argument(
        "--baseline",
        metavar="KNOB=VALUE|FILE",
        action="append",
        default=[],
        help="start from, and compare with, these flags instead of vLLM's defaults; may be repeated",
    )
    asked.add_argument(
        "--objective",
        choices=("capacity", "goodput", "throughput", "latency"),
        help="what to improve (default: capacity, the highest rate that keeps the promise); the others take --rate",
    )
    asked.add_argument("--rate", metavar="R", help="with such an --objective: requests a second offered to each class")
    asked.add_argument("--mixed", action="store_true", help="also score all classes at once, in the SLO's proportions")
    asked.add_argument(
        "--allow-lossy",
        action="store_true",
        help="also search knobs that may change what the model answers; they win only if it stays the same",
    )
    asked.add_argument(
        "--quality-prompts",
        metavar="FILE",
        help="with --allow-lossy: the prompts on which answers are compared (default: 48 that come with the tuner)",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--vllm", metavar="PATH", default="vllm", help="the vLLM executable (default: vllm)")
    where.add_argument(
        "--gpus", metavar="LIST", help="GPUs that one server may use, e.g. 0 or 0,1 (default: the first visible)"
    )
    spend = parser.add_argument_group("budget (the finish is reserved beforehand; default: 25 trials)")
    spend.add_argument("--trials", metavar="N", help="configurations that the search tries, the baseline included")
    spend.add_argument("--wall", metavar="TIME", help="wall time, e.g. 90m or 8h")
    spend.add_argument("--gpu-hours", metavar="H", help="GPU hours: wall time × GPUs")
    spend.add_argument("--speed", choices=SPEED_NAMES, help="how long each probe measures (default: normal)")
    spend.add_argument(
        "--finish-rounds",
        metavar="N",
        help="interleaved rounds of the finish (default: 5, or 10 where a gain stays open; 3 in a short budget)",
    )
    parser.add_argument("--seed", metavar="N", help="seed of requests and proposals (default: 1)")
    parser.add_argument(
        "--json", action="store_true", help="the result as JSON on standard output; progress on standard error"
    )
