"""The promise: reads `slo.yaml` into an `Slo` for every class; it measures and judges nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.documents import Node, digest, read_yaml
from tuner.records import ClassSlo, Limit, Metric, Slo

DEFAULT_SUCCESS = 0.999
METRICS = tuple(metric.value for metric in Metric)

_SLO_KEYS = (*METRICS, "success")
_CLASS_KEYS = (*METRICS, "success", "weight")
_PERCENTILE = re.compile(r"p(\d{2}(?:\.\d+)?)")


def load_slo(path: Path, class_names: Sequence[str]) -> Slo:
    """The promise in the file at `path` for each of `class_names`; raises `InputError`."""
    return _slo(read_yaml(path), class_names)


def parse_slo(document: object, where: str, class_names: Sequence[str]) -> Slo:
    """As `load_slo`, from a plain document (mappings, numbers); `where` names its origin in errors."""
    return _slo(Node(document, where), class_names)


def _slo(root: Node, class_names: Sequence[str]) -> Slo:
    top = root.mapping(("slo", "classes"))
    default = top["slo"].mapping(_SLO_KEYS) if "slo" in top else {}
    overrides = top["classes"].mapping(class_names) if "classes" in top else {}
    own = {name: node.mapping(_CLASS_KEYS) for name, node in overrides.items()}
    default_limits = _limits(default)
    default_success = _success(default, DEFAULT_SUCCESS)
    weights = _weights(own, class_names, overrides)
    classes: dict[str, ClassSlo] = {}
    for name in class_names:
        entries = own.get(name, {})
        merged = {**default_limits, **_limits(entries)}
        limits = tuple(limit for metric in METRICS for limit in merged.get(metric, ()))
        if not limits:
            place = overrides.get(name) or top.get("slo") or root
            place.fail(
                f"class `{name}` has no latency limit, so every configuration would keep the promise",
                "Add one, such as `ttft: {p99: 500}` (milliseconds).",
            )
        classes[name] = ClassSlo(limits, _success(entries, default_success), weights[name])
    return Slo(classes, digest(_plain(classes)))


def _limits(entries: Mapping[str, Node]) -> dict[str, tuple[Limit, ...]]:
    """By metric; an empty tuple where the user wrote `null` to drop an inherited limit."""
    limits: dict[str, tuple[Limit, ...]] = {}
    for metric in Metric:
        node = entries.get(metric.value)
        if node is None:
            continue
        if node.value is None:
            limits[metric.value] = ()
            continue
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            node.fail("needs a percentile", f"Write `{metric.value}: {{p99: {node.value}}}`.")
        found = [Limit(metric, _percentile(key, entry), _limit_s(entry)) for key, entry in node.mapping().items()]
        if not found:
            node.fail("has no limit", f"Write `{metric.value}: {{p99: 500}}`, or null to drop an inherited limit.")
        limits[metric.value] = tuple(sorted(found, key=lambda limit: limit.percentile))
    return limits


def _percentile(key: str, node: Node) -> float:
    if key == "max":
        return 100.0
    match = _PERCENTILE.fullmatch(key)
    if match is None:
        node.fail("is not a percentile", "Use p50 to p99.9 or `max`; a mean would hide the tail.")
    percentile = float(match[1])
    if not 50.0 <= percentile <= 99.9:
        node.fail("must be a percentile from p50 to p99.9, or `max`", "Use for example p95 or p99.")
    return percentile


def _limit_s(node: Node) -> float:
    return node.number(above=0.0) / 1000.0


def _success(entries: Mapping[str, Node], otherwise: float) -> float:
    node = entries.get("success")
    if node is None:
        return otherwise
    if isinstance(node.value, int | float) and not isinstance(node.value, bool) and 1.0 < node.value <= 100.0:
        node.fail("must be a share between 0 and 1", f"Write {node.value / 100:g} for {node.value:g} %.")
    return node.number(above=0.0, at_most=1.0)


def _weights(
    own: Mapping[str, Mapping[str, Node]], class_names: Sequence[str], nodes: Mapping[str, Node]
) -> dict[str, float]:
    """Shares of the traffic, summing to 1.

    Every class weighted: relative to each other. Some weighted: those are shares, and the others divide what is left.
    """
    given = {name: entries["weight"].number(above=0.0) for name, entries in own.items() if "weight" in entries}
    rest = [name for name in class_names if name not in given]
    total = sum(given.values())
    if not rest:
        return {name: weight / total for name, weight in given.items()}
    if given and total >= 1.0:
        last = list(given)[-1]
        own[last]["weight"].fail(
            f"the weights given sum to {total:g}, which leaves no traffic for {', '.join(rest)}",
            "Give shares that sum to less than 1, weights for every class, or leave those classes out of the study.",
        )
    return {**given, **{name: (1.0 - total) / len(rest) for name in rest}}


def _plain(classes: Mapping[str, ClassSlo]) -> dict[str, object]:
    return {
        name: [
            [[limit.metric.value, limit.percentile, limit.limit_s] for limit in slo.limits],
            slo.success,
            slo.weight,
        ]
        for name, slo in classes.items()
    }
