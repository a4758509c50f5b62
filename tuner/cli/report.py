"""`tune report`: what a study found, as a page, as text or as data."""

from __future__ import annotations

import argparse
from pathlib import Path

from tuner.errors import ExitCode, HarnessError

FORMAT_NAMES = ("html", "md", "json", "csv", "parquet")


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write the report of a study",
        description="Write the report of a study, finished or running: one HTML file that opens offline, the same as "
        "Markdown or JSON, or its tables (trials, probes, requests) as CSV or Parquet.",
    )
    parser.add_argument("study", metavar="STUDY", help="folder of the study, e.g. results/NAME")
    parser.add_argument("--format", choices=FORMAT_NAMES, default="html", help="default: html")
    parser.add_argument("--out", metavar="PATH", help="file (tables: folder) to write; default: in the study's folder")
    parser.add_argument(
        "--check", action="store_true", help="first score every probe again from its raw requests and compare"
    )
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    from tuner.report import check, load, write
    from tuner.store import ResultsFolder

    folder = ResultsFolder(Path(arguments.study))
    report = load(folder)
    if arguments.check:
        result = check(folder)
        print(f"{result.compared} probes scored again; {result.without_requests} have no raw requests here")
        if result.differences:
            raise HarnessError("stored scores differ from the raw requests:\n" + "\n".join(result.differences[:20]))
    for path in write(report, folder, arguments.format, Path(arguments.out) if arguments.out else None):
        print(path)
    return int(ExitCode.OK)
