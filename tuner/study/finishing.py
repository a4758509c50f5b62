"""The finish of a study: finalists and baseline again on fresh servers, then each flag left out.

The plan is fixed before its first run and kept in `study.json`. A round counts only when all of it ran on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tuner.capacity import ProbeSettings
from tuner.finish import (
    Conclusion,
    Contender,
    Decision,
    FlagEffect,
    Look,
    Run,
    ablation_rounds,
    changed_flags,
    choose_finalists,
    effects,
    feasible,
    judge,
    plan_looks,
    plan_rounds,
    reduced_stands,
    removals,
    worth_more,
)
from tuner.optimizer import Optimizer
from tuner.quality import Comparison
from tuner.records import Config, KnobValue, Slo, StepKind, StudyDefinition, TrialRecord, TrialState
from tuner.study.budget import trial_estimate_s
from tuner.study.evaluate import reference_rates
from tuner.study.guard import barred
from tuner.study.result import ClassRates, FinishPlan, StudyFile, StudyResult
from tuner.study.rounds import Rounds
from tuner.study.runner import Runner
from tuner.study.values import excess, saturation_note
from tuner.study.verification import class_bests, mixed_rates

MIXED_ROUNDS = 2


class Finish:
    """From the end of the search to the verdict; resumes where its records end."""

    def __init__(
        self,
        runner: Runner,
        definition: StudyDefinition,
        settings: ProbeSettings,
        file: StudyFile,
        optimizer: Optimizer,
        run_factor: float,
        slo: Slo,
    ) -> None:
        self._runner, self._definition, self._settings = runner, definition, settings
        self._run_factor, self._slo = run_factor, slo
        self._rounds = Rounds(runner, settings)
        self.plan = file.plan or self._planned(optimizer)
        self._judged_runs = self.plan.runs

    def run(self) -> StudyResult:
        observer, plan = self._runner.observer, self.plan
        names = ", ".join(f"trial {contender.number}" for contender in plan.contenders[1:]) or "nothing"
        rounds = len({run.round for run in plan.runs})
        observer.phase("finish", f"{names} against the baseline, {rounds} interleaved rounds on fresh servers")
        contenders = {contender.number: contender for contender in plan.contenders}
        verdict = self._judged(contenders)
        last = plan_looks(rounds, len({run.round for run in (*plan.runs, *plan.more_runs)}))[-1]
        gain = 0.0 if verdict.gain is None else verdict.gain.value
        proved = verdict.decision is Decision.IMPROVED
        if plan.more_runs and not proved and worth_more(gain, verdict.log_sd, len(contenders) - 1, last):
            self._judged_runs = (*plan.runs, *plan.more_runs)
            rounds = len({run.round for run in self._judged_runs})
            observer.phase("finish", f"a gain of {gain - 1:+.1%} is not proved yet; {rounds} rounds in all")
            verdict = self._judged(contenders)
        if verdict.decision is not Decision.IMPROVED or verdict.winner is None:
            return self._result(verdict, contenders, (), (), self._judged_runs)
        return self._mixed(self._explained(verdict, verdict.winner, contenders), contenders)

    def _judged(self, contenders: Mapping[int, Contender]) -> Conclusion:
        """The verdict of the present look, its runs made up for."""
        self._rounds.run_all(self._judged_runs, contenders, StepKind.FINALIST)
        return judge(
            self._rounds.measured(self._judged_runs),
            self.plan.baseline,
            self._runner.weights,
            barred=self._barred(contenders),
            confidence=self._look.confidence,
        )

    @property
    def _look(self) -> Look:
        """The planned look that the judged runs belong to."""
        plan = self.plan
        first = len({run.round for run in plan.runs})
        looks = plan_looks(first, len({run.round for run in (*plan.runs, *plan.more_runs)}))
        return looks[-1] if len(self._judged_runs) > len(plan.runs) else looks[0]

    # --- planning --------------------------------------------------------------------------------------------

    def _planned(self, optimizer: Optimizer) -> FinishPlan:
        baseline_record = self._runner.all_baselines()[-1]
        baseline, guard = Contender(baseline_record.number, self._definition.baseline), self._runner.guard
        measured = [
            Contender(number, record.config, optimizer.expected(number))
            for number, record in self._complete().items()
            if record.config != self._definition.baseline
            and all(excess(record, name, self._definition.objective) <= 0 for name in self._runner.weights)
            and (guard is None or guard.admissible(record.config, self._runner.records))
        ]
        rounds = self._definition.finish_rounds
        most = 2 if self._affords(3 * rounds) else 1
        chosen = choose_finalists(measured, optimizer.incumbent, optimizer.noise, most)
        if guard is not None and most > 1 and all(guard.values(contender.config) for contender in chosen):
            # Were the answers of all of them found wanting, the finish would be left with nothing.
            lossless = [contender for contender in measured if not guard.values(contender.config)]
            best = choose_finalists(lossless, optimizer.incumbent, optimizer.noise, 1)
            chosen = (*chosen[: most - len(best)], *best)
        contenders = (baseline, *(c for c in chosen if c.number != baseline.number))
        first = 1 + max((r.round for r in self._runner.records if r.round is not None), default=-1)
        numbers = [contender.number for contender in contenders]
        if len(numbers) == 1:
            rounds = 1  # nothing to be told apart from the baseline
        most = max(rounds, self._definition.most_finish_rounds)
        if len(numbers) < 2 or not self._affords(len(numbers) * most):
            most = rounds
        runs = plan_rounds(numbers, most, self._definition.seed, first)
        planned = len(numbers) * rounds
        return FinishPlan(baseline.number, contenders, runs[:planned], ablation_rounds(rounds), runs[planned:])

    def _complete(self) -> dict[int, TrialRecord]:
        return {r.number: r for r in self._runner.records if r.state is TrialState.COMPLETE and r.round is None}

    # --- ablation --------------------------------------------------------------------------------------------

    def _explained(self, verdict: Conclusion, winner: int, contenders: dict[int, Contender]) -> StudyResult:
        """What each flag of the winner is worth; those worth nothing are dropped, and what is left verified."""
        plan, runner = self.plan, self._runner
        baseline = self._definition.baseline
        left_out = {self._number_of(r.config, contenders): r for r in removals(contenders[winner].config, baseline)}
        if not left_out:
            only = self._single_effect(verdict, contenders[winner].config)
            return self._result(verdict, contenders, only, (), self._judged_runs)
        if not self._affords(plan.later_rounds * (1 + len(left_out))):
            note = "the budget left no time to measure the winner without each of its flags"
            return self._result(verdict, contenders, (), (), self._judged_runs, (note,))
        runner.observer.phase("ablation", f"the winner (trial {winner}) without each of its {len(left_out)} flags")
        first = 1 + max(run.round for run in (*plan.runs, *plan.more_runs))
        contenders |= {number: Contender(number, removal.config) for number, removal in left_out.items()}
        runs = plan_rounds([winner, *left_out], plan.later_rounds, self._definition.seed, first)
        self._rounds.run_all(runs, contenders, StepKind.ABLATION)
        ablated = self._rounds.measured(runs)
        if any(run.number == winner and not feasible(run) for run in ablated):
            return self._without(winner, contenders, (*self._judged_runs, *runs))
        found = effects(ablated, winner, left_out, runner.weights)
        idle = tuple(effect.flag for effect in found if not effect.matters)
        reduced: dict[str, KnobValue] = {n: v for n, v in contenders[winner].config.items() if n not in idle}
        reduced |= {name: baseline[name] for name in idle if name in baseline}
        if not idle or reduced == dict(baseline):
            return self._result(verdict, contenders, found, (), (*self._judged_runs, *runs))
        number = self._number_of(reduced, contenders)
        contenders[number] = Contender(number, reduced)
        runner.observer.phase(
            "verification", f"without {', '.join(idle)}, which made no difference that could be shown"
        )
        check = plan_rounds(
            [plan.baseline, winner, number], plan.later_rounds, self._definition.seed, first + plan.later_rounds
        )
        self._rounds.run_all(check, contenders, StepKind.FINALIST)
        again, everything = self._rounds.measured(check), (*self._judged_runs, *runs, *check)
        if reduced_stands(again, plan.baseline, winner, number, runner.weights):
            lean = judge(
                (*self._rounds.measured(self._judged_runs), *again),
                plan.baseline,
                runner.weights,
                only=number,
                barred=self._barred(contenders),
                confidence=self._look.confidence,
            )
            if lean.decision is Decision.IMPROVED:
                return self._result(lean, contenders, found, idle, everything)
        if any(run.number == winner and not feasible(run) for run in again):
            return self._without(winner, contenders, everything)
        return self._result(verdict, contenders, found, (), everything)

    def _without(self, winner: int, contenders: Mapping[int, Contender], runs: Sequence[Run]) -> StudyResult:
        """The verdict when the winner crashed or missed the SLO after all: whoever stood, without an examination."""
        out = frozenset({winner})
        verdict = judge(
            self._rounds.measured(self._judged_runs),
            self.plan.baseline,
            self._runner.weights,
            out=out,
            barred=self._barred(contenders),
            confidence=self._look.confidence,
        )
        return self._result(verdict, contenders, (), (), runs)

    def _mixed(self, result: StudyResult, contenders: Mapping[int, Contender]) -> StudyResult:
        """The result with baseline and winner measured under all classes at once, where that was not asked for anyway.

        The order of the stages is fixed and later rounds have higher numbers, so a resumed study finds these again.
        """
        mixes = tuple(name for name in self._definition.workload_digests if name not in self._known_workloads)
        winner = result.conclusion.winner
        if not mixes or winner is None or winner == self.plan.baseline:
            return result
        if not self._affords(2 * MIXED_ROUNDS):
            return replace(result, notes=(*result.notes, "the budget left no time to measure all classes at once"))
        self._runner.observer.phase("verification", f"{', '.join(mixes)}: all classes at once, baseline and winner")
        taken = [record.round for record in self._runner.records if record.round is not None]
        own = [
            record.round
            for record in self._runner.records
            if record.round is not None and set(mixes) & {*record.capacities, *record.decided}
        ]
        first = min(own, default=1 + max(taken, default=-1))
        pair = (contenders[self.plan.baseline], contenders[winner])
        rates = mixed_rates(self._runner, self._settings, mixes, pair, first, MIXED_ROUNDS)
        return replace(result, mixed=rates)

    @property
    def _known_workloads(self) -> set[str]:
        """Classes, and the mixes that were asked for."""
        return {*self._slo.classes, *self._definition.workloads}

    def _affords(self, runs: int) -> bool:
        """Whether so many runs of the finish fit into what is left, by the mean of full trials so far."""
        spent = self._runner.spent()
        run_s = self._run_factor * trial_estimate_s(spent, 0.0)
        return self._runner.remaining_s() >= runs * run_s

    def _number_of(self, config: Config, contenders: Mapping[int, Contender]) -> int:
        """The number of this configuration's trial, or a new one."""
        known = {repr(sorted(r.config.items())): r.number for r in reversed(self._runner.records)}
        known |= {repr(sorted(c.config.items())): c.number for c in contenders.values()}
        taken = [*known.values(), *(r.number for r in self._runner.records)]
        return known.get(repr(sorted(config.items())), 1 + max(taken))

    def _single_effect(self, verdict: Conclusion, config: Config) -> tuple[FlagEffect, ...]:
        """One flag only: its effect is the gain."""
        flags = changed_flags(config, self._definition.baseline)
        return tuple(FlagEffect(name, config.get(name), verdict.gain, True) for name in flags)

    def _comparisons(self, contenders: Mapping[int, Contender]) -> dict[int, Comparison]:
        guard, records = self._runner.guard, self._runner.records
        configs = {number: contender.config for number, contender in contenders.items()}
        return {} if guard is None else guard.comparisons(configs, records)

    def _barred(self, contenders: Mapping[int, Contender]) -> dict[int, str]:
        """Those whose answers are not shown to be the baseline's."""
        return barred(self._comparisons(contenders))

    # --- the result ------------------------------------------------------------------------------------------

    def _result(
        self,
        verdict: Conclusion,
        contenders: Mapping[int, Contender],
        found: tuple[FlagEffect, ...],
        dropped: tuple[str, ...],
        runs: Sequence[Run],
        notes: tuple[str, ...] = (),
    ) -> StudyResult:
        """`found`: what each flag of the winner is worth."""
        names, records = self._definition.workloads, self._rounds.records(runs)
        objective = self._definition.objective
        best = verdict.winner if verdict.winner is not None else self.plan.baseline
        own = [r for r in records if r.number == self.plan.baseline]
        before = reference_rates(own, names, objective) or {}
        after = reference_rates([r for r in records if r.number == best], names, objective) or {}
        spent = self._runner.spent()
        gains = {name: verdict.classes[name].gain if name in verdict.classes else None for name in names}
        return StudyResult(
            conclusion=verdict,
            config=dict(contenders[best].config),
            rates={name: ClassRates(before.get(name), after.get(name), gains[name]) for name in names},
            effects=found,
            dropped=dropped,
            search_trials=self._runner.search_trials(),
            runs=len(records),
            wall_s=spent.wall_s,
            gpu_s=spent.wall_s * len(self._definition.gpus),
            simulated=any(record.simulated for record in records),
            finished_at=time.time(),
            notes=(*notes, *(full for r in own[:1] if (full := saturation_note(r, objective)) is not None)),
            class_bests=class_bests(self._runner),
            quality=self._comparisons(
                {contender.number: contender for contender in self.plan.contenders} | {best: contenders[best]}
            ),
        )
