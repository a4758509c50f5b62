"""Intervals and comparisons for small samples; it owns formulae with their sources and refuses to decide anything.

All intervals are two-sided at the stated confidence. Rates and capacities are compared on logarithms, because their
spread is proportional to their size. SciPy is imported inside the functions that need it: it is slow to load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

from tuner.records import Estimate


@dataclass(frozen=True, slots=True)
class Spread:
    """A standard deviation of logarithms and the degrees of freedom behind it."""

    log_sd: float
    df: int


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


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Arithmetic mean with Student's t interval; unbounded for a single value."""
    if not values:
        raise ValueError("mean of nothing")
    n, mean = len(values), fmean(values)
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    half = _t(confidence, n - 1) * _sd(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def log_ratio_interval(
    ours: Sequence[float],
    baseline: Sequence[float],
    pooled_sd: float | None = None,
    df: int | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """Ratio of geometric means, ours ÷ baseline, with Student's t interval on the logarithms; n is the smaller count.

    `pooled_sd` and `df` (from `pooled_spread`) use a spread that all configurations of a finish share; without them
    the spread is pooled over these two samples alone. Unbounded where no spread is known (one value each).
    """
    _require_positive(ours, baseline)
    if (pooled_sd is None) != (df is None):
        raise ValueError("pooled_sd and df belong together")
    spread = pooled_spread((ours, baseline)) if pooled_sd is None or df is None else Spread(pooled_sd, df)
    difference = fmean(map(math.log, ours)) - fmean(map(math.log, baseline))
    scale = math.sqrt(1 / len(ours) + 1 / len(baseline))
    return _ratio(difference, spread, scale, confidence, min(len(ours), len(baseline)))


def paired_log_ratio_interval(
    ours: Sequence[float],
    baseline: Sequence[float],
    pooled: Spread | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """Ratio ours ÷ baseline from rounds in which both were measured, with Student's t interval on the log differences.

    What a whole round shares (its requests, the time of day) cancels out. `pooled`: the spread of one value within a
    round, from `pooled_spread(…, rounds=True)`; without it the spread of the differences themselves is taken.
    """
    if len(ours) != len(baseline):
        raise ValueError(f"{len(ours)} and {len(baseline)} values cannot be paired")
    _require_positive(ours, baseline)
    differences = [math.log(a) - math.log(b) for a, b in zip(ours, baseline, strict=True)]
    n = len(differences)
    if pooled is not None:
        return _ratio(fmean(differences), pooled, math.sqrt(2 / n), confidence, n)
    spread = Spread(_sd(differences), n - 1) if n > 1 else Spread(math.nan, 0)
    return _ratio(fmean(differences), spread, 1 / math.sqrt(n), confidence, n)


def pooled_spread(groups: Sequence[Sequence[float]], *, rounds: bool = False) -> Spread:
    """One standard deviation of log(value) for all configurations: residuals of one-way analysis of variance.

    Pooled over baseline and finalists it has enough degrees of freedom for three rounds. `rounds=True`: the i-th
    values of all groups were measured in the same round, whose common shift is removed as well (two-way layout without
    interaction; both layouts: Montgomery, Design and Analysis of Experiments, 3.2 and 4.1). df = 0 and NaN where
    nothing repeats.
    """
    _require_positive(*groups)
    logs = [[math.log(value) for value in group] for group in groups if group]
    residuals = [[value - fmean(group) for value in group] for group in logs]
    df = sum(len(group) - 1 for group in residuals)
    if rounds:
        if len({len(group) for group in residuals}) > 1:
            raise ValueError("rounds need the same number of values in every group")
        shifts = [fmean(column) for column in zip(*residuals, strict=True)]
        residuals = [[value - shift for value, shift in zip(group, shifts, strict=True)] for group in residuals]
        df -= max(0, len(shifts) - 1)
    if df <= 0:
        return Spread(math.nan, 0)
    return Spread(math.sqrt(sum(value * value for group in residuals for value in group) / df), df)


def noise_floor(replicates: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Standard deviation of log(value) over replicates on fresh servers, with its chi-square interval.

    (n − 1)s²/σ² is chi-square with n − 1 degrees of freedom for normal logarithms (Hahn and Meeker (1991), 4.2). With
    one replicate nothing is known: NaN in 0..∞.
    """
    spread = pooled_spread([replicates])
    if spread.df == 0:
        return Estimate(math.nan, 0.0, math.inf, len(replicates))
    from scipy.special import chdtri  # the inverse of the upper tail

    tail = (1 - confidence) / 2
    square = spread.df * spread.log_sd**2
    low, high = (math.sqrt(square / float(chdtri(spread.df, level))) for level in (tail, 1 - tail))
    return Estimate(spread.log_sd, low, high, len(replicates))


def equivalent(ratio: Estimate, margin: float) -> bool:
    """Whether a ratio is shown to lie within ±margin of one (0.03: between 1/1.03 and 1.03).

    The two one-sided tests of Schuirmann (1987), J. Pharmacokinet. Biopharm. 15, 657: pass an interval at 90 %
    confidence for a test at 5 %. False also where the interval is too wide to tell.
    """
    return ratio.low >= 1 / (1 + margin) and ratio.high <= 1 + margin


def _ratio(difference: float, spread: Spread, scale: float, confidence: float, n: int) -> Estimate:
    if spread.df == 0:
        return Estimate(math.exp(difference), 0.0, math.inf, n)
    half = _t(confidence, spread.df) * spread.log_sd * scale
    return Estimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half), n)


def _t(confidence: float, df: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, 0.5 + confidence / 2))


def _sd(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _require_positive(*groups: Sequence[float]) -> None:
    if any(not math.isfinite(value) or value <= 0 for group in groups for value in group):
        raise ValueError("logarithms need finite values above zero")
