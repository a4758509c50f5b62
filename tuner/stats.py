"""Intervals and comparisons for small samples; it owns formulae with their sources and refuses to decide anything.

All intervals are two-sided at the stated confidence. Rates and capacities are compared on logarithms, because their
spread is proportional to their size. SciPy is imported inside the functions that need it: it is slow to load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean

from tuner.records import Estimate


def wilson(successes: float, n: int, confidence: float = 0.95) -> Estimate:
    """Share successes ÷ n with the Wilson score interval.

    Wilson (1927), J. Am. Stat. Assoc. 22, 209; recommended for small n by Brown, Cai and DasGupta (2001), Stat. Sci.
    16, 101. With n = 0 nothing is known: the value is NaN and the interval 0..1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    share = successes / n
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At the edges the formula gives 0 and 1 up to rounding only.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Estimate(share, low, high, n)


def percentile(
    values: Sequence[float], q: float, confidence: float = 0.95, *, independent: int | None = None
) -> Estimate:
    """The q-th percentile (0 < q ≤ 100) with a distribution-free interval from order statistics.

    The value is the smallest observation with at least q % of all observations at or below it (type 1 of Hyndman and
    Fan (1996), Am. Stat. 50, 361), so that `percentile ≤ limit` and `share within limit ≥ q %` are the same statement
    and infinities need no arithmetic. The interval takes the ranks l and u with P(l ≤ Bin(n, q) < u) ≥ confidence
    (Hahn and Meeker (1991), Statistical Intervals, 5.2). Where the sample is too small to bound it, it ends in 0 or
    infinity. `independent`: number of independent groups that the values come from (gaps of one request are not
    independent); the ranks are then those of that many observations, spread over the sorted values.
    """
    if not values:
        raise ValueError("percentile of nothing")
    if not 0 < q <= 100:
        raise ValueError(f"percentile {q}")
    return sorted_percentile(sorted(values), q, confidence, independent=independent)


def sorted_percentile(
    ordered: Sequence[float], q: float, confidence: float = 0.95, *, independent: int | None = None
) -> Estimate:
    """`percentile` of values that are sorted already; not checked."""
    n = len(ordered)
    groups = min(independent or n, n)
    low_rank, high_rank = _ranks(groups, q, confidence)
    low = 0.0 if low_rank < 1 else ordered[_rank(100 * low_rank / groups, n) - 1]
    high = math.inf if high_rank > groups else ordered[_rank(100 * high_rank / groups, n) - 1]
    return Estimate(ordered[_rank(q, n) - 1], low, high, n)


def _rank(q: float, n: int) -> int:
    # Rounded first: 0.99 × 100 must be rank 99, not 100.
    return min(n, max(1, math.ceil(round(q * n / 100, 9))))


@lru_cache(maxsize=4096)
def _ranks(n: int, q: float, confidence: float) -> tuple[int, int]:
    from scipy.special import bdtr, bdtrik

    share, tail = q / 100, (1 - confidence) / 2
    if share >= 1:
        return 0, n + 1

    def quantile(level: float) -> int:
        # bdtrik is the continuous inverse; one step either way makes it the smallest k with P(Bin ≤ k) ≥ level.
        k = max(0, math.ceil(float(bdtrik(level, n, share))))
        return k - 1 if k > 0 and float(bdtr(k - 1, n, share)) >= level else k

    return quantile(tail), quantile(1 - tail) + 1


def log_ratio_interval(ours: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Ratio of geometric means, ours ÷ baseline, with Student's t interval on the logarithms; n is the smaller count.

    The spread is pooled over both samples. Unbounded where none is known (one value each).
    """
    samples = [[math.log(value) for value in group] for group in (_positive(ours), _positive(baseline))]
    means = [fmean(logs) for logs in samples]
    difference, df = means[0] - means[1], len(ours) + len(baseline) - 2
    n = min(len(ours), len(baseline))
    if df == 0:
        return Estimate(math.exp(difference), 0.0, math.inf, n)
    square = sum((value - mean) ** 2 for logs, mean in zip(samples, means, strict=True) for value in logs) / df
    half = _t(confidence, df) * math.sqrt(square * (1 / len(ours) + 1 / len(baseline)))
    return Estimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half), n)


def equivalent(ratio: Estimate, margin: float) -> bool:
    """Whether a ratio is shown to lie within ±margin of one (0.03: between 1/1.03 and 1.03).

    The two one-sided tests of Schuirmann (1987), J. Pharmacokinet. Biopharm. 15, 657: pass an interval at 90 %
    confidence for a test at 5 %. False also where the interval is too wide to tell.
    """
    return ratio.low >= 1 / (1 + margin) and ratio.high <= 1 + margin


def _t(confidence: float, df: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, 0.5 + confidence / 2))


def _positive(values: Sequence[float]) -> Sequence[float]:
    if any(not math.isfinite(value) or value <= 0 for value in values):
        raise ValueError("logarithms need finite values above zero")
    return values
