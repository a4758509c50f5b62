"""`python -m benchmarks.search`: run the comparison, print the tables, write docs/bench-search.md."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import optuna

from benchmarks.search.engine import Engine, Events
from benchmarks.search.finish import BANDS, Finished, examine
from benchmarks.search.kept import Kept
from benchmarks.search.study import SEARCHERS, Result, run
from benchmarks.search.table import Table, World, stored_noise
from benchmarks.search.tables import by_noise, by_scenario, summary, targets, verdicts
from tuner.sim.held_out import HELD_OUT
from tuner.sim.scenario import Scenario
from tuner.sim.scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bench-search.md"
MARK = "<!-- tables -->"
CACHE = ROOT / ".cache" / "bench-search"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="searches a scenario (default 20)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scenarios", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--searchers", default=",".join(SEARCHERS))
    parser.add_argument("--finishes", type=int, default=600, help="simulated finishes over all scenarios")
    parser.add_argument("--engine", choices=("table", "events"), default="table")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="stop after so long; run again to go on")
    parser.add_argument("--quick", action="store_true", help="3 seeds, 60 finishes, nothing written")
    options = parser.parse_args(argv)
    if options.quick:
        options.seeds, options.finishes = 3, 60
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    logging.getLogger("tuner").setLevel(logging.ERROR)
    begun, parts = time.monotonic(), []
    options.until = begun + options.limit_s
    wanted = set(filter(None, options.scenarios.split(",")))
    for title, scenarios in (("Scenarios of the design", SCENARIOS), ("Scenarios held out", HELD_OUT)):
        chosen = [scenario for scenario in scenarios if not wanted or scenario.name in wanted]
        if chosen:
            parts.append(compare(title, chosen, options))
            print(f"{parts[-1]}\n", flush=True)
    print(f"{(time.monotonic() - begun) / 60:.0f} minutes")
    if not options.quick and not wanted and options.engine == "table":
        head = PAGE.read_text(encoding="utf-8").partition(MARK)[0] if PAGE.exists() else ""
        PAGE.write_text(f"{head}{MARK}\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")


def compare(title: str, scenarios: Sequence[Scenario], options: argparse.Namespace) -> str:
    """Every searcher on every scenario, and the finishes, as Markdown."""
    names = options.searchers.split(",")
    kept = Kept(CACHE, options.engine)
    results: list[Result] = []
    finished: list[Finished] = []
    for scenario in scenarios:
        engine, world = prepared(scenario, options.engine)
        for name in names:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                results.append(kept.result(scenario, name, seed, partial(run, engine, name, seed, world)))
                _stop_at(options.until)
            print(scenario.name, name, f"{sum(r.minutes for r in results[-options.seeds :]) / options.seeds:.0f} min")
        for band in BANDS:
            count = options.finishes // (len(BANDS) * len(scenarios))
            compute = partial(examine, engine, world, count, band, 1)
            finished += kept.finishes(scenario, f"{band}/{count}", compute)
            _stop_at(options.until)
    tables = [
        f"## {title}",
        f"{len(scenarios)} scenarios, {options.seeds} searches each, engine: {options.engine}.",
        summary(results, names),
        "Minutes in the mean (share that reached 97 %; final regret):",
        by_scenario(results, names),
    ]
    if "ours" in names:
        tables.append(targets(results, "ours", names))
    if finished:
        tables += [
            "Verdicts over simulated finishes (two finalists, five rounds, ten where a gain stays open):",
            verdicts(finished),
            by_noise(finished),
        ]
    return "\n\n".join(tables)


def _stop_at(until: float) -> None:
    """Exit with 3 when the time is over; what was finished is kept."""
    if time.monotonic() > until:
        sys.exit(3)


def prepared(scenario: Scenario, kind: str) -> tuple[Engine, World]:
    """Engine and truth of a scenario."""
    world = World(scenario, CACHE)
    return (Events(scenario) if kind == "events" else Table(scenario, world, stored_noise(world, CACHE), CACHE)), world


if __name__ == "__main__":
    main()
