"""Latency over rate, and TTFT over throughput, from the probes that capacities were found with; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tuner.export import Rate, RatePair
from tuner.records import (
    Bound,
    ClassMetrics,
    Estimate,
    Limit,
    LimitOutcome,
    Metric,
    Outcome,
    Probe,
    Slo,
    TrialRecord,
    TrialState,
)
from tuner.report.model import Curve, CurvePoint, ParetoPoint, Ref


def curves(
    slo: Slo, baseline: Sequence[TrialRecord], best: Sequence[TrialRecord], rates: Mapping[str, RatePair]
) -> tuple[Curve, ...]:
    """One curve a workload, class and limit, in the SLO's order. `mixed` has those of every class in it."""
    found = []
    measured = dict.fromkeys(name for record in (*baseline, *best) for name in record.capacities)
    workloads = [name for name in measured if name in rates]  # an edited study may name fewer
    for workload in workloads:
        pair = rates[workload]
        classes = [workload] if workload in slo.classes else list(slo.classes)
        for class_name in classes:
            for limit in slo.classes[class_name].limits:
                found.append(
                    Curve(
                        workload=workload if class_name == workload else f"{workload}: {class_name}",
                        metric=limit.metric.value,
                        percentile=limit.percentile,
                        limit_s=limit.limit_s,
                        baseline=_points(baseline, workload, class_name, limit),
                        best=_points(best, workload, class_name, limit),
                        baseline_rps=_line(pair.baseline),
                        best_rps=_line(pair.best) if best else None,
                    )
                )
    return tuple(found)


def pareto(trials: Sequence[TrialRecord], baseline: int | None, best: int | None) -> tuple[ParetoPoint, ...]:
    """Each complete trial's fastest probe that kept the SLO, by workload; mixes are left out (no single TTFT)."""
    found: list[ParetoPoint] = []
    for record in trials:
        if record.state is not TrialState.COMPLETE:
            continue
        for workload, capacity in record.capacities.items():
            kept = [p for p in capacity.probes if p.validity.valid and p.margin <= 0 and workload in p.classes]
            if not kept:
                continue
            probe = max(kept, key=lambda probe: probe.rate_rps)
            metrics = probe.classes[workload]
            latency = metrics.latency.get(Metric.TTFT)
            if latency is None:
                continue
            role = "baseline" if record.number == baseline else "best" if record.number == best else ""
            found.append(
                ParetoPoint(
                    ref=Ref(record.number, record.replicate),
                    workload=workload,
                    rate_rps=probe.rate_rps,
                    output_tps=metrics.output_tps,
                    ttft_p99=latency.p99,
                    requests_file=probe.requests_file,
                    role=role,
                    front=False,
                )
            )
    order = list(dict.fromkeys(name for record in trials for name in record.capacities))
    found.sort(key=lambda point: (order.index(point.workload), point.output_tps))
    return tuple(_with_front(point, found) for point in found)


def _with_front(point: ParetoPoint, others: Sequence[ParetoPoint]) -> ParetoPoint:
    beaten = any(
        other.workload == point.workload
        and other.output_tps > point.output_tps
        and other.ttft_p99.value < point.ttft_p99.value
        for other in others
    )
    return ParetoPoint(
        point.ref,
        point.workload,
        point.rate_rps,
        point.output_tps,
        point.ttft_p99,
        point.requests_file,
        point.role,
        not beaten,
    )


def _points(records: Sequence[TrialRecord], workload: str, class_name: str, limit: Limit) -> tuple[CurvePoint, ...]:
    found = []
    for record in records:
        capacity = record.capacities.get(workload)
        for probe in capacity.probes if capacity is not None else ():
            metrics = probe.classes.get(class_name)
            if metrics is None or not probe.validity.valid or probe.outcome is Outcome.INVALID:
                continue
            outcome = next((outcome for outcome in metrics.limits if outcome.limit == limit), None)
            if outcome is not None and outcome.share_within.n > 0:
                found.append(_point(record, probe, metrics, outcome))
    return tuple(sorted(found, key=lambda point: point.rate_rps))


def _point(record: TrialRecord, probe: Probe, metrics: ClassMetrics, outcome: LimitOutcome) -> CurvePoint:
    known = _percentile(metrics, outcome.limit) if metrics.failed == 0 else None
    return CurvePoint(
        rate_rps=probe.rate_rps,
        value_s=outcome.observed_s,
        low_s=None if known is None else known.low,
        high_s=None if known is None or math.isinf(known.high) else known.high,
        requests=metrics.requests,
        failed=metrics.failed,
        ref=Ref(record.number, record.replicate),
        requests_file=probe.requests_file,
    )


def _percentile(metrics: ClassMetrics, limit: Limit) -> Estimate | None:
    """The stored percentile of a limit, where it is one of those stored with an interval."""
    latency = metrics.latency.get(limit.metric)
    if latency is None:
        return None
    return {50.0: latency.p50, 95.0: latency.p95, 99.0: latency.p99}.get(limit.percentile)


def _line(rate: Rate | None) -> float | None:
    """Where a capacity is drawn; nowhere when the SLO was missed at every rate."""
    return None if rate is None or rate.bound is Bound.BELOW else rate.value
