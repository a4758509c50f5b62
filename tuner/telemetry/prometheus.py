"""`/metrics` text to a snapshot under our own names; it reads any text without raising and skips what is no metric."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Row

from tuner.telemetry.histogram import Histogram
from tuner.telemetry.names import BUCKETED, COUNTERS, EVERY_SAMPLE, GAUGES, HISTOGRAMS, UNSUCCESSFUL


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading; names as in `tuner.telemetry.names`, several engines added up (`kv_usage`: the fullest)."""

    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.gauges or self.counters or self.histograms)


def parse(text: str, wanted: AbstractSet[str] = EVERY_SAMPLE) -> Snapshot:
    """The snapshot in a `/metrics` answer, of the samples named `wanted`; lines that are no metric are skipped."""
    rows: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    for row in _rows([line for line in text.splitlines() if _name(line) in wanted]):
        value = _finite(row.value)
        if value is not None:
            rows[row.name].append((row.labels, value))
    return Snapshot(
        gauges={
            ours: combine(value for _, value in rows[theirs])
            for ours, spellings in GAUGES.items()
            for combine in (max if ours == "kv_usage" else sum,)
            if (theirs := _present(spellings, rows))
        },
        counters={
            ours: sum(value for labels, value in rows[theirs] if labels.get("finished_reason") not in UNSUCCESSFUL)
            for ours, spellings in COUNTERS.items()
            if (theirs := _present(spellings, rows))
        },
        histograms={
            ours: _histogram(theirs, rows, buckets=ours in BUCKETED)
            for ours, spellings in HISTOGRAMS.items()
            if (theirs := _present(spellings, rows, suffix="_count"))
        },
    )


def _name(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]


def _rows(lines: list[str]) -> Iterator[Row]:
    # The whole text at once is several times as fast; line by line, a broken line loses only itself.
    try:
        yield from [row for family in text_string_to_metric_families("\n".join(lines)) for row in family.samples]
    except (ValueError, IndexError):
        if len(lines) > 1:
            for line in lines:
                yield from _rows([line])


def _finite(value: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # the parser returns integers of any length
        return None
    return number if math.isfinite(number) else None


def _present(spellings: tuple[str, ...], rows: Mapping[str, object], suffix: str = "") -> str | None:
    return next((name for name in spellings if name + suffix in rows), None)


def _histogram(family: str, rows: Mapping[str, list[tuple[Mapping[str, str], float]]], *, buckets: bool) -> Histogram:
    at: dict[float, float] = defaultdict(float)
    for labels, value in rows.get(f"{family}_bucket", ()) if buckets else ():
        bound = _bound(labels.get("le", ""))
        if bound is not None:
            at[bound] += value
    bounds = tuple(sorted(at))
    return Histogram(
        bounds=bounds,
        cumulative=tuple(at[bound] for bound in bounds),
        sum=sum(value for _, value in rows.get(f"{family}_sum", ())),
        count=sum(value for _, value in rows[f"{family}_count"]),
    )


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) else bound
