"""Numbers and configurations in words, the same in every format; pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

from tuner.export import Rate
from tuner.records import Config, Estimate, KnobValue, Limit, Probe, StepKind, TrialRecord

_DIGITS = re.compile(r"\d[\d.,]*")


def all_probes(record: TrialRecord) -> tuple[Probe, ...]:
    """Every probe of a trial, those of its capacities too."""
    return (*record.probes, *(probe for capacity in record.capacities.values() for probe in capacity.probes))


def value_text(value: KnobValue | None) -> str:
    """A knob's value; None is vLLM's default."""
    if value is None:
        return "default"
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting_text(value: KnobValue | None) -> str:
    """A flag's value beside another one; None is vLLM's default."""
    return "vLLM's default" if value is None else value_text(value)


def rate_text(rate: Rate | None) -> str:
    """`8.57 (7.95–9.20)`, with `≥` or `≤` before it where it is only a bound; `–` where there is nothing."""
    return interval(rate) if rate is None else f"{rate.mark}{interval(rate)}"


def config_text(config: Config) -> str:
    return " ".join(f"{name}={value_text(value)}" for name, value in config.items()) or "vLLM's defaults"


def change_text(record: TrialRecord, baseline: Config) -> str:
    """The step in a few words: `max-num-seqs 128 → 256`; the whole configuration where nothing was stepped from."""
    step = record.step
    if step.changed:
        return ", ".join(f"{name} {value_text(old)} → {value_text(new)}" for name, (old, new) in step.changed.items())
    if step.kind is StepKind.BASELINE or dict(record.config) == dict(baseline):
        return f"baseline: {config_text(record.config)}"
    return config_text(record.config)


def limit_text(limit: Limit) -> str:
    at = "max" if limit.percentile == 100 else f"P{limit.percentile:g}"
    return f"{limit.metric.upper()} {at} ≤ {limit.limit_s * 1000:g} ms"


def probe_notes(records: Iterable[TrialRecord]) -> tuple[str, ...]:
    """What was odd about scored probes: one line a workload and kind of note (they differ in their numbers)."""
    examples: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for record in records:
        for probe in all_probes(record):
            for note in (*probe.notes, *probe.validity.notes) if probe.classes else ():
                key = probe.workload, _DIGITS.sub("", note.partition(":")[0])
                examples.setdefault(key, note)
                counts[key] += 1
    return tuple(
        f"{workload}: {note}"
        + (f" (and alike in {counts[workload, kind] - 1} other probes)" * (counts[workload, kind] > 1))
        for (workload, kind), note in examples.items()
    )


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def milliseconds(seconds: float) -> str:
    return f"{number(seconds * 1000)} ms"


def interval(estimate: Estimate | None, unit: str = "") -> str:
    """`8.57 (7.95–9.20)`; `–` where there is nothing."""
    if estimate is None:
        return "–"
    return f"{number(estimate.value)}{unit} ({number(estimate.low)}–{number(estimate.high)})"


def ratio(estimate: Estimate | None) -> str:
    """`1.54× (1.40–1.69)`."""
    if estimate is None:
        return "–"
    high = "∞" if math.isinf(estimate.high) else f"{estimate.high:.2f}"
    return f"{estimate.value:.2f}× ({estimate.low:.2f}–{high})"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def duration(seconds: float) -> str:
    """`48 s`, `3 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
