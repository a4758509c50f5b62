"""What noisy measurements say together: a Gaussian process over the grid of tracks; it decides nothing.

One measurement of a configuration is off by several percent, mostly by the luck of its start, and the best of many is
the luckiest. Neighbours were measured as well, so the process shares what they say: log objective = prior + one smooth
effect a track + a small joint effect + luck with the requests, which are the same in every trial + noise (additive
kernels: Duvenaud, Nickisch and Rasmussen (2011), NIPS 24; Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2.2 and 5.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tuner.optimizer.tracks import Point, Track

Array = NDArray[np.float64]

OFFSET = 0.05
"""Prior spread of what all values share: the luck of the baseline that they are divided by."""
LENGTH = 0.5
"""Correlation length of an effect, as a share of its track."""
PAIR = 0.02
"""Prior spread of the luck of one configuration with the requests of the study, which no second look averages."""
SCALES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Amplitudes tried for each effect, as multiples of its prior amplitude."""
SCALE_SPREAD = 1.0
"""Prior spread of the logarithm of those multiples."""
NOISE_SCALES = (0.71, 1.0, 1.41, 2.0, 2.83, 4.0)
NOISE_SPREAD = 0.25
"""The same for the noise: how much the values scatter is measured by replicates too."""
SWEEPS = 2
QUANTILES: Array = np.array([NormalDist().inv_cdf((i + 0.5) / 32) for i in range(32)])


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured or predicted log objective and its noise variance."""

    point: Point
    value: float
    variance: float


@dataclass(frozen=True, slots=True)
class Effect:
    """What is believed of a track before anything was measured."""

    amplitude: float  # spread of its effect on the log objective
    fall: float  # expected loss at a whole track's distance from the start; grows with the square
    joint: float = 0.02
    group: str = ""  # tracks of one group have one effect together: what one does hangs on the others


class Surface:
    """The posterior over all points, given observations."""

    def __init__(
        self, tracks: Sequence[Track], effects: Sequence[Effect], start: Point, observations: Sequence[Observation]
    ) -> None:
        self._tracks, self._effects, self._start = tracks, effects, start
        self._points = _places([observation.point for observation in observations], tracks)
        self._noise = np.array([o.variance for o in observations])
        self._residual = np.array([o.value for o in observations]) - self.prior(self._points)
        joint = float(np.mean([e.joint for e in effects])) if effects else 0.0
        grouped: dict[str, list[int]] = {}
        for i, effect in enumerate(effects):
            grouped.setdefault(effect.group or f"track {i}", []).append(i)
        self._groups = tuple(grouped.values())
        # One amplitude a group, those of the joint effect and of the luck with the requests; `_scales` are multiples of
        # them and of the noise.
        self._amplitudes = np.array([*(effects[group[0]].amplitude for group in self._groups), joint, PAIR])
        self._scales = np.ones(len(self._groups) + 3)
        self._parts = self._correlations(self._points, self._points)
        self._fit()

    def prior(self, points: Array) -> Array:
        """Expected log objective before any measurement: vLLM's defaults are good, far away is worse."""
        total = np.zeros(len(points))
        for i, (track, effect) in enumerate(zip(self._tracks, self._effects, strict=True)):
            if track.ordered:
                total -= effect.fall * ((points[:, i] - self._start[i]) / (len(track.values) - 1)) ** 2
            else:
                total -= 0.25 * effect.fall * (points[:, i] != self._start[i])
        return total

    def predict(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Posterior mean and standard deviation of the log objective of each point, without noise and luck."""
        places = _places(points, self._tracks)
        cross = self._true(self._correlations(places, self._points))
        mean = self.prior(places) + cross @ self._weights
        variance = self._variance() - np.sum((cross @ self._inverse) * cross, axis=1)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def learning(self, candidates: Sequence[Point], promised: Array, known: Sequence[Point], variance: float) -> Array:
        """Expected rise of the best posterior mean by one measurement of each candidate, in log objective.

        The knowledge gradient over `known` (measured; one of them would be recommended) and the candidate itself, so it
        weighs a new configuration against another look at an old one (Frazier, Powell and Dayanik (2009), INFORMS J.
        Comput. 21, 599). `promised` is added to the candidates' means; `variance` is that of one measurement's noise.
        """
        if not candidates:
            return np.zeros(0)
        mine, others = _places(candidates, self._tracks), _places(known, self._tracks)
        parts = self._correlations(mine, self._points)
        cross, seen = self._true(parts), self._kernel(parts)
        mean = self.prior(mine) + cross @ self._weights + promised
        own = np.maximum(self._variance() - np.sum((cross @ self._inverse) * seen, axis=1), 1e-12)
        cross_known = self._true(self._correlations(others, self._points))
        best = self.prior(others) + cross_known @ self._weights
        covariance = self._true(self._correlations(others, mine)) - cross_known @ self._inverse @ seen.T
        # What will be measured carries the luck with the requests too: of what was seen before, what is still unknown.
        shown = self._variance() + self._luck() - np.sum((seen @ self._inverse) * seen, axis=1)
        deviation = np.sqrt(np.maximum(shown, 1e-12) + variance)
        # What is known and the candidate move along one normal variable: the maximum is taken at its quantiles.
        at_known = best[:, None, None] + (covariance / deviation)[:, :, None] * QUANTILES
        at_own = mean[:, None] + (own / deviation)[:, None] * QUANTILES
        gain: Array = np.maximum(at_known.max(axis=0), at_own).mean(axis=1) - float(best.max())
        return gain

    def spread(self) -> float:
        """Prior standard deviation of any point, after the amplitudes were fitted."""
        return math.sqrt(self._variance())

    @property
    def luck(self) -> float:
        """Spread of what the requests of the study make of a configuration, the same at every look."""
        return math.sqrt(self._luck())

    @property
    def noise_scale(self) -> float:
        """How much noisier the values are than they were said to be, as a factor of their standard deviation."""
        return float(self._scales[-1])

    # --- inside ----------------------------------------------------------------------------------------------

    def _correlations(self, one: Array, other: Array) -> Array:
        """Correlation of each effect between two sets of points: Matérn 1/2, or equality for names.

        The roughest of its family: a knob's effect has cliffs and plateaus, and a smooth one is misled by them.

        Then the joint effect's, and whether the points are the same.
        """
        found = []
        for i, track in enumerate(self._tracks):
            if track.ordered:
                distance = np.abs(one[:, i][:, None] - other[:, i][None]) / (len(track.values) - 1)
                found.append(np.exp(-distance / LENGTH))
            else:
                found.append((one[:, i][:, None] == other[:, i][None]).astype(np.float64))
        parts = [np.prod(np.stack([found[i] for i in group]), axis=0) for group in self._groups]
        same = (one[:, None] == other[None]).all(axis=2).astype(np.float64)
        return np.stack([*parts, np.prod(np.stack(found), axis=0), same])

    def _kernel(self, parts: Array) -> Array:
        """Covariance of what is measured, the noise left out."""
        total: Array = OFFSET**2 + np.tensordot((self._amplitudes * self._scales[:-1]) ** 2, parts, axes=1)
        return total

    def _true(self, parts: Array) -> Array:
        """Covariance of the objective with what is measured: without the luck."""
        total: Array = self._kernel(parts) - self._luck() * parts[-1]
        return total

    def _variance(self) -> float:
        return OFFSET**2 + float(np.sum((self._amplitudes * self._scales[:-1]) ** 2)) - self._luck()

    def _luck(self) -> float:
        return float((self._amplitudes[-1] * self._scales[-2]) ** 2)

    def _fit(self) -> None:
        """Scales by coordinate ascent on the marginal likelihood with a log-normal prior (type-II MAP)."""
        for _ in range(SWEEPS if len(self._residual) > 2 else 0):
            for i in range(len(self._scales)):
                self._scales[i] = self._best_scale(i)
        covariance = self._kernel(self._parts) + np.diag(self._noise * self._scales[-1] ** 2)
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ self._residual

    def _best_scale(self, i: int) -> float:
        """The multiple of one amplitude (or of the noise) with the largest evidence, the others as they are."""
        noise = i == len(self._scales) - 1
        choices = np.array(NOISE_SCALES if noise else SCALES)
        amplitudes = (self._amplitudes * self._scales[:-1]) ** 2
        fixed = np.diag(self._noise * self._scales[-1] ** 2)
        if noise:
            fixed, own = np.zeros_like(fixed), np.diag(self._noise)
        else:
            amplitudes[i], own = 0.0, self._amplitudes[i] ** 2 * self._parts[i]
        rest = OFFSET**2 + np.tensordot(amplitudes, self._parts, axes=1) + fixed
        stack = rest + (choices**2)[:, None, None] * own
        lower = np.linalg.cholesky(stack)
        fit = np.einsum("i,ki->k", self._residual, np.linalg.solve(stack, self._residual[None, :, None])[..., 0])
        volume = 2 * np.sum(np.log(np.diagonal(lower, axis1=1, axis2=2)), axis=1)
        spread = NOISE_SPREAD if noise else SCALE_SPREAD
        prior = np.log(np.maximum(choices, 0.125)) ** 2 / (2 * spread**2)
        evidence = -0.5 * (fit + volume) - prior
        here = int(np.argmin(np.abs(choices - self._scales[i])))
        best = int(np.argmax(evidence))
        return float(choices[best if evidence[best] > evidence[here] + 1e-9 else here])


def _places(points: Sequence[Point], tracks: Sequence[Track]) -> Array:
    return np.array(points, dtype=np.float64).reshape(len(points), len(tracks))
