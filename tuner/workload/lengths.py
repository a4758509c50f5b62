"""Token lengths: the distributions a workload may name, read from YAML and drawn from a given source of chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from tuner.documents import Node

MAX_LENGTH = 10_000_000
"""Longer than any context; a typing error rather than a length."""

_Z95 = 1.6448536269514722  # 95th percentile of the standard normal distribution
_REDRAWS = 1000

_KEYS = {
    "constant": ("value",),
    "uniform": ("min", "max"),
    "normal": ("mean", "sd", "min", "max"),
    "lognormal": ("median", "p95", "min", "max"),
    "empirical": ("values", "weights"),
}
_REQUIRED = {
    "constant": ("value",),
    "uniform": ("min", "max"),
    "normal": ("mean", "sd"),
    "lognormal": ("median", "p95"),
    "empirical": ("values",),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over whole token counts from `minimum` to `maximum`, both possible.

    `location` and `spread` are the mean and standard deviation of a normal distribution, or of the logarithm of a
    lognormal one; values outside the bounds are drawn again. `values` and `cumulative` belong to `empirical`.
    """

    kind: str
    minimum: int
    maximum: int
    location: float = 0.0
    spread: float = 0.0
    values: tuple[int, ...] = ()
    cumulative: tuple[float, ...] = ()

    def draw(self, random: Random) -> int:
        if self.minimum == self.maximum:
            return self.minimum
        if self.kind == "uniform":
            return random.randint(self.minimum, self.maximum)
        if self.kind == "empirical":
            return random.choices(self.values, cum_weights=self.cumulative)[0]
        for _ in range(_REDRAWS):
            value = random.normalvariate(self.location, self.spread)
            if self.kind == "lognormal":
                value = math.exp(min(value, 700.0))
            if self.minimum <= round(value) <= self.maximum:
                return round(value)
        # The bounds cut off all but a sliver of the distribution: the nearer bound is what is left of it.
        return self.minimum if value < self.minimum else self.maximum


def constant(value: int) -> Lengths:
    return Lengths("constant", value, value)


def parse_lengths(node: Node) -> Lengths:
    """A whole number, or a mapping with `distribution` and its parameters; raises `InputError`."""
    if not isinstance(node.value, dict):
        return constant(node.integer(at_least=1, at_most=MAX_LENGTH))
    kind = node.mapping(required=("distribution",))["distribution"].text(tuple(_KEYS))
    entries = node.mapping(("distribution", *_KEYS[kind]), required=_REQUIRED[kind])
    if kind == "constant":
        return constant(_length(entries["value"]))
    if kind == "empirical":
        return _empirical(entries)
    minimum = _length(entries["min"]) if "min" in entries else 1
    if kind == "uniform":
        maximum = _length(entries["max"])
        _ordered(entries["max"], minimum, maximum)
        return Lengths(kind, minimum, maximum)
    if kind == "normal":
        location, spread = entries["mean"].number(above=0.0, at_most=MAX_LENGTH), entries["sd"].number(at_least=0.0)
        centre, likely_maximum = location, location + 4 * spread
    else:
        centre = entries["median"].number(at_least=1.0, at_most=MAX_LENGTH)
        p95 = entries["p95"].number(at_most=MAX_LENGTH)
        if p95 < centre:
            entries["p95"].fail(
                f"must not be below the median ({centre:g})", "Give the 95th percentile of the lengths."
            )
        location, spread = math.log(centre), math.log(p95 / centre) / _Z95
        likely_maximum = centre * (p95 / centre) ** 2  # 3.3 standard deviations
    maximum = _length(entries["max"]) if "max" in entries else min(MAX_LENGTH, math.ceil(likely_maximum))
    _ordered(entries.get("max", node), minimum, maximum)
    if not minimum <= centre <= maximum:
        bound = entries["max" if centre > maximum and "max" in entries else "min"] if len(entries) > 3 else node
        bound.fail(
            f"the centre of the distribution ({centre:g}) lies outside {minimum} to {maximum}", "Widen the bounds."
        )
    return Lengths(kind, minimum, maximum, location, spread)


def _empirical(entries: dict[str, Node]) -> Lengths:
    values = tuple(_length(item) for item in entries["values"].items())
    if not values:
        entries["values"].fail("must not be empty", "List the lengths that occur.")
    weights = [1.0] * len(values)
    if "weights" in entries:
        weights = [item.number(at_least=0.0) for item in entries["weights"].items()]
        if len(weights) != len(values):
            entries["weights"].fail(
                f"must have one weight for each of the {len(values)} values", "Make the lists equal."
            )
        if not sum(weights) > 0.0:
            entries["weights"].fail("must not all be 0", "Give at least one positive weight.")
    used = [value for value, weight in zip(values, weights, strict=True) if weight > 0.0]
    return Lengths("empirical", min(used), max(used), values=values, cumulative=tuple(accumulate(weights)))


def _length(node: Node) -> int:
    return node.integer(at_least=1, at_most=MAX_LENGTH)


def _ordered(node: Node, minimum: int, maximum: int) -> None:
    if minimum > maximum:
        node.fail(f"the maximum {maximum} is below the minimum {minimum}", "Swap or mend the bounds.")
