"""The loop of a study: baseline, search, finish; it decides what runs next and keeps the study's file.

What has happened is read from the trial records, never from memory: a study that was killed goes on where its records
end. Capacities are compared within one machine only; a study continued elsewhere measures its baseline there first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from tuner.errors import EnvironmentFault
from tuner.executor import Executor
from tuner.finish import changed_flags
from tuner.optimizer import Optimizer, Told
from tuner.quality import PromptSet, built_in
from tuner.records import Config, EnvironmentFacts, Proposal, Slo, StepKind, StudyDefinition, TrialRecord, TrialState
from tuner.space import Space
from tuner.store import ResultsFolder
from tuner.study.advice import advice_for
from tuner.study.budget import grown, may_start
from tuner.study.finishing import Finish
from tuner.study.guard import BASELINE_REPLICATES, Guard
from tuner.study.observer import Observer
from tuner.study.result import Status, StudyFile, StudyResult, read_study, write_study
from tuner.study.runner import FINISH_KINDS, PAUSE_S, Runner
from tuner.study.signals import StopSignals
from tuner.study.speeds import SPEEDS
from tuner.study.values import saturation_note


class Study:
    """One study from its first trial, or from where its records end, to its verdict."""

    def __init__(
        self,
        definition: StudyDefinition,
        slo: Slo,
        space: Space,
        folder: ResultsFolder,
        executor: Executor,
        environment: EnvironmentFacts,
        signals: StopSignals,
        observer: Observer,
        *,
        pause_s: float = PAUSE_S,
        prompts: PromptSet | None = None,
        rules: Callable[[Config, Config], bool] = lambda config, defaults: True,
        enqueued: Sequence[Config] = (),
    ) -> None:
        """`enqueued`: configurations to try first, the same on every resume.
        `rules`: whether a configuration may start at all, given the baseline's defaults; others cost no trial.
        `prompts`: on which answers are compared when lossy knobs are searched (None: those of the tuner)."""
        guard = Guard(space, definition.baseline, prompts or built_in(), folder) if definition.lossy_allowed else None
        self._guard = guard if guard is not None and guard.active else None
        self._runner = Runner(
            definition, slo, folder, executor, environment, signals, observer, pause_s=pause_s, guard=self._guard
        )
        self._definition, self._slo, self._space, self._folder = definition, slo, space, folder
        self._environment, self._observer, self._rules = environment, observer, rules
        self._enqueued = enqueued
        self._speed = SPEEDS[definition.speed]
        self._advice: dict[int, dict[str, tuple[str, float]]] = {}
        self._file = self._opened()

    def run(self) -> StudyResult:
        """To the verdict. Raises Interrupted, EnvironmentFault or HarnessError with everything finished on disk."""
        if self._file.result is not None:
            return self._file.result
        optimizer = self._optimizer()
        if self._file.plan is None:
            self._measure_baseline(optimizer)
            self._search(optimizer)
        else:
            self._measure_baseline(optimizer)
        finish = Finish(
            self._runner, self._definition, self._speed.finish, self._file, optimizer, self._speed.run_factor, self._slo
        )
        self._keep(status=Status.FINISHING, plan=finish.plan)
        result = finish.run()
        self._keep(status=Status.DONE, result=result)
        return result

    # --- phases ----------------------------------------------------------------------------------------------

    def _measure_baseline(self, optimizer: Optimizer) -> None:
        """Baseline replicates on this machine: all of them on the study's first machine, one on any later one."""
        machine = self._environment.machine
        wanted = self._baselines() if machine == self._file.machines[0] else 1
        if len(self._runner.baselines(machine)) < wanted:
            self._observer.phase(
                "baseline", "the configuration that everything else is compared with, on fresh servers"
            )
        while len(done := self._runner.baselines(machine)) < wanted:
            proposal = self._baseline_proposal(optimizer)
            if proposal is None:
                raise self._runner.fault()
            position = f"{len(done) + 1} of {wanted}"
            record = self._runner.run(
                proposal, self._speed.search, seed=self._definition.seed, position=position, incumbent=self._latest()
            )
            self._tell(optimizer, record)
            full = saturation_note(record, self._definition.objective)
            if full is not None:
                self._observer.note(full)
            if record.state is TrialState.INFEASIBLE:
                self._observer.note("the baseline does not run; the search looks for a configuration that does")
                if self._guard is not None:
                    self._observer.note("without the baseline's answers nothing that may change them can win")
                return
        if self._guard is not None:
            self._guard.require_reference(self._runner.records)

    def _search(self, optimizer: Optimizer) -> None:
        budget, rounds = self._definition.budget, self._definition.finish_rounds
        self._observer.phase("search", "one change at a time from the best configuration so far")
        speed = self._speed
        while may_start(
            budget,
            self._runner.spent(),
            guess_s=speed.guess_s,
            rounds=rounds,
            flags=self._flags(optimizer) + 1,
            run_factor=speed.run_factor,
        ):
            incumbent = self._incumbent(optimizer)
            if incumbent is not None:
                optimizer.advise(advice_for(incumbent, self._slo), self._diagnoses())
            proposal = optimizer.ask()
            if proposal is None:
                self._observer.note("the search is complete: nothing is left that is worth a trial")
                return
            total = f" of {budget.trials}" if budget.trials is not None else ""
            record = self._runner.run(
                proposal,
                speed.search,
                seed=self._definition.seed,
                position=f"{self._runner.search_trials() + 1}{total}",
                incumbent=incumbent,
                screen_below=self._screen_below(optimizer, proposal, incumbent),
            )
            self._tell(optimizer, record)

    # --- inside ----------------------------------------------------------------------------------------------

    def _baseline_proposal(self, optimizer: Optimizer) -> Proposal | None:
        """The optimizer's first proposal; once that has run, the same again."""
        known = self._runner.all_baselines()
        return Proposal(known[-1].number, known[-1].config, known[-1].step) if known else optimizer.ask()

    def _tell(self, optimizer: Optimizer, record: TrialRecord) -> None:
        told = self._told(record, optimizer)
        optimizer.tell(told.record, told.objective, told.constraints)
        best = optimizer.value(optimizer.incumbent) if optimizer.incumbent is not None else None
        self._observer.trial_ended(record, told.objective, best, self._runner.remaining_s())

    def _told(self, record: TrialRecord, optimizer: Optimizer | None) -> Told:
        """How a record is told: against its machine's baseline, or, screened out, as predicted from its incumbent."""
        evaluation = self._runner.evaluation(record)
        objective = evaluation.objective
        if record.state is TrialState.SCREENED and record.screened_against is not None:
            base = optimizer.value(record.screened_against) if optimizer is not None else None
            objective = None if base is None or record.predicted is None else base * (1 + record.predicted)
        return Told(record, objective, evaluation.constraints)

    def _optimizer(self) -> Optimizer:
        """The optimizer with everything that the records tell, in their order."""
        definition = self._definition
        history: list[Told] = []
        values: dict[int, float] = {}
        for record in self._runner.records:
            if record.step.kind in FINISH_KINDS or record.round is not None:
                continue
            told = self._told(record, None)
            if (
                record.state is TrialState.SCREENED
                and record.screened_against in values
                and record.predicted is not None
            ):
                told = replace(told, objective=values[record.screened_against] * (1 + record.predicted))
            if told.objective is not None:
                values.setdefault(record.number, told.objective)
            history.append(told)
        return Optimizer(
            self._space,
            name=definition.name,
            seed=definition.seed,
            storage=f"sqlite:///{self._folder.database}",
            baseline=definition.baseline,
            enqueued=self._enqueued,
            history=history,
            taken=[record.number for record in self._runner.records],
            devices=max(1, len(definition.gpus)),
            admissible=self._admissible,
        )

    def _incumbent(self, optimizer: Optimizer) -> TrialRecord | None:
        """The incumbent's record on this machine if there is one, else its latest anywhere."""
        if optimizer.incumbent is None:
            return None
        return self._best_record([told.record for told in optimizer.told(optimizer.incumbent)])

    def _diagnoses(self) -> dict[int, dict[str, tuple[str, float]]]:
        """What the first full measurement of each trial of the search suggests."""
        for record in self._runner.records:
            full = record.state is TrialState.COMPLETE and record.round is None
            if full and record.number not in self._advice:
                self._advice[record.number] = advice_for(record, self._slo)
        return self._advice

    def _screen_below(self, optimizer: Optimizer, proposal: Proposal, incumbent: TrialRecord | None) -> float | None:
        """None: measure in full. A second look is; and another machine's probes are no yardstick here."""
        if incumbent is None or incumbent.machine != self._environment.machine:
            return None
        return None if proposal.step.kind is StepKind.CONFIRM else optimizer.screen_below

    def _baselines(self) -> int:
        """Replicates of the baseline at the start; the noise of answers takes two."""
        return max(self._speed.baseline_replicates, BASELINE_REPLICATES if self._guard is not None else 0)

    def _admissible(self, config: Config) -> bool:
        """Breaks no rule that is known before a launch, and answers as the baseline does where that was found out."""
        asked = {**self._definition.fixed, **self._definition.baseline}
        shown = next((record.effective for record in self._runner.all_baselines() if record.effective), {})
        if not self._rules(config, {name: value for name, value in shown.items() if name not in asked}):
            return False
        return self._guard is None or self._guard.admissible(config, self._runner.records)

    def _flags(self, optimizer: Optimizer) -> int:
        """How many flags the incumbent changes."""
        incumbent = self._incumbent(optimizer)
        baseline = self._definition.baseline
        return 0 if incumbent is None else len(changed_flags(incumbent.config, baseline))

    def _latest(self) -> TrialRecord | None:
        return self._best_record(self._runner.all_baselines())

    def _best_record(self, records: list[TrialRecord]) -> TrialRecord | None:
        complete = [record for record in records if record.state is TrialState.COMPLETE]
        here = [record for record in complete if record.machine == self._environment.machine]
        return (here or complete)[-1] if complete else None

    def _opened(self) -> StudyFile:
        """The study's file, new or as it was; a machine of another kind is refused, another one of this kind noted."""
        facts = self._environment
        if not self._folder.study_file.exists():
            file = StudyFile(self._definition, facts, machines=(facts.machine,))
            write_study(self._folder, file)
            return file
        file = read_study(self._folder)
        differences = _differences(file.environment, facts)
        if file.environment.digest != facts.digest:
            raise EnvironmentFault(
                f"this study was measured on another kind of machine ({differences}). Capacities of unlike machines "
                "must not be mixed: go on where it began, or start a new study here."
            )
        if facts.machine not in file.machines:
            note = f"continued on another machine of the same kind ({facts.host}{differences and '; '}{differences})"
            note += "; its baseline is measured again, and no capacity is compared across machines"
            self._observer.note(note)
            file = replace(file, machines=(*file.machines, facts.machine), notes=(*file.notes, note))
        if file.result is not None and grown(file.definition.budget, self._definition.budget):
            # Every further finish is a further chance to be lucky, so that all of them stay on record.
            earlier = (*file.earlier, file.result)
            said = file.result.conclusion.decision
            note = f"the search went on after a verdict ({said}); this is finish {len(earlier) + 1}"
            file = replace(
                file, status=Status.SEARCHING, plan=None, result=None, earlier=earlier, notes=(*file.notes, note)
            )
        elif file.plan is not None and file.result is None and grown(file.definition.budget, self._definition.budget):
            self._observer.note("the finish had begun; the larger budget counts once it has ended: --resume again then")
        file = replace(file, definition=self._definition)
        write_study(self._folder, file)
        return file

    def _keep(self, **changes: object) -> None:
        self._file = replace(self._file, **changes)  # type: ignore[arg-type]
        write_study(self._folder, self._file)


def _differences(before: EnvironmentFacts, now: EnvironmentFacts) -> str:
    """What differs between two machines, by name; empty where nothing does."""
    names = [field.name for field in fields(EnvironmentFacts) if field.name not in ("digest", "host", "machine")]
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in names]
    return "; ".join(f"{name}: {old} before, {new} here" for name, old, new in pairs if old != new)
