"""`tune watch`: a live view of a running or finished study, from its files."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.options import positive, refuse
from tuner.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tuner.report.model import TrialRow
    from tuner.report.watch import View, Watcher

TRIALS_SHOWN = 12


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "watch",
        help="look on while a study runs",
        description="Show what a study is doing, from its files: in another shell, over SSH, or after it has ended. "
        "Where the output is no terminal, one line is printed for each trial that ends.",
    )
    parser.add_argument("study", metavar="STUDY", help="folder of the study, e.g. results/NAME")
    parser.add_argument("--interval", metavar="S", default="1", help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look once and end")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from tuner.report.watch import Watcher
    from tuner.store import ResultsFolder

    interval_s = positive("--interval", arguments.interval)
    if interval_s > 3600:
        raise refuse("--interval", arguments.interval, "is more than an hour", "Give less.")
    watcher = Watcher(ResultsFolder(Path(arguments.study)))
    console = Console(highlight=False, soft_wrap=False)
    if arguments.once or ended(watcher.look()):
        console.print(shown(watcher.look()))
    elif console.is_terminal:
        _live(watcher, console, interval_s)
    else:
        _lines(watcher, interval_s)
    return int(ExitCode.OK)


def ended(view: View) -> bool:
    """Whether nothing more will come: there is a verdict, or nobody is working on one."""
    return bool(view.report.decision) or view.alive is False


def _live(watcher: Watcher, console: Console, interval_s: float) -> None:
    from rich.live import Live

    with Live(shown(watcher.look()), console=console, auto_refresh=False) as live:
        while True:
            view = watcher.look()
            live.update(shown(view), refresh=True)
            if ended(view):
                return
            time.sleep(interval_s)


def _lines(watcher: Watcher, interval_s: float) -> None:
    printed = 0
    while True:
        view = watcher.look()
        for row in view.report.trials[printed:]:
            print(line(row), flush=True)
        printed = len(view.report.trials)
        if ended(view):
            print(view.report.headline, flush=True)
            return
        time.sleep(interval_s)


def line(row: TrialRow) -> str:
    """One ended trial on one line."""
    from tuner.cli.live import seconds
    from tuner.failures import plain
    from tuner.report.words import ratio

    told = plain(row.failure) or (f"{ratio(row.objective)} the baseline" if row.objective else row.state)
    name = f"trial {row.ref.number}.{row.ref.replicate}"
    return f"{name}  {row.change}  {row.state}: {told}  [{seconds(row.duration_s)}]"


def shown(view: View) -> RenderableType:
    """The view as it stands on a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tuner.cli.live import seconds
    from tuner.failures import plain
    from tuner.report.words import ratio

    report = view.report
    budget = report.definition.budget.trials
    searched = len({row.ref.number for row in report.trials if row.round is None})
    head = f"{report.definition.name} · {report.definition.model} · {report.status} · "
    head += f"{searched}{f' of {budget}' if budget else ''} configurations, {seconds(report.wall_s)} of trials"
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("trial", no_wrap=True, min_width=5)
    table.add_column("step", overflow="ellipsis", no_wrap=True, ratio=3)
    table.add_column("outcome", overflow="ellipsis", no_wrap=True, min_width=10, ratio=1)
    table.add_column("÷ baseline (95 %)", justify="right", no_wrap=True, min_width=17)
    table.add_column("time", justify="right", no_wrap=True, min_width=6)
    hidden = len(report.trials) - TRIALS_SHOWN
    for row in report.trials[-TRIALS_SHOWN:]:
        best = row.ref.number == report.winner
        outcome = plain(row.failure) or row.state
        name = f"{row.ref.number}.{row.ref.replicate}"
        style = "green" if best else "red" if row.failure else ""
        # Text, not markup: what a log says may look like markup.
        cells = (name, row.change, outcome, ratio(row.objective), seconds(row.duration_s))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    parts: list[RenderableType] = [Text(head, style="bold"), Text(report.headline, style="green bold"), Text()]
    parts += [Text(f"… {hidden} earlier", style="dim")] if hidden > 0 else []
    return Group(*parts, table, Text(), *_now(view))


def _now(view: View) -> list[RenderableType]:
    from rich.text import Text

    from tuner.cli.live import seconds

    current = view.current
    if view.report.decision:
        return []
    if view.alive is False:
        return [Text("Nobody is working on it. Go on with: tune run --resume STUDY", style="yellow")]
    if current is None:
        return [Text("between two trials")]
    done = f"{len(current.probes)} probes" + (f", last {current.probes[-1]}" if current.probes else "")
    lines = [f"now: trial {current.number}.{current.replicate} for {seconds(current.since_s)} · {done}"]
    lines += [f"log: {current.log_line}"] if current.log_line else []
    return [Text(text, no_wrap=True, overflow="ellipsis") for text in lines]
