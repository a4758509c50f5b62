"""Owns /metrics of a simulated server under vLLM's names and buckets; it measures nothing by itself."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tuner.sim.memory import Memory
from tuner.sim.profile import Effective

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REASONS = ("stop", "length", "abort", "error", "repetition")


class Metrics:
    """Counters and histograms of every engine rank."""

    def __init__(self, model: str, effective: Effective, memory: Memory, ranks: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        labels = ("model_name", "engine")
        known = [(model, str(rank)) for rank in range(ranks)]

        def gauge(name: str, text: str) -> list[Gauge]:
            family = Gauge(f"vllm:{name}", text, labels, registry=self.registry)
            return [family.labels(*values) for values in known]

        def counter(name: str, text: str) -> list[Counter]:
            family = Counter(f"vllm:{name}", text, labels, registry=self.registry)
            return [family.labels(*values) for values in known]

        def histogram(name: str, text: str, buckets: Sequence[float]) -> list[Histogram]:
            family = Histogram(f"vllm:{name}", text, labels, buckets=buckets, registry=self.registry)
            return [family.labels(*values) for values in known]

        self.running = gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self.usage = gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.preemptions = counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.queries = counter("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.")
        self.hits = counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self.prompt = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation = counter("generation_tokens", "Number of generation tokens processed.")
        self.iteration = histogram("iteration_tokens_total", "Histogram of number of tokens per engine_step.", _TOKENS)
        self.ttft = histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _ITL)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", _ITL
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _LONG)
        self.queue = histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _LONG
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _LONG
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _LONG
        )
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*labels, "finished_reason"),
            registry=self.registry,
        )
        self.finished = [{reason: success.labels(*values, reason) for reason in REASONS} for values in known]
        info = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            (
                "block_size",
                "cache_dtype",
                "enable_prefix_caching",
                "engine",
                "gpu_memory_utilization",
                "num_gpu_blocks",
            ),
            registry=self.registry,
        )
        dtype = "auto" if effective.kv_factor == 1.0 else "fp8"
        for _, rank in known:
            info.labels(
                str(effective.block),
                dtype,
                str(effective.prefix),
                rank,
                str(effective.utilization),
                str(memory.kv_tokens // effective.block),
            ).set(1)

    def text(self, names: Sequence[str]) -> bytes:
        """Everything, or the samples of these names only, as Prometheus' own application selects them."""
        registry = self.registry.restricted_registry(names) if names else self.registry
        return generate_latest(registry)
