"""What a comparison says, as lines for the console; shared by `compare`, `verify` and `nightly`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tuner.records import Estimate

if TYPE_CHECKING:
    from tuner.comparison import Comparison, Contrast, SideRate, Verification


def comparison_text(comparison: Comparison, folder: str) -> str:
    """Verdict first, then the classes and how it was measured."""
    from tuner.export import ALONE, POINT_ESTIMATES

    definition, result = comparison.definition, comparison.result
    assert result is not None
    judged = result.against_first[1]
    first, second = definition.sides
    lines = [
        f"Verdict: B is {standing(judged.overall, judged.margin)}",
        f"  A: {first.source}",
        f"  B: {second.source}",
    ]
    if result.simulated:
        lines.append("SIMULATED: measured on the simulator; it says nothing about vLLM.")
    lines += ["", *rate_table(definition.workloads, ("A", "B"), result.rates, judged.classes, judged.margin)]
    lines += [POINT_ESTIMATES, *([ALONE] if len(definition.workloads) > 1 else [])]
    lines += [f"note: {note}" for note in comparison.notes]
    spread = "" if math.isnan(judged.log_sd) else f", spread of one run {judged.log_sd:.1%}"
    lines += ["", f"{definition.rounds} rounds on fresh servers, {result.wall_s:.0f} s{spread}", f"results: {folder}"]
    return "\n".join(lines)


def verification_text(verification: Verification, folder: str) -> str:
    """Verdict, what has changed, and the classes."""
    from tuner.export import POINT_ESTIMATES

    verified, result = verification.verified, verification.comparison.result
    assert result is not None
    ratio = "" if verified.ratio is None else f": {interval(verified.ratio)} the recorded SLO capacity"
    lines = [f"Verdict: {verified.held}{ratio}" + (f"; {verified.reason}" if verified.reason else "")]
    if result.simulated:
        lines.append("SIMULATED: measured on the simulator; it says nothing about vLLM.")
    lines += ["", "changed since the export:" if verified.drift else "nothing has changed since the export"]
    lines += [f"  {drift}" for drift in verified.drift]
    rows = [("SLO capacity", "recorded", "now", "")]
    for name, one in verified.classes.items():
        recorded = "–" if one.recorded_rps is None else f"{one.recorded_rps:.3g}"
        told = "" if one.ratio is None else f"{one.held}: {interval(one.ratio)}"
        rows.append((name, recorded, _rate(one.measured), told))
    lines += ["", *_columns(rows), POINT_ESTIMATES]
    definition = verification.comparison.definition
    lines += ["", f"{definition.rounds} fresh servers, {result.wall_s:.0f} s", f"results: {folder}"]
    return "\n".join(lines)


def standing(contrast: Contrast, margin: float) -> str:
    """`better: 1.12 times (95 %: 1.05 to 1.20, n = 5)`, `same within 5 %: …`, `unresolved: …`."""
    word = f"same within {margin * 100:g} %" if contrast.standing == "same" else str(contrast.standing)
    ratio = "" if contrast.ratio is None else f": {interval(contrast.ratio)} the SLO capacity of A"
    return word + ratio + (f"; {contrast.reason}" if contrast.reason else "")


def interval(ratio: Estimate) -> str:
    high = "unbounded" if math.isinf(ratio.high) else f"{ratio.high:.3f}"
    return f"{ratio.value:.3f} times (95 %: {ratio.low:.3f} to {high}, n = {ratio.n})"


def rate_table(
    workloads: Sequence[str],
    names: Sequence[str],
    rates: Sequence[Mapping[str, SideRate]],
    classes: Mapping[str, Contrast],
    margin: float,
) -> list[str]:
    """SLO capacity of each side by class, requests/s, and how the last side stands."""
    rows = [("SLO capacity", *names, "")]
    for name in workloads:
        contrast = classes.get(name)
        told = "" if contrast is None else standing(contrast, margin)
        rows.append((name, *(_rate(side.get(name)) for side in rates), told))
    return _columns(rows)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first column and the last to the left, those between to the right."""
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last)]
    return [
        "  ".join([f"{row[0]:{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in range(1, last)), row[-1]]).rstrip()
        for row in rows
    ]


def _rate(rate: SideRate | None) -> str:
    return "–" if rate is None else f"{'≥ ' if rate.at_least else ''}{rate.value:.3g}"
