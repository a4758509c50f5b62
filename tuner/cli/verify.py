"""`tune verify best.yaml`: does an exported configuration still hold on this machine?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.asked import chosen_gpus
from tuner.cli.compare import add_measuring_arguments, new_folder, refuse_kept, seed_of, workloads_of
from tuner.cli.options import existing_file, positive, refuse, whole
from tuner.documents import strict_json
from tuner.errors import ExitCode

if TYPE_CHECKING:
    from tuner.comparison import Asked, Verification


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="does an exported configuration still hold?",
        description="Read an exported configuration and the lock beside it, name what has changed since, measure it "
        "again on fresh servers, and say whether it still carries what was recorded within the SLO.",
        epilog="exit codes: 0 holds, 2 bad input, 3 environment, 5 holds not, 7 unresolved, 130 interrupted",
    )
    parser.set_defaults(takes_fixed=True, handler=run)
    parser.add_argument("configuration", metavar="FILE", help="an exported best.yaml; best.lock.json lies beside it")
    add_measuring_arguments(parser, rounds=3)
    parser.add_argument("--vllm", metavar="PATH", help="the vLLM executable (default: vllm)")
    parser.add_argument(
        "--tolerance", metavar="PERCENT", help="loss of capacity that still counts as holding (default: 10)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the results (default: results/verify-TIME)")
    parser.add_argument("--resume", metavar="DIR", help="go on with a verification of the same file that was stopped")


def run(arguments: argparse.Namespace) -> int:
    from tuner.comparison import held, prepare_verification, read_comparison, require_sides, resume_verification, verify
    from tuner.server import find_vllm, telling_environment
    from tuner.store import ResultsFolder
    from tuner.study import StopSignals

    existing_file("configuration", arguments.configuration)
    tolerance = 0.10 if arguments.tolerance is None else positive("--tolerance", arguments.tolerance) / 100
    if tolerance >= 1:
        raise refuse("--tolerance", arguments.tolerance, "must be less than 100 %", "Write for example 10.")
    folder = ResultsFolder(_folder(arguments))
    asked = _asked(arguments, (), folder.root.name)  # what needs no vLLM is checked first
    if arguments.resume is not None:
        comparison = read_comparison(folder)
        require_sides(comparison, 1, folder.root, "tune verify")
        install = find_vllm(comparison.definition.sides[0].vllm)
        definition, traffic, lock = resume_verification(asked, install, folder)
    else:
        install = find_vllm(arguments.vllm or "vllm")
        asked = _asked(arguments, chosen_gpus(arguments, install), folder.root.name)
        definition, traffic, lock = prepare_verification(asked, install)
    from tuner.cli.live import Progress

    stream = sys.stderr if arguments.json else sys.stdout
    with (
        Progress(stream, title=definition.name, expected_trials=definition.rounds) as progress,
        StopSignals(progress.note) as signals,
        held(
            definition.name,
            folder.root,
            definition.gpus,
            [install],
            signals.stop,
            signals.abort,
            progress.event,
            progress.note,
        ) as place,
    ):
        variables = telling_environment(os.environ)
        verification = verify(
            definition, traffic, lock, install, folder, place, variables, signals, progress, tolerance=tolerance
        )
    return _report(arguments, verification, folder.root)


def _folder(arguments: argparse.Namespace) -> Path:
    if arguments.resume is None:
        return new_folder(arguments.out, "verify")
    # The model and the words after `--` are said again: with the file they tell what is verified.
    refuse_kept(
        arguments, "verification", ("slo", "workloads", "gpus", "rounds", "speed", "seed", "vllm", "mixed", "out")
    )
    return Path(arguments.resume)


def _asked(arguments: argparse.Namespace, gpus: tuple[int, ...], name: str) -> Asked:
    from tuner.comparison import Asked, lock_of

    lock = lock_of(Path(arguments.configuration))
    return Asked(
        words=(arguments.configuration,),
        vllms=(arguments.vllm or "vllm",),
        model=arguments.model,
        slo=None if arguments.slo is None else existing_file("--slo", arguments.slo),
        workloads=workloads_of(arguments),
        given=tuple(arguments.fixed),
        gpus=gpus,
        rounds=whole("--rounds", arguments.rounds or "3", at_least=2, at_most=50),
        speed=arguments.speed or ("normal" if lock is None else lock.speed),
        mixed=arguments.mixed,
        seed=seed_of(arguments),
        name=name,
    )


def _report(arguments: argparse.Namespace, verification: Verification, folder: Path) -> int:
    from tuner.cli.compared import verification_text
    from tuner.comparison import VERIFIED_FILE, Held

    if arguments.json:
        print(strict_json(json.loads((folder / VERIFIED_FILE).read_text())))
    else:
        print(verification_text(verification, str(folder)))
    codes = {Held.HOLDS: ExitCode.OK, Held.HOLDS_NOT: ExitCode.REGRESSION, Held.UNRESOLVED: ExitCode.UNRESOLVED}
    return int(codes[verification.verified.held])
