"""How many requests a verdict at a given rate takes, and windows that hold them; it measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from tuner.capacity import ProbeSettings
from tuner.records import ClassSlo
from tuner.stats import wilson

_SPARE = 2.0
"""A server that is slightly better than promised still has a few late answers among the fewest requests that prove."""


def requests_to_prove(percentile: float, looks: int) -> int | None:
    """Fewest requests, all within the limit, whose Wilson interval at 1 - 0.05/looks lies above `percentile`.

    n / (n + z²) ≥ p, solved for n. None for 100: no number proves that.
    """
    if percentile >= 100:
        return None
    share, confidence = percentile / 100, 1 - 0.05 / looks
    n = math.ceil(NormalDist().inv_cdf(0.5 + confidence / 2) ** 2 * share / (1 - share))
    while wilson(n, n, confidence).low < share:  # by rounding
        n += 1
    return n


def hardest_promise(
    slos: Mapping[str, ClassSlo], shares: Mapping[str, float], looks: int
) -> tuple[float | None, int | None]:
    """The percentile that takes most requests to prove, and how many; (None, 0) where no limit is promised.

    `shares`: each class's part of the requests; the answer counts the requests of all classes together.
    """
    percentile, most = None, 0
    for name, slo in slos.items():
        for limit in slo.limits:
            needed = requests_to_prove(limit.percentile, looks)
            if needed is None:
                return limit.percentile, None
            if needed / shares[name] > most:
                percentile, most = limit.percentile, math.ceil(needed / shares[name])
    return percentile, most


def window_at(rate_rps: float, needed: int | None, looks: int, settings: ProbeSettings) -> float:
    """Seconds of one window, so that `looks` of them hold twice what is needed, as far as the settings allow."""
    wanted = _SPARE * (needed or 0) / looks / rate_rps
    return min(settings.window_cap_s, max(settings.window_for(rate_rps), wanted))
