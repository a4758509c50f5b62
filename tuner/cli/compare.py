"""`tune compare A B`: two configurations, or two versions of vLLM, against each other in interleaved rounds."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.asked import chosen_gpus
from tuner.cli.options import existing_file, positive, refuse, whole
from tuner.documents import strict_json
from tuner.errors import EnvironmentFault, ExitCode
from tuner.records import SPEED_NAMES

if TYPE_CHECKING:
    from tuner.comparison import Asked, Comparison
    from tuner.server import VllmInstall

EXIT_CODES = "exit codes: 0 better or the same, 2 bad input, 3 environment, 5 worse, 7 unresolved, 130 interrupted"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="two configurations or two vLLMs against each other",
        description="Measure two sides in interleaved rounds, each run on a fresh server, and say whether B carries "
        "more traffic within the SLO than A. A side is a file for `vllm serve --config`, a results folder (its best), "
        "`defaults`, or `baseline` (what the other side's study started from). With `--vllm A --vllm B` one side, or "
        "none, is enough. Flags for every server go after `--`.",
        epilog=EXIT_CODES,
    )
    parser.set_defaults(takes_fixed=True, handler=run)
    parser.add_argument("sides", metavar="SIDE", nargs="*", help="A and B")
    add_measuring_arguments(parser, rounds=5)
    parser.add_argument(
        "--vllm",
        metavar="PATH",
        action="append",
        help="the vLLM executable (default: vllm); given twice: A's and B's",
    )
    parser.add_argument("--margin", metavar="PERCENT", help="differences below this count as the same (default: 5)")
    parser.add_argument("--out", metavar="DIR", help="folder of the comparison (default: results/compare-TIME)")
    parser.add_argument("--resume", metavar="DIR", help="go on with a comparison")


def add_measuring_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """What `compare` and `verify` have in common."""
    parser.add_argument("--model", metavar="MODEL", help="folder or hub name (default: what the side names)")
    parser.add_argument("--slo", metavar="FILE", help="the promise (default: the one of the study or lock)")
    parser.add_argument("--workloads", metavar="DIR|FILE", help="workload classes (default: those of the study)")
    parser.add_argument("--mixed", action="store_true", help="also measure all classes at once")
    parser.add_argument("--gpus", metavar="LIST", help="GPUs that one server may use (default: the first visible)")
    parser.add_argument("--rounds", metavar="N", help=f"runs of each side (default: {rounds})")
    parser.add_argument("--speed", choices=SPEED_NAMES, help="how long each probe measures")
    parser.add_argument("--seed", metavar="N", help="seed of the requests (default: one that was never used)")
    parser.add_argument("--json", action="store_true", help="the result as JSON; progress on standard error")


def run(arguments: argparse.Namespace) -> int:
    from tuner.comparison import compare, held, kept_traffic, prepare, read_comparison, require_sides
    from tuner.server import find_vllm
    from tuner.store import ResultsFolder
    from tuner.study import StopSignals

    folder = ResultsFolder(_folder(arguments))
    notes: tuple[str, ...] = ()
    if arguments.resume is not None:
        comparison = read_comparison(folder)
        require_sides(comparison, 2, folder.root, "tune compare")
        definition = comparison.definition
        traffic = kept_traffic(folder)
        installs = [find_vllm(side.vllm) for side in definition.sides]
    else:
        asked = _asked(arguments, (), folder.root.name)  # what needs no vLLM is checked first
        installs = [find_vllm(path) for path in asked.vllms]
        asked = _asked(arguments, chosen_gpus(arguments, installs[0]), folder.root.name)
        definition, traffic, notes = prepare(asked, installs)
    from tuner.cli.live import Progress

    stream = sys.stderr if arguments.json else sys.stdout
    by_path: dict[str, VllmInstall] = {install.path: install for install in installs}
    total = definition.rounds * len(definition.sides)
    with (
        Progress(stream, title=definition.name, expected_trials=total) as progress,
        StopSignals(progress.note) as signals,
        held(
            definition.name,
            folder.root,
            definition.gpus,
            installs,
            signals.stop,
            signals.abort,
            progress.event,
            progress.note,
        ) as place,
    ):
        for note in notes:
            progress.note(note)
        comparison = compare(definition, traffic, by_path, folder, place, signals, progress)
    return _report(arguments, comparison, folder.root)


def _report(arguments: argparse.Namespace, comparison: Comparison, folder: Path) -> int:
    from tuner.cli.compared import comparison_text
    from tuner.comparison import Standing

    assert comparison.result is not None
    if arguments.json:
        print(strict_json(json.loads((folder / "comparison.json").read_text())))
    else:
        print(comparison_text(comparison, str(folder)))
    standing = comparison.result.against_first[1].overall.standing
    codes = {Standing.WORSE: ExitCode.REGRESSION, Standing.UNRESOLVED: ExitCode.UNRESOLVED}
    return int(codes.get(standing, ExitCode.OK))


def _asked(arguments: argparse.Namespace, gpus: tuple[int, ...], name: str) -> Asked:
    from tuner.comparison import Asked

    vllms = tuple(arguments.vllm or ("vllm",))
    if len(vllms) > 2:
        raise refuse("--vllm", ", ".join(vllms), "is given more than twice", "Compare two at a time.")
    if len(arguments.sides) > 2:
        raise refuse("configurations", " ".join(arguments.sides), "are more than two", "Compare two at a time.")
    if len(arguments.sides) < 2 and len(vllms) < 2:
        remedy = "Name two of: a file, a results folder, `defaults`, `baseline`; or one with `--vllm A --vllm B`."
        raise refuse("configurations", " ".join(arguments.sides) or None, "need two sides to compare", remedy)
    margin = 5.0 if arguments.margin is None else positive("--margin", arguments.margin)
    if margin >= 100:
        raise refuse("--margin", arguments.margin, "must be less than 100 %", "Write for example 5.")
    return Asked(
        words=tuple(arguments.sides),
        vllms=vllms,
        model=arguments.model,
        slo=None if arguments.slo is None else existing_file("--slo", arguments.slo),
        workloads=workloads_of(arguments),
        given=tuple(arguments.fixed),
        gpus=gpus,
        rounds=whole("--rounds", arguments.rounds or "5", at_least=2, at_most=50),
        speed=arguments.speed or "normal",
        margin=margin / 100,
        mixed=arguments.mixed,
        seed=seed_of(arguments),
        name=name,
    )


def workloads_of(arguments: argparse.Namespace) -> Path | None:
    if arguments.workloads is None:
        return None
    path = Path(arguments.workloads)
    if not path.exists():
        raise refuse("--workloads", arguments.workloads, "is neither a folder nor a file", "Check the path.")
    return path


def seed_of(arguments: argparse.Namespace) -> int:
    """As given, else from the clock: requests that no earlier measurement has used."""
    if arguments.seed is None:
        return int(time.time()) % 2**31
    return whole("--seed", arguments.seed, at_least=0, at_most=2**31 - 1)


def _folder(arguments: argparse.Namespace) -> Path:
    if arguments.resume is not None:
        kept = ("model", "slo", "workloads", "gpus", "rounds", "speed", "margin", "seed", "vllm", "mixed", "out")
        refuse_kept(arguments, "comparison", kept)
        if arguments.sides or arguments.fixed:
            raise refuse("--resume", arguments.resume, "keeps its sides and flags", "Leave them out.")
        return Path(arguments.resume)
    return new_folder(arguments.out, "compare")


def refuse_kept(arguments: argparse.Namespace, kind: str, flags: Sequence[str]) -> None:
    """What --resume takes from the folder may not be said again: it would have no effect."""
    for flag in flags:
        if getattr(arguments, flag):
            raise refuse(f"--{flag}", getattr(arguments, flag), f"is kept by the {kind}", "Leave it out.")


def new_folder(out: str | None, kind: str) -> Path:
    """Where the results go; refused where something else lies already."""
    from tuner.store import usable_name
    from tuner.store.files import disk_errors

    if out is None:
        return Path("results") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = usable_name(Path(out), "--out")
    with disk_errors(folder):
        if any((folder / name).exists() for name in ("comparison.json", "study.json", "trials")):
            raise refuse("--out", out, "holds results already", "Choose another folder, or go on with --resume.")
        if folder.exists() and not folder.is_dir():
            raise EnvironmentFault(f"{folder}: is no folder. Choose another --out.")
        if folder.is_symlink() and not folder.exists():
            raise refuse("--out", out, "is a link that leads nowhere", "Create its target, or name another.")
    return folder
