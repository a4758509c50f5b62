"""Ratios between configurations measured in interleaved rounds, with their intervals; it decides nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tuner.records import Estimate

CONFIDENCE = 0.95

Cell = tuple[int, int]
"""(configuration, round)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Least squares over configurations × rounds without interaction; what a whole round shares cancels out.

    Unbalanced layouts are allowed (Montgomery, Design and Analysis of Experiments, 4.1). `log_sd` is NaN where no
    degree of freedom is left.
    """

    configurations: tuple[int, ...]
    means: tuple[float, ...]  # of log(value), by configuration; only their differences mean anything
    covariance: tuple[tuple[float, ...], ...]  # of the means, in units of log_sd²
    counts: tuple[int, ...]
    log_sd: float
    df: int

    def ratio(self, ours: int, other: int, comparisons: int = 1, confidence: float = CONFIDENCE) -> Estimate:
        """Geometric mean of `ours` ÷ `other`, with an interval that holds for all `comparisons` at once.

        With several configurations against one baseline, the best of them is picked by the same numbers that judge it;
        Dunnett's (1955) simultaneous interval covers whichever is picked.
        """
        a, b = self.configurations.index(ours), self.configurations.index(other)
        difference = self.means[a] - self.means[b]
        n = min(self.counts[a], self.counts[b])
        if self.df <= 0:
            return Estimate(math.exp(difference), 0.0, math.inf, n)
        c = self.covariance
        error = self.log_sd * math.sqrt(max(0.0, c[a][a] + c[b][b] - 2 * c[a][b]))
        half = dunnett(comparisons, self.df, confidence) * error
        return Estimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half), n)


def layout(values: Mapping[Cell, Sequence[float]]) -> Layout:
    """Fit log(value) = configuration + round to positive values by (configuration, round)."""
    cells = sorted(values)
    rows = [(cell, math.log(value)) for cell in cells for value in values[cell]]
    configurations = sorted({cell[0] for cell in cells})
    rounds = sorted({cell[1] for cell in cells})
    design = np.zeros((len(rows), len(configurations) + len(rounds) - 1))
    for line, ((configuration, turn), _) in enumerate(rows):
        design[line, configurations.index(configuration)] = 1.0
        if turn != rounds[0]:
            design[line, len(configurations) + rounds.index(turn) - 1] = 1.0
    observed = np.array([value for _, value in rows])
    inverse = np.linalg.pinv(design.T @ design)
    solution = inverse @ design.T @ observed
    df = len(rows) - int(np.linalg.matrix_rank(design))
    residual = observed - design @ solution
    log_sd = math.sqrt(float(residual @ residual) / df) if df > 0 else math.nan
    k = len(configurations)
    counts = tuple(sum(cell[0] == configuration for cell, _ in rows) for configuration in configurations)
    return Layout(
        configurations=tuple(configurations),
        means=tuple(float(value) for value in solution[:k]),
        covariance=tuple(tuple(float(value) for value in row[:k]) for row in inverse[:k]),
        counts=counts,
        log_sd=log_sd,
        df=df,
    )


@lru_cache(maxsize=256)
def dunnett(comparisons: int, df: int, confidence: float = CONFIDENCE) -> float:
    """Two-sided critical value of Dunnett's test for equal counts; Student's t for one comparison.

    P(max |Tᵢ| ≤ c) with correlation ½: the common part integrated by Gauss-Hermite quadrature, the spread (chi with df
    degrees of freedom) by quantiles (Dunnett (1955), J. Am. Stat. Assoc. 50, 1096).
    """
    from scipy.optimize import brentq
    from scipy.special import chdtri, ndtr, stdtrit

    if comparisons == 1:
        return float(stdtrit(df, 0.5 + confidence / 2))
    nodes, weights = np.polynomial.hermite_e.hermegauss(48)
    weights = weights / weights.sum()
    levels = (np.arange(800) + 0.5) / 800
    spread = np.sqrt(chdtri(df, 1 - levels) / df)[:, None]

    def excess(critical: float) -> float:
        inside = ndtr(math.sqrt(2) * critical * spread + nodes) - ndtr(-math.sqrt(2) * critical * spread + nodes)
        return float((inside**comparisons @ weights).mean()) - confidence

    return float(brentq(excess, 0.5, 1000.0, xtol=1e-6))
