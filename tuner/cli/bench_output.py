"""How one probe is printed: as a table for people, as a document with stable keys for programs; it judges nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.records import ClassSlo, Estimate, Metric, Outcome, Probe

FORMAT_VERSION = 1
_ORDER = (Metric.TTFT, Metric.TPOT, Metric.ITL, Metric.E2E)


def as_document(
    probe: Probe, *, url: str, model: str, api: str, slo: ClassSlo, asked: Mapping[str, object]
) -> dict[str, object]:
    """The JSON of `tune bench --url`; docs/client.md explains the keys. Numbers that are infinite are null."""
    (metrics,) = probe.classes.values()
    validity, client = probe.validity, probe.client
    return {
        "format_version": FORMAT_VERSION,
        "url": url,
        "model": model,
        "api": api,
        "load": {**asked, "ramp_s": probe.ramp_s, "window_s": probe.window_s},
        "outcome": _outcome(probe, slo),
        "requests": {
            "scored": metrics.requests,
            "ok": metrics.requests - metrics.failed,
            "failed": metrics.failed,
            "by_status": dict(metrics.statuses),
        },
        "success": _estimate(metrics.success),
        "attainment": _estimate(metrics.attainment) if slo.limits else None,
        "limits": [
            {
                "metric": outcome.limit.metric.value,
                "percentile": outcome.limit.percentile,
                "limit_ms": outcome.limit.limit_s * 1e3,
                # Without a request for which it is defined (TPOT of single tokens) a limit is not observed at all.
                "observed_ms": _finite(outcome.observed_s * 1e3) if outcome.share_within.n else None,
                "share_within": _estimate(outcome.share_within),
            }
            for outcome in metrics.limits
        ],
        "latency_ms": {
            name: {
                "n": found.n,
                "mean": found.mean * 1e3,
                "p50": _estimate(found.p50, 1e3),
                "p95": _estimate(found.p95, 1e3),
                "p99": _estimate(found.p99, 1e3),
            }
            for name, found in metrics.latency.items()
        },
        "rates": {
            "offered_rps": validity.offered_rps or None,
            "achieved_rps": validity.achieved_rps,
            "throughput_rps": metrics.throughput_rps,
            "goodput_rps": metrics.goodput_rps if slo.limits else None,
            "output_tps": metrics.output_tps,
            "input_tps": metrics.input_tps,
        },
        "validity": {
            "valid": validity.valid,
            "reasons": list(validity.reasons),
            "notes": list(validity.notes),
            "send_lag_p99_ms": validity.send_lag_p99_s * 1e3,
        },
        "client": {
            "workers": client.workers,
            "cpu_share": client.cpu_share,
            "loop_lag_p99_ms": client.loop_lag_p99_s * 1e3,
            "loop_lag_max_ms": client.loop_lag_max_s * 1e3,
            "start_s": client.start_s,
            "peak_rss_bytes": client.peak_rss_bytes,
        },
        "started_at": probe.started_at,
        "wall_s": probe.wall_s,
        "notes": list(probe.notes),
    }


def as_table(probe: Probe, *, url: str, model: str, slo: ClassSlo, asked: Mapping[str, object]) -> str:
    """Several lines of text."""
    (metrics,) = probe.classes.values()
    validity, client = probe.validity, probe.client
    loop = f"{asked['concurrency']} at a time" if asked["concurrency"] else f"{probe.rate_rps:g} requests/s"
    lines = [
        f"{model} at {url}: {asked['input_tokens']} → {asked['output_tokens']} tokens, {loop}",
        "",
        f"{'ms':8}{'mean':>9}   {'P50':<24}{'P95':<24}P99",
    ]
    for metric in _ORDER:
        if (found := metrics.latency.get(metric.value)) is not None:
            cells = "".join(f"{_interval(estimate):<24}" for estimate in (found.p50, found.p95, found.p99))
            lines.append(f"{metric.value.upper():8}{found.mean * 1e3:9.1f}   {cells}".rstrip())
    statuses = ", ".join(f"{count} {name}" for name, count in sorted(metrics.statuses.items()) if name != "ok")
    achieved = f"{validity.achieved_rps:.2f} requests/s sent"
    lines += [
        "",
        f"requests  {metrics.requests} scored, {metrics.failed} failed{f' ({statuses})' if statuses else ''};"
        f" success {_share(metrics.success)}",
        f"rates     {achieved}{f' of {validity.offered_rps:g} offered' if validity.offered_rps else ''},"
        f" {metrics.throughput_rps:.2f}/s completed, {metrics.output_tps:.0f} tokens/s out,"
        f" {metrics.input_tps:.0f} in",
    ]
    for outcome in metrics.limits:
        name = f"{outcome.limit.metric.value} p{outcome.limit.percentile:g}"
        observed = f"{_observed(outcome.observed_s)}, {_share(outcome.share_within)} within"
        told = observed if outcome.share_within.n else "not defined for any of these requests"
        lines.append(f"limit     {name} ≤ {outcome.limit.limit_s * 1e3:g} ms: {told}")
    if slo.limits:
        lines.append(
            f"SLO       {_outcome(probe, slo)}: {_share(metrics.attainment)} of the requests kept every limit,"
            f" {metrics.goodput_rps:.2f}/s"
        )
    lines.append(
        f"client    {client.workers} worker(s), CPU {client.cpu_share:.0%}, send lag P99"
        f" {validity.send_lag_p99_s * 1e3:.1f} ms, loop lag P99 {client.loop_lag_p99_s * 1e3:.1f} ms"
    )
    lines += [f"note      {note}" for note in (*probe.notes, *validity.notes)]
    lines += [f"NOT VALID {reason}" for reason in validity.reasons]
    return "\n".join(lines)


def _outcome(probe: Probe, slo: ClassSlo) -> str:
    """`measured` where nothing was promised and so nothing judged."""
    return "measured" if probe.outcome is not Outcome.INVALID and not slo.limits else probe.outcome.value


def _estimate(estimate: Estimate, scale: float = 1.0) -> dict[str, object]:
    bounds = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {**{name: _finite(value * scale) for name, value in bounds.items()}, "n": estimate.n}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value * 1e3:.1f} [{estimate.low * 1e3:.1f} … {estimate.high * 1e3:.1f}]"


def _observed(value_s: float) -> str:
    return f"{value_s * 1e3:.1f} ms" if math.isfinite(value_s) else "more than any (failed requests)"


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.2%} [{estimate.low:.2%} … {estimate.high:.2%}]"
