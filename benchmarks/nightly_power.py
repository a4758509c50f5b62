"""How often quiet nights raise a false alarm, and how soon a real loss is found: `python -m benchmarks.nightly_power`.

Nights are drawn from a statistical model: log(capacity) of a run = level + night + start + start within a class, all
normal. The judging is the real one of `tuner.nightly`, confirmation rounds and change points included.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.nightly.judge import Judged, Tonight, judge_confirmed
from tuner.nightly.profile import Regression
from tuner.nightly.record import Night, SideRuns, State
from tuner.records import EnvironmentFacts
from tuner.stats import wilson

FACTS = EnvironmentFacts("0.32.0", "3.12", "Linux", "cpu", 8, 2**34, ("GPU",), "580", "13", "host", "kind", "machine")


@dataclass(frozen=True)
class World:
    """Standard deviations of logarithms."""

    run_sd: float = 0.03  # of one start, all classes alike
    class_sd: float = 0.02  # of one start, each class by itself
    night_sd: float = 0.01  # of a night, incumbent and defaults alike
    classes: int = 4
    rounds: int = 3


@dataclass
class Nights:
    """A sequence of nights, each judged against those before it."""

    world: World
    seed: int
    rules: Regression

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self.history: list[Night] = []
        self.confirmed = 0
        self._names = [f"class{number}" for number in range(self.world.classes)]
        self._weights = dict.fromkeys(self._names, 1 / self.world.classes)

    def night(self, factor: float = 1.0, defaults: float = 0.8, one_class: float = 1.0) -> Judged:
        """One night whose incumbent carries `factor`, and the first class `one_class` of that."""
        shared, world = self._draw.gauss(0, self.world.night_sd), self.world

        def side(level: float, first: float) -> list[dict[str, float]]:
            found = []
            for _ in range(world.rounds):
                start = shared + self._draw.gauss(0, world.run_sd)
                values = {n: level * math.exp(start + self._draw.gauss(0, world.class_sd)) for n in self._names}
                values[self._names[0]] *= first
                found.append(values)
            return found

        def tonight() -> Tonight:
            runs, control = side(factor, one_class), side(defaults, 1.0)
            return Tonight(len(self.history) + 1, "s", {}, self._weights, runs, "", control)

        def more() -> Tonight:
            self.confirmed += 1
            return tonight()

        whole, judged = judge_confirmed(self.history, tonight(), more, (), self.rules)
        self.history.append(_record(whole, judged))
        return judged


def _record(whole: Tonight, judged: Judged) -> Night:
    sides = (
        SideRuns("incumbent", "0.32.0", tuple(whole.runs), (), ""),
        SideRuns("defaults", "0.32.0", tuple(whole.defaults), (), ""),
    )
    return Night(
        number=whole.number,
        series="s",
        incumbent=0,
        config={},
        given={},
        started_at=0.0,
        ended_at=0.0,
        environment=FACTS,
        model_revision="",
        weights=whole.weights,
        sides=sides,
        changes=judged.changes,
        state=judged.state,
        events=judged.events,
    )


def quiet(world: World, nights: int, repetitions: int, rules: Regression, seed: int = 0) -> tuple[int, int]:
    """(sequences with any false alarm, nights that asked for further rounds) over `repetitions` sequences."""
    false = confirmed = 0
    for repetition in range(repetitions):
        one = Nights(world, seed + repetition, rules)
        false += any(one.night().state is State.REGRESSED for _ in range(nights))
        confirmed += one.confirmed
    return false, confirmed


def planted(
    world: World,
    before: int,
    after: int,
    repetitions: int,
    rules: Regression,
    *,
    factor: float = 1.0,
    one_class: float = 1.0,
    seed: int = 10_000,
) -> list[int]:
    """Nights until the loss was reported, from 1, `after` + 1 where it was not; without sequences alarmed before."""
    found: list[int] = []
    for repetition in range(repetitions):
        one = Nights(world, seed + repetition, rules)
        if any(one.night().state is State.REGRESSED for _ in range(before)):
            continue
        states = [one.night(factor, one_class=one_class).state for _ in range(after)]
        found.append(next((n for n, state in enumerate(states, 1) if state is State.REGRESSED), after + 1))
    return found


def within(found: Sequence[int], nights: int) -> str:
    share = wilson(sum(n <= nights for n in found), len(found))
    return f"{share.value:6.1%} ({share.low:.1%} to {share.high:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--nights", type=int, default=25)
    arguments = parser.parse_args()
    repetitions, rules = arguments.repetitions, Regression()
    print(f"{repetitions} sequences each; 3 rounds a night; 95 % intervals of the shares in brackets\n")
    print(f"quiet: sequences of {arguments.nights} nights with any false regression")
    worlds = {
        "as assumed (run 3 %, night 1 %)": World(),
        "one class": World(classes=1),
        "steady (run 1 %, night 0.5 %)": World(0.01, 0.01, 0.005),
        "noisy (run 5 %, night 1 %)": World(0.05, 0.02, 0.01),
        "restless (run 3 %, night 3 %)": World(night_sd=0.03),
    }
    for name, world in worlds.items():
        false, confirmed = quiet(world, arguments.nights, repetitions, rules)
        share, nights = wilson(false, repetitions), repetitions * arguments.nights
        print(
            f"  {name:34}  {share.value:6.1%} ({share.low:.1%} to {share.high:.1%})"
            f"   {1e3 * false / nights:.1f} in 1,000 nights; further rounds in {confirmed / nights:.1%} of them"
        )
    print("\nplanted after 10 quiet nights: share reported within so many nights")
    print(f"  {'':34}  {'1':>24}  {'2':>24}  {'7':>24}  {'14':>24}")
    plants = {
        "10 % everywhere": (World(), 0.9, 1.0),
        "10 % everywhere, one class": (World(classes=1), 0.9, 1.0),
        "10 % everywhere, noisy": (World(0.05, 0.02, 0.01), 0.9, 1.0),
        "7 % everywhere": (World(), 0.93, 1.0),
        "5 % everywhere (change point)": (World(), 0.95, 1.0),
        "20 % in one class of four": (World(), 1.0, 0.8),
    }
    for name, (world, factor, one_class) in plants.items():
        found = planted(world, 10, 14, repetitions, rules, factor=factor, one_class=one_class)
        print(f"  {name:34}  " + "  ".join(f"{within(found, nights):>24}" for nights in (1, 2, 7, 14)))


if __name__ == "__main__":
    main()
