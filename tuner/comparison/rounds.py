"""A comparison from its plan, or from where its records end, to its verdict; every measurement is the study's own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from tuner.comparison.lock import carried
from tuner.comparison.place import BySide, Place, Servers, Traffic
from tuner.comparison.record import Comparison, Definition, Result, keep_traffic, read_comparison, write_comparison
from tuner.comparison.verdict import contrast, failure, kept_values, side_rates
from tuner.errors import EnvironmentFault
from tuner.finish import Contender, plan_rounds
from tuner.records import Budget, EnvironmentFacts, StepKind, StudyDefinition
from tuner.server import VllmInstall
from tuner.store import ResultsFolder
from tuner.study import SPEEDS, Observer, Rounds, Runner, StopSignals
from tuner.study.runner import PAUSE_S


def compare(
    definition: Definition,
    traffic: Traffic,
    installs: Mapping[str, VllmInstall],
    folder: ResultsFolder,
    place: Place,
    signals: StopSignals,
    observer: Observer,
    *,
    pause_s: float = PAUSE_S,
) -> Comparison:
    """Measure what is missing and judge. `installs`: by the path that a side names.

    Raises Interrupted, EnvironmentFault or HarnessError with everything finished on disk; the same call goes on.
    """
    servers = [
        Servers(installs[side.vllm], definition.model, definition.fixed, definition.gpus, carried(side.variables))
        for side in definition.sides
    ]
    environments = tuple(place.facts(one.install, definition.gpus) for one in servers)
    if (folder.root / "comparison.json").is_file():
        comparison = read_comparison(folder)
        _same_kind(comparison, environments)
    else:
        numbers = range(len(definition.sides))
        comparison = Comparison(definition, environments, plan_rounds(numbers, definition.rounds, definition.seed))
        keep_traffic(folder, traffic)
        write_comparison(folder, comparison)
    if comparison.result is not None:
        return comparison
    executor = BySide({number: place.executor(one, traffic, folder) for number, one in enumerate(servers)})
    runner = Runner(
        _as_study(definition), traffic.slo, folder, executor, environments[0], signals, observer, pause_s=pause_s
    )
    rounds = Rounds(runner, SPEEDS[definition.speed].finish, "the comparison")
    contenders = {number: Contender(number, side.config) for number, side in enumerate(definition.sides)}
    names = " against ".join(side.name for side in reversed(definition.sides))
    observer.phase("rounds", f"{names}, {definition.rounds} rounds, each on a fresh server")
    rounds.run_all(comparison.plan, contenders, StepKind.FINALIST)
    comparison = replace(comparison, result=_result(comparison, rounds, runner))
    write_comparison(folder, comparison)
    return comparison


def _result(comparison: Comparison, rounds: Rounds, runner: Runner) -> Result:
    definition = comparison.definition
    runs, records = rounds.measured(comparison.plan), rounds.records(comparison.plan)
    numbers = range(len(definition.sides))
    return Result(
        rates=tuple(side_rates(runs, number, definition.workloads) for number in numbers),
        values=tuple(kept_values(runs, number) for number in numbers),
        weights=runner.weights,
        failures=tuple(failure(runs, number) for number in numbers),
        against_first={n: contrast(runs, n, 0, runner.weights, definition.margin) for n in numbers if n > 0},
        runs=len(records),
        wall_s=sum(record.ended_at - record.started_at for record in runner.records),
        simulated=any(record.simulated for record in records),
        finished_at=time.time(),
    )


def _same_kind(comparison: Comparison, now: tuple[EnvironmentFacts, ...]) -> None:
    """A comparison goes on only with the machine and the vLLM that it began with."""
    for before, environment in zip(comparison.environments, now, strict=True):
        if before.digest != environment.digest:
            raise EnvironmentFault(
                f"this comparison began with vLLM {before.vllm_version} on {' + '.join(before.gpus) or before.cpu}, "
                "which is not what is here now. Start a new one."
            )


def _as_study(definition: Definition) -> StudyDefinition:
    """The comparison in the words that the study's runner understands."""
    first = definition.sides[0]
    return StudyDefinition(
        name=definition.name,
        model=definition.model,
        vllm=first.vllm,
        objective="capacity",
        workloads=definition.workloads,
        fixed=definition.fixed,
        baseline=first.config,
        gpus=definition.gpus,
        budget=Budget(),
        finish_rounds=definition.rounds,
        speed=definition.speed,
        lossy_allowed=True,
        seed=definition.seed,
        slo_digest=definition.slo_digest,
        workload_digests=definition.workload_digests,
        space_digest="",
        created_at=definition.created_at,
        tuner_version=definition.tuner_version,
        model_revision=definition.model_revision,
    )
