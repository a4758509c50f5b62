"""From trial records to what the search knows of each configuration; it decides nothing and knows no Optuna."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.optimizer.policy import Entry
from tuner.optimizer.tracks import Point, Tracks
from tuner.records import Proposal, TrialRecord, TrialState

UNFINISHED = (TrialState.FAULT, TrialState.INTERRUPTED)
"""States that say nothing about the configuration."""


@dataclass(frozen=True, slots=True)
class Told:
    """One replicate and how the study judged it. `objective` is relative to the baseline, larger is better."""

    record: TrialRecord
    objective: float | None  # predicted where screened
    constraints: Mapping[str, float]  # relative excess over each limit; <= 0 is kept


def entry(proposal: Proposal, told: Sequence[Told], tracks: Tracks) -> Entry | None:
    """What is known of one trial that was asked for; None where its configuration is not on the grid."""
    point = tracks.point(proposal.config)
    lasting = [item for item in told if item.record.state not in UNFINISHED]
    if point is None:
        return None
    kind, base = proposal.step.kind, proposal.step.from_trial
    if not lasting:
        return Entry(proposal.number, point, kind, base, state=told[-1].record.state if told else None)
    states = {item.record.state for item in lasting}
    # One replicate that could not run is enough: a configuration must start every time.
    state = next(s for s in (TrialState.INFEASIBLE, TrialState.COMPLETE, TrialState.SCREENED) if s in states)
    counted = [item for item in lasting if item.record.state is state]
    return Entry(
        number=proposal.number,
        point=point,
        kind=kind,
        base=base,
        state=state,
        values=tuple(math.log(value) for item in counted if (value := _usable(item.objective)) is not None),
        violation=sum(max(0.0, v) for item in counted for v in item.constraints.values()) / len(counted),
        cures={k: v for item in counted if item.record.failure for k, v in item.record.failure.moves.items()},
        effective=_effective(counted[0].record, point, tracks),
    )


def _usable(objective: float | None) -> float | None:
    return objective if objective is not None and math.isfinite(objective) and objective > 0 else None


def _effective(record: TrialRecord, point: Point, tracks: Tracks) -> Point:
    """What really ran, where the log says it: asking for a value that vLLM turns into another is the same trial."""
    names = [track.name for track in tracks.tracks]
    found = [tracks.tracks[i].find(record.effective[n]) if n in record.effective else None for i, n in enumerate(names)]
    return tuple(own if index is None else index for own, index in zip(point, found, strict=True))
