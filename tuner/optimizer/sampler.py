"""The Optuna sampler of one-variable steps; free steps are TPE's, told everything. It decides no step itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tuner.optimizer.tracks import Point, Track, Tracks

TRIES, CHOICES = 32, 16
"""Draws for one free step, and how many acceptable ones are compared. Every other draw is uniform, because TPE stays
where good ones were found."""


class StepSampler(BaseSampler):
    """Gives the planned point; without a plan, the best scored of TPE's acceptable draws.

    TPE is made anew for every trial from (seed, trial number), so a resumed study continues as it would have.
    """

    def __init__(self, tracks: Tracks, seed: int) -> None:
        self._tracks, self._seed = tracks, seed
        self._plan: Point | None = None
        self._acceptable: Callable[[Point], bool] = tracks.sound
        self._scores: Callable[[Sequence[Point]], Sequence[float]] = lambda points: [0.0] * len(points)
        self._fallback: Point = tracks.default

    def plan(self, point: Point) -> None:
        """The next trial gets exactly this point."""
        self._plan = point

    def free(
        self,
        acceptable: Callable[[Point], bool],
        scores: Callable[[Sequence[Point]], Sequence[float]],
        fallback: Point,
    ) -> None:
        """The next trial is TPE's: of its acceptable draws the best scored, `fallback` when no draw is acceptable."""
        self._plan, self._acceptable, self._scores, self._fallback = None, acceptable, scores, fallback

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions(self._tracks)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return parameters(self._tracks, self._plan or self._drawn(study, trial, search_space))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Only a parameter outside the space comes here, which is none of ours."""
        seed = (self._seed, trial.number).__hash__() & 0x7FFFFFFF
        return RandomSampler(seed=seed).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Nothing to do: constraints are set by whoever tells."""

    def _drawn(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> Point:
        seed = mixed(self._seed, trial.number)
        # Trials that are still running are refused by `acceptable`; without the liar TPE keeps no state in storage.
        tpe = TPESampler(seed=seed, constant_liar=False, n_startup_trials=8)
        uniform = RandomSampler(seed=seed + 1)
        found: list[Point] = []
        for number in range(TRIES):
            drawn = tpe.sample_relative(study, trial, search_space) if number % 2 == 0 else {}
            if not drawn:  # also where TPE has fewer finished trials than it starts with
                drawn = {n: uniform.sample_independent(study, trial, n, d) for n, d in search_space.items()}
            point = point_of(self._tracks, drawn)
            if point not in found and self._acceptable(point):
                found.append(point)
            if len(found) == CHOICES:
                break
        scores = self._scores(found)
        return max(zip(scores, found, strict=True))[1] if found else self._fallback


def mixed(seed: int, number: int) -> int:
    """A 31-bit seed from the study's seed and a trial's number (splitmix64's finaliser)."""
    mask = (1 << 64) - 1
    state = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return (state ^ (state >> 31)) & 0x7FFFFFFF


def distributions(tracks: Tracks) -> dict[str, BaseDistribution]:
    """One distribution a track: ordered values as an index into the frozen list, unordered ones as categories."""
    return {track.name: _distribution(track) for track in tracks.tracks}


def parameters(tracks: Tracks, point: Point) -> dict[str, Any]:
    """Optuna's parameters of a point."""
    return {
        track.name: index if track.ordered else track.shown(index)
        for track, index in zip(tracks.tracks, point, strict=True)
    }


def point_of(tracks: Tracks, params: dict[str, Any]) -> Point:
    """The inverse of `parameters`."""
    return tuple(
        int(params[track.name])
        if track.ordered
        else [track.shown(i) for i in range(len(track.values))].index(params[track.name])
        for track in tracks.tracks
    )


def _distribution(track: Track) -> BaseDistribution:
    if track.ordered:
        return IntDistribution(0, len(track.values) - 1)
    return CategoricalDistribution([track.shown(index) for index in range(len(track.values))])
