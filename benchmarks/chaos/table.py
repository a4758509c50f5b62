"""Outcomes in words and as a table; it judges nothing."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.chaos.campaign import Outcome

_WHAT = ("lost", "left", "wrong", "unfinished", "tracebacks")
_HEAD = ("target", "fault", "runs", "hit", "trials lost", "left behind", "wrong verdicts", "unfinished", "tracebacks")


def line(outcome: Outcome) -> str:
    """One run in one line, and what went wrong in it below."""
    done = outcome.done or ("undisturbed" if outcome.kind == "none" else "nothing was there to hit")
    text = f"{outcome.target} {outcome.index}, {outcome.truth}, {outcome.kind} {outcome.moment} ({done}): "
    text += f"{outcome.finished} trials finished, exit codes {list(outcome.codes)}, {outcome.duration_s:.0f} s"
    wrong = [f"  {what}: {item}" for what in _WHAT for item in getattr(outcome, what)]
    return "\n".join([text, *wrong])


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: one row for every target and kind of fault, and the sum of each target."""
    rows: list[tuple[object, ...]] = []
    for target in dict.fromkeys(outcome.target for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.target == target]
        for kind in dict.fromkeys(outcome.kind for outcome in mine):
            rows.append(_row(target, kind, [outcome for outcome in mine if outcome.kind == kind]))
        rows.append(_row(target, "all", mine))
    if len({outcome.target for outcome in outcomes}) > 1:
        rows.append(_row("both", "all", outcomes))
    lines = [_HEAD, tuple("---" for _ in _HEAD), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def _row(target: str, kind: str, outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    counts = (sum(len(getattr(outcome, what)) for outcome in outcomes) for what in _WHAT)
    return (target, kind, len(outcomes), sum(bool(outcome.done) for outcome in outcomes), *counts)
