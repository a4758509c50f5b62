"""vLLM's metric names, newest first, under our own names; the only place that knows them.

Checked against recorded `/metrics` of vLLM 0.26 and 0.32 and against the metric loggers' source; older spellings are
kept because they cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}

COUNTERS: Mapping[str, tuple[str, ...]] = {
    "generation_tokens": ("vllm:generation_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "requests_success": ("vllm:request_success_total",),
}

HISTOGRAMS: Mapping[str, tuple[str, ...]] = {
    "ttft_s": ("vllm:time_to_first_token_seconds",),
    "tpot_s": ("vllm:request_time_per_output_token_seconds",),
    "itl_s": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2e_s": ("vllm:e2e_request_latency_seconds",),
    "queue_time_s": ("vllm:request_queue_time_seconds",),
    "prefill_time_s": ("vllm:request_prefill_time_seconds",),
    "decode_time_s": ("vllm:request_decode_time_seconds",),
    "iteration_tokens": ("vllm:iteration_tokens_total",),
}

BUCKETED = frozenset({"ttft_s", "tpot_s", "itl_s", "queue_time_s"})
"""Histograms whose buckets are read; of the others sum and count are enough, and every line costs the server time."""

UNSUCCESSFUL = frozenset({"abort", "error"})
"""Values of `finished_reason` that are no success although vLLM counts them under `request_success`."""

FAST = ("running", "waiting", "kv_usage", "generation_tokens", "preemptions")
"""Read with every sample; everything else only every few seconds (docs/telemetry.md: what a scrape costs)."""


def samples_of(name: str) -> tuple[str, ...]:
    """Names of the samples that make up one of our names, in every spelling."""
    if name in HISTOGRAMS:
        suffixes = ("_sum", "_count", "_bucket") if name in BUCKETED else ("_sum", "_count")
        return tuple(family + suffix for family in HISTOGRAMS[name] for suffix in suffixes)
    return GAUGES.get(name) or COUNTERS[name]


ALL = (*GAUGES, *COUNTERS, *HISTOGRAMS)
EVERY_SAMPLE = frozenset(sample for name in ALL for sample in samples_of(name))
FAST_SAMPLES = frozenset(sample for name in FAST for sample in samples_of(name))
