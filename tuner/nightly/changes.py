"""Change points over many nights, by Apache Otava; it only translates, and says so where Otava is not installed.

Otava's `Series.analyze` is its E-divisive search with Student's t test ("Hunter", Fleming et al. (2023),
doi:10.1145/3578244.3583719). Its package asks for much that finding change points does not need, so it is optional.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

P_VALUE = 0.0002
AFTER = 3
"""Nights that must lie on either level before a change point is believed: one odd night is none."""

NOT_INSTALLED = "change points over nights were not looked for: pip install 'vllm-tune[nightly]' brings Apache Otava"


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """The level of a series changed between two nights."""

    index: int  # of the first value on the new level
    effect: float  # relative: −0.04 is a loss of 4 %
    probability: float


def change_points(values: Sequence[float], minimum_effect: float) -> tuple[ChangePoint, ...] | None:
    """Of positive values in the order of time; None where Otava is not installed.

    `minimum_effect` is relative; smaller changes are not reported, whatever their probability.
    """
    try:
        otava = importlib.import_module("otava.series")
    except ModuleNotFoundError:
        return None
    if len(values) < 2 * AFTER:
        return ()
    options = otava.AnalysisOptions()
    options.max_pvalue, options.min_magnitude = P_VALUE, minimum_effect
    # On logarithms a spread is the same at every level. Otava measures changes relative to the mean, so the series is
    # moved far enough from zero that relative and absolute changes of the logarithm agree: log(value) + 1 near 1.
    centre = sum(map(math.log, values)) / len(values)
    moved = [1 + math.log(value) - centre for value in values]
    series = otava.Series(
        "nightly", None, list(range(len(moved))), {"capacity": otava.Metric(1, 1.0)}, {"capacity": moved}, {}
    )
    found = series.analyze(options).change_points["capacity"]
    return tuple(
        ChangePoint(
            int(point.index), math.expm1(float(point.mean_after()) - float(point.mean_before())), float(point.pvalue())
        )
        for point in found
        if AFTER <= point.index <= len(values) - AFTER
    )
