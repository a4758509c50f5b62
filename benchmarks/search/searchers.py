"""The searchers that are compared: ours and what people use instead; they see measurements only, never the truth."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Protocol

import optuna

from benchmarks.search.engine import Engine, Trial, record_of
from benchmarks.search.finish import finish
from tuner.finish import Contender, Decision, changed_flags, choose_finalists
from tuner.optimizer import Advice, Optimizer, Settings
from tuner.records import (
    Capacity,
    Config,
    KnobValue,
    Proposal,
    Step,
    StepKind,
    TrialState,
    Verdict,
)
from tuner.sim.memory import starts
from tuner.sim.scenario import Scenario
from tuner.space import STAGES, Kind, Knob, Scale, Space, load_space, make_space

Values = Mapping[str, tuple[KnobValue, ...]]


class Searcher(Protocol):
    """One search over one scenario."""

    @property
    def screens(self) -> bool:
        """Whether a candidate is screened before it is measured."""

    @property
    def screen_below(self) -> float:
        """Predicted relative change below which it is dropped."""

    def ask(self) -> Config | None:
        """The next configuration; None when it has nothing left to try."""

    def tell(self, config: Config, trial: Trial, value: float | None) -> None:
        """Its outcome; `value` is relative to the baseline, a prediction where screened, None where it did not run."""

    def best(self) -> Config:
        """What it would recommend now."""

    def reference(self) -> Mapping[str, Capacity] | None:
        """Capacities of what it would recommend now."""

    def advise(self, engine: Engine) -> None:
        """Ask for the diagnosis of what was measured; most do not."""

    def verdict(self, engine: Engine, seed: int) -> Decision:
        """What it says in the end: improved or not."""


class _Remembering:
    """Recommends the best measured value."""

    screens = False
    screen_below = -0.03

    def __init__(self) -> None:
        self._best: tuple[float, Config, Mapping[str, Capacity]] = (-math.inf, {}, {})

    def tell(self, config: Config, trial: Trial, value: float | None) -> None:
        if trial.state is TrialState.COMPLETE and value is not None and value > self._best[0]:
            self._best = (value, config, trial.capacities)

    def best(self) -> Config:
        return self._best[1]

    def advise(self, engine: Engine) -> None:
        """Takes no advice."""

    def verdict(self, engine: Engine, seed: int) -> Decision:
        """Nobody measures again: whatever looked better than the baseline is an improvement."""
        return Decision.IMPROVED if self._best[0] > 1 else Decision.KEEP_DEFAULTS

    def reference(self) -> Mapping[str, Capacity] | None:
        return self._best[2] if self.screens and self._best[2] else None


class Listed(_Remembering):
    """A list of configurations, one after the other: random search and grids."""

    def __init__(self, configs: Iterator[Config]) -> None:
        super().__init__()
        self._configs = configs

    def ask(self) -> Config | None:
        return next(self._configs, None)


def random_search(scenario: Scenario, seed: int) -> Listed:
    """The baseline, then every other configuration once in random order."""
    configs = scenario.configs()[1:]
    random.Random(seed).shuffle(configs)
    return Listed(iter([{}, *configs]))


def coarse_grid(scenario: Scenario, seed: int) -> Listed:
    """The baseline, then the product of at most three values a knob, as a sweep over parameter files would run it.

    Three values spread evenly over each list. In random order: the order of a file would be luck that no average shows.
    """
    defaults = scenario.defaults()
    thin = {}
    for name, values in scenario.knobs.items():
        places = sorted({round(i * (len(values) - 1) / 2) for i in range(3)})
        thin[name] = [values[i] for i in places]
    chosen = [dict(zip(thin, values, strict=True)) for values in itertools.product(*thin.values())]
    configs = [{n: v for n, v in config.items() if v != defaults[n]} for config in chosen]
    random.Random(seed).shuffle(configs)
    return Listed(iter([{}, *(config for config in configs if config)]))


class Coordinate(_Remembering):
    """One knob after the other in stage order, neighbour by neighbour while that is better, every trial in full."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__()
        self._defaults = scenario.defaults()
        self._knobs = {knob.name: knob.values for knob in space_of(scenario).knobs}
        self._random = random.Random(seed)
        self._seen: set[tuple[tuple[str, KnobValue], ...]] = set()
        self._steps = self._walk()

    def ask(self) -> Config | None:
        return next(self._steps, None)

    def _walk(self) -> Iterator[Config]:
        yield {}
        improved = True
        while improved:
            before = self._best[0]
            for name, values in self._knobs.items():
                for direction in self._random.sample((1, -1), 2):
                    while True:
                        full = {**self._defaults, **self._best[1]}
                        place = values.index(full[name]) + direction
                        if not 0 <= place < len(values):
                            break
                        full[name] = values[place]
                        config = {n: v for n, v in full.items() if v != self._defaults[n]}
                        key = tuple(sorted(config.items()))
                        value = self._best[0]
                        if key in self._seen:
                            break
                        self._seen.add(key)
                        yield config
                        if self._best[0] <= value:
                            break
            improved = self._best[0] > before


class Tpe(_Remembering):
    """Optuna's TPE as it comes, with crashes told as violated constraints; ordered values as indices."""

    def __init__(self, scenario: Scenario, seed: int, *, screens: bool = False) -> None:
        super().__init__()
        self.screens = screens
        self._scenario, self._defaults = scenario, scenario.defaults()
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values)
            if any(isinstance(value, str) for value in values)
            else optuna.distributions.IntDistribution(0, len(values) - 1)
            for name, values in scenario.knobs.items()
        }
        self._study.enqueue_trial(
            {
                name: self._defaults[name]
                if any(isinstance(v, str) for v in values)
                else values.index(self._defaults[name])
                for name, values in scenario.knobs.items()
            }
        )
        self._trial: optuna.Trial | None = None

    def ask(self) -> Config | None:
        self._trial = self._study.ask(self._distributions)
        config = {}
        for name, values in self._scenario.knobs.items():
            given = self._trial.params[name]
            value = given if isinstance(given, str) else values[given]
            if value != self._defaults[name]:
                config[name] = value
        return config

    def tell(self, config: Config, trial: Trial, value: float | None) -> None:
        super().tell(config, trial, value)
        assert self._trial is not None
        if trial.state is TrialState.COMPLETE:
            self._trial.set_constraint("starts", 0.0)
            self._study.tell(self._trial, value)
            return
        failed = trial.state is TrialState.INFEASIBLE
        violation = trial.failure.violation if trial.failure is not None else 1.0
        self._trial.set_constraint("starts", violation if failed else 0.0)
        if not failed and value is not None:
            self._trial.report(value, 0)
        self._study.tell(self._trial, state=optuna.trial.TrialState.PRUNED)


class Ours:
    """The tuner's own search: `tuner.optimizer`, told as the study loop tells it."""

    def __init__(self, scenario: Scenario, seed: int, settings: Settings | None = None) -> None:
        self._scenario = scenario

        def admissible(config: Config) -> bool:
            failure = starts(scenario.profile, config)
            return failure is None or failure.verdict is not Verdict.STATIC

        self._optimizer = Optimizer(
            space_of(scenario),
            name=scenario.name,
            seed=seed,
            devices=scenario.profile.machine.devices,
            admissible=admissible,
            settings=settings,
        )
        self._proposal: Proposal | None = None
        self._capacities: dict[int, Mapping[str, Capacity]] = {}
        self._configs: dict[int, Config] = {}
        self._advice: dict[int, Advice] = {}
        self.steps: list[tuple[Step, TrialState, float | None]] = []

    def ask(self) -> Config | None:
        self._proposal = self._optimizer.ask()
        return None if self._proposal is None else self._proposal.config

    def tell(self, config: Config, trial: Trial, value: float | None) -> None:
        proposal = self._proposal
        assert proposal is not None
        record = record_of(proposal, trial)
        self._optimizer.tell(record, value, {})
        self._capacities[proposal.number], self._configs[proposal.number] = trial.capacities, config
        self.steps.append((proposal.step, trial.state, value))

    @property
    def screens(self) -> bool:
        """A second look is taken in full."""
        return self._proposal is None or self._proposal.step.kind is not StepKind.CONFIRM

    @property
    def screen_below(self) -> float:
        return self._optimizer.screen_below

    def advise(self, engine: Engine) -> None:
        best = self._optimizer.incumbent
        if best is None:
            return
        for number, capacities in self._capacities.items():
            # Others are not asked for, and asking is slow here.
            near = len(changed_flags(self._configs[number], self._configs[best])) <= 1
            if capacities and near and number not in self._advice:
                self._advice[number] = engine.advice(self._configs[number], capacities)
        self._optimizer.advise(self._advice[best], self._advice)

    def verdict(self, engine: Engine, seed: int) -> Decision:
        """Finalists and baseline measured again, as a study does."""
        measured = [
            Contender(number, self._configs[number], value)
            for number in self._configs
            if self._configs[number] and (value := self._optimizer.expected(number)) is not None
        ]
        chosen = choose_finalists(measured, self._optimizer.incumbent, self._optimizer.noise)
        return finish(engine, chosen, seed).decision if chosen else Decision.KEEP_DEFAULTS

    def best(self) -> Config:
        number = self._optimizer.incumbent
        return {} if number is None else self._configs[number]

    def reference(self) -> Mapping[str, Capacity] | None:
        number = self._optimizer.incumbent
        return None if number is None else self._capacities[number]


def space_of(scenario: Scenario) -> Space:
    """The scenario's grid as a search space; stages as the shipped space has them."""
    stages = {knob.name: knob.stage for knob in load_space("default").knobs}
    knobs = []
    for name, values in scenario.knobs.items():
        words = any(isinstance(value, str) for value in values)
        kind = Kind.CHOICE if words else Kind.BOOL if isinstance(values[0], bool) else Kind.FLOAT
        scale = Scale.LIST if words else Scale.ORDERED
        ordered = values if words else tuple(sorted(values, key=float))
        knobs.append(Knob(name, kind, ordered, scale, stages.get(name, STAGES.index("scheduling"))))
    return make_space(scenario.name, knobs)
