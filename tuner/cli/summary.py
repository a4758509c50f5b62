"""The result of a study on the console: verdict first, then classes, flags and what to do with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.live import STATES, seconds, shown
from tuner.records import Config, Estimate, TrialRecord
from tuner.store import ResultsFolder

if TYPE_CHECKING:
    from tuner.export import Rate, RatePair, Wording
    from tuner.finish import FlagEffect
    from tuner.study import StudyFile, StudyResult

MOST_SHOWN = 8
"""Configurations of an unfinished study that are listed; the report has them all."""


def summary(file: StudyFile, folder: Path, files: tuple[Path, ...]) -> str:
    """The text that `tune run` ends with; of an unfinished study, what the search has seen so far."""
    from tuner.export import answers_text, rate_pairs, wording

    result, trials = file.result, ResultsFolder(folder).trials()
    if result is None:
        head = f"{file.definition.name}: no verdict yet; go on with `tune run --resume {folder}`"
        return "\n".join([head, *_unfinished(file, ResultsFolder(folder), trials)])
    said = wording(file.definition.objective, file.definition.rate_rps)
    lines = [f"Verdict: {verdict_line(result, bool(file.definition.baseline), said)}"]
    if result.simulated:
        lines.append("SIMULATED: measured on the simulator; it says nothing about vLLM.")
    lines += ["", *class_table(rate_pairs(file, trials, result.conclusion.winner), said), said.about]
    lines += ["", *flag_lines(file.definition.baseline, result, said)]
    winner = result.conclusion.winner
    if winner is not None and (answers := result.quality.get(winner)) is not None:
        lines.append(f"Answers: {answers_text(answers)}")
    lines += [f"note: {note}" for note in (*result.conclusion.notes, *result.notes, *file.notes)]
    lines += [
        "",
        f"{result.search_trials} configurations, {result.runs} runs in the finish, {seconds(result.wall_s)} of trials",
    ]
    lines += [f"{'results:':10}{folder}", *(f"{'':10}{path}" for path in files)]
    return "\n".join(lines)


def verdict_line(result: StudyResult, own_baseline: bool, said: Wording) -> str:
    conclusion, baseline = result.conclusion, "the baseline" if own_baseline else "vLLM's defaults"
    gain = conclusion.gain
    if conclusion.decision == "improved":
        if gain is None:
            return f"improved – {baseline} keep the SLO at no rate, the configuration below does"
        return f"improved – {interval(gain)} the {said.noun} of {baseline} ({conclusion.rounds} interleaved rounds)"
    if conclusion.decision == "keep-defaults":
        name = "keep the baseline" if own_baseline else "keep-defaults"
        if gain is None:
            return f"{name} – the search found nothing to set against {baseline}"
        return f"{name} – the best rival has {interval(gain)} the {said.short}, which is no proof of a gain"
    miss = conclusion.nearest
    nearest = f"; the nearest is trial {miss.number}, {miss.excess:+.0%} over {miss.limit}" if miss is not None else ""
    return f"no-feasible – no configuration keeps the SLO{nearest}"


def interval(estimate: Estimate) -> str:
    """`1.31× (95 %: 1.24–1.38)`."""
    high = "∞" if math.isinf(estimate.high) else f"{estimate.high:.2f}"
    return f"{estimate.value:.2f}× (95 %: {estimate.low:.2f}–{high})"


def class_table(rates: Mapping[str, RatePair], said: Wording) -> list[str]:
    alone = " (each class by itself)" if len(rates) > 1 else ""
    rows = [(f"{said.noun}, {said.unit}", "baseline", "best", f"best ÷ baseline{alone}")]
    for name, pair in rates.items():
        rows.append((name, _rate(pair.baseline), _rate(pair.best), "–" if pair.gain is None else interval(pair.gain)))
    return _aligned(rows)


def flag_lines(baseline: Config, result: StudyResult, said: Wording) -> list[str]:
    from tuner.finish import changed_flags

    changed = changed_flags(result.config, baseline)
    effects = {effect.flag: effect for effect in result.effects}
    lines = [f"Flags that were changed ({said.short} with ÷ without):" if changed else "Flags: none to change"]
    for name in changed:
        if name in result.config:
            before = shown(baseline[name]) if name in baseline else "vLLM's default"
            line = f"--{name} {shown(result.config[name])}  (was {before})"
        else:
            line = f"--{name} {shown(baseline[name])} → vLLM's default"
        lines.append(f"  {line}: {_effect(effects.get(name))}")
    if result.dropped:
        names = ", ".join(f"--{name}" for name in result.dropped)
        lines.append(f"Left out, because no difference could be shown: {names}")
    return lines


def so_far(trials: Sequence[TrialRecord], baseline: Config, objectives: Mapping[int, float]) -> list[str]:
    """Configurations of a search, best first, each with its change; `objectives` over the baseline, by number."""
    from tuner.report.words import change_text

    first = {record.number: record for record in reversed(trials) if record.round is None}
    if not first:
        return []
    order = sorted(first, key=lambda number: (-objectives.get(number, 0.0), number))
    rows = [("trial", "÷ baseline", "change")]
    for number in order[:MOST_SHOWN]:
        value = f"{objectives[number]:.2f}×" if number in objectives else STATES[first[number].state]
        rows.append((str(number), value, change_text(first[number], baseline)))
    more = len(order) - MOST_SHOWN
    return [
        "so far (search values, not verified):",
        *_aligned(rows),
        *([f"and {more} more: `tune report`"] if more > 0 else []),
    ]


def _unfinished(file: StudyFile, folder: ResultsFolder, trials: Sequence[TrialRecord]) -> list[str]:
    from tuner.report.build import Material, objective
    from tuner.report.study import in_order
    from tuner.study.inputs import kept

    if not trials:
        return []
    material = Material(file, kept(folder).slo, in_order(trials), {})
    values: dict[int, list[float]] = {}
    for record in material.trials:
        value = objective(material, record) if record.round is None else None
        if value is not None:
            values.setdefault(record.number, []).append(math.log(value.value))
    means = {number: math.exp(sum(logs) / len(logs)) for number, logs in values.items()}
    return so_far(material.trials, file.definition.baseline, means)


def _rate(rate: Rate | None) -> str:
    return "–" if rate is None else f"{rate.mark}{rate.value:.3g}"


def _effect(effect: FlagEffect | None) -> str:
    from tuner.export import NOT_SHOWN

    if effect is None:
        return "not examined alone"
    if effect.effect is None:
        return "does not run without it, or keeps the SLO at no rate"
    return interval(effect.effect) + ("" if effect.matters else f"; {NOT_SHOWN}")


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as columns: the first and last to the left, those between to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([f"{row[0]:{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in range(1, len(widths))), row[-1]])
        for row in rows
    ]
