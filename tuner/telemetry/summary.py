"""Samples to the summary of a window; pure, so that any window can be cut from the same samples afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.records import TelemetrySummary
from tuner.telemetry.devices import DeviceReading
from tuner.telemetry.histogram import Histogram
from tuner.telemetry.prometheus import Snapshot, parse

SERIES_SAMPLES = 120
"""Samples kept a series; means and maxima are taken over all of them before that."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of every source; `t_s` counts from the start of the telemetry."""

    t_s: float
    metrics: Snapshot | None = None  # the fast ones
    text: str | None = None  # `/metrics` of a complete reading; parsed only if it comes to lie at a window's end
    device: DeviceReading | None = None
    cpu: Mapping[str, float] = field(default_factory=dict)


Reader = Callable[[Sample], float | None]


def _gauge(name: str) -> Reader:
    return lambda sample: None if sample.metrics is None else sample.metrics.gauges.get(name)


def _counter(name: str) -> Reader:
    return lambda sample: None if sample.metrics is None else sample.metrics.counters.get(name)


def _device(name: str) -> Reader:
    return lambda sample: None if sample.device is None else float(getattr(sample.device, name))


def _cpu(role: str) -> Reader:
    return lambda sample: sample.cpu.get(role)


SERIES: Mapping[str, Reader] = {
    "running": _gauge("running"),
    "waiting": _gauge("waiting"),
    "kv_usage": _gauge("kv_usage"),
    "generation_tokens": _counter("generation_tokens"),
    "gpu_util": _device("util"),
    "mem_used_bytes": _device("mem_used_bytes"),
    "power_w": _device("power_w"),
    "sm_clock_mhz": _device("sm_clock_mhz"),
    "temperature_c": _device("temperature_c"),
    "throttled": _device("throttled"),
    "power_capped": _device("power_capped"),
    "api_cpu": _cpu("api"),
    "engine_cpu": _cpu("engine"),
    "worker_cpu": _cpu("worker"),
    "client_cpu": _cpu("client"),
}

MEANS = {
    "running": "running_mean",
    "waiting": "waiting_mean",
    "kv_usage": "kv_usage_mean",
    "gpu_util": "gpu_util_mean",
    "power_w": "power_w_mean",
    "sm_clock_mhz": "sm_clock_mhz_mean",
    "throttled": "throttled_share",
    "power_capped": "power_capped_share",
    "api_cpu": "api_cpu_mean",
    "engine_cpu": "engine_cpu_mean",
    "worker_cpu": "worker_cpu_mean",
    "client_cpu": "client_cpu_mean",
}
MAXIMA = {
    "running": "running_max",
    "waiting": "waiting_max",
    "kv_usage": "kv_usage_max",
    "mem_used_bytes": "mem_used_bytes_max",
    "temperature_c": "temperature_c_max",
}


def summarize(
    samples: Sequence[Sample], window: tuple[float, float] | None = None, absent: Sequence[str] = ()
) -> TelemetrySummary:
    """The summary of `window` (seconds since the start, None: everything).

    Counters and histograms are differenced between the complete readings nearest to the window's ends;
    `counters["span_s"]` is the time that truly lies between them. Gauges are those of the samples inside the window.
    """
    start, end = window or (-math.inf, math.inf)
    inside = [sample for sample in samples if start <= sample.t_s <= end]
    values = {name: [read(sample) for sample in inside] for name, read in SERIES.items()}
    known = {name: present for name, column in values.items() if (present := [v for v in column if v is not None])}
    gauges = {MEANS[name]: sum(column) / len(column) for name, column in known.items() if name in MEANS}
    gauges |= {MAXIMA[name]: max(column) for name, column in known.items() if name in MAXIMA}
    concurrency = [
        running + waiting
        for running, waiting in zip(values["running"], values["waiting"], strict=True)
        if running is not None and waiting is not None
    ]
    if concurrency:
        gauges["concurrency_max"] = max(concurrency)
    step = max(1, math.ceil(len(inside) / SERIES_SAMPLES))
    series = {"t_s": tuple(round(sample.t_s, 3) for sample in inside[::step])}
    for name in known:
        series[name] = tuple(math.nan if value is None else round(value, 4) for value in values[name][::step])
    return TelemetrySummary(
        series=series, counters=_differences(samples, start, end), gauges=gauges, absent=tuple(absent)
    )


def histogram(summary: TelemetrySummary, name: str) -> Histogram | None:
    """Histogram `name` (`ttft_s`, `tpot_s`, `itl_s`, `queue_time_s`, …) over the summary's window; None if absent."""
    count = summary.counters.get(f"{name}_count")
    if count is None:
        return None
    prefix = f"{name}_le_"
    at = {float(key.removeprefix(prefix)): n for key, n in summary.counters.items() if key.startswith(prefix)}
    bounds = tuple(sorted(at))
    return Histogram(bounds, tuple(at[bound] for bound in bounds), summary.counters.get(f"{name}_sum", 0.0), count)


def _differences(samples: Sequence[Sample], start: float, end: float) -> dict[str, float]:
    complete = [(sample.t_s, sample.text) for sample in samples if sample.text is not None]
    if not complete:
        return {}
    (first_s, first_text), (last_s, last_text) = _nearest(complete, start), _nearest(complete, end)
    if last_s <= first_s:
        return {}
    first, last = parse(first_text), parse(last_text)
    counters = {"span_s": last_s - first_s}
    for name, value in last.counters.items():
        before = first.counters.get(name, 0.0)
        counters[name] = value - before if value >= before else value
    for name, now in last.histograms.items():
        then = first.histograms.get(name)
        difference = now if then is None else now.minus(then)
        counters[f"{name}_sum"], counters[f"{name}_count"] = difference.sum, difference.count
        for bound, below in zip(difference.bounds, difference.cumulative, strict=True):
            counters[f"{name}_le_{bound:g}"] = below
    return counters


def _nearest(readings: Sequence[tuple[float, str]], t_s: float) -> tuple[float, str]:
    if math.isinf(t_s):
        return readings[0] if t_s < 0 else readings[-1]
    return min(readings, key=lambda reading: abs(reading[0] - t_s))
