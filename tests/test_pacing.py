"""Arrivals by their statistics; nothing here sleeps."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from scipy import stats

from tuner.pacing import PROCESSES, arrival_offsets

COUNT = 20_000


def gaps(process: str, rate: float, burstiness: float = 1.0, seed: int = 11) -> list[float]:
    offsets = arrival_offsets(process, rate_rps=rate, count=COUNT, seed=seed, burstiness=burstiness)
    return [offsets[0], *(later - earlier for earlier, later in itertools.pairwise(offsets))]


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("rate", [0.25, 7.0, 300.0])
def test_the_long_run_rate_is_the_rate_asked_for(process: str, rate: float) -> None:
    # The mean of COUNT gaps has a standard error of (coefficient of variation) / sqrt(COUNT) = 0.7 %.
    assert statistics.fmean(gaps(process, rate)) * rate == pytest.approx(1.0, abs=4 / math.sqrt(COUNT))


def test_poisson_gaps_are_exponential_and_independent() -> None:
    sample = gaps("poisson", 5.0)
    assert stats.kstest(sample, stats.expon(scale=1 / 5.0).cdf).pvalue > 0.01
    assert abs(statistics.correlation(sample[:-1], sample[1:])) < 4 / math.sqrt(COUNT)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_shape_that_burstiness_says(burstiness: float) -> None:
    sample = gaps("gamma", 5.0, burstiness)
    assert stats.kstest(sample, stats.gamma(burstiness, scale=1 / (5.0 * burstiness)).cdf).pvalue > 0.01
    variation = statistics.stdev(sample) / statistics.fmean(sample)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_constant_gaps_are_equal() -> None:
    assert arrival_offsets("constant", rate_rps=4.0, count=4, seed=1) == (0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("process", PROCESSES)
def test_another_rate_stretches_the_same_arrivals_and_a_larger_count_extends_them(process: str) -> None:
    slow = arrival_offsets(process, rate_rps=2.0, count=50, seed=3)
    fast = arrival_offsets(process, rate_rps=8.0, count=80, seed=3)
    assert [offset * 2.0 for offset in slow] == pytest.approx([offset * 8.0 for offset in fast[:50]])
    assert list(slow) == sorted(slow)


def test_seeds_differ_and_repeat() -> None:
    assert arrival_offsets("poisson", rate_rps=1, count=5, seed=1) == arrival_offsets(
        "poisson", rate_rps=1, count=5, seed=1
    )
    assert arrival_offsets("poisson", rate_rps=1, count=5, seed=1) != arrival_offsets(
        "poisson", rate_rps=1, count=5, seed=2
    )


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (math.inf, 1), (1, 0), (1, math.nan)])
def test_impossible_arguments_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        arrival_offsets("gamma", rate_rps=rate, count=1, seed=1, burstiness=burstiness)


def test_an_unknown_process_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown arrival process"):
        arrival_offsets("poison", rate_rps=1, count=1, seed=1)
