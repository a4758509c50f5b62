"""The comparison of answers in words, the same in every format; it compares by the rules of `tuner.quality` only."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.quality import Comparison, compare
from tuner.records import Config, Estimate, StepKind, TrialRecord
from tuner.report.model import QualityRow, Ref
from tuner.report.words import change_text
from tuner.study.guard import own_noise

ABOUT = (
    "Greedy answers against the baseline's on the same prompts; in brackets 95 % intervals over prompts, then what the "
    "baseline differs from itself on a fresh server. Only equivalent ones may win."
)
HEAD = (
    "trial",
    "configuration",
    "answers",
    "of 100 tokens chosen differently",
    "drift of log-probabilities, nats",
    "answers equal to the end",
    "why",
)


def quality_rows(trials: Sequence[TrialRecord], baseline: Config) -> tuple[QualityRow, ...]:
    """Every comparison of a study but the baseline's with itself, in the order of running."""
    noise = own_noise(trials)
    return tuple(
        QualityRow(Ref(record.number, record.replicate), change_text(record, baseline), compare(record.quality, noise))
        for record in trials
        if record.quality is not None and record.step.kind is not StepKind.BASELINE
    )


def cells(comparison: Comparison) -> tuple[str, str, str, str, str]:
    """Verdict to reason, by `HEAD`."""
    return (
        comparison.verdict,
        _cell(_turned(comparison.agreement), _turned_value(comparison.own_agreement), 100, 1),
        _cell(comparison.drift, comparison.own_drift, 1, 3),
        _cell(comparison.exact, comparison.own_exact, 100, 0, " %"),
        comparison.reason,
    )


def _cell(estimate: Estimate | None, own: float | None, scale: float, digits: int, unit: str = "") -> str:
    if estimate is None or own is None:
        return "–"
    value, low, high, itself = (f"{scale * x:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high, own))
    return f"{value}{unit} ({low}–{high}), itself {itself}{unit}"


def _turned(share: Estimate | None) -> Estimate | None:
    return None if share is None else Estimate(1 - share.value, 1 - share.high, 1 - share.low, share.n)


def _turned_value(share: float | None) -> float | None:
    return None if share is None else 1 - share
