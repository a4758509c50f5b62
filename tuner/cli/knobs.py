"""`tune knobs`: the knobs of the installed vLLM, with their defaults and what a search space makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.serve_args import ServeFlags
    from tuner.space import Knob, Space

_COLUMNS = ("flag", "default", "values", "scale", "stage", "lossy", "in this space")
_MANY = 1 << 20  # devices: what the machine has is `tune doctor`'s and `tune plan`'s concern


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("knobs", help="list the installed vLLM's knobs and a search space's values for them")
    parser.add_argument("--vllm", default="vllm", metavar="PATH", help="which vLLM executable to ask (default: vllm)")
    parser.add_argument(
        "--space",
        action="append",
        metavar="SPACE",
        help="default, conservative, throughput, latency, a YAML file, or knob=v1,v2,…; may be repeated",
    )
    parser.add_argument("--help-file", metavar="FILE", help="read a saved `vllm serve --help=all` instead of asking")
    parser.add_argument("--version", dest="help_version", metavar="V", help="the vLLM version of --help-file")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="for which device (default: that of the vLLM build)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    import json

    from tuner.space import load_space

    space = load_space(*(arguments.space or ["default"]))
    flags, device = _flags(arguments)
    rows = _rows(space, flags, device)
    if arguments.json:
        print(json.dumps({"vllm": flags.version, "device": device, "space": space.name, "knobs": rows}, indent=2))
        return 0
    print(f"vLLM {flags.version} on {device}, {len(flags.flags)} flags; search space {space.name}\n")
    print(_table([[_cell(row[column]) for column in _COLUMNS] for row in rows]))
    return 0


def _flags(arguments: argparse.Namespace) -> tuple[ServeFlags, str]:
    if arguments.help_file is None:
        if arguments.help_version is not None:
            _refuse("--version", arguments.help_version, "belongs to --help-file", "Leave it out.")
        from tuner.server import find_vllm

        install = find_vllm(arguments.vllm)
        return install.flags, arguments.device or install.device

    import re
    from pathlib import Path

    from tuner.documents import read_text
    from tuner.serve_args import parse_help

    text = read_text(Path(arguments.help_file), what="help file")
    linked = re.search(r"docs\.vllm\.ai/en/v(\d+\.\d+\.\d+)/", text)
    version = arguments.help_version or (linked[1] if linked else None)
    flags = parse_help(text, version or "")
    if "max-num-seqs" not in flags:
        _refuse("--help-file", arguments.help_file, "is no help of `vllm serve`", "Save `vllm serve --help=all` there.")
    if version is None:
        _refuse("--version", None, "the help file does not say its version", "Add `--version 0.33.0` or what it is.")
    return flags, arguments.device or "cuda"


def _rows(space: Space, flags: ServeFlags, device: str) -> list[dict[str, object]]:
    """The knobs of this space, then those that only the shipped spaces have."""
    from tuner.space import load_space, restrict, shipped_spaces

    kept, notes = restrict(
        space, flags, fixed={}, devices=_MANY, device_type=device, lossy_allowed=True, max_model_len=None
    )
    reasons = dict(note.split(": left out, ", 1) for note in notes if ": left out, " in note)
    here = {knob.name: knob for knob in kept.knobs}
    rows = [_row(here.get(knob.name, knob), flags, _verdict(knob, knob.name in here, reasons)) for knob in space.knobs]
    mentioned = {knob.name for knob in space.knobs}
    for name in shipped_spaces():
        for knob in load_space(name).knobs:
            if knob.name not in mentioned and knob.name in flags:
                mentioned.add(knob.name)
                rows.append(_row(knob, flags, "no"))
    return rows


def _verdict(knob: Knob, kept: bool, reasons: Mapping[str, str]) -> str:
    if not kept:
        return f"no: {reasons[knob.name]}"
    conditions = [f"from {knob.min_devices} devices"] if knob.min_devices > 1 else []
    conditions += ["when lossy knobs are allowed"] if knob.lossy else []
    return ", ".join(["yes", *conditions])


def _row(knob: Knob, flags: ServeFlags, verdict: str) -> dict[str, object]:
    flag = flags.get(knob.name)
    return {
        "knob": knob.name,
        "flag": f"--{knob.name}",
        "negation": None if flag is None else flag.negation,
        "default": None if flag is None or "." in knob.name else flag.default,
        "values": list(knob.values),
        "scale": knob.scale.value,
        "stage": knob.stage_name,
        "lossy": knob.lossy,
        "in this space": verdict,
        "note": knob.note,
    }


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        shown = [str(item).lower() if isinstance(item, bool) else str(item) for item in value]
        return ", ".join(shown) if len(shown) <= 5 else f"{shown[0]}, {shown[1]}, … {shown[-1]} ({len(shown)})"
    return str(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _refuse(field: str, value: object, rule: str, remedy: str) -> None:
    from tuner.errors import InputError

    raise InputError(where="command line", field=field, value=value, rule=rule, remedy=remedy)
