"""One search of one scenario on a budget of simulated minutes, judged by the truth that it never saw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.search.engine import Engine, Trials
from benchmarks.search.searchers import Coordinate, Ours, Searcher, Tpe, coarse_grid, random_search
from benchmarks.search.table import World
from tuner.finish import Decision
from tuner.records import Config, TrialState
from tuner.sim.scenario import Scenario

BUDGET_MIN = 360.0
GOAL = 0.97

SEARCHERS: dict[str, Callable[[Scenario, int], Searcher]] = {
    "ours": Ours,
    "TPE + screening": lambda scenario, seed: Tpe(scenario, seed, screens=True),
    "TPE": Tpe,
    "random": random_search,
    "coarse grid": coarse_grid,
    "coordinate": Coordinate,
}


@dataclass(slots=True)
class Result:
    """How one search went."""

    scenario: str
    searcher: str
    seed: int
    minutes: float = BUDGET_MIN  # to the goal; the whole budget where it was missed
    reached: bool = False
    regret: float = 1.0  # 1 − truth of the final recommendation ÷ optimum
    trials: int = 0
    crashes: int = 0
    screened: int = 0
    gain: float = 1.0  # truth of the final recommendation over the baseline
    value: float = 1.0  # what the search believed it to be
    optimum: float = 1.0
    verdict: Decision = Decision.KEEP_DEFAULTS
    config: dict[str, object] = field(default_factory=dict)


def run(
    engine: Engine,
    name: str,
    seed: int,
    world: World,
    *,
    watch: Callable[[float, Config, TrialState, float | None, float, Searcher], None] | None = None,
) -> Result:
    """Search until the budget is spent. `watch` is shown every trial, with the truth of what is recommended then."""
    scenario = engine.scenario
    trials = Trials(engine, seed)
    searcher = SEARCHERS[name](scenario, seed)
    start = {load.name: load.start_rps for load in scenario.loads}
    baseline: dict[str, float] = {}
    values: dict[tuple[tuple[str, object], ...], float] = {}
    result = Result(scenario.name, name, seed)
    spent = 0.0
    while spent < BUDGET_MIN and (config := searcher.ask()) is not None:
        reference = searcher.reference() if searcher.screens else None
        trial = trials.measure(config, seed * 100_003 + result.trials, start, reference, searcher.screen_below)
        spent += trial.minutes
        result.trials += 1
        result.crashes += trial.state is TrialState.INFEASIBLE
        result.screened += trial.state is TrialState.SCREENED
        if not baseline and trial.state is TrialState.COMPLETE:
            start = baseline = dict(trial.rates)
        value = trials.relative(trial.rates, baseline) if trial.rates and baseline else None
        searcher.tell(config, trial, value)
        if value is not None and trial.state is TrialState.COMPLETE:
            values[_key(config)] = value
        searcher.advise(engine)
        true = world.objective(searcher.best()) if baseline else 0.0
        if watch is not None:
            watch(spent, config, trial.state, value, true / world.optimum, searcher)
        if not result.reached and spent <= BUDGET_MIN and true >= GOAL * world.optimum:
            result.reached, result.minutes = True, spent
    best = searcher.best()
    result.gain = world.objective(best) if baseline else 0.0
    result.value = values.get(_key(best), math.nan)
    result.regret = max(0.0, 1 - result.gain / world.optimum)
    result.optimum, result.config = world.optimum, dict(best)
    result.verdict = searcher.verdict(engine, seed)
    return result


def _key(config: Config) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(config.items()))
