"""`tune nightly`: one night of a profile, for cron, systemd, CI, Kubernetes and Slurm."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.options import existing_file, refuse
from tuner.documents import strict_json
from tuner.errors import ExitCode

if TYPE_CHECKING:
    from tuner.nightly import Outcome, Profile
    from tuner.server import VllmInstall


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "nightly",
        help="verify the incumbent, watch for regressions, search on where better is likely",
        description="One night of a profile (docs/nightly.md): incumbent and defaults in interleaved rounds on fresh "
        "servers, held against the nights before; a search where better is likely; a new incumbent only with proof. "
        "A night that was killed is taken up again by the next call.",
        epilog="exit codes: 0 nothing to do, 2 bad input, 3 environment, 5 a loss that stands, 130 interrupted",
    )
    parser.set_defaults(handler=run)
    parser.add_argument("--profile", metavar="FILE", required=True, help="what every night does")
    parser.add_argument(
        "--vllm",
        metavar="PATH",
        action="append",
        help="the vLLM executable (default: the profile's); given twice: the second one is compared with the first",
    )
    parser.add_argument("--accept", action="store_true", help="take tonight's level as the new reference")
    parser.add_argument("--no-search", action="store_true", help="measure and judge only")
    parser.add_argument("--junit", metavar="FILE", help="also write the JUnit XML there")
    parser.add_argument("--markdown", metavar="FILE", help="also write the summary there")
    parser.add_argument("--json", action="store_true", help="the night as JSON; progress on standard error")


def run(arguments: argparse.Namespace) -> int:
    from tuner.cli.live import Progress
    from tuner.comparison import held
    from tuner.nightly import Nightly, check_variables, exit_state, load_profile, ready
    from tuner.server import find_vllm
    from tuner.study import StopSignals

    profile = load_profile(existing_file("--profile", arguments.profile))
    check_variables(profile, dict(os.environ))
    vllms = tuple(arguments.vllm or (profile.vllm,))
    if len(vllms) > 2:
        raise refuse("--vllm", ", ".join(vllms), "is given more than twice", "Compare two at a time.")
    installs = [find_vllm(path) for path in vllms]
    inputs = ready(profile, installs, _gpus(profile, installs[0]))
    logging.getLogger("optuna").setLevel(logging.WARNING)  # its lines would break through the live view
    stream = sys.stderr if arguments.json else sys.stdout
    with (
        Progress(stream, title=profile.name, expected_trials=None) as progress,
        StopSignals(progress.note) as signals,
        held(
            profile.name,
            profile.results,
            inputs.gpus,
            installs,
            signals.stop,
            signals.abort,
            progress.event,
            progress.note,
        ) as place,
    ):
        night = Nightly(inputs, place, signals, progress, accept=arguments.accept, searching=not arguments.no_search)
        outcome = night.run()
    _report(arguments, outcome)
    return int(ExitCode.REGRESSION if exit_state(outcome.night) else ExitCode.OK)


def _report(arguments: argparse.Namespace, outcome: Outcome) -> None:
    from tuner.store import write_atomic

    summary = (outcome.folder / "summary.md").read_text()
    if arguments.markdown:
        write_atomic(Path(arguments.markdown), summary)
    if arguments.junit:
        write_atomic(Path(arguments.junit), (outcome.folder / "junit.xml").read_text())
    for told in outcome.told:
        if told.problem:
            print(f"tune: hook {told.hook} {told.problem}", file=sys.stderr)
    if arguments.json:
        print(strict_json(json.loads((outcome.folder / "night.json").read_text())))
    else:
        print(f"\n{summary}\nresults: {outcome.folder}")


def _gpus(profile: Profile, install: VllmInstall) -> tuple[int, ...]:
    """As the profile says, else the first visible one."""
    from tuner.cli.asked import chosen_gpus

    named = None if profile.gpus is None else ",".join(map(str, profile.gpus))
    return chosen_gpus(argparse.Namespace(gpus=named or None), install)
