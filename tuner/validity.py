"""Judges whether a probe measured the server or something else: pure arithmetic over evidence; it judges no SLO.

Every threshold is named here, with its source, and explained in docs/client.md. What only the server can be blamed for
makes no probe invalid: a probe is repeated with more workers when it is invalid, and that would mend nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from tuner.records import ClientEvidence, Limit, LoadResult, Metric, RequestResult, RequestStatus, Validity

LAG_SHARE = 0.05
"""Share of the tightest TTFT or E2E limit that the client may add to it."""
LAG_FLOOR_S = 0.005
"""Less than this is never held against the client; a busy machine wakes a process about so late."""
LAG_WITHOUT_LIMIT_S = 0.025
CPU_SHARE = 0.9
"""A worker is one thread: beyond this its stamps wait for its CPU time."""
RATE_TOLERANCE = 0.03
"""Achieved against planned rate (vllm#21104 reports a target of 200 requests/s of which 183.5 were sent)."""
COUNT_TOLERANCE = 0.01
"""A token count may miss by this share, and so may this share of the answers (ai-dynamo/aiperf#850: 1-2 % short)."""
SHORT_TOLERANCE = 0.005
"""Answers that end early though end tokens are ignored: fewer are failures, more a wrong load (inference-perf#497)."""
PREFIX_TOLERANCE = 0.05
"""Share of prompt tokens that the prefix cache may answer beyond what the load shares on purpose (vllm#54227)."""
BURST_RATIO, BURST_GAP_S = 0.1, 0.0005
"""A median gap between chunks that is shorter than any step of an engine and far below the mean: something holds the
stream back and lets it go in bursts (tt-inference-server#4681: 0.02 ms against 6.2)."""
FOREIGN_TOLERANCE = 0.05
"""Requests that the server counted beyond ours."""
CONCURRENCY_RATIO = 0.5
CONCURRENCY_LEAST = 32
"""The server must have seen at least half of the requests under way (guidellm#487: a client that stopped at 100)."""
TTFT_RATIO, TTFT_SLACK_S = 1.25, 0.05
"""Our median TTFT against the bucket of the server's own (vllm#39963: 134 s at the client where 1.3 s were true)."""
IDLE_SHARE = 0.2
"""A client that used less than this of each of its allowances is cleared of a difference between server and client."""


@dataclass(frozen=True, slots=True)
class ServerEvidence:
    """What the server's metrics say about the time of the probe; None where they say nothing."""

    peak_concurrency: float | None = None  # running + waiting
    ttft_median_bucket_s: tuple[float, float] | None = None  # bounds of the histogram bucket that holds the median
    requests: float | None = None  # first tokens that the server counted
    prefix_queries: float | None = None  # tokens
    prefix_hits: float | None = None  # tokens


def judge_validity(
    result: LoadResult,
    *,
    offered_rps: float,
    window: tuple[float, float],
    limits: Sequence[Limit],
    server: ServerEvidence | None = None,
    shared_prefix_share: float = 0.0,
) -> Validity:
    """Whether `result` says something about the server.

    `offered_rps` 0: a closed loop, which offers no rate. `window`: the scored part, seconds on the probe's clock.
    `limits`: of all classes in the probe. `shared_prefix_share`: of the prompt tokens, those that other requests of the
    probe share on purpose.
    """
    server = server or ServerEvidence()
    start, end = window
    sent = [request for request in result.requests if not _unsent(request)]
    scored = [request for request in sent if start <= request.scheduled_s < end]
    answered = [request for request in scored if request.ok or request.status is RequestStatus.SHORT_OUTPUT]
    send_lag_s = _rank([request.send_lag_s for request in scored], 0.99)
    achieved_rps = sum(start <= request.sent_s < end for request in sent) / (end - start)
    allowed_s = allowed_lag_s(limits)
    reasons = _client_reasons(result.client, send_lag_s, allowed_s)
    if offered_rps:
        reasons += _rate_reasons(scored, achieved_rps, end - start)
    reasons += _token_reasons(scored, answered)
    reasons += _prefix_reasons(answered, server, shared_prefix_share)
    reasons += _burst_reasons(answered)
    differences = _server_differences(sent, scored, server)
    if not _is_idle(result.client, send_lag_s, allowed_s):
        reasons += differences
        differences = []
    reasons += _foreign_reasons(result.requests, server)
    bucket = server.ttft_median_bucket_s
    return Validity(
        valid=not reasons,
        reasons=tuple(reasons),
        send_lag_p99_s=send_lag_s,
        achieved_rps=achieved_rps,
        offered_rps=offered_rps,
        server_peak_concurrency=server.peak_concurrency,
        server_ttft_p50_s=None if bucket is None or math.isinf(bucket[1]) else (bucket[0] + bucket[1]) / 2,
        notes=tuple(f"{text}; the client had time to spare, so the server's front end is slow" for text in differences),
    )


def allowed_lag_s(limits: Sequence[Limit]) -> float:
    """How late the client may be at its 99th percentile before it bends the latencies that are judged."""
    bounds = [limit.limit_s * LAG_SHARE for limit in limits if limit.metric in (Metric.TTFT, Metric.E2E)]
    # A late read shifts one gap by its whole size; that is judged directly only where ITL has a limit.
    bounds += [limit.limit_s * 2 * LAG_SHARE for limit in limits if limit.metric is Metric.ITL]
    return max(min(bounds, default=LAG_WITHOUT_LIMIT_S), LAG_FLOOR_S)


def _client_reasons(client: ClientEvidence, send_lag_s: float, allowed_s: float) -> list[str]:
    reasons = []
    if send_lag_s > allowed_s:
        reasons.append(
            f"the client sent late: send lag P99 {_ms(send_lag_s)}, allowed {_ms(allowed_s)} (CPU or workers short)"
        )
    if client.loop_lag_p99_s > allowed_s:
        reasons.append(
            f"the client read late: event loop lag P99 {_ms(client.loop_lag_p99_s)}, allowed {_ms(allowed_s)}"
            f" (CPU or workers short; {client.workers} in use)"
        )
    if client.cpu_share > CPU_SHARE:
        reasons.append(
            f"the busiest of {client.workers} client worker(s) used {client.cpu_share:.0%} of a core,"
            f" allowed {CPU_SHARE:.0%}"
        )
    return reasons


def _is_idle(client: ClientEvidence, send_lag_s: float, allowed_s: float) -> bool:
    """Whether the client's own evidence clears it."""
    most_lag_s = max(send_lag_s, client.loop_lag_p99_s)
    return most_lag_s <= max(IDLE_SHARE * allowed_s, LAG_FLOOR_S) and client.cpu_share <= 0.5


def _rate_reasons(scored: Sequence[RequestResult], achieved_rps: float, span_s: float) -> list[str]:
    """Against what was planned for the window, which for random arrivals is not exactly the offered rate."""
    planned_rps = len(scored) / span_s
    if abs(achieved_rps - planned_rps) <= max(RATE_TOLERANCE * planned_rps, 2 / span_s):
        return []
    return [f"the client sent {achieved_rps:.2f} requests/s where {planned_rps:.2f} were planned"]


def _token_reasons(scored: Sequence[RequestResult], answered: Sequence[RequestResult]) -> list[str]:
    reasons = []
    uncounted = sum(not request.usage_reported for request in answered)
    if uncounted > COUNT_TOLERANCE * len(answered):
        reasons.append(f"the server reported no usage for {uncounted} of {len(answered)} answers: tokens are unknown")
        return reasons
    known = [request for request in answered if request.planned_input_tokens > 0]
    wrong = [r for r in known if _differs(r.input_tokens, r.planned_input_tokens)]
    if len(wrong) > COUNT_TOLERANCE * len(known):
        example = wrong[0]
        reasons.append(
            f"{len(wrong)} of {len(known)} prompts had another length than planned, such as"
            f" {example.input_tokens} tokens for {example.planned_input_tokens}"
        )
    short = [request for request in scored if request.status is RequestStatus.SHORT_OUTPUT]
    if len(short) > max(SHORT_TOLERANCE * len(scored), 1):
        reasons.append(
            f"{len(short)} of {len(scored)} answers ended early although end tokens are ignored: {short[0].error}"
        )
    long = [r for r in answered if r.planned_output_tokens > 0 and _exceeds(r.output_tokens, r.planned_output_tokens)]
    if len(long) > COUNT_TOLERANCE * len(answered):
        example = long[0]
        reasons.append(
            f"{len(long)} of {len(answered)} answers were longer than asked for, such as {example.output_tokens} tokens"
            f" for {example.planned_output_tokens}"
        )
    return reasons


def _exceeds(counted: int, planned: int) -> bool:
    return counted > planned and _differs(counted, planned)


def _differs(counted: int, planned: int) -> bool:
    return abs(counted - planned) > max(COUNT_TOLERANCE * planned, 1)


def _prefix_reasons(answered: Sequence[RequestResult], server: ServerEvidence, shared_prefix_share: float) -> list[str]:
    if server.prefix_queries and server.prefix_hits is not None:
        share = server.prefix_hits / server.prefix_queries
    else:
        known = [request for request in answered if request.cached_tokens is not None and request.input_tokens]
        total = sum(request.input_tokens for request in known)
        share = sum(request.cached_tokens or 0 for request in known) / total if total else 0.0
    if share <= shared_prefix_share + PREFIX_TOLERANCE:
        return []
    return [
        f"the prefix cache answered {share:.0%} of the prompt tokens where {shared_prefix_share:.0%} are shared on"
        " purpose: prompts were repeated, or the cache was not reset"
    ]


def _burst_reasons(answered: Sequence[RequestResult]) -> list[str]:
    gaps_us = [gap for request in answered if request.chunks >= 10 for gap in request.gaps_us]
    if not gaps_us:
        return []
    middle, mean = median(gaps_us), fmean(gaps_us)
    if middle >= BURST_RATIO * mean or middle >= BURST_GAP_S * 1e6:
        return []
    return [f"chunks arrive in bursts: median gap {middle / 1e3:.2f} ms, mean {mean / 1e3:.2f} ms"]


def _server_differences(
    sent: Sequence[RequestResult], scored: Sequence[RequestResult], server: ServerEvidence
) -> list[str]:
    """Where server and client disagree about what the requests went through."""
    differences = []
    if server.peak_concurrency is not None:
        ours = typical_peak_concurrency(sent)
        if ours >= CONCURRENCY_LEAST and server.peak_concurrency < CONCURRENCY_RATIO * ours:
            differences.append(
                f"the server saw at most {server.peak_concurrency:.0f} requests at once, {ours} were under way"
            )
    ttfts_s = [request.ttft_sent_s for request in scored if request.ttft_sent_s is not None]
    if server.ttft_median_bucket_s is not None and ttfts_s:
        low_s, high_s = server.ttft_median_bucket_s
        ours_s = median(ttfts_s)
        if ours_s > TTFT_RATIO * high_s + TTFT_SLACK_S:
            differences.append(f"median TTFT {_ms(ours_s)} at the client, at most {_ms(high_s)} at the server")
        elif ours_s < low_s / TTFT_RATIO - TTFT_SLACK_S:
            differences.append(f"median TTFT {_ms(ours_s)} at the client, at least {_ms(low_s)} at the server")
    return differences


def _foreign_reasons(requests: Sequence[RequestResult], server: ServerEvidence) -> list[str]:
    ours = sum(not _unsent(request) for request in requests)
    if server.requests is None or server.requests <= ours * (1 + FOREIGN_TOLERANCE) + 2:
        return []
    return [f"the server answered {server.requests:.0f} requests, of which only {ours} were ours: it has other traffic"]


def typical_peak_concurrency(requests: Sequence[RequestResult]) -> int:
    """Requests under way, 95th percentile over time: what a sampler that looks twice a second would meet."""
    changes = sorted([(request.sent_s, 1) for request in requests] + [(request.end_s, -1) for request in requests])
    lasted: dict[int, float] = {}
    level = 0
    for (at_s, change), (next_s, _) in pairwise(changes):
        level += change
        lasted[level] = lasted.get(level, 0.0) + next_s - at_s
    left_s = 0.05 * sum(lasted.values())
    for level in sorted(lasted, reverse=True):
        left_s -= lasted[level]
        if left_s <= 0:
            return level
    return 0


def _unsent(request: RequestResult) -> bool:
    return request.status is RequestStatus.CANCELLED and request.sent_s >= request.end_s


def _rank(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:.1f} ms"
