"""`tune diagnose`: what the log of a vLLM that failed means; it starts nothing and needs no GPU."""

from __future__ import annotations

import argparse
import codecs
import json
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tuner.errors import ExitCode, InputError

if TYPE_CHECKING:
    from tuner.records import Failure

HEAD_BYTES, TAIL_BYTES = 4 * 2**20, 12 * 2**20
"""Of a longer log, its start and its end are read: causes stand there, access logs between them."""
ENDLESS_BYTES = 4 * 2**30
"""What has no size and goes on for longer than this is no log: a device, or a pipe that nobody closes."""
_BLOCK_BYTES = 2**20

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le", 4),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be", 4),
    (codecs.BOM_UTF16_LE, "utf-16-le", 2),
    (codecs.BOM_UTF16_BE, "utf-16-be", 2),
)

_MEANING = {
    "ok": "the server started",
    "STATIC": "impossible, and provable before any launch",
    "INFEASIBLE": "impossible for this model, GPU and version; the same again would fail again",
    "RUNTIME": "started, then died or degraded under load",
    "TRANSIENT": "not the configuration's fault; clean up and try again",
    "ENV": "the machine or installation; no other configuration helps",
    "HARNESS": "the command itself, or its fixed flags",
    "DEGRADED": "runs, but not with what was asked for",
    "unknown": "not known here",
}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "diagnose",
        help="explain the log of a vLLM that would not start or died",
        description="Explain the log of a vLLM server that would not start or died: what it means, what to do, and "
        "which way each setting should move.",
    )
    parser.add_argument("file", metavar="FILE", help="the log (stdout and stderr together), or - for standard input")
    parser.add_argument("--exit-code", type=int, metavar="N", help="exit code, as the shell or Python shows it")
    parser.add_argument("--idle-free-gib", type=float, metavar="X", help="free GPU memory when nothing runs")
    parser.add_argument("--device-gib", type=float, metavar="X", help="total GPU memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    for flag in ("idle_free_gib", "device_gib"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < 1e6:
            raise InputError(
                where="command line",
                field="--" + flag.replace("_", "-"),
                value=value,
                rule="must be a positive number of GiB",
                remedy="Read it from `nvidia-smi`.",
            )
    text = read_log(arguments.file)

    from tuner.failures import FailureFacts, classify, was_ready

    ready = was_ready(text)
    failure = classify(
        text,
        exit_code=arguments.exit_code,
        phase="measure" if ready else "launch",
        # A log on its own: nobody is going to try again, so verdicts say what the log shows.
        facts=FailureFacts(idle_free_gib=arguments.idle_free_gib, device_gib=arguments.device_gib, retries=None),
    )
    # A server that came up and was then asked to stop has not failed.
    fine = failure.kind == "started" or (failure.kind == "stopped-from-outside" and ready and not failure.exit_code)
    print(_as_json(failure, fine) if arguments.json else _as_text(failure, fine))
    return int(ExitCode.OK)


class _Endless(Exception):
    """More was read than a log can be."""


def read_log(name: str) -> str:
    """The text of a log file, its middle left out where it is very long. InputError for what is no readable file."""
    try:
        if name == "-":
            return _ends(sys.stdin.buffer, None)
        path = Path(name)
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode):
            with path.open("rb") as file:
                return _ends(file, path.stat().st_size if stat.S_ISREG(mode) else None)
        rule = "is a folder, not a log"
    except _Endless:
        rule = f"does not end: more than {ENDLESS_BYTES >> 30} GiB were read"
    except FileNotFoundError:
        rule = "there is no such file"
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        rule = f"cannot be read ({error.__class__.__name__}: {error})"
    remedy = "Name the file that holds vLLM's output, or - to read it from standard input."
    raise InputError(where="command line", field="FILE", value=name, rule=rule, remedy=remedy)


def _ends(file: BinaryIO, size: int | None) -> str:
    """The start and the end as text; `size` is None where it is not known, as of a pipe."""
    head = file.read(HEAD_BYTES)
    position, tail = len(head), bytearray()
    if size is not None and size > HEAD_BYTES + TAIL_BYTES:
        position = file.seek(-TAIL_BYTES, os.SEEK_END)
    while block := file.read(_BLOCK_BYTES):
        position += len(block)
        if size is None and position > ENDLESS_BYTES:
            raise _Endless
        tail += block
        if len(tail) > 2 * TAIL_BYTES:
            del tail[:-TAIL_BYTES]
    del tail[:-TAIL_BYTES]
    encoding, width = _encoding(head)
    if position == len(head) + len(tail):
        return (head + tail).decode(encoding, errors="replace")
    del tail[: -(position - len(tail)) % width]  # from the next whole character on
    return f"{head.decode(encoding, errors='replace')}\n{tail.decode(encoding, errors='replace')}"


def _encoding(head: bytes) -> tuple[str, int]:
    """By the mark at the start, and bytes of a unit: PowerShell's `>` writes UTF-16."""
    for mark, encoding, width in _MARKS:
        if head.startswith(mark):
            return encoding, width
    return "utf-8", 1


def _as_json(failure: Failure, fine: bool) -> str:
    document = {
        "verdict": "ok" if fine else failure.verdict.value,
        "kind": "started" if fine else failure.kind,
        "cause": failure.cause,
        "explanation": failure.explanation,
        "remedy": failure.remedy,
        "moves": dict(failure.moves),
        "evidence": list(failure.evidence),
        "violation": None if fine else failure.violation,
        "phase": failure.phase,
        "exit_code": failure.exit_code,
    }
    return json.dumps(document, ensure_ascii=False, indent=2)


def _as_text(failure: Failure, fine: bool) -> str:
    verdict = "ok" if fine else failure.verdict.value
    rows = [
        ("verdict", f"{verdict} – {_MEANING[verdict]}"),
        ("kind", "started" if fine else failure.kind),
        ("cause", failure.cause),
        ("meaning", failure.explanation),
        ("remedy", failure.remedy),
        ("moves", ", ".join(f"--{knob} {direction}" for knob, direction in failure.moves.items())),
    ]
    lines = [f"{name:<9}{value}" for name, value in rows if value]
    if not fine and failure.evidence:
        lines += ["evidence", *(f"  {line}" for line in failure.evidence)]
    return "\n".join(lines)
