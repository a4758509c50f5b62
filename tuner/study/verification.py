"""What is told beside the verdict: the winner under all classes at once, and what each class alone would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.capacity import ProbeSettings
from tuner.finish import Contender, class_winners, judge, plan_rounds
from tuner.records import StepKind, TrialState
from tuner.study.evaluate import reference_rates
from tuner.study.result import ClassBest, ClassRates
from tuner.study.rounds import Rounds
from tuner.study.runner import Runner
from tuner.study.values import excess, values


def mixed_rates(
    runner: Runner, settings: ProbeSettings, mixes: Sequence[str], pair: Sequence[Contender], first: int, rounds: int
) -> dict[str, ClassRates]:
    """Baseline and winner (`pair`) with all classes at once, in rounds of their own from `first` on.

    Interference between classes shows only here. The verdict does not rest on it unless a mix was asked for.
    """
    definition = runner.definition
    baseline, winner = (contender.number for contender in pair)
    runs = plan_rounds([baseline, winner], rounds, definition.seed, first)
    measuring = Rounds(runner, settings, "the mixed verification", mixes)
    measuring.run_all(runs, {contender.number: contender for contender in pair}, StepKind.FINALIST)
    records, measured = measuring.records(runs), measuring.measured(runs)
    before, after = (
        reference_rates([r for r in records if r.number == number], mixes, definition.objective) or {}
        for number in (baseline, winner)
    )
    found = {}
    for name in mixes:
        verdict = judge(measured, baseline, {name: 1.0})
        found[name] = ClassRates(before.get(name), after.get(name), verdict.gains.get(winner))
    return found


def class_bests(runner: Runner) -> dict[str, ClassBest]:
    """For each class what carried most of it in the search, against the best compromise; empty while one is missing."""
    goal, weights = runner.definition.objective, runner.weights
    by_class: dict[int, Mapping[str, float]] = {}
    objectives: dict[int, float] = {}
    for record in runner.records:
        if record.state is not TrialState.COMPLETE or record.round is not None:
            continue
        found, objective = values(record, goal), runner.evaluation(record).objective
        if objective is None or any(excess(record, name, goal) > 0 for name in weights):
            continue
        by_class.setdefault(record.number, found)  # the first look of each, so that nobody has more chances
        objectives.setdefault(record.number, objective)
    if not objectives:
        return {}
    compromise = max(objectives, key=lambda number: objectives[number])
    configs = {record.number: record.config for record in runner.records}
    best: dict[str, ClassBest] = {}
    for name, number in class_winners(by_class).items():
        gain = by_class[number][name] / by_class[compromise][name]
        best[name] = ClassBest(number, configs[number], gain, 1 - objectives[number] / objectives[compromise])
    return best
