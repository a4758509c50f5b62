"""Runs the trials of a study one after the other and keeps their records; it does not choose them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tuner.capacity import THRESHOLD, ProbeSettings, Reference, reference
from tuner.errors import EnvironmentFault, HarnessError, Interrupted, TunerError
from tuner.executor import Executor
from tuner.records import (
    EnvironmentFacts,
    Proposal,
    Slo,
    StepKind,
    StudyDefinition,
    TrialRecord,
    TrialState,
    Verdict,
)
from tuner.store import ResultsFolder
from tuner.study.budget import Spent, remaining_s
from tuner.study.evaluate import Evaluation, evaluate, reference_rates, weights_of
from tuner.study.guard import Guard
from tuner.study.observer import Observer
from tuner.study.signals import StopSignals
from tuner.study.values import WINDOWS
from tuner.trial import TrialRequest

LASTING = (TrialState.COMPLETE, TrialState.SCREENED, TrialState.INFEASIBLE)
FINISH_KINDS = (StepKind.FINALIST, StepKind.ABLATION)
PAUSE_S = 30.0  # between a fault of the machine and the next attempt; doubled each time
FAULTS_IN_A_ROW = 4  # one more than a single configuration is tried, so that the last is another one's


class Runner:
    """What the phases of a study share: its records, and the way a trial is run."""

    def __init__(
        self,
        definition: StudyDefinition,
        slo: Slo,
        folder: ResultsFolder,
        executor: Executor,
        environment: EnvironmentFacts,
        signals: StopSignals,
        observer: Observer,
        *,
        pause_s: float = PAUSE_S,
        guard: Guard | None = None,
    ) -> None:
        self.definition, self.folder, self.environment = definition, folder, environment
        self.signals, self.observer = signals, observer
        self.weights = weights_of(slo, definition.workloads)
        self.records: list[TrialRecord] = list(folder.trials())
        self.guard = guard  # None: nothing that may change the answers is searched
        self._executor, self._pause_s = executor, pause_s
        self._faults = 0

    def run(
        self,
        proposal: Proposal,
        settings: ProbeSettings,
        *,
        seed: int,
        position: str,
        incumbent: TrialRecord | None = None,
        screen_below: float | None = None,
        workloads: Sequence[str] | None = None,
        round_: int | None = None,
    ) -> TrialRecord:
        """One replicate, recorded. Interrupted when asked to stop, EnvironmentFault when the machine stays unfit.

        `incumbent` gives the rates to start from; a candidate that is predicted to fall short of it by more than
        `screen_below` (a negative share) ends early, None: never. `workloads`: others than the study's.
        """
        self.check_stop()
        replicate = self.next_replicate(proposal.number)
        self.observer.trial_started(proposal, replicate, position)
        references = self._references(incumbent)
        names = tuple(workloads or self.definition.workloads)
        request = TrialRequest(
            proposal=proposal,
            replicate=replicate,
            seed=seed,
            workloads=names,
            weights=self.weights if workloads is None else dict.fromkeys(names, 1 / len(names)),
            settings=settings,
            start_rates={name: item.capacity_rps for name, item in references.items()},
            incumbent=references if screen_below is not None else None,
            incumbent_number=incumbent.number if incumbent is not None and screen_below is not None else None,
            screen_below=THRESHOLD if screen_below is None else screen_below,
            ramps={} if round_ is None else self._ramps(),
            fixed_rates={} if self.definition.rate_rps is None else dict.fromkeys(names, self.definition.rate_rps),
            looks=WINDOWS,
            least_looks=WINDOWS,
            round=round_,
            quality=self.guard.examination(proposal, round_, self.records) if self.guard is not None else None,
        )
        record = self._executor.run(request)
        self.folder.write_trial(record)
        self.records.append(record)
        self._count_fault(record)
        if record.state is TrialState.INTERRUPTED:
            self.check_stop()
        return record

    def fault(self) -> TunerError:
        """The error that ends the study for now, from the last trial that failed through no fault of its own."""
        record = next(record for record in reversed(self.records) if record.state is TrialState.FAULT)
        where = self.folder.trial_folder(record.number, record.replicate)
        message = (
            f"{self._faults} trials in a row failed through no fault of their configuration. The last ({where}): "
            f"{_told(record)} The study is kept; mend this, then --resume."
        )
        ours = record.failure is not None and record.failure.verdict is Verdict.HARNESS
        return HarnessError(message) if ours else EnvironmentFault(message)

    def check_stop(self) -> None:
        if self.signals.stop.is_set():
            raise Interrupted("stopped as asked; every finished trial is kept. Go on with --resume")

    def next_replicate(self, number: int) -> int:
        return 1 + max((record.replicate for record in self.records if record.number == number), default=-1)

    def all_baselines(self) -> list[TrialRecord]:
        """Lasting replicates of the baseline's search trial, on any machine."""
        return [r for r in self.records if r.step.kind is StepKind.BASELINE and r.state in LASTING]

    def baselines(self, machine: str) -> list[TrialRecord]:
        """Those on one machine."""
        return [record for record in self.all_baselines() if record.machine == machine]

    def evaluation(self, record: TrialRecord) -> Evaluation:
        """Against the baseline as measured on the record's own machine."""
        found = evaluate(record, self._reference(record), self.weights, self.definition.objective)
        if self.guard is None or found.objective is None:
            return found
        constraints = {**found.constraints, **self.guard.constraint(record.config, self.records)}
        return Evaluation(found.objective, constraints)

    def search_trials(self) -> int:
        """Configurations that the search has tried, the baseline included."""
        return len({r.number for r in self.records if r.state in LASTING and r.step.kind not in FINISH_KINDS})

    def spent(self) -> Spent:
        full = [r.ended_at - r.started_at for r in self.records if r.state is TrialState.COMPLETE and r.round is None]
        return Spent(
            search_trials=self.search_trials(),
            wall_s=sum(r.ended_at - r.started_at for r in self.records),
            gpus=max(1, len(self.definition.gpus)),
            trial_s=full,
        )

    def remaining_s(self) -> float:
        return remaining_s(self.definition.budget, self.spent())

    def _reference(self, record: TrialRecord) -> dict[str, float] | None:
        """One replicate of the baseline: of the record's own round, else its first; where it never ran, the first run.

        One, and always the same one: against a mean that they are part of, replicates of the baseline would seem less
        noisy than they are.
        """
        here = [r for r in self.records if r.state is TrialState.COMPLETE and r.machine == record.machine]
        of_baseline = [r for r in here if r.config == self.definition.baseline]
        of_round = [r for r in of_baseline if r.round == record.round] if record.round is not None else []
        chosen = (of_round or of_baseline or here)[:1]
        return reference_rates(chosen, self.definition.workloads, self.definition.objective)

    def _references(self, incumbent: TrialRecord | None) -> Mapping[str, Reference]:
        if incumbent is None:
            return {}
        found = {name: reference(capacity) for name, capacity in incumbent.capacities.items()}
        return {name: item for name, item in found.items() if item is not None}

    def _ramps(self) -> dict[str, float]:
        """Ramps of the rounds: the baseline's for everybody, because a ramp biases what follows it.

        Where no baseline has run, those of the latest run, which were its predecessor's.
        """
        known = [record for record in self.records if record.state is TrialState.COMPLETE]
        complete = [record for record in self.all_baselines() if record.state is TrialState.COMPLETE] or known
        references = self._references(complete[-1] if complete else None)
        return {name: item.ramp_s for name, item in references.items() if item.ramp_s > 0}

    def _count_fault(self, record: TrialRecord) -> None:
        """A fault of the machine is waited out a few times; one of our own is not hidden by trying again and again."""
        if record.state is not TrialState.FAULT:
            self._faults = 0
            return
        self._faults += 1
        if self._faults >= FAULTS_IN_A_ROW:
            raise self.fault()
        pause_s = self._pause_s * 2 ** (self._faults - 1)
        self.observer.note(f"paused for {pause_s:.0f} s: {_told(record)}")
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline and not self.signals.stop.wait(0.5):
            pass


def _told(record: TrialRecord) -> str:
    return f"{record.failure.cause}. {record.failure.remedy}" if record.failure is not None else "unknown fault."
