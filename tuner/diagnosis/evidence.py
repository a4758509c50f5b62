"""What one probe says about where time went, as numbers with names; it concludes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.records import ClassMetrics, ClassSlo, KnobValue, Metric, Percentiles, Probe


@dataclass(frozen=True, slots=True)
class Evidence:
    """None where the source was absent. Means are over the probe's window, times in seconds, shares in 0..1."""

    margins: Mapping[Metric, float] = field(default_factory=dict)  # worst observed ÷ limit − 1 of each limited metric
    limits_s: Mapping[Metric, float] = field(default_factory=dict)  # tightest limit of each
    mean_s: Mapping[Metric, float] = field(default_factory=dict)
    p50_s: Mapping[Metric, float] = field(default_factory=dict)
    p99_s: Mapping[Metric, float] = field(default_factory=dict)
    requests: float | None = None  # finished in the window
    failed: int = 0
    input_tokens: float | None = None  # prompt tokens a request
    output_tokens: float | None = None
    # --- engine
    running_mean: float | None = None
    running_max: float | None = None
    waiting_mean: float | None = None
    waiting_max: float | None = None
    kv_usage_mean: float | None = None
    kv_usage_max: float | None = None
    preemptions: float | None = None
    prefix_hit_rate: float | None = None  # None also where nothing was looked up
    tokens_per_step: float | None = None
    queue_s: float | None = None  # a request, in the engine
    prefill_s: float | None = None
    decode_s: float | None = None
    # --- in effect
    max_num_seqs: float | None = None  # of all replicas together
    budget: float | None = None
    long_prefill_threshold: float | None = None  # None also where it is off
    pinned_share: float | None = None  # of samples with a queue, those in which `running` stood at its own maximum
    # --- host and device
    api_cpu: float | None = None  # cores of the busiest process; 1.0 is one full core
    engine_cpu: float | None = None
    client_cpu: float | None = None
    client_lag_s: float | None = None  # p99 of loop lag or send lag, whichever is longer
    gpu_util: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    throttled_share: float | None = None

    @property
    def worst(self) -> Metric | None:
        """The metric that decides; None without limits."""
        return max(self.margins, key=lambda metric: self.margins[metric]) if self.margins else None

    @property
    def worst_margin(self) -> float | None:
        return max(self.margins.values()) if self.margins else None

    @property
    def prefill_share(self) -> float | None:
        """Share of prompt tokens among all tokens that the engine computed."""
        if not self.input_tokens or self.output_tokens is None:
            return None
        computed = self.input_tokens * (1 - (self.prefix_hit_rate or 0.0))
        return computed / (computed + self.output_tokens)


def from_probe(probe: Probe, effective: Mapping[str, KnobValue], slo: ClassSlo) -> Evidence:
    """The evidence of one probe.

    `effective` are the values in effect (read back, over the defaults). For a mix of classes the worst one speaks for
    the limits, and `slo` is that class's promise; limits that the probe's own metrics do not show are taken from it.
    """
    metrics = _speaking(probe)
    latency = metrics.latency if metrics is not None else {}
    margins, limits = _margins(metrics, slo)
    gauges = probe.telemetry.gauges if probe.telemetry is not None else {}
    counters = probe.telemetry.counters if probe.telemetry is not None else {}
    finished = counters.get("requests_success") or counters.get("e2e_s_count") or counters.get("ttft_s_count")
    # Tokens are counted as they are computed: in a window shorter than an answer few requests finish, but the prompts
    # of all that begin are counted.
    begun = counters.get("ttft_s_count") or finished
    sent = sum(entry.requests for entry in probe.classes.values())
    return Evidence(
        margins=margins,
        limits_s=limits,
        mean_s={Metric(name): value.mean for name, value in latency.items()},
        p50_s={Metric(name): value.p50.value for name, value in latency.items()},
        p99_s={Metric(name): value.p99.value for name, value in latency.items()},
        requests=finished or float(sent) or None,
        failed=sum(entry.failed for entry in probe.classes.values()),
        input_tokens=_ratio(counters.get("prompt_tokens"), begun),
        output_tokens=_ratio(counters.get("generation_tokens"), begun),
        running_mean=gauges.get("running_mean"),
        running_max=gauges.get("running_max"),
        waiting_mean=gauges.get("waiting_mean"),
        waiting_max=gauges.get("waiting_max"),
        kv_usage_mean=gauges.get("kv_usage_mean"),
        kv_usage_max=gauges.get("kv_usage_max"),
        preemptions=counters.get("preemptions"),
        prefix_hit_rate=_ratio(counters.get("prefix_hits"), counters.get("prefix_queries")),
        tokens_per_step=_mean(counters, "iteration_tokens"),
        queue_s=_mean(counters, "queue_time_s"),
        prefill_s=_mean(counters, "prefill_time_s"),
        decode_s=_mean(counters, "decode_time_s"),
        max_num_seqs=_times(_number(effective, "max-num-seqs"), _number(effective, "data-parallel-size")),
        budget=_number(effective, "max-num-batched-tokens"),
        long_prefill_threshold=_number(effective, "long-prefill-token-threshold"),
        pinned_share=_pinned(probe),
        api_cpu=gauges.get("api_cpu_mean"),
        engine_cpu=gauges.get("engine_cpu_mean"),
        client_cpu=probe.client.cpu_share,
        client_lag_s=max(probe.client.loop_lag_p99_s, probe.validity.send_lag_p99_s),
        gpu_util=gauges.get("gpu_util_mean"),
        power_w=gauges.get("power_w_mean"),
        sm_clock_mhz=gauges.get("sm_clock_mhz_mean"),
        throttled_share=gauges.get("throttled_share"),
    )


def _pinned(probe: Probe) -> float | None:
    """How often the number of running requests stood at one ceiling while others waited: a limit leaves that trace
    even where nothing says what the limit is."""
    series = probe.telemetry.series if probe.telemetry is not None else {}
    pairs = list(zip(series.get("running", ()), series.get("waiting", ()), strict=False))
    queued = [running for running, waiting in pairs if waiting >= 1]  # NaN, a gap, compares as no
    if len(queued) < 5:
        return None
    ceiling = max(queued)
    return sum(running >= 0.995 * ceiling for running in queued) / len(queued)


def _speaking(probe: Probe) -> ClassMetrics | None:
    """The class that was probed, or the worst one of a mix."""
    if probe.workload in probe.classes:
        return probe.classes[probe.workload]
    return max(probe.classes.values(), key=lambda entry: entry.margin, default=None)


def _margins(metrics: ClassMetrics | None, slo: ClassSlo) -> tuple[dict[Metric, float], dict[Metric, float]]:
    margins: dict[Metric, float] = {}
    limits: dict[Metric, float] = {}
    for outcome in metrics.limits if metrics is not None else ():
        metric, limit_s = outcome.limit.metric, outcome.limit.limit_s
        margins[metric] = max(margins.get(metric, -1.0), outcome.observed_s / limit_s - 1)
        limits[metric] = min(limits.get(metric, limit_s), limit_s)
    for limit in slo.limits:
        limits[limit.metric] = min(limits.get(limit.metric, limit.limit_s), limit.limit_s)
        observed = metrics.latency.get(limit.metric.value) if metrics is not None else None
        if limit.metric not in margins and observed is not None:
            margins[limit.metric] = _at(observed, limit.percentile) / limit.limit_s - 1
    return margins, limits


def _at(values: Percentiles, percentile: float) -> float:
    """The recorded percentile nearest to the one asked for."""
    recorded = {50.0: values.p50.value, 95.0: values.p95.value, 99.0: values.p99.value}
    return recorded[min(recorded, key=lambda known: abs(known - percentile))]


def _mean(counters: Mapping[str, float], name: str) -> float | None:
    return _ratio(counters.get(f"{name}_sum"), counters.get(f"{name}_count"))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _times(one: float | None, factor: float | None) -> float | None:
    return None if one is None else one * (factor or 1.0)


def _number(values: Mapping[str, KnobValue], knob: str) -> float | None:
    value = values.get(knob)
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0 else float(value)
