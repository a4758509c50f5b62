"""`tune dashboard`: optuna-dashboard on a study's storage."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sqlite3
import threading
import webbrowser
from pathlib import Path

from tuner.cli.options import refuse, whole
from tuner.errors import EnvironmentFault, ExitCode


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dashboard",
        help="open a study in optuna-dashboard",
        description="Serve optuna-dashboard for a study on this machine, until Ctrl-C. It shows Optuna's copy of the "
        "study; the trial records stay the truth.",
    )
    parser.add_argument("study", metavar="STUDY", help="folder of the study, e.g. results/NAME")
    parser.add_argument("--port", metavar="N", default="8080", help="port on 127.0.0.1 (default: 8080)")
    parser.add_argument("--open", action="store_true", help="also open a browser")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    from tuner.store import ResultsFolder

    port = whole("--port", arguments.port, at_least=1, at_most=65535)
    database = ResultsFolder(Path(arguments.study)).database
    if not database.is_file():
        raise refuse("STUDY", arguments.study, "holds no optuna.db", "Name the folder of a study that has run.")
    _check(database, arguments.study)
    if importlib.util.find_spec("optuna_dashboard") is None:
        raise EnvironmentFault("optuna-dashboard is not installed: `pip install 'vllm-tune[dashboard]'`.")
    from optuna_dashboard import run_server

    url = f"http://127.0.0.1:{port}/"
    print(f"{url}  (Ctrl-C ends it)", flush=True)
    if arguments.open:
        threading.Timer(1.0, webbrowser.open, [url]).start()
    try:
        run_server(f"sqlite:///{database.resolve()}", host="127.0.0.1", port=port)
    except OSError as error:
        raise EnvironmentFault(f"port {port} on 127.0.0.1: {error.strerror}. Name another one by --port.") from error
    return int(ExitCode.OK)


def _check(database: Path, study: str) -> None:
    """InputError for a file in which Optuna would find no study; it is only read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            (answer,) = connection.execute("PRAGMA quick_check").fetchone()
            connection.execute("SELECT 1 FROM studies, trials, version_info LIMIT 1")
    except sqlite3.Error as error:
        answer = str(error)
    if answer != "ok":
        rule = f"holds an optuna.db that is empty or damaged ({answer})"
        raise refuse("STUDY", study, rule, "`tune run --resume STUDY` makes it anew from the trial records.")
