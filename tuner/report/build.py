"""From the files of a study to the report's data; pure apart from `load`, and nothing is measured or judged anew."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import variance

from tuner.export import NOT_SHOWN, RatePair, Wording, rate_pairs, standing, wording
from tuner.finish import Decision, changed_flags
from tuner.records import (
    Capacity,
    Config,
    Estimate,
    KnobValue,
    Slo,
    StepKind,
    TrialRecord,
    TrialState,
)
from tuner.report.curves import curves, pareto
from tuner.report.limits import findings
from tuner.report.model import ClassRow, FindingRow, FlagRow, KnobValues, PathStep, Ref, Report, TrialRow, TroubleRow
from tuner.report.quality import quality_rows
from tuner.report.words import (
    all_probes,
    change_text,
    config_text,
    limit_text,
    probe_notes,
    setting_text,
    value_text,
)
from tuner.space import Space
from tuner.study.evaluate import evaluate, reference_rates, weights_of
from tuner.study.result import StudyFile, StudyResult
from tuner.study.values import Objective, window_values

TWO_SIDED_95 = 1.96
FINISHING = (StepKind.FINALIST, StepKind.ABLATION)


@dataclass(frozen=True, slots=True)
class Material:
    """What a report is made of."""

    file: StudyFile
    slo: Slo
    trials: tuple[TrialRecord, ...]  # in the order of running
    importance: Mapping[str, float]
    space: Space | None = None  # what was searched

    @property
    def result(self) -> StudyResult | None:
        return self.file.result

    @property
    def wording(self) -> Wording:
        return wording(self.file.definition.objective, self.file.definition.rate_rps)

    @property
    def weights(self) -> dict[str, float]:
        return weights_of(self.slo, self.file.definition.workloads)

    def is_baseline(self, record: TrialRecord) -> bool:
        return dict(record.config) == dict(self.file.definition.baseline)

    def rates(self, best: int | None) -> dict[str, RatePair]:
        return rate_pairs(self.file, self.trials, best)

    def standing(self, best: int | None) -> tuple[tuple[TrialRecord, ...], tuple[TrialRecord, ...]]:
        """Records behind the numbers of the baseline and of the best configuration."""
        return standing(self.file, self.trials, best)


def build(material: Material) -> Report:
    """The report; works on a running or interrupted study too, with what there is."""
    file, result = material.file, material.result
    definition = file.definition
    baseline, best = _contenders(material)
    conclusion = None if result is None else result.conclusion
    rates, (before, after) = material.rates(best), material.standing(best)
    return Report(
        definition=definition,
        environment=file.environment,
        slo=material.slo,
        status=str(file.status),
        decision="" if conclusion is None else str(conclusion.decision),
        wording=material.wording,
        headline=_headline(material, best),
        warnings=_warnings(material),
        gain=None if conclusion is None else conclusion.gain,
        rounds=0 if conclusion is None else conclusion.rounds,
        noise=None if conclusion is None or math.isnan(conclusion.log_sd) else conclusion.log_sd,
        smallest_claim=None if conclusion is None else conclusion.smallest_claim,
        winner=best,
        winner_config=result.config if result is not None else _config(material, best),
        classes=tuple(_class_row(material, name, rates[name], before, after) for name in definition.workloads),
        flags=_flags(material),
        curves=curves(material.slo, before, after if best != baseline else (), rates),
        findings=_findings(material, before, after if best != baseline else ()),
        path=_path(material, best),
        trials=tuple(_trial_row(material, record) for record in material.trials),
        pareto=pareto(material.trials, baseline, best),
        importance=material.importance,
        trouble=_trouble(material.trials),
        knobs=_knobs(material.trials),
        time_s=_times(material.trials),
        wall_s=sum(record.ended_at - record.started_at for record in material.trials),
        gpu_s=sum(record.ended_at - record.started_at for record in material.trials) * len(definition.gpus),
        notes=(*file.notes, *(() if result is None else (*result.conclusion.notes, *result.notes))),
        reproduce=_reproduce(file, material.space),
        written_at=time.time(),
        quality=quality_rows(material.trials, definition.baseline),
    )


def ref(record: TrialRecord) -> Ref:
    return Ref(record.number, record.replicate)


def spread(capacity: Capacity) -> Estimate:
    """A capacity with the 95 % interval that its own probes give."""
    factor = math.exp(TWO_SIDED_95 * capacity.log_sd)
    return Estimate(capacity.rate_rps, capacity.rate_rps / factor, capacity.rate_rps * factor, len(capacity.probes))


# --- verdict ------------------------------------------------------------------------------------------------------


def _contenders(material: Material) -> tuple[int | None, int | None]:
    """Numbers of the baseline and of the best configuration; before the verdict, the best of the search so far."""
    baseline = next((record.number for record in material.trials if material.is_baseline(record)), None)
    if material.result is not None:
        return baseline, material.result.conclusion.winner
    objectives = [(objective(material, record), record.number) for record in material.trials]
    return baseline, max(((o.value, n) for o, n in objectives if o is not None), default=(0.0, baseline))[1]


def _headline(material: Material, best: int | None) -> str:
    definition, result = material.file.definition, material.result
    base = "the baseline" if definition.baseline else "vLLM's defaults"
    if result is None:
        measured = any(record.state is TrialState.COMPLETE for record in material.trials)
        far = f"Best so far: trial {best}." if measured else "Nothing was measured to its end so far."
        return f"No verdict yet: the study is {material.file.status}. {far}"
    conclusion = result.conclusion
    if conclusion.decision is Decision.IMPROVED:
        if conclusion.gain is None:
            return f"Improved: {base} keeps the SLO at no rate, the configuration below does."
        return (
            f"Improved: {conclusion.gain.value:.2f} times the {material.wording.noun} of {base} "
            f"(95 %: {conclusion.gain.low:.2f} to {conclusion.gain.high:.2f})."
        )
    if conclusion.decision is Decision.KEEP_DEFAULTS:
        claim = "" if math.isinf(conclusion.smallest_claim) else f" above {conclusion.smallest_claim:.0%}"
        return f"Keep {base}: nothing that was tried is better{claim} beyond the noise."
    miss = conclusion.nearest
    near = "" if miss is None else f" Nearest: trial {miss.number}, {miss.excess:.0%} over {miss.limit}."
    return f"No feasible configuration: nothing that was tried keeps the SLO.{near}"


def _warnings(material: Material) -> tuple[str, ...]:
    found = []
    if any(record.simulated for record in material.trials):
        found.append("SIMULATED: measured on the simulator. Nothing here is a result about vLLM.")
    if len(material.file.machines) > 1:
        found.append(f"{len(material.file.machines)} machines of the same kind contributed; each has its own baseline.")
    invalid = sum(not probe.validity.valid for record in material.trials for probe in all_probes(record))
    if invalid:
        found.append(f"{invalid} probes were invalid (the client, not the server, was measured) and count for nothing.")
    degraded = sorted({f"trial {r.number}: {text}" for r in material.trials for text in r.degraded})
    return (*found, *degraded, *probe_notes(material.trials))


def _reproduce(file: StudyFile, space: Space | None) -> tuple[str, ...]:
    """Command lines; `inputs.json` beside `slo.yaml` holds the workloads for comparison."""
    definition, budget = file.definition, file.definition.budget
    folder = f"results/{definition.name}"
    words = [
        "tune",
        "run",
        "--vllm",
        definition.vllm,
        "--model",
        definition.model,
        "--slo",
        f"{folder}/inputs/slo.yaml",
    ]
    words += [word for name, value in definition.baseline.items() for word in ("--baseline", f"{name}={value}")]
    for knob in space.knobs if space is not None else ():
        words += ["--space", f"{knob.name}={','.join(map(value_text, knob.values))}"]
    asked = {
        "--trials": budget.trials,
        "--wall": None if budget.wall_s is None else f"{budget.wall_s:g}s",
        "--gpu-hours": None if budget.gpu_s is None else f"{budget.gpu_s / 3600:g}",
        "--gpus": ",".join(map(str, definition.gpus)) or None,
        "--objective": None if definition.objective == "capacity" else definition.objective,
        "--rate": definition.rate_rps,
        "--finish-rounds": definition.finish_rounds,
        "--speed": definition.speed,
        "--seed": definition.seed,
    }
    words += [word for name, value in asked.items() if value is not None for word in (name, str(value))]
    words += ["--allow-lossy"] if definition.lossy_allowed else []
    fixed = [f"{name}={value_text(value)}" for name, value in definition.fixed.items()]
    again = shlex.join(words) + (f"   # with the same vLLM flags after `--`: {', '.join(fixed)}" if fixed else "")
    verified = (f"tune verify {folder}/best.yaml",) if file.result is not None else ()
    return (*verified, again, f"tune report {folder}")


# --- classes and flags --------------------------------------------------------------------------------------------


def _class_row(
    material: Material, name: str, rates: RatePair, before: Sequence[TrialRecord], after: Sequence[TrialRecord]
) -> ClassRow:
    verdict = None if material.result is None else material.result.conclusion.classes.get(name)
    promises = [material.slo.classes[name]] if name in material.slo.classes else list(material.slo.classes.values())
    return ClassRow(
        workload=name,
        weight=material.weights[name],
        limits=tuple(dict.fromkeys(limit_text(limit) for promise in promises for limit in promise.limits)),
        baseline=rates.baseline,
        best=rates.best,
        gain=rates.gain,
        regret=None if verdict is None else verdict.regret,
        class_best=None if verdict is None else verdict.best,
        baseline_refs=tuple(map(ref, before)),
        best_refs=tuple(map(ref, after)),
    )


def _flags(material: Material) -> tuple[FlagRow, ...]:
    result, baseline = material.result, material.file.definition.baseline
    if result is None:
        return ()
    effects = {effect.flag: effect for effect in result.effects}
    rows = []
    for name in dict.fromkeys((*changed_flags(result.config, baseline), *effects)):
        effect = effects.get(name)
        if effect is None:
            note = "not examined alone"
        elif name in result.dropped:
            note = f"left out: {setting_text(effect.value)} made no difference that could be shown"
        elif effect.effect is None:
            note = "needed: without it the server does not run or keeps the SLO at no rate"
        else:
            note = "makes a difference" if effect.matters else NOT_SHOWN
        rows.append(
            FlagRow(
                name=name,
                before=baseline.get(name),
                after=result.config.get(name),
                effect=None if effect is None else effect.effect,
                note=note,
                refs=_without(material, name),
                kept=name not in result.dropped,
            )
        )
    return tuple(rows)


def _without(material: Material, flag: str) -> tuple[Ref, ...]:
    """The runs that left the flag out of the winner; where it is the only one, those of the baseline."""
    assert material.result is not None
    winner, baseline = material.result.conclusion.winner, material.file.definition.baseline
    ablated = [
        record
        for record in material.trials
        if record.step.kind is StepKind.ABLATION
        and record.number != winner
        and record.config.get(flag) == baseline.get(flag)
    ]
    return tuple(map(ref, ablated or material.standing(winner)[0]))


def _findings(
    material: Material, before: Sequence[TrialRecord], after: Sequence[TrialRecord]
) -> tuple[FindingRow, ...]:
    return (*findings(material.slo, before, "baseline"), *findings(material.slo, after, "best"))


# --- trials -------------------------------------------------------------------------------------------------------


def _trial_row(material: Material, record: TrialRecord) -> TrialRow:
    return TrialRow(
        ref=ref(record),
        kind=str(record.step.kind),
        change=change_text(record, material.file.definition.baseline),
        reason=record.step.reason,
        state=str(record.state),
        objective=objective(material, record),
        predicted=record.predicted,
        rates={name: spread(capacity) for name, capacity in record.capacities.items()},
        failure="" if record.failure is None else record.failure.cause,
        config=record.config,
        started_at=record.started_at,
        duration_s=record.ended_at - record.started_at,
        round=record.round,
        simulated=record.simulated,
    )


def _path(material: Material, best: int | None) -> tuple[PathStep, ...]:
    """The search trials from the baseline to the best, each stepped from the one before."""
    searched = {r.number: r for r in reversed(material.trials) if r.round is None and r.step.kind not in FINISHING}
    chain: list[TrialRecord] = []
    number = best
    while number in searched and searched[number] not in chain:
        chain.insert(0, searched[number])
        number = searched[number].step.from_trial
    steps: list[PathStep] = []
    before: Estimate | None = None
    for record in chain:
        value = objective(material, record)
        factor = None if value is None or before is None else value.value / before.value
        change = change_text(record, material.file.definition.baseline)
        steps.append(PathStep(ref(record), change, record.step.reason, value, factor))
        before = value or before
    return tuple(steps)


def objective(material: Material, record: TrialRecord) -> Estimate | None:
    """A record's objective over the baseline of its own machine, in its own round where it has one.

    The interval holds the spread of the probes alone, of this record and of the baseline's: what one start differs from
    the next by comes on top (`Report.noise`).
    """
    names = material.file.definition.workloads
    here = [r for r in material.trials if r.machine == record.machine and r.state is TrialState.COMPLETE]
    baselines = [r for r in here if r.step.kind is StepKind.BASELINE and material.is_baseline(r)]
    if record.round is not None:
        baselines = [r for r in here if r.round == record.round and material.is_baseline(r)] or baselines
    kind = material.file.definition.objective
    value = evaluate(record, reference_rates(baselines, names, kind), material.weights, kind).objective
    if value is None:
        return None
    spread_2 = sum(
        weight**2
        * (
            _log_variance(record, name, kind)
            + sum(_log_variance(r, name, kind) for r in baselines) / len(baselines) ** 2
        )
        for name, weight in material.weights.items()
    )
    factor = math.exp(TWO_SIDED_95 * math.sqrt(spread_2))
    probes = [probe for probe in all_probes(record) if probe.classes]
    return Estimate(value, value / factor, value * factor, len(probes))


def _log_variance(record: TrialRecord, workload: str, objective: str) -> float:
    """Of the logarithm of a value, as its own probes tell it."""
    if objective == Objective.CAPACITY:
        capacity = record.capacities.get(workload)
        return 0.0 if capacity is None else capacity.log_sd**2
    logs = [math.log(value) for value in window_values(record, workload, objective)]
    return variance(logs) / len(logs) if len(logs) > 1 else 0.0


def _config(material: Material, number: int | None) -> Config:
    return next((record.config for record in material.trials if record.number == number), {})


# --- what does not run, and where the time went -------------------------------------------------------------------


def _trouble(trials: Sequence[TrialRecord]) -> tuple[TroubleRow, ...]:
    by_kind: dict[str, list[TrialRecord]] = {}
    for record in trials:
        if record.failure is not None:
            by_kind.setdefault(record.failure.kind, []).append(record)
    rows = []
    for kind, records in by_kind.items():
        failure = records[0].failure
        assert failure is not None
        configs = tuple(dict.fromkeys(config_text(record.config) for record in records))
        rows.append(
            TroubleRow(
                kind=kind,
                verdict=str(failure.verdict),
                cause=failure.cause,
                explanation=failure.explanation,
                remedy=failure.remedy,
                configs=configs,
                refs=tuple(map(ref, records)),
            )
        )
    return tuple(sorted(rows, key=lambda row: -len(row.refs)))


def _knobs(trials: Sequence[TrialRecord]) -> tuple[KnobValues, ...]:
    ran: dict[str, set[KnobValue]] = {}
    failed: dict[str, set[KnobValue]] = {}
    for record in trials:
        if record.state in (TrialState.COMPLETE, TrialState.SCREENED, TrialState.INFEASIBLE):
            where = failed if record.state is TrialState.INFEASIBLE else ran
            for name, value in record.config.items():
                where.setdefault(name, set()).add(value)
    return tuple(
        KnobValues(name, _ordered(ran.get(name, set())), _ordered(failed.get(name, set()) - ran.get(name, set())))
        for name in sorted({*ran, *failed})
    )


def _ordered(values: set[KnobValue]) -> tuple[KnobValue, ...]:
    numbers = sorted(value for value in values if not isinstance(value, str))
    return (*numbers, *sorted(value for value in values if isinstance(value, str)))


def _times(trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Seconds by phase, all trials together; measuring is what windows scored, waiting the ramps and drains around."""
    total: dict[str, float] = {"start-up": 0.0, "warm-up": 0.0, "scored windows": 0.0, "ramps and drains": 0.0}
    total |= {"stop and settle": 0.0, "comparing answers": 0.0, "preparation": 0.0, "between": 0.0}
    for record in trials:
        phases = record.phases
        scored = sum(probe.window_s for probe in all_probes(record) if probe.classes)
        total["preparation"] += phases.prepare_s
        total["start-up"] += phases.launch_s
        total["warm-up"] += phases.warm_up_s
        total["scored windows"] += min(scored, phases.measure_s)
        total["ramps and drains"] += max(0.0, phases.measure_s - scored)
        total["stop and settle"] += phases.stop_s + phases.settle_s
        total["comparing answers"] += phases.quality_s
        total["between"] += max(0.0, record.ended_at - record.started_at - phases.total_s)
    return {name: seconds for name, seconds in total.items() if seconds > 0}
