"""Scores probes again from their raw requests and says where the stored numbers differ; it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

from tuner.metrics import overall, score_all
from tuner.records import ClassMetrics, Outcome, Probe, RequestResult, Slo, TrialRecord
from tuner.report.words import all_probes
from tuner.store import ResultsFolder

TOLERANCE = 1e-9
"""Relative; sums of the same numbers in another order differ by less."""


_ROUNDING = 1e-12
"""Relative; a few units in the last place, and far below the nanosecond in which times are taken."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What came of it: probes compared, those whose raw requests are not there, and every difference in words."""

    compared: int
    without_requests: int
    differences: tuple[str, ...]


def recompute(folder: ResultsFolder, trials: Iterable[TrialRecord], slo: Slo) -> Recomputed:
    """Compare every scored probe of `trials` with what its raw requests give."""
    compared, missing, differences = 0, 0, []
    for record in trials:
        for probe in all_probes(record):
            if not probe.classes:  # a warm-up is kept and not scored
                continue
            path = folder.trial_folder(record.number, record.replicate) / probe.requests_file
            if not path.is_file():
                missing += 1
                continue
            compared += 1
            again = rescore(probe, folder.requests(record, probe.requests_file), slo)
            where = f"trial {record.number}.{record.replicate}, {probe.requests_file}"
            differences += [f"{where}: {text}" for text in compare(probe.classes, again)]
            differences += [f"{where}: {text}" for text in _overall_differences(probe, again)]
    return Recomputed(compared, missing, tuple(differences))


def rescore(probe: Probe, requests: tuple[RequestResult, ...], slo: Slo) -> dict[str, ClassMetrics]:
    """The scores of a probe's window from raw requests."""
    promises = {name: slo.classes[name] for name in probe.classes}
    return score_all(requests, promises, window=scored_window(probe, requests))


def scored_window(probe: Probe, requests: Sequence[RequestResult]) -> tuple[float, float]:
    """Start and end of what was scored, on the probe's clock.

    The record holds start and length. Their sum can miss the end by a rounding, and the end may be the very moment of
    a request, which then falls to the wrong side. So of the ends that can be meant, it is the one that agrees with the
    stored counts; where none does, the sum.
    """
    start, end = probe.ramp_s, probe.ramp_s + probe.window_s
    ours = [request for request in requests if request.class_name in probe.classes]
    scheduled = sum(metrics.requests for metrics in probe.classes.values())
    finished = round(sum(metrics.throughput_rps for metrics in probe.classes.values()) * probe.window_s)
    moments = {moment for request in ours for moment in (request.scheduled_s, request.last_s) if moment is not None}
    near = sorted(moment for moment in moments if math.isclose(moment, end, rel_tol=_ROUNDING))
    for meant in (end, *near, *(math.nextafter(moment, math.inf) for moment in near)):
        inside = [request for request in ours if start <= request.scheduled_s < meant]
        done = [r for r in ours if r.ok and r.last_s is not None and start <= r.last_s < meant]
        if (len(inside), len(done)) == (scheduled, finished):
            return start, meant
    return start, end


def compare(stored: object, again: object, path: str = "") -> list[str]:
    """Every leaf in which two records differ, as `path: stored ≠ again`."""
    if is_dataclass(stored) and not isinstance(stored, type) and type(stored) is type(again):
        return [
            text
            for field in fields(stored)
            # The outcome of an invalid probe is not a score; `_overall_differences` looks at the probe's own.
            if field.name != "outcome"
            for text in compare(getattr(stored, field.name), getattr(again, field.name), f"{path}.{field.name}")
        ]
    if isinstance(stored, Mapping) and isinstance(again, Mapping):
        keys = dict.fromkeys((*stored, *again))
        return [text for key in keys for text in compare(stored.get(key), again.get(key), f"{path}.{key}")]
    if isinstance(stored, tuple) and isinstance(again, tuple) and len(stored) == len(again):
        pairs = enumerate(zip(stored, again, strict=True))
        return [text for index, (a, b) in pairs for text in compare(a, b, f"{path}[{index}]")]
    if isinstance(stored, float) and isinstance(again, float):
        both_nan = math.isnan(stored) and math.isnan(again)
        same = both_nan or math.isclose(stored, again, rel_tol=TOLERANCE, abs_tol=1e-12)
    else:
        same = stored == again
    return [] if same else [f"{path.lstrip('.')}: {stored} ≠ {again}"]


def _overall_differences(probe: Probe, again: Mapping[str, ClassMetrics]) -> list[str]:
    outcome, margin = overall(again)
    found = compare(probe.margin, margin, "margin")
    if probe.outcome is not Outcome.INVALID:
        found += compare(probe.outcome.value, outcome.value, "outcome")
    return found
