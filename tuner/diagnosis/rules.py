"""From the evidence of one probe to what limits the server, each with its numbers; proposes directions, no values.

Every rule is a product of ramps: how strongly each of its signs shows, from 0 to 1. A sign whose source was absent
counts as undecided (`UNKNOWN`), so a diagnosis from little evidence is possible and says so by its confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from tuner.diagnosis.evidence import Evidence
from tuner.records import Metric

UNKNOWN = 0.5
"""What an absent sign is worth: it neither confirms nor excludes."""
LEAST_CONFIDENCE = 0.2
"""Below this a finding is not reported."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One limiter. `moves` point the way for the knobs that act on it, most effective first."""

    kind: str
    confidence: float
    evidence: tuple[str, ...]
    explanation: str
    moves: Mapping[str, str] = field(default_factory=dict)


def diagnose(evidence: Evidence) -> tuple[Finding, ...]:
    """What limits the server, most confident first; empty where nothing shows."""
    findings = [finding for rule in RULES if (finding := rule(evidence)).confidence >= LEAST_CONFIDENCE]
    return tuple(sorted(findings, key=lambda finding: -finding.confidence))


def combine(findings: Mapping[str, Iterable[Finding]], weights: Mapping[str, float]) -> tuple[Finding, ...]:
    """The findings of several classes as one list: confidences averaged with the classes' weights, evidence kept."""
    total = sum(weights.get(name, 0.0) for name in findings) or 1.0
    merged: dict[str, Finding] = {}
    for name, found in findings.items():
        for finding in found:
            share = finding.confidence * weights.get(name, 0.0) / total
            said = tuple(f"{name}: {text}" for text in finding.evidence)
            other = merged.get(finding.kind)
            if other is not None:
                share, said = share + other.confidence, other.evidence + said
            merged[finding.kind] = replace(finding, confidence=share, evidence=said)
    return tuple(sorted(merged.values(), key=lambda finding: -finding.confidence))


def suggested_moves(findings: Iterable[Finding]) -> dict[str, tuple[str, float]]:
    """Knob to (direction, weight 0..1) for the search. Later moves of a finding weigh less; opposites cancel."""
    sums: dict[str, float] = {}
    words: dict[str, str] = {}
    for finding in findings:
        for rank, (knob, direction) in enumerate(finding.moves.items()):
            weight = finding.confidence * 0.8**rank
            sums[knob] = sums.get(knob, 0.0) + (weight if direction in ("up", "on") else -weight)
            words.setdefault(f"{knob} {direction in ('up', 'on')}", direction)
    moves = {}
    for knob, total in sums.items():
        if abs(total) >= 0.1:
            moves[knob] = (words[f"{knob} {total > 0}"], min(abs(total), 1.0))
    return dict(sorted(moves.items(), key=lambda item: -item[1][1]))


def ramp(value: float | None, low: float, high: float) -> float:
    """0 at `low` and below, 1 at `high` and above, linear between; UNKNOWN for None."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return min(max((value - low) / (high - low), 0.0), 1.0)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _said(*parts: str | None) -> tuple[str, ...]:
    return tuple(part for part in parts if part)


def _of(name: str, value: float | None, unit: str = "", limit: float | None = None) -> str | None:
    """`running 250 of 256`, `queue time 0.31 s`; None where the number is absent."""
    if value is None:
        return None
    number = f"{100 * value:.0f} %" if unit == "%" else f"{_shown(value)}{unit}"
    return f"{name} {number}" + (f" of {_shown(limit)}" if limit is not None else "")


def _shown(value: float) -> str:
    """Three digits, never as a power of ten."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else "< 0.001"


# --- signs that several rules share ----------------------------------------------------------------------------------


def _kv_full(e: Evidence) -> float:
    """Blocks ran out: sequences were thrown out, or requests wait while the cache is nearly full."""
    return max(_thrown_out(e), min(ramp(e.kv_usage_max, 0.85, 0.97), _waits(e)))


def _thrown_out(e: Evidence) -> float:
    """Sequences lost their blocks and were computed again."""
    return ramp(_ratio(e.preemptions, e.requests), 0.005, 0.05) if e.preemptions is not None else 0.0


def _waits(e: Evidence) -> float:
    """Requests stand in the engine's queue for longer than it takes to notice them."""
    standing = ramp(e.waiting_mean, 0.3, max(2.0, 0.03 * (e.running_mean or 0.0)))
    share = ramp(_ratio(e.queue_s, (e.queue_s or 0.0) + (e.prefill_s or 0.0)), 0.15, 0.5)
    return max(standing, share) if e.waiting_mean is not None and e.queue_s is not None else standing


def _at_seq_limit(e: Evidence) -> float:
    if e.max_num_seqs is None:
        return ramp(e.pinned_share, 0.1, 0.4)
    return ramp(_ratio(e.running_max, e.max_num_seqs), 0.85, 0.98)


def _pressed(e: Evidence) -> float:
    """How far the load presses on the promise; far below it, what would limit the server first is a guess."""
    return 0.3 + 0.7 * ramp(e.worst_margin, -0.75, -0.35)


def _budget_used(e: Evidence) -> float:
    return ramp(_ratio(e.tokens_per_step, e.budget), 0.3, 0.75)


def _token_metric(e: Evidence) -> Metric | None:
    """ITL where it is promised and tighter, else TPOT."""
    known = [metric for metric in (Metric.ITL, Metric.TPOT) if metric in e.margins]
    return max(known, key=lambda metric: e.margins[metric]) if known else None


def _slow_steps(e: Evidence) -> float | None:
    """Share of decoding time that exceptionally long steps cost: by how far the mean gap exceeds the median one."""
    mean, median = e.mean_s.get(Metric.ITL), e.p50_s.get(Metric.ITL)
    return max(1 - median / mean, 0.0) if mean and median is not None else None


def _tail(e: Evidence) -> float:
    """Tokens come evenly for most of the time and late for the rest."""
    slow = _slow_steps(e)
    ratio = _ratio(e.p99_s.get(Metric.TPOT), e.p50_s.get(Metric.TPOT))
    signs = [ramp(slow, 0.06, 0.22)] if slow is not None else []
    signs += [ramp(ratio, 1.4, 2.2)] if ratio is not None else []
    return max(signs, default=UNKNOWN)


def _decides(e: Evidence, *metrics: Metric) -> float:
    """How near these metrics are to deciding: 1 where one of them is the worst, 0 where others are far worse."""
    margins = [e.margins[metric] for metric in metrics if metric in e.margins]
    worst = e.worst_margin
    if not margins or worst is None:
        return 0.0 if worst is not None else UNKNOWN
    mine = max(margins)
    if math.isinf(worst):
        return 1.0 if math.isinf(mine) else UNKNOWN
    return ramp((1 + mine) / (1 + worst), 0.6, 0.95) if 1 + worst > 0 else UNKNOWN


# --- rules -----------------------------------------------------------------------------------------------------------


def _queueing(e: Evidence) -> Finding:
    # A limit that is reached on average, not just at times, saturates the server whichever metric shows it first.
    pinned = ramp(_ratio(e.running_mean, e.max_num_seqs), 0.75, 0.9) if e.running_mean and e.max_num_seqs else 0.0
    matters = max(_decides(e, Metric.TTFT, Metric.E2E), pinned)
    confidence = _at_seq_limit(e) * _waits(e) * matters * _pressed(e)
    confidence *= (1 - _thrown_out(e)) * (1 - 0.3 * ramp(e.kv_usage_max, 0.9, 1))
    return Finding(
        "queueing",
        confidence,
        _said(
            _of("running at most", e.running_max, limit=e.max_num_seqs),
            _of("waiting", e.waiting_mean),
            _of("queue time", e.queue_s, " s"),
            _of("KV cache at most", e.kv_usage_max, "%"),
        ),
        "Requests queue behind the sequence limit while the KV cache has room.",
        {"max-num-seqs": "up"},
    )


def _kv_bound(e: Evidence) -> Finding:
    waiting = _waits(e) * ramp(e.kv_usage_max, 0.75, 0.92) * (1 - 0.5 * _at_seq_limit(e))
    return Finding(
        "kv-bound",
        max(_thrown_out(e), waiting * _decides(e, Metric.TTFT, Metric.E2E)) * _pressed(e),
        _said(
            _of("preemptions", e.preemptions),
            _of("KV cache at most", e.kv_usage_max, "%"),
            _of("waiting", e.waiting_mean),
            _of("running at most", e.running_max, limit=e.max_num_seqs),
        ),
        "The KV cache is full: requests wait for blocks, or are thrown out and computed again.",
        {
            "gpu-memory-utilization": "up",
            "kv-cache-memory-bytes": "up",
            "max-num-seqs": "down",
            "max-num-batched-tokens": "down",
            "watermark": "up",
            "kv-cache-dtype": "on",
            "data-parallel-size": "up",
            "tensor-parallel-size": "up",
        },
    )


def _prefill_interference(e: Evidence) -> Finding:
    mixed = ramp(e.prefill_share, 0.2, 0.5) * ramp(e.input_tokens, 250, 800)
    slow = _slow_steps(e)
    return Finding(
        "prefill-interference",
        _tail(e) * mixed * _decides(e, Metric.TPOT, Metric.ITL) * _pressed(e),
        _said(
            *(
                f"{metric.value} p99 is {e.p99_s[metric] / e.p50_s[metric]:.1f} times its p50"
                for metric in (Metric.TPOT, Metric.ITL)
                if e.p50_s.get(metric) and metric in e.p99_s
            ),
            _of("decoding time lost to long steps", slow, "%"),
            _of("tokens a prompt", e.input_tokens),
            _of("token budget", e.budget),
        ),
        "Prefills of other requests take up whole steps, and running answers wait for them.",
        {
            "max-num-batched-tokens": "down",
            "long-prefill-token-threshold": "down" if e.long_prefill_threshold else "on",
            "max-num-partial-prefills": "down",
        },
    )


def _prefill_bound(e: Evidence) -> Finding:
    # A short prompt waits for one running step and takes one: only what is much longer than steps is computing.
    long = ramp(_ratio(e.prefill_s, e.p50_s.get(Metric.TPOT)), 2.0, 6.0)
    full_steps = _budget_used(e)
    confidence = (
        _decides(e, Metric.TTFT)
        * max(long, full_steps)
        * _pressed(e)
        * ramp(e.prefill_share, 0.4, 0.8)
        * (1 - _kv_full(e))
        * (1 - 0.7 * _at_seq_limit(e))
    )
    moves = {"enable-prefix-caching": "on", "tensor-parallel-size": "up", "data-parallel-size": "up"}
    if full_steps >= UNKNOWN:
        moves = {"max-num-batched-tokens": "up", **moves}
    return Finding(
        "prefill-bound",
        confidence,
        _said(
            _of("tokens a step", e.tokens_per_step, limit=e.budget),
            _of("prefill time", e.prefill_s, " s"),
            _of("queue time", e.queue_s, " s"),
            _of("prompt share of computed tokens", e.prefill_share, "%"),
        ),
        "Computing prompts takes the time to the first token: steps are full of them.",
        moves,
    )


def _decode_bound(e: Evidence) -> Finding:
    metric = _token_metric(e)
    typical = _ratio(e.p50_s.get(metric), e.limits_s.get(metric)) if metric is not None else None
    slow = ramp(typical, 0.6, 0.9) if metric is not None else 0.0
    return Finding(
        "decode-bound",
        slow * _decides(e, Metric.TPOT, Metric.ITL) * (1 - 0.8 * _tail(e)) * (1 - 0.5 * _kv_full(e)) * _pressed(e),
        _said(
            f"{metric.value} p50 is {100 * typical:.0f} % of its limit" if metric and typical is not None else None,
            _of("running", e.running_mean),
            _of("tokens a step", e.tokens_per_step),
        ),
        "Every step is too long for the promise: too many sequences share one, or the device is simply at its limit.",
        {
            "max-num-seqs": "down",
            "async-scheduling": "on",
            "max-cudagraph-capture-size": "up",
            "max-num-batched-tokens": "down",
            "tensor-parallel-size": "up",
            "data-parallel-size": "up",
        },
    )


def _api_server_bound(e: Evidence) -> Finding:
    outside = None
    mean = e.mean_s.get(Metric.TTFT)
    if mean and e.queue_s is not None and e.prefill_s is not None:
        outside = max(1 - (e.queue_s + e.prefill_s) / mean, 0.0)
    busy = ramp(e.api_cpu, 0.65, 0.9) if e.api_cpu is not None else 0.6 * ramp(outside, 0.4, 0.8)
    lost = ramp(outside, 0.1, 0.4) if outside is not None else UNKNOWN
    return Finding(
        "api-server-bound",
        busy * max(lost, UNKNOWN) * (1 - 0.5 * _kv_full(e)) * _pressed(e),
        _said(
            _of("API server uses", e.api_cpu, " cores"),
            _of("time to first token outside the engine", outside, "%"),
            _of("queue time in the engine", e.queue_s, " s"),
        ),
        "The HTTP front end, not the engine, is what requests and tokens wait for.",
        {"api-server-count": "up", "stream-interval": "up", "data-parallel-size": "up"},
    )


def _client_bound(e: Evidence) -> Finding:
    # Lag adds to the time to the first token; to the others only its changes do.
    promise = e.limits_s.get(Metric.TTFT) or min(e.limits_s.values(), default=None)
    lag = ramp(_ratio(e.client_lag_s, promise), 0.05, 0.2) if promise is not None else 0.0
    busy = ramp(e.client_cpu, 0.8, 0.97) if e.client_cpu is not None else 0.0
    return Finding(
        "client-bound",
        max(lag if e.client_lag_s is not None else 0.0, busy),
        _said(_of("client uses", e.client_cpu, " cores"), _of("client lag p99", e.client_lag_s, " s")),
        "The load generator could not keep up: this probe says little about the server.",
    )


def _host_bound(e: Evidence) -> Finding:
    known = e.engine_cpu is not None and e.gpu_util is not None
    return Finding(
        "host-bound",
        ramp(e.engine_cpu, 0.8, 0.97) * (1 - ramp(e.gpu_util, 0.6, 0.9)) * _pressed(e) if known else 0.0,
        _said(_of("engine uses", e.engine_cpu, " cores"), _of("GPU utilisation", e.gpu_util, "%")),
        "The engine's own process is busy while the GPU has gaps: preparing a step takes longer than computing it.",
        {"async-scheduling": "on", "enforce-eager": "off", "max-cudagraph-capture-size": "up", "stream-interval": "up"},
    )


def _long_outputs(e: Evidence) -> Finding:
    share = _ratio(e.decode_s, (e.queue_s or 0.0) + (e.prefill_s or 0.0) + (e.decode_s or 0.0))
    kept = min(
        (-e.margins[metric] for metric in (Metric.TTFT, Metric.TPOT, Metric.ITL) if metric in e.margins), default=1
    )
    return Finding(
        "long-outputs",
        _decides(e, Metric.E2E) * ramp(share, 0.7, 0.95) * ramp(kept, 0.0, 0.2) if Metric.E2E in e.margins else 0.0,
        _said(
            _of("decode share of a request", share, "%"),
            _of("tokens an answer", e.output_tokens),
        ),
        "The end-to-end promise breaks by the length of the answers alone; only faster decoding helps.",
        {"max-num-seqs": "down", "async-scheduling": "on", "tensor-parallel-size": "up"},
    )


def _throttled(e: Evidence) -> Finding:
    return Finding(
        "throttled",
        ramp(e.throttled_share, 0.05, 0.3) if e.throttled_share is not None else 0.0,
        _said(
            _of("share of samples throttled", e.throttled_share, "%"),
            _of("clock", e.sm_clock_mhz, " MHz"),
            _of("power", e.power_w, " W"),
        ),
        "Heat or missing power slowed the GPU down: results are not comparable with others.",
    )


def _idle(e: Evidence) -> Finding:
    margin = e.worst_margin
    easy = ramp(-margin, 0.3, 0.6) if margin is not None else 0.0
    empty = (1 - ramp(e.waiting_mean, 0.1, 1.0)) if e.waiting_mean is not None else UNKNOWN
    slack = 1 - ramp(e.gpu_util, 0.5, 0.9) if e.gpu_util is not None else 1.0
    return Finding(
        "idle",
        easy * empty * slack * (1 - _at_seq_limit(e) if e.max_num_seqs else 1.0),
        _said(
            f"worst margin {100 * margin:+.0f} %" if margin is not None else None,
            _of("running", e.running_mean, limit=e.max_num_seqs),
            _of("waiting", e.waiting_mean),
            _of("GPU utilisation", e.gpu_util, "%"),
        ),
        "The load does not ask for more: nothing waits, and every limit is kept with room.",
    )


RULES: tuple[Callable[[Evidence], Finding], ...] = (
    _queueing,
    _kv_bound,
    _prefill_interference,
    _prefill_bound,
    _decode_bound,
    _api_server_bound,
    _client_bound,
    _host_bound,
    _long_outputs,
    _throttled,
    _idle,
)
