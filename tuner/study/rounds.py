"""Interleaved rounds on fresh servers: runs a plan, skipping what its records hold already; it judges nothing.

A round counts only when all of it ran on one machine, because capacities are compared within one machine only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.capacity import ProbeSettings
from tuner.errors import EnvironmentFault
from tuner.finish import Contender, Measured, Run
from tuner.records import Proposal, Step, StepKind, TrialRecord, TrialState
from tuner.study.runner import LASTING, Runner
from tuner.study.values import Objective, bounded_below, excess, values

ATTEMPTS = 3


class Rounds:
    """Runs of planned rounds and what they have measured, over the records of one runner."""

    def __init__(
        self,
        runner: Runner,
        settings: ProbeSettings,
        what: str = "the finish",
        workloads: Sequence[str] | None = None,
    ) -> None:
        """`what` is said where a run is named to a reader. `workloads`: others than the study's."""
        self._runner, self._settings, self._what = runner, settings, what
        self._machine, self._workloads = runner.environment.machine, workloads

    def run_all(self, runs: Sequence[Run], contenders: Mapping[int, Contender], kind: StepKind) -> None:
        """Every run that has no lasting record yet; rounds that are complete on any machine are left alone."""
        for position, run in enumerate(runs, 1):
            round_runs = [other for other in runs if other.round == run.round]
            if self._machine_of(round_runs) is not None:
                continue
            attempts = 0
            while self._found(run, self._machine) is None:
                attempts += 1
                if attempts > ATTEMPTS:
                    raise EnvironmentFault(
                        f"a run of {self._what} failed again and again through no fault of its configuration"
                    )
                self._run_one(run, contenders[run.number], kind, f"{position} of {len(runs)}")

    def measured(self, runs: Sequence[Run]) -> tuple[Measured, ...]:
        """What these runs say, for a verdict; only rounds that are complete on one machine."""
        names, objective = self._workloads, self._runner.definition.objective
        weights = self._runner.weights if names is None else dict.fromkeys(names, 1 / len(names))
        return tuple(measured(record, weights, objective) for record in self.records(runs))

    def records(self, runs: Sequence[Run]) -> list[TrialRecord]:
        found: list[TrialRecord] = []
        for run in runs:
            machine = self._machine_of([other for other in runs if other.round == run.round])
            record = self._found(run, machine) if machine is not None else None
            if record is not None:
                found.append(record)
        return found

    def _run_one(self, run: Run, contender: Contender, kind: StepKind, position: str) -> None:
        step = Step(kind, {}, None, f"round {run.round + 1} of {self._what}")
        record = self._runner.run(
            Proposal(contender.number, contender.config, step),
            self._settings,
            seed=run.seed,
            position=position,
            incumbent=self._start_of(contender),
            workloads=self._workloads,
            round_=run.round,
        )
        objective = self._runner.evaluation(record).objective
        self._runner.observer.trial_ended(record, objective, None, self._runner.remaining_s())

    def _start_of(self, contender: Contender) -> TrialRecord | None:
        """Where to begin probing: what was found for this configuration before, else for the baseline."""
        complete = [record for record in self._runner.records if record.state is TrialState.COMPLETE]
        own = [record for record in complete if record.number == contender.number]
        return next(iter(reversed(own or self._runner.all_baselines() or complete)), None)

    def _found(self, run: Run, machine: str) -> TrialRecord | None:
        for record in self._runner.records:
            same = record.number == run.number and record.round == run.round and record.machine == machine
            if same and record.state in LASTING:
                return record
        return None

    def _machine_of(self, runs: Sequence[Run]) -> str | None:
        """The machine on which all of a round has run; None where none has it complete."""
        for machine in dict.fromkeys(record.machine for record in self._runner.records):
            if all(self._found(run, machine) is not None for run in runs):
                return machine
        return None


def measured(record: TrialRecord, weights: Mapping[str, float], objective: str = Objective.CAPACITY) -> Measured:
    """One record as a verdict takes it: values by workload, and how far each is from keeping its promise."""
    found = values(record, objective) if record.state is TrialState.COMPLETE else {}
    ran = bool(found) and set(weights) <= set(found)
    mine = {name: found[name] for name in weights} if ran else {}
    over = {name: excess(record, name, objective) for name in mine}
    above = frozenset(name for name in mine if bounded_below(record, name, objective))
    return Measured(record.number, record.round or 0, mine, over, ran, above)
