"""Simulated finishes: how often the verdict is wrong, and whether the stated interval holds the truth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.search.engine import Engine, Trials
from benchmarks.search.table import World
from tuner.capacity import FINISH
from tuner.finish import (
    FULL_ROUNDS,
    MOST_ROUNDS,
    Conclusion,
    Contender,
    Decision,
    Look,
    Measured,
    judge,
    plan_looks,
    plan_rounds,
    worth_more,
)
from tuner.records import Config, TrialState
from tuner.sim.scenario import Scenario

BANDS = ((-1.0, 0.005), (0.08, 0.15), (0.15, 10.0))
"""True gains of the best finalist: none, 8-15 %, more."""
BASELINE = 0
LOOKS = plan_looks(FULL_ROUNDS, MOST_ROUNDS)


@dataclass(frozen=True, slots=True)
class Finished:
    """One simulated finish."""

    scenario: str
    true_gain: float  # of the best finalist over the baseline
    decision: Decision
    stated: float | None  # gain of the named winner, or of the best finalist where none won
    covered: bool  # its interval holds its truth
    rounds: int


def finish(engine: Engine, contenders: Sequence[Contender], seed: int, looks: Sequence[Look] = LOOKS) -> Conclusion:
    """Measure baseline and contenders as a study's finish does, look after look, and judge."""
    configs: dict[int, Config] = {BASELINE: {}, **{c.number: c.config for c in contenders}}
    start = {load.name: load.start_rps for load in engine.scenario.loads}
    weights = {name: promise.weight for name, promise in engine.scenario.slo.classes.items()}
    plan = plan_rounds(list(configs), looks[-1].rounds, seed)
    measured: list[Measured] = []
    for look in looks:
        for position, run in enumerate(plan[: look.rounds * len(configs)]):
            if position < len(measured):
                continue
            trials = Trials(engine, run.seed, FINISH)
            trial = trials.measure(configs[run.number], seed * 7919 + position, start)
            ran = trial.state is TrialState.COMPLETE
            measured.append(Measured(run.number, run.round, trial.rates, {}, ran))
            if run.number == BASELINE and ran:
                start = dict(trial.rates)
        verdict = judge(measured, BASELINE, weights, confidence=look.confidence)
        best = 0.0 if verdict.gain is None else verdict.gain.value
        if verdict.decision is Decision.IMPROVED or not worth_more(best, verdict.log_sd, len(contenders), looks[-1]):
            break
    return verdict


def examine(engine: Engine, world: World, count: int, band: tuple[float, float], seed: int) -> list[Finished]:
    """`count` finishes of two finalists whose better one truly gains as much as `band` says; fewer where none does."""
    draw = random.Random(f"{engine.scenario.name}/{band}/{seed}")
    pool = _pool(engine.scenario, world, band)
    found: list[Finished] = []
    for number in range(count if pool else 0):
        first = draw.choice(pool)
        second = draw.choice(_near(pool, world, first))
        contenders = [Contender(1, first)] if second == first else [Contender(1, first), Contender(2, second)]
        verdict = finish(engine, contenders, seed * 100_000 + number)
        gains = {c.number: world.objective(c.config) for c in contenders}
        named = verdict.winner if verdict.winner in gains else max(verdict.gains, key=lambda n: verdict.gains[n].value)
        stated = verdict.gains[named]
        covered = stated.low <= gains[named] <= stated.high
        best = max(gains.values()) - 1
        found.append(Finished(engine.scenario.name, best, verdict.decision, stated.value - 1, covered, verdict.rounds))
    return found


def _pool(scenario: Scenario, world: World, band: tuple[float, float]) -> list[Config]:
    low, high = band
    floor = max(low, -0.05)  # nobody re-measures what is clearly worse
    values = [(config, world.objective(config) - 1) for config in scenario.feasible() if config]
    return [config for config, gain in values if floor <= gain <= high]


def _near(pool: Sequence[Config], world: World, config: Config) -> list[Config]:
    """What a search could not tell from it."""
    best = world.objective(config)
    return [other for other in pool if 0.97 * best <= world.objective(other) <= best]
