"""`tune export`: the verified configuration of a study in the formats that start servers."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.cli.options import whole
from tuner.errors import ExitCode

FORMAT_NAMES = ("vllm", "shell", "json", "systemd", "compose", "kubernetes", "helm")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write the verified configuration for vLLM, systemd, Docker, Kubernetes, …",
        description="Write the verified configuration of a study, each flag with its measured effect, and a lock file "
        "that says what it was measured with. What was not verified, or was simulated, is refused.",
    )
    parser.add_argument("study", metavar="STUDY", help="folder of the study, e.g. results/NAME")
    parser.add_argument(
        "--format",
        dest="formats",
        action="append",
        choices=FORMAT_NAMES,
        help="may be repeated (default: vllm, shell and json)",
    )
    parser.add_argument("--out", metavar="DIR", help="where to write (default: the study's folder)")
    parser.add_argument("--trial", metavar="N", help="another trial than the winner; needs --force")
    parser.add_argument("--force", action="store_true", help="export what was not verified; the files say so")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    from tuner.export import AT_THE_END, export
    from tuner.store import ResultsFolder

    folder = ResultsFolder(Path(arguments.study))
    trial = None if arguments.trial is None else whole("--trial", arguments.trial, at_least=0, at_most=10**6)
    out = Path(arguments.out) if arguments.out else folder.root
    for path in export(folder, arguments.formats or AT_THE_END, out, trial=trial, forced=arguments.force):
        print(path)
    return int(ExitCode.OK)
