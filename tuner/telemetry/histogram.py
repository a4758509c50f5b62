"""Histograms with fixed buckets: differences over time and quantiles with their resolution; pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by bucket; the unit is that of the observed quantity."""

    bounds: tuple[float, ...]  # upper bounds, ascending, the last one infinite; empty where only the sum was read
    cumulative: tuple[float, ...]  # observations at or below each bound
    sum: float
    count: float

    def minus(self, earlier: Histogram) -> Histogram:
        """What was observed since `earlier`; a histogram that shrank was reset in between and counts from zero."""
        if earlier.bounds != self.bounds or self.count < earlier.count:
            return self
        return Histogram(
            self.bounds,
            tuple(max(0.0, now - then) for now, then in zip(self.cumulative, earlier.cumulative, strict=True)),
            self.sum - earlier.sum,
            self.count - earlier.count,
        )

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count > 0 else None

    def bracket(self, q: float) -> tuple[float, float] | None:
        """Lower and upper bound of the bucket that holds quantile `q` (0..1); None without observations."""
        if self.count <= 0 or not self.bounds:
            return None
        lower = 0.0
        for bound, below in zip(self.bounds, self.cumulative, strict=True):
            if below >= q * self.count:
                return lower, bound
            lower = bound
        return lower, math.inf

    def quantile(self, q: float) -> float | None:
        """Linear within its bucket, as Prometheus' `histogram_quantile`; the lower bound where the bucket is open."""
        bracket = self.bracket(q)
        if bracket is None:
            return None
        lower, upper = bracket
        if math.isinf(upper):
            return lower
        index = self.bounds.index(upper)
        below = self.cumulative[index - 1] if index else 0.0
        inside = self.cumulative[index] - below
        return upper if inside <= 0 else lower + (upper - lower) * (q * self.count - below) / inside

    def bucket_width(self, q: float) -> float | None:
        """Width of that bucket: how far `quantile` can be from the truth; infinite in the open bucket."""
        bracket = self.bracket(q)
        return None if bracket is None else bracket[1] - bracket[0]
