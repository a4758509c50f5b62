"""Capacities of many nights against tonight's: the noise they show, and whether something was lost; pure arithmetic.

The model: log(objective) of one run = level + effect of the night + luck of the server's start. Runs of one night share
the night's effect, so the night, not the run, is what repeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

PRIOR_RUN_SD, PRIOR_RUN_DF = 0.03, 4
"""Spread of one run before any was seen, and how many degrees of freedom that is worth (docs/measurement.md: 3-4 %)."""

PRIOR_NIGHT_SD, PRIOR_NIGHT_DF = 0.01, 6
"""The same for what all runs of a night share."""

SUSPICION = 0.02
"""One-sided probability below which a night is measured further before anything is said."""

ALARM = 0.0005
"""One-sided probability below which a loss is reported, divided by the number of series that are looked at."""

MOST_NIGHTS = 60
"""Nights that make a reference; older ones say little about this machine."""


@dataclass(frozen=True, slots=True)
class Level:
    """One night of one series: logarithms of its runs."""

    logs: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.logs)

    @property
    def squares(self) -> float:
        """Sum of squares around the night's own mean; len − 1 degrees of freedom."""
        return sum((log - self.mean) ** 2 for log in self.logs)


@dataclass(frozen=True, slots=True)
class Floor:
    """The noise that history shows: standard deviations of logarithms."""

    run_sd: float
    night_sd: float  # of the mean of a night with as many runs as tonight's, the luck of its starts included
    df: float


@dataclass(frozen=True, slots=True)
class Change:
    """Tonight against the reference. `effect` is relative: −0.1 is a loss of 10 %."""

    effect: float
    low: float  # of the 95 % interval
    high: float
    probability: float  # one-sided, of a loss this large by chance
    nights: int  # in the reference
    floor: Floor


def level(runs: Sequence[float]) -> Level | None:
    """From positive values of one night's runs; None without any."""
    return Level(tuple(math.log(value) for value in runs)) if runs else None


def noise_floor(reference: Sequence[Level], runs: int, others: Sequence[Level] = ()) -> Floor:
    """Pooled over the reference nights and blended with the prior, whose weight fades as nights are added.

    A variance with a scaled inverse chi-square prior: (ν₀s₀² + SS) ÷ (ν₀ + ν) (Gelman et al., Bayesian Data Analysis,
    2.6). `others`: further series whose runs have the same luck (the defaults), for the spread within a night.
    """
    within = [*reference, *others]
    run_df = PRIOR_RUN_DF + sum(len(night.logs) - 1 for night in within)
    run_variance = (PRIOR_RUN_DF * PRIOR_RUN_SD**2 + sum(night.squares for night in within)) / run_df
    expected = run_variance / max(1, runs) + PRIOR_NIGHT_SD**2
    means = [night.mean for night in reference]
    centre = fmean(means) if means else 0.0
    df = PRIOR_NIGHT_DF + max(0, len(means) - 1)
    between = sum((mean - centre) ** 2 for mean in means)
    return Floor(math.sqrt(run_variance), math.sqrt((PRIOR_NIGHT_DF * expected + between) / df), df)


def change(reference: Sequence[Level], tonight: Sequence[Level], others: Sequence[Level] = ()) -> Change | None:
    """The mean of the latest nights (tonight, and suspected ones just before it) against the reference.

    None where there is no reference. A prediction interval: both the reference's mean and tonight are uncertain.
    """
    from scipy.special import stdtr, stdtrit

    if not reference or not tonight:
        return None
    reference = reference[-MOST_NIGHTS:]
    runs = min(len(night.logs) for night in tonight)
    floor = noise_floor(reference, runs, others)
    shift = fmean(night.mean for night in tonight) - fmean(night.mean for night in reference)
    error = floor.night_sd * math.sqrt(1 / len(tonight) + 1 / len(reference))
    half = float(stdtrit(floor.df, 0.975)) * error
    return Change(
        effect=math.expm1(shift),
        low=math.expm1(shift - half),
        high=math.expm1(shift + half),
        probability=float(stdtr(floor.df, shift / error)),
        nights=len(reference),
        floor=floor,
    )


def suspicious(found: Change | None, minimum_effect: float) -> bool:
    """Worth further rounds tonight."""
    return found is not None and found.effect <= -minimum_effect and found.probability < SUSPICION


def alarming(found: Change | None, minimum_effect: float, series: int) -> bool:
    """Worth waking somebody: too large to be let go and too unlikely to be luck, over `series` looked at."""
    return found is not None and found.effect <= -minimum_effect and found.probability < ALARM / series


def objectives(values: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> list[float]:
    """Weighted geometric mean over classes of each run that has them all."""
    complete = [run for run in values if set(weights) <= set(run)]
    return [math.exp(sum(weight * math.log(run[name]) for name, weight in weights.items())) for run in complete]
