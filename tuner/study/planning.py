"""What a study will do and about what it will cost, before anything runs."""

from __future__ import annotations

import math
from typing import Any

from tuner.records import ClassSlo, StudyDefinition
from tuner.study.budget import finish_s, limit_s
from tuner.study.inputs import Inputs
from tuner.study.speeds import SPEEDS


def plan_of(definition: StudyDefinition, inputs: Inputs) -> dict[str, Any]:
    """The plan as plain data: `slo` by class, `combinations`, `cost` (texts and the guess of one trial in seconds)."""
    budget, speed = definition.budget, SPEEDS[definition.speed]
    trial_s, rounds = speed.guess_s, definition.finish_rounds
    proof_s = finish_s(budget, len(definition.gpus), trial_s * speed.run_factor, rounds, 2)
    most = definition.most_finish_rounds
    more = f" (up to {most} where a gain stays open and time allows)" if most > rounds else ""
    limits = []
    if budget.trials is not None:
        limits.append(f"{budget.trials} configurations in all, unless nothing worth trying is left")
    if budget.wall_s is not None:
        limits.append(f"{budget.wall_s / 3600:.1f} h of wall time")
    if budget.gpu_s is not None:
        limits.append(f"{budget.gpu_s / 3600:.1f} GPU hours")
    search_s = math.inf if budget.trials is None else (budget.trials + speed.baseline_replicates - 1) * trial_s
    total_s = min(search_s + proof_s, limit_s(budget, len(definition.gpus)))
    gpus = max(1, len(definition.gpus))
    return {
        "model": definition.model,
        "slo": {
            name: limits_text(inputs.slo.classes[name]) for name in definition.workloads if name in inputs.slo.classes
        },
        "combinations": math.prod(len({*knob.values, knob.default}) for knob in inputs.space.knobs),
        "knobs": {knob.name: list(knob.values) for knob in inputs.space.knobs},
        "notes": list(inputs.notes),
        "cost": {
            "search": f"{speed.baseline_replicates} × the baseline, then " + "; ".join(limits),
            "finish": f"{rounds} interleaved rounds of baseline and up to 2 finalists{more}, then each flag left out",
            "trial_s": trial_s,
            "total_s": total_s,
            "total": f"up to about {total_s / 3600:.1f} h in all"
            + (f", {total_s * gpus / 3600:.1f} GPU hours" if definition.gpus else ""),
        },
    }


def limits_text(slo: ClassSlo) -> str:
    """`TTFT P99 ≤ 500 ms, TPOT P99 ≤ 40 ms, 99.9 % answered, weight 0.25`."""
    parts = []
    for limit in slo.limits:
        at = "max" if limit.percentile == 100 else f"P{limit.percentile:g}"
        parts.append(f"{limit.metric.value.upper()} {at} ≤ {limit.limit_s * 1000:g} ms")
    return ", ".join([*parts, f"{slo.success * 100:g} % answered", f"weight {slo.weight:.2g}"])
