"""Statistics against published values, SciPy's own and simulated coverage."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, ttest_ind

from tuner import stats
from tuner.records import Estimate

counts = st.integers(1, 3000)


@given(n=counts, share=st.floats(0, 1), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_wilson_equals_scipy(n: int, share: float, confidence: float) -> None:
    k = round(share * n)
    ours = stats.wilson(k, n, confidence)
    theirs = binomtest(k, n).proportion_ci(confidence, "wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert ours.low <= ours.value <= ours.high


def test_wilson_edges() -> None:
    assert stats.wilson(0, 10).low == 0.0
    assert stats.wilson(10, 10).high == 1.0
    empty = stats.wilson(0, 0)
    assert math.isnan(empty.value)
    assert (empty.low, empty.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="11 successes of 10"):
        stats.wilson(11, 10)


@pytest.mark.parametrize(("needed", "promised"), [(381, 0.99), (73, 0.95), (3838, 0.999)])
def test_how_many_requests_prove_a_percentile(needed: int, promised: float) -> None:
    """The counts that docs/measurement.md states."""
    assert stats.wilson(needed, needed).low >= promised > stats.wilson(needed - 1, needed - 1).low


@given(n=counts, q=st.sampled_from([50.0, 90.0, 95.0, 99.0, 99.9]), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_percentile_ranks_are_the_binomial_quantiles(n: int, q: float, confidence: float) -> None:
    tail = (1 - confidence) / 2
    low, high = int(binom.ppf(tail, n, q / 100)), int(binom.ppf(1 - tail, n, q / 100)) + 1
    estimate = stats.percentile(range(1, n + 1), q, confidence)
    assert estimate.low == max(low, 0)
    assert estimate.high == (high if high <= n else math.inf)


@given(
    values=st.lists(st.floats(0, 100) | st.just(math.inf), min_size=1, max_size=300),
    q=st.sampled_from([1.0, 50.0, 95.0, 99.0, 99.9, 100.0]),
    limit=st.floats(0, 100),
)
def test_percentile_within_limit_is_share_within_limit(values: list[float], q: float, limit: float) -> None:
    kept = sum(value <= limit for value in values)
    assert (stats.percentile(values, q).value <= limit) == (kept * 100 >= round(q * len(values), 9))


def test_percentile_counts_failures_as_infinite() -> None:
    estimate = stats.percentile([1.0] * 98 + [math.inf] * 2, 99)
    assert estimate.value == math.inf
    assert estimate.low == 1.0
    assert stats.percentile([1.0] * 99 + [math.inf], 99).value == 1.0


def test_percentile_of_dependent_values_is_wider() -> None:
    values = [float(i) for i in range(10_000)]
    alone, grouped = stats.percentile(values, 50), stats.percentile(values, 50, independent=100)
    assert alone.value == grouped.value
    assert (alone.low, alone.high) == (4901, 5098)
    assert (grouped.low, grouped.high) == (3999, 6099)


def test_percentile_refuses() -> None:
    for values, q in (([], 50.0), ([1.0], 0.0), ([1.0], 101.0)):
        with pytest.raises(ValueError, match="percentile"):
            stats.percentile(values, q)


def test_percentile_interval_covers() -> None:
    rng = random.Random(1)
    truth = -math.log(0.05)
    hits = 0
    for _ in range(600):
        estimate = stats.percentile([rng.expovariate(1) for _ in range(150)], 95)
        hits += estimate.low <= truth <= estimate.high
    assert hits / 600 >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / 600)


def test_log_ratio_equals_scipy() -> None:
    ours, baseline = [11.0, 10.5, 11.4], [10.0, 10.2, 9.7, 9.9]
    theirs = ttest_ind([math.log(v) for v in ours], [math.log(v) for v in baseline]).confidence_interval(0.95)
    estimate = stats.log_ratio_interval(ours, baseline)
    assert (math.log(estimate.low), math.log(estimate.high)) == pytest.approx((theirs.low, theirs.high))
    assert estimate.n == 3


def test_single_values_claim_nothing() -> None:
    assert stats.log_ratio_interval([11.0], [10.0]) == Estimate(pytest.approx(1.1), 0.0, math.inf, 1)
    with pytest.raises(ValueError, match="above zero"):
        stats.log_ratio_interval([0.0, 1.0], [1.0])


def test_equivalence_needs_evidence() -> None:
    assert stats.equivalent(Estimate(1.0, 0.98, 1.02, 5), 0.03)
    assert not stats.equivalent(Estimate(1.0, 0.9, 1.1, 2), 0.03)
    assert not stats.equivalent(Estimate(1.05, 1.04, 1.06, 5), 0.03)


def test_scipy_is_not_imported_until_needed() -> None:
    code = "import sys, tuner.stats, tuner.metrics; tuner.stats.wilson(1, 2); sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
