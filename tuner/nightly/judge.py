"""Tonight against the nights before it: quiet, suspected or regressed, and since when; pure judging.

Two ways to see a loss. Within a night: fresh runs, confirmed by further ones, far outside of what the nights before
scattered. Over nights: a change point (Otava), which finds small losses that no single night proves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.nightly.changes import NOT_INSTALLED, change_points
from tuner.nightly.level import MOST_NIGHTS, Change, Level, alarming, change, level, objectives, suspicious
from tuner.nightly.profile import Regression
from tuner.nightly.record import Event, Night, State
from tuner.records import Config

OVERALL, DEFAULTS = "overall", "defaults"
MOST_SUSPECTED = 2
"""Suspected nights just before tonight that are judged together with it."""

Runs = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Tonight:
    """What was measured tonight."""

    number: int
    series: str
    config: Config  # of the incumbent
    weights: Mapping[str, float]
    runs: Runs  # of the incumbent that kept the SLO
    failure: str  # why some did not; empty where all did
    defaults: Runs = ()
    defaults_failure: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """What tonight means. `confirm` asks for further rounds before anything is said."""

    state: State
    events: tuple[Event, ...]
    changes: Mapping[str, Change]
    confirm: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Past:
    """The nights that tonight can be held against."""

    reference: tuple[Night, ...]
    suspected: tuple[Night, ...]  # the latest ones, directly before tonight
    everything: tuple[Night, ...]  # of the same incumbent in the same series, in order
    lost_since: int | None  # a loss that still stands, and the night it began with
    known_since: int  # change points up to this night have been dealt with


def judge(history: Sequence[Night], tonight: Tonight, recorded: Runs, rules: Regression) -> Judged:
    """`recorded`: runs behind the incumbent's lock where they are comparable; they count as one night more."""
    past = past_of(history, tonight)
    changes = _changes(past, tonight, recorded)
    looked_at = [name for name in changes if name != DEFAULTS]
    if tonight.failure:
        return _failed(past, tonight, changes)
    if past.lost_since is not None:
        return _standing(past, tonight, changes, rules)
    alone = _changes(past, tonight, recorded, with_suspected=False) if past.suspected else changes
    lost = [
        name
        for name in looked_at
        if alarming(changes[name], rules.minimum_effect, len(looked_at)) and alone[name].effect <= -rules.minimum_effect
    ]
    doubtful = any(suspicious(alone[name], rules.minimum_effect) for name in looked_at)
    if lost:
        event = Event("regression", _loss_text(lost, changes, rules))
        return Judged(State.REGRESSED, (event,), changes, confirm=True)
    drifted, notes = _drifted(past, tonight, rules)
    if drifted is not None:
        return Judged(State.REGRESSED, (drifted,), changes, confirm=False, notes=notes)
    state = State.SUSPECTED if doubtful else State.QUIET
    return Judged(state, (), changes, confirm=doubtful, notes=notes)


def judge_confirmed(
    history: Sequence[Night],
    tonight: Tonight,
    more: Callable[[], Tonight],
    recorded: Runs,
    rules: Regression,
) -> tuple[Tonight, Judged]:
    """As `judge`, with further rounds (`more`) before anything is said; returns all that was measured.

    A failure that does not happen again is a note, not a loss.
    """
    first = judge(history, tonight, recorded, rules)
    if not first.confirm:
        return tonight, first
    again = more()
    whole = replace(
        tonight,
        runs=(*tonight.runs, *again.runs),
        failure=again.failure if tonight.failure else "",
        defaults=(*tonight.defaults, *again.defaults),
        defaults_failure=again.defaults_failure if tonight.defaults_failure else "",
    )
    once = tonight.failure or again.failure
    judged = judge(history, whole, recorded, rules)
    if once and not whole.failure:
        judged = replace(judged, notes=(*judged.notes, f"the incumbent once {once}, but not again"))
    return whole, judged


def past_of(history: Sequence[Night], tonight: Tonight) -> Past:
    """Walks the nights that are comparable, from the last change of incumbent, machine or inputs on."""
    same: list[Night] = []
    for night in history:
        if night.series != tonight.series or night.config != tonight.config or night.accepted:
            same = []
        if night.series == tonight.series and night.config == tonight.config:
            same.append(night)
    reference: list[Night] = []
    lost_since: int | None = None
    known_since = 0
    for night in same:
        for event in night.events:
            if event.kind == "regression":
                lost_since = event.since if event.since is not None else night.number
                known_since = night.number
                reference = [one for one in reference if one.number < lost_since]
            elif event.kind == "recovery":
                lost_since, known_since = None, night.number
        if lost_since is None and night.runs:
            reference.append(night)
    suspected: list[Night] = []
    while reference and reference[-1].state is State.SUSPECTED:
        suspected.insert(0, reference.pop())
    return Past(tuple(reference), tuple(suspected[-MOST_SUSPECTED:]), tuple(same), lost_since, known_since)


def _changes(past: Past, tonight: Tonight, recorded: Runs, *, with_suspected: bool = True) -> dict[str, Change]:
    """Tonight against the reference: overall, each class where there are several, and the defaults."""
    names = [OVERALL, *(tonight.weights if len(tonight.weights) > 1 else ())]
    tail = past.suspected if with_suspected else ()
    found: dict[str, Change] = {}
    reference = past.reference[-MOST_NIGHTS:]
    control = _present([_defaults_level(night) for night in reference])
    for name in names:
        before = [_level(name, night.runs, night.weights) for night in reference]
        now = [_level(name, runs, tonight.weights) for runs in (*(night.runs for night in tail), tonight.runs)]
        against = _present([_level(name, recorded, tonight.weights), *before])
        # The spread of one run of a class is its own; overall it is the defaults' too.
        if (one := change(against, _present(now), control if name == OVERALL else ())) is not None:
            found[name] = one
    now_defaults = _present([_level(OVERALL, tonight.defaults, tonight.weights)])
    if (one := change(control, now_defaults)) is not None:
        found[DEFAULTS] = one
    return found


def _standing(past: Past, tonight: Tonight, changes: Mapping[str, Change], rules: Regression) -> Judged:
    """A loss that was reported before: still there, or gone."""
    whole = changes.get(OVERALL)
    if whole is None:
        event = Event("recovery", "it runs again; there is no level before to hold it against", past.lost_since)
        return Judged(State.QUIET, (event,), changes, confirm=False)
    gone = min(rules.minimum_effect, rules.minimum_drift) / 2
    if all(one.effect > -gone for name, one in changes.items() if name != DEFAULTS):
        text = f"back to {whole.effect:+.1%} of the level before night {past.lost_since}"
        return Judged(State.QUIET, (Event("recovery", text, past.lost_since),), changes, confirm=False)
    return Judged(
        State.REGRESSED, (), changes, confirm=False, notes=(f"the loss since night {past.lost_since} stands",)
    )


def _failed(past: Past, tonight: Tonight, changes: Mapping[str, Change]) -> Judged:
    if past.lost_since is not None:
        return Judged(State.REGRESSED, (), changes, confirm=False, notes=(tonight.failure,))
    blame = ""
    if tonight.defaults_failure:
        blame = f"; the defaults {tonight.defaults_failure} too, so look at the machine or vLLM first"
    event = Event("regression", f"the incumbent {tonight.failure}{blame}")
    return Judged(State.REGRESSED, (event,), changes, confirm=True)


def _drifted(past: Past, tonight: Tonight, rules: Regression) -> tuple[Event | None, tuple[str, ...]]:
    """The latest change point, where it is a loss that nobody has been told of and that still stands."""
    nights = [night for night in past.everything if night.runs]
    values = [
        *(_mean(night.runs, night.weights) for night in nights),
        *([_mean(tonight.runs, tonight.weights)] if tonight.runs else []),
    ]
    points = change_points(values, rules.minimum_drift)
    if points is None:
        return None, (NOT_INSTALLED,)
    if not points:
        return None, ()
    latest = points[-1]
    since = nights[latest.index].number
    if latest.effect > -rules.minimum_drift or since <= past.known_since:
        return None, ()
    text = (
        f"capacity {latest.effect:+.1%} since night {since}: a change point over {len(values)} nights "
        f"(p = {latest.probability:.1g})"
    )
    return Event("regression", text, since), ()


def _loss_text(lost: Sequence[str], changes: Mapping[str, Change], rules: Regression) -> str:
    parts = [f"{name} {_effect(changes[name])}" for name in lost]
    text = "capacity " + ", ".join(parts) + f", against the mean of {changes[lost[0]].nights} nights"
    control = changes.get(DEFAULTS)
    if control is None:
        return text
    if control.effect <= -rules.minimum_effect / 2:
        return f"{text}; the defaults changed by {_effect(control)} too, so look at the machine or vLLM first"
    return f"{text}; the defaults changed by {_effect(control)}, so it is this configuration"


def _effect(found: Change) -> str:
    return f"{found.effect:+.1%} (95 %: {found.low:+.1%} to {found.high:+.1%})"


def _level(name: str, runs: Runs, weights: Mapping[str, float]) -> Level | None:
    values = objectives(runs, weights) if name == OVERALL else [run[name] for run in runs if name in run]
    return level(values)


def _defaults_level(night: Night) -> Level | None:
    side = next((side for side in night.sides if side.name == DEFAULTS), None)
    return None if side is None else _level(OVERALL, side.values, night.weights)


def _mean(runs: Runs, weights: Mapping[str, float]) -> float:
    one = level(objectives(runs, weights))
    return math.exp(one.mean) if one is not None else math.nan


def _present(levels: Sequence[Level | None]) -> list[Level]:
    return [one for one in levels if one is not None]
