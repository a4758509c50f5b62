"""The search space as index grids: values in order, points, configurations, couplings; it decides nothing.

A *track* is one knob's values in the order of its own scale, with vLLM's default among them. A *point* holds one index
a track. Lists are frozen once the baseline has shown the defaults, so an index means the same value for a whole study
(Optuna stores indices: categories lose the order, and a changed list of choices breaks a stored study).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tuner.records import Config, KnobValue

if TYPE_CHECKING:
    from tuner.space import Space

Point = tuple[int, ...]
"""One index a track, in the order of the space."""

SEQUENCES, BUDGET, MEMORY = "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization"
FOOTPRINT = frozenset(
    {
        SEQUENCES,
        BUDGET,
        MEMORY,
        "max-model-len",
        "kv-cache-dtype",
        "kv-cache-memory-bytes",
        "block-size",
        "max-cudagraph-capture-size",
        "enforce-eager",
        "cpu-offload-gb",
        "quantization",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "performance-mode",
        "enable-chunked-prefill",
    }
)
"""Flags that decide whether a configuration fits and starts."""
REPLICAS = ("tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size")


@dataclass(frozen=True, slots=True)
class Track:
    """One knob's values in order. The value at `default` is left out of a configuration."""

    name: str
    values: tuple[KnobValue | None, ...]  # None: vLLM's own default where nobody knows its value
    default: int
    ordered: bool  # False: neighbours mean nothing (names of backends, policies)
    stage: int

    def shown(self, index: int) -> str:
        value = self.values[index]
        return "vLLM's default" if value is None else str(value)

    def find(self, value: KnobValue) -> int | None:
        """Index of a value; numbers equal within rounding are the same value."""
        for index, own in enumerate(self.values):
            if _same(own, value):
                return index
        return None


@dataclass(frozen=True, slots=True)
class Tracks:
    """Every track of a study, and what couples them."""

    tracks: tuple[Track, ...]
    devices: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(track.name for track in self.tracks)

    @property
    def default(self) -> Point:
        return tuple(track.default for track in self.tracks)

    def position(self, name: str) -> int | None:
        return next((i for i, track in enumerate(self.tracks) if track.name == name), None)

    def config(self, point: Point) -> dict[str, KnobValue]:
        """Overrides over vLLM's defaults."""
        chosen = ((track, track.values[index]) for track, index in zip(self.tracks, point, strict=True))
        return {
            track.name: value
            for (track, value), index in zip(chosen, point, strict=True)
            if value is not None and index != track.default
        }

    def point(self, config: Config) -> Point | None:
        """The point of a configuration; None when a value is not on its track."""
        indices: list[int] = []
        for track in self.tracks:
            index = track.find(config[track.name]) if track.name in config else track.default
            if index is None:
                return None
            indices.append(index)
        return tuple(indices)

    def value(self, point: Point, name: str) -> KnobValue | None:
        position = self.position(name)
        return None if position is None else self.tracks[position].values[point[position]]

    def overrides(self, point: Point) -> int:
        return sum(index != track.default for track, index in zip(self.tracks, point, strict=True))

    def changes(self, old: Point, new: Point) -> dict[str, tuple[KnobValue | None, KnobValue | None]]:
        """Knob to (from, to) as a step names them; None stands for vLLM's default."""
        return {
            track.name: (
                None if before == track.default else track.values[before],
                None if after == track.default else track.values[after],
            )
            for track, before, after in zip(self.tracks, old, new, strict=True)
            if before != after
        }

    def sound(self, point: Point) -> bool:
        """Whether every declared coupling holds."""
        seqs, budget = self.value(point, SEQUENCES), self.value(point, BUDGET)
        if isinstance(seqs, int) and isinstance(budget, int) and seqs > budget:
            return False
        return self._replicas_fit(point)

    def couple(self, point: Point, moved: int) -> Point | None:
        """`point` with what is coupled to track `moved` put right; None when nothing puts it right.

        vLLM refuses more sequences than tokens in one step, and more ranks than there are devices.
        """
        if self.sound(point):
            return point
        name = self.tracks[moved].name
        partners = [BUDGET] if name == SEQUENCES else [SEQUENCES] if name == BUDGET else []
        if name in REPLICAS:
            partners = [other for other in REPLICAS if other != name]
        for partner in partners:
            position = self.position(partner)
            if position is None:
                continue
            # The nearest value that satisfies the rule is the smallest second change.
            nearest = sorted(range(len(self.tracks[position].values)), key=partial(_distance, point[position]))
            for index in nearest:
                fixed = replaced(point, position, index)
                if self.sound(fixed):
                    return fixed
        return None

    def everything(self, near: Point) -> Iterator[Point]:
        """Every sound point, the values next to those of `near` first."""
        indices = [
            sorted(range(len(track.values)), key=partial(_distance, here))
            for track, here in zip(self.tracks, near, strict=True)
        ]
        return filter(self.sound, itertools.product(*indices))

    def _replicas_fit(self, point: Point) -> bool:
        ranks = [value for name in REPLICAS if isinstance(value := self.value(point, name), int)]
        return math.prod(ranks) <= self.devices


def _distance(here: int, index: int) -> tuple[int, int]:
    return abs(index - here), index


def replaced(point: Point, position: int, index: int) -> Point:
    return (*point[:position], index, *point[position + 1 :])


def freeze(space: Space, effective: Mapping[str, KnobValue], configs: Sequence[Config], devices: int) -> Tracks:
    """Tracks of a space, with the baseline's own defaults (read back from its log) and the values of `configs` added.

    A default that is known neither from the log nor from the space becomes a value of its own at the low end.
    """
    tracks: list[Track] = []
    for knob in space.knobs:
        ordered = all(isinstance(value, bool | int | float) for value in knob.values)
        overridden = any(knob.name in config for config in configs[:1])  # then the log shows the override
        default = knob.default if overridden else effective.get(knob.name, knob.default)
        values: tuple[KnobValue | None, ...] = tuple(knob.values)
        for value in (*(config[knob.name] for config in configs if knob.name in config), default):
            values = _inserted(values, value, ordered)
        if len(values) > 1:
            position = next(i for i, value in enumerate(values) if _same(value, default))
            tracks.append(Track(knob.name, values, position, ordered, knob.stage))
    return Tracks(tuple(tracks), devices)


def _inserted(
    values: tuple[KnobValue | None, ...], value: KnobValue | None, ordered: bool
) -> tuple[KnobValue | None, ...]:
    """`values` with `value` at its place in order; as they are where it is one of them."""
    if any(_same(own, value) for own in values):
        return values
    place = 0
    if ordered and isinstance(value, int | float):
        place = sum((isinstance(own, int | float) and own < value) or own is None for own in values)
    return (*values[:place], value, *values[place:])


def _same(one: KnobValue | None, other: KnobValue | None) -> bool:
    if isinstance(one, bool | str | None) or isinstance(other, bool | str | None):
        return type(one) is type(other) and one == other
    return math.isclose(one, other, rel_tol=1e-9)
