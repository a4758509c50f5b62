"""From the raw requests of one probe to its scores against the SLO; it measures nothing and knows no server.

A request is scored when its *scheduled* time lies in the window [start, end); those before it are the ramp, those after
it the tail. Failed requests have missed the SLO, count in every share, and are infinitely slow where a limit is judged;
only the latency table (`ClassMetrics.latency`) is over successful requests. Definitions: docs/measurement.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from tuner.records import (
    ClassMetrics,
    ClassSlo,
    Estimate,
    Limit,
    LimitOutcome,
    Metric,
    Outcome,
    Percentiles,
    RequestResult,
)
from tuner.stats import percentile, sorted_percentile, wilson


def score(
    requests: Sequence[RequestResult], slo: ClassSlo, *, class_name: str, window: tuple[float, float]
) -> ClassMetrics:
    """The scores of one class; `window` is in seconds on the probe's clock, other classes' requests are ignored.

    Shares, percentiles and goodput are over the scored requests. Throughput and token rates count what was completed
    *inside* the window, whenever it was scheduled: beyond saturation they stay behind the offered rate.
    """
    start, end = window
    if not end > start:
        raise ValueError(f"empty window {window}")
    ours = [request for request in requests if request.class_name == class_name]
    scored = [request for request in ours if start <= request.scheduled_s < end]
    succeeded = [request for request in scored if request.ok]
    good = sum(meets(request, slo) for request in succeeded)
    success = wilson(len(succeeded), len(scored))
    limits = tuple(_judge(limit, scored) for limit in slo.limits)
    finished = [request for request in ours if request.ok]
    span = end - start
    return ClassMetrics(
        class_name=class_name,
        requests=len(scored),
        failed=len(scored) - len(succeeded),
        success=success,
        attainment=wilson(good, len(scored)),
        limits=limits,
        margin=_margin(limits, success.value < slo.success),
        latency=_latency(succeeded),
        goodput_rps=good / span,
        throughput_rps=sum(start <= _last(request) < end for request in finished) / span,
        output_tps=sum(_output_tokens_inside(request, start, end) for request in finished) / span,
        input_tps=sum(request.input_tokens for request in finished if start <= _first(request) < end) / span,
        statuses=dict(Counter(request.status.value for request in scored)),
        outcome=outcome_of(slo, [(limits, success)]),
    )


def score_all(
    requests: Sequence[RequestResult], slos: Mapping[str, ClassSlo], *, window: tuple[float, float]
) -> dict[str, ClassMetrics]:
    """Every class of a probe by its own SLO; several for `mixed`."""
    return {name: score(requests, slo, class_name=name, window=window) for name, slo in slos.items()}


def overall(classes: Mapping[str, ClassMetrics]) -> tuple[Outcome, float]:
    """Outcome and margin of a probe: those of its worst class. Met only when every class is."""
    outcomes = {metrics.outcome for metrics in classes.values()}
    margin = max(metrics.margin for metrics in classes.values())
    if Outcome.MISSED in outcomes:
        return Outcome.MISSED, margin
    return (Outcome.MET if outcomes == {Outcome.MET} else Outcome.UNRESOLVED), margin


def meets(request: RequestResult, slo: ClassSlo) -> bool:
    """Whether one request was answered and kept every limit.

    A limit that is undefined for it (TPOT of a single token) is kept. For ITL, the request's own gaps at the limit's
    percentile must keep it.
    """
    return request.ok and all(_kept(request, limit) for limit in slo.limits)


def _kept(request: RequestResult, limit: Limit) -> bool:
    if limit.metric is Metric.ITL:
        return not request.gaps_us or percentile(request.gaps_us, limit.percentile).value / 1e6 <= limit.limit_s
    value = _value(request, limit.metric)
    return value is None or value <= limit.limit_s


def _value(request: RequestResult, metric: Metric) -> float | None:
    """TTFT, TPOT or E2E of a successful request, seconds; None where undefined."""
    match metric:
        case Metric.TTFT:
            return request.ttft_s
        case Metric.TPOT:
            return request.tpot_s
        case _:
            return request.e2e_s


def _judge(limit: Limit, scored: Sequence[RequestResult]) -> LimitOutcome:
    """One limit over the scored requests for which it is defined, and the failed ones at infinity.

    A failed request of a single token would have had no TPOT and no gap: it says nothing there, as if it had succeeded.
    """
    if limit.metric is Metric.ITL:
        return _judge_gaps(limit, scored)
    single = limit.metric is Metric.TPOT
    told = [request for request in scored if request.ok or not (single and request.planned_output_tokens <= 1)]
    values = [_value(request, limit.metric) if request.ok else math.inf for request in told]
    defined = [value for value in values if value is not None]
    within = wilson(sum(value <= limit.limit_s for value in defined), len(defined))
    return LimitOutcome(limit, percentile(defined, limit.percentile).value if defined else 0.0, within)


def _judge_gaps(limit: Limit, scored: Sequence[RequestResult]) -> LimitOutcome:
    """Pooled gaps of all requests; a failed one adds as many infinite gaps as its planned tokens would have had.

    Gaps of one request are far from independent, so the interval is that of as many observations as there are requests.
    """
    gaps: list[float] = []
    sources = 0
    for request in scored:
        own = request.gaps_us if request.ok else (math.inf,) * max(0, request.planned_output_tokens - 1)
        gaps.extend(own)
        sources += bool(own)
    if not gaps:
        return LimitOutcome(limit, 0.0, wilson(0, 0))
    share = sum(gap / 1e6 <= limit.limit_s for gap in gaps) / len(gaps)
    return LimitOutcome(limit, percentile(gaps, limit.percentile).value / 1e6, wilson(share * sources, sources))


def _margin(limits: Sequence[LimitOutcome], too_many_failures: bool) -> float:
    if too_many_failures:
        return math.inf
    return max((outcome.observed_s / outcome.limit.limit_s - 1 for outcome in limits), default=-1.0)


def outcome_of(
    slo: ClassSlo, windows: Sequence[tuple[Sequence[LimitOutcome], Estimate]], confidence: float = 0.95
) -> Outcome:
    """Met or missed only where Wilson intervals say so; windows = (limits, success) of one class, counts are pooled.

    Success is the exception: to prove 0.999 takes 3,838 requests without a failure, more than any probe has, so for
    `met` the observed share decides. A limit that is undefined for every request (TPOT of single tokens) says nothing.
    """
    success = _pool([success for _, success in windows], confidence)
    if success.n == 0:
        return Outcome.UNRESOLVED
    shares = [
        (limit.percentile / 100, _pool([limits[i].share_within for limits, _ in windows], confidence))
        for i, limit in enumerate(slo.limits)
    ]
    judged = [(promised, share) for promised, share in shares if share.n > 0]
    if success.high < slo.success or any(share.high < promised for promised, share in judged):
        return Outcome.MISSED
    if success.value >= slo.success and all(share.low >= promised for promised, share in judged):
        return Outcome.MET
    return Outcome.UNRESOLVED


def _pool(shares: Sequence[Estimate], confidence: float) -> Estimate:
    n = sum(share.n for share in shares)
    return wilson(min(float(n), sum(share.value * share.n for share in shares if share.n)), n, confidence)


def _latency(succeeded: Sequence[RequestResult]) -> dict[str, Percentiles]:
    """Seconds by metric over successful requests; a metric that none of them defines is left out."""
    table: dict[str, Percentiles] = {}
    for metric in (Metric.TTFT, Metric.TPOT, Metric.E2E):
        values = [value for request in succeeded if (value := _value(request, metric)) is not None]
        if values:
            table[metric.value] = _percentiles(values, len(values))
    gaps = [gap / 1e6 for request in succeeded for gap in request.gaps_us]
    if gaps:
        table[Metric.ITL.value] = _percentiles(gaps, sum(bool(request.gaps_us) for request in succeeded))
    return table


def _percentiles(values: Sequence[float], independent: int) -> Percentiles:
    ordered = sorted(values)
    p50, p95, p99 = (sorted_percentile(ordered, q, independent=independent) for q in (50.0, 95.0, 99.0))
    return Percentiles(mean=fmean(ordered), p50=p50, p95=p95, p99=p99, n=len(ordered))


def _first(request: RequestResult) -> float:
    return math.inf if request.first_s is None else request.first_s


def _last(request: RequestResult) -> float:
    return math.inf if request.last_s is None else request.last_s


def _output_tokens_inside(request: RequestResult, start: float, end: float) -> float:
    """Tokens whose chunk arrived in [start, end); tokens are spread evenly over the request's chunks."""
    if request.first_s is None or _last(request) < start or request.first_s >= end:
        return 0.0
    if request.first_s >= start and _last(request) < end:
        return float(request.output_tokens)
    at, inside = request.first_s, 0
    inside += start <= at < end
    for gap in request.gaps_us:
        at += gap / 1e6
        inside += start <= at < end
    return request.output_tokens * inside / (len(request.gaps_us) + 1)
