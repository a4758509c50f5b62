"""What a set of probes says about a capacity: a noisy line through log(margin + 1) over log(rate), near its zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.records import ClassMetrics, Metric, Outcome, Probe

SLOPE = 2.5
"""d log(margin + 1) / d log(rate) near a capacity where nothing is known: H200 measurements lie between 1 and 4."""
MIN_SLOPE, MAX_SLOPE = 0.7, 15.0
MIN_Y, MAX_Y = -3.0, 1.0
"""Beyond e times the limit a queue only shows how long the window was; failures (an infinite margin) end there too."""
_CURVATURE = 0.5  # a point at distance |y| from the limit errs by this share of it, because the curve is no line
_NEARBY = 0.3  # of log(rate) around the capacity (or the bracket, where that is wider): a line holds there
_AUTOCORRELATION = 1.5  # neighbours wait in the same queue: fewer independent requests than there are
_DRIFT = 0.1  # of y between two windows of one server, whatever their length
_PRIOR_DF = 4.0  # how many probes the assumed noise is worth against the observed one


@dataclass(frozen=True, slots=True)
class Point:
    """One valid probe as the search sees it."""

    x: float  # log(rate)
    y: float  # log(margin + 1), clipped
    sd: float  # of y, from the number of requests
    completed: float | None  # completions ÷ arrivals of the window, clearly below 1 is saturation; None: not yet steady
    concurrency: float  # mean number of requests in the server, by Little's law


@dataclass(frozen=True, slots=True)
class Fit:
    """The estimated capacity."""

    x: float  # log(rate)
    log_sd: float
    slope: float


def log_margin(margin: float) -> float:
    """log(margin + 1), clipped to MIN_Y..MAX_Y; defined for −1 (nothing measured took any time) and infinity."""
    return min(MAX_Y, max(MIN_Y, math.log(margin + 1) if margin > -1 else MIN_Y))


def point(probe: Probe) -> Point | None:
    """None for a probe that must not be used: invalid, or without a single scored request."""
    arrivals = sum(metrics.requests for metrics in probe.classes.values())
    if probe.outcome is Outcome.INVALID or arrivals == 0:
        return None
    completed = sum(metrics.throughput_rps for metrics in probe.classes.values()) * probe.window_s
    times = [metrics.latency[Metric.E2E] for metrics in probe.classes.values() if Metric.E2E in metrics.latency]
    answers = sum(time.n for time in times)
    mean_s = sum(time.mean * time.n for time in times) / answers if answers else 0.0
    worst = max(probe.classes.values(), key=lambda metrics: metrics.margin)
    # Answers that take longer than the ramp end after the window through no fault of the server.
    steady = probe.ramp_s >= mean_s
    return Point(
        x=math.log(probe.rate_rps),
        y=log_margin(probe.margin),
        sd=_noise(worst),
        completed=completed / arrivals if steady else None,
        concurrency=probe.rate_rps * mean_s,
    )


def fit(points: Sequence[Point], slope: float = SLOPE) -> Fit:
    """Zero of a weighted line, whose slope is drawn towards `slope` as far as the points leave it open.

    Bayesian linear regression with a normal prior on the slope (Gelman et al., Bayesian Data Analysis, 14.8) and the
    noise variance shrunk towards the assumed one; the standard deviation of the zero is that of inverse prediction
    (Draper and Smith, Applied Regression Analysis, 3.2). Points far from the limit weigh less: there the curve bends.
    """
    points = _nearby(points)
    weights = [1 / (p.sd**2 + (_CURVATURE * p.y) ** 2) for p in points]
    total = sum(weights)
    mean_x = sum(w * p.x for w, p in zip(weights, points, strict=True)) / total
    mean_y = sum(w * p.y for w, p in zip(weights, points, strict=True)) / total
    prior = 1 / (0.5 * slope) ** 2
    sxx = sum(w * (p.x - mean_x) ** 2 for w, p in zip(weights, points, strict=True)) + prior
    sxy = sum(w * (p.x - mean_x) * (p.y - mean_y) for w, p in zip(weights, points, strict=True)) + prior * slope
    steep = min(MAX_SLOPE, max(MIN_SLOPE, sxy / sxx))
    zero = mean_x - mean_y / steep
    misfit = sum(w * (p.y - mean_y - steep * (p.x - mean_x)) ** 2 for w, p in zip(weights, points, strict=True))
    scale = (_PRIOR_DF + misfit) / (_PRIOR_DF + len(points) - 1)
    log_sd = math.sqrt(scale * (1 / total + (zero - mean_x) ** 2 / sxx)) / steep
    return Fit(_inside(zero, points), log_sd, steep)


def bracket(points: Sequence[Point]) -> tuple[float | None, float | None]:
    """Highest log(rate) that kept the limits and lowest that did not. Noise may put the first above the second."""
    kept = [p.x for p in points if p.y <= 0]
    missed = [p.x for p in points if p.y > 0]
    return (max(kept) if kept else None), (min(missed) if missed else None)


def _nearby(points: Sequence[Point]) -> Sequence[Point]:
    low, high = bracket(points)
    if low is None or high is None:
        return points
    reach = max(_NEARBY, abs(high - low))
    return [p for p in points if abs(p.x - (low + high) / 2) <= reach]


def _inside(x: float, points: Sequence[Point]) -> float:
    """A capacity lies between what kept and what missed, in whichever order noise has put them."""
    low, high = bracket(points)
    if low is None or high is None:
        return x
    return min(max(x, min(low, high)), max(low, high))


def _noise(metrics: ClassMetrics) -> float:
    """Standard deviation of log(observed percentile), from the number of requests behind it.

    √(p(1 − p)/n) ÷ density for a percentile of an exponential tail (David and Nagaraja, Order Statistics, 10.2),
    relative to the percentile itself; the percentile is that of the limit that decides.
    """
    share, n = 0.99, metrics.requests
    judged = [outcome for outcome in metrics.limits if outcome.share_within.n > 0]
    if judged:
        deciding = max(judged, key=lambda outcome: outcome.observed_s / outcome.limit.limit_s)
        share, n = min(deciding.limit.percentile / 100, 0.999), deciding.share_within.n
    tail = math.sqrt(share / ((1 - share) * max(1, n))) / -math.log(1 - share)
    return math.hypot(_DRIFT, min(0.5, _AUTOCORRELATION * tail))
