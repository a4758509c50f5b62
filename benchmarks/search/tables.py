"""Results to tables: means with standard errors over scenarios, targets, Markdown; it measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.search.finish import BANDS, Finished
from benchmarks.search.study import BUDGET_MIN, Result
from tuner.finish import Decision

FALSE, MISSED = 0.005, 0.05
"""`improved` at a true gain below the first is wrong; so is `keep-defaults` where more than the second was there."""


def rows_of(results: Sequence[Result], searcher: str, scenario: str | None = None) -> list[Result]:
    return [r for r in results if r.searcher == searcher and scenario in (None, r.scenario)]


def wrong(result: Result) -> bool:
    """Whether the verdict of a search is false, or misses what was to be had."""
    if result.verdict == Decision.IMPROVED:
        return result.gain <= 1 + FALSE
    return result.optimum > 1 + MISSED


def over_scenarios(results: Sequence[Result], searcher: str, value: str) -> tuple[float, float]:
    """Mean of a field over scenario means, and its standard error over scenarios (0 for a single one)."""
    names = sorted({r.scenario for r in results})
    means = [statistics.fmean(float(getattr(r, value)) for r in rows_of(results, searcher, n)) for n in names]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return statistics.fmean(means), error


def ratio(results: Sequence[Result], ours: str, other: str) -> tuple[float, float]:
    """Mean minutes of one searcher ÷ another's, with its standard error over scenarios (delta method; 0 for one)."""
    names = sorted({r.scenario for r in results})
    pairs = [tuple(statistics.fmean(r.minutes for r in rows_of(results, s, n)) for s in (ours, other)) for n in names]
    mine, theirs = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    quotient = mine / theirs
    if len(pairs) < 2:
        return quotient, 0.0
    spread = statistics.stdev(a - quotient * b for a, b in pairs)
    return quotient, spread / math.sqrt(len(pairs)) / theirs


def summary(results: Sequence[Result], searchers: Sequence[str]) -> str:
    """One line a searcher, over all scenarios."""
    lines = [
        f"| searcher, {BUDGET_MIN:.0f} min budget | mean min to 97 % (miss = {BUDGET_MIN:.0f}) ± s.e. | median "
        "| reached | final regret ± s.e. | crashes | wrong verdicts |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in searchers:
        mine = rows_of(results, name)
        minutes, minutes_error = over_scenarios(results, name, "minutes")
        regret, regret_error = over_scenarios(results, name, "regret")
        lines.append(
            f"| {name} | {minutes:.0f} ± {minutes_error:.0f} | {statistics.median(r.minutes for r in mine):.0f} "
            f"| {statistics.fmean(r.reached for r in mine):.2f} | {regret:.1%} ± {regret_error:.1%} "
            f"| {sum(r.crashes for r in mine) / sum(r.trials for r in mine):.0%} "
            f"| {statistics.fmean(wrong(r) for r in mine):.2f} |"
        )
    return "\n".join(lines)


def by_scenario(results: Sequence[Result], searchers: Sequence[str]) -> str:
    """Mean minutes (and share reached) of every searcher in every scenario."""
    lines = ["| scenario (optimum) | " + " | ".join(searchers) + " |", "|---" * (len(searchers) + 1) + "|"]
    for scenario in dict.fromkeys(r.scenario for r in results):
        cells = []
        for name in searchers:
            mine = rows_of(results, name, scenario)
            minutes = statistics.fmean(r.minutes for r in mine)
            cells.append(
                f"{minutes:.0f} ({statistics.fmean(r.reached for r in mine):.2f}; "
                f"{statistics.fmean(r.regret for r in mine):.1%})"
            )
        optimum = next(r.optimum for r in results if r.scenario == scenario)
        lines.append(f"| {scenario} (×{optimum:.2f}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def targets(results: Sequence[Result], ours: str, searchers: Sequence[str]) -> str:
    """What was promised, and what was found."""
    lines = ["| promise | found | kept |", "|---|---|---|"]

    def line(promise: str, found: str, kept: bool) -> None:
        lines.append(f"| {promise} | {found} | {'yes' if kept else '**no**'} |")

    for other, limit in (("TPE", 0.55), ("TPE + screening", 0.75)):
        if other in searchers:
            quotient, error = ratio(results, ours, other)
            line(f"≤ {limit} × the mean minutes of {other}", f"{quotient:.2f} ± {error:.2f}", quotient <= limit)
    reached = statistics.fmean(r.reached for r in rows_of(results, ours))
    line("97 % reached within the budget in ≥ 95 % of runs", f"{reached:.1%}", reached >= 0.95)
    regret, _ = over_scenarios(results, ours, "regret")
    line("final regret ≤ 1 % in the mean", f"{regret:.2%}", regret <= 0.01)
    worst, where = 0.0, ""
    for scenario in dict.fromkeys(r.scenario for r in results):
        minutes = {n: statistics.fmean(r.minutes for r in rows_of(results, n, scenario)) for n in searchers}
        best = min((value for name, value in minutes.items() if name != ours), default=math.inf)
        worst, where = max((worst, where), (minutes[ours] / best, scenario))
    line("in no scenario slower than 1.3 × the best rival", f"{worst:.2f} ({where})", worst <= 1.3)
    return "\n".join(lines)


def verdicts(finished: Sequence[Finished]) -> str:
    """Shares of `improved` and coverage by true gain."""
    lines = [
        "| true gain of the best finalist | finishes | `improved` | interval holds the truth |",
        "|---|---|---|---|",
    ]
    for low, high in BANDS:
        mine = [f for f in finished if low <= f.true_gain <= high]
        if mine:
            name = f"≤ {high:.1%}" if low < 0 else f"{low:.0%}–{high:.0%}" if high < 1 else f"> {low:.0%}"
            improved = statistics.fmean(f.decision is Decision.IMPROVED for f in mine)
            covered = statistics.fmean(f.covered for f in mine)
            lines.append(f"| {name} | {len(mine)} | {improved:.1%} | {covered:.1%} |")
    covered = statistics.fmean(f.covered for f in finished)
    lines.append(f"| all | {len(finished)} | | {covered:.1%} |")
    return "\n".join(lines)


def by_noise(finished: Sequence[Finished]) -> str:
    """`improved` by scenario: what decides is how much a start differs from the next."""
    names = ["≤ 0.5 %", "8–15 %", "> 15 %"]
    lines = ["| scenario | " + " | ".join(names) + " | rounds in the mean |", "|---|---|---|---|---|"]
    for scenario in dict.fromkeys(f.scenario for f in finished):
        mine = [f for f in finished if f.scenario == scenario]
        cells = []
        for low, high in BANDS:
            inside = [f.decision is Decision.IMPROVED for f in mine if low <= f.true_gain <= high]
            cells.append(f"{statistics.fmean(inside):.0%}" if inside else "–")
        lines.append(f"| {scenario} | " + " | ".join(cells) + f" | {statistics.fmean(f.rounds for f in mine):.1f} |")
    return "\n".join(lines)
