"""Which configuration to try next, as a pure function of what has been tried; it measures nothing and knows no Optuna.

One knob of the incumbent at a time: of all such steps, the one with the largest expected gain by what all measurements
say together, by the diagnosis and by stage. A crash is repaired with memory before its direction is given up; knobs
that each gained a little are tried together. When no step promises enough, the answer is a free one: TPE's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.optimizer.surface import Effect, Observation, Surface
from tuner.optimizer.tracks import BUDGET, FOOTPRINT, MEMORY, REPLICAS, SEQUENCES, Point, Tracks, replaced
from tuner.records import StepKind, TrialState

Advice = Mapping[str, tuple[str, float]]
"""Knob to (`up` | `down` | `on` | `off`, confidence 0..1): the diagnosis of the incumbent's own metrics."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Constants of the search; where each comes from is told in docs/search.md."""

    accept: float = 0.01  # least relative gain, after shrinkage, that makes a new incumbent
    crash_share: float = 0.25  # of all trials, at most
    repairs: tuple[int, ...] = (1, 2, 4)  # notches of memory utilisation, from the crashed configuration
    noise: float = 0.035  # relative spread of one objective, as long as the study has not measured its own
    noise_weight: int = 4  # replicates that the line above is worth
    screen_noise: float = 0.04  # spread that a prediction from one probe per class adds
    screen: float = 0.03  # predicted loss, as a logarithm, at which a candidate is dropped
    advice_gain: float = 0.05  # expected from a step in the direction of a diagnosis that is sure
    least: float = 0.001  # expected improvement below which free steps are tried
    free_share: float = 1 / 3  # of all trials after the first ones are free, at least: no step's promise is sure
    first: int = 5  # trials before that
    optimism: float = 2.0  # standard deviations above the expectation that a free step hopes for
    looks: int = 4  # measurements of one configuration in the search, at most
    bearable: float = 0.05  # loss of a step, in log objective, up to which its new bottleneck is worth a try
    leaps: tuple[int, ...] = (1, 2, 4)  # notches against that bottleneck
    strong: float = 0.08  # prior effect of token budget and sequence limit
    middle: float = 0.05  # of memory utilisation
    replicas: float = 0.3  # of ranks and replicas
    weak: float = 0.03  # of everything else
    fall: float = 0.06  # loss expected at a whole track's distance from the start


@dataclass(frozen=True, slots=True)
class Entry:
    """What the search knows of one asked configuration."""

    number: int
    point: Point
    kind: StepKind
    base: int | None  # number of the incumbent it was a step from
    state: TrialState | None = None  # None: asked, not yet told
    values: tuple[float, ...] = ()  # log objective, one a replicate; predicted where screened
    violation: float = 0.0  # sum of positive constraints; 0 is feasible
    cures: Mapping[str, str] = field(default_factory=dict)  # of a crash: knob to direction
    effective: Point = ()  # what really ran

    @property
    def value(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def crashed(self) -> bool:
        return self.state is TrialState.INFEASIBLE

    @property
    def measured(self) -> bool:
        return self.state is TrialState.COMPLETE and bool(self.values)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration worth a trial, and why."""

    point: Point
    kind: StepKind
    reason: str
    promised: float = 0.0  # by a diagnosis that is not the origin's


def noise_floor(entries: Sequence[Entry], settings: Settings) -> float:
    """Relative spread of one measured objective, from replicates, shrunk to the prior while there are few."""
    squares, freedom = settings.noise_weight * settings.noise**2, settings.noise_weight
    for values in _replicates(entries).values():
        mean = sum(values) / len(values)
        squares += sum((value - mean) ** 2 for value in values)
        freedom += len(values) - 1
    return math.sqrt(squares / freedom)


def _replicates(entries: Sequence[Entry]) -> dict[Point, list[float]]:
    """Every measured value of each point, in whichever trials."""
    found: dict[Point, list[float]] = {}
    for entry in entries:
        if entry.measured:
            found.setdefault(entry.point, []).extend(entry.values)
    return found


class Knowledge:
    """Everything that was told, and what it says together."""

    def __init__(self, tracks: Tracks, entries: Sequence[Entry], settings: Settings) -> None:
        self.tracks, self.entries, self.settings = tracks, entries, settings
        self.noise = noise_floor(entries, settings)
        start = entries[0].point if entries else tracks.default
        self.surface = Surface(tracks.tracks, self._effects(), start, self._observations())
        broken = {entry.point for entry in entries if entry.crashed}
        measured = [entry for entry in entries if entry.measured]
        # What crashed once is no candidate, even if it ran another time, as long as there is another one.
        sound = [entry for entry in measured if entry.point not in broken]
        self.measured = sound if any(entry.violation == 0 for entry in sound) else measured
        self.incumbent = self._incumbent()

    @property
    def noise_of_one(self) -> float:
        """Spread of one measured log objective, by replicates and by how much all values scatter."""
        return self.noise * self.surface.noise_scale

    def expected(self, entry: Entry) -> float:
        """Log objective of a configuration after shrinkage: its own values, and what its neighbours say."""
        mean, _ = self.surface.predict([entry.point])
        return float(mean[0])

    def _observations(self) -> list[Observation]:
        found = []
        for entry in self.entries:
            if entry.value is None or entry.crashed:
                continue
            variance = self.noise**2 / len(entry.values)
            if not entry.measured:
                variance += self.settings.screen_noise**2
            found.append(Observation(entry.effective or entry.point, entry.value, variance))
        return found

    def _effects(self) -> list[Effect]:
        found = []
        for track in self.tracks.tracks:
            s = self.settings
            if track.name in REPLICAS:
                found.append(Effect(s.replicas, 0.0, group="replicas"))  # idle devices are no safe default
                continue
            amplitude = s.strong if track.name in (SEQUENCES, BUDGET) else s.middle if track.name == MEMORY else s.weak
            found.append(Effect(amplitude, s.fall * amplitude / s.strong))
        return found

    def _incumbent(self) -> Entry | None:
        """Where steps start from: replayed in the order of asking, so a resumed study agrees.

        The best by what all measurements say, not the luckiest; ties go to fewer overrides.
        """
        if not self.measured:
            return None
        kept = [entry for entry in self.measured if entry.violation == 0]
        if not kept:
            return min(self.measured, key=lambda entry: entry.violation)
        means, _ = self.surface.predict([entry.effective or entry.point for entry in kept])
        best, best_mean = kept[0], float(means[0])
        gate = math.log1p(self.settings.accept)
        for entry, mean in zip(kept[1:], means[1:], strict=True):
            simpler = self.tracks.overrides(entry.point) < self.tracks.overrides(best.point)
            if mean - best_mean > (0.0 if simpler else gate):
                best, best_mean = entry, float(mean)
        return best


class Policy:
    """One decision: everything that has been tried in, the next candidate out.

    `origin` is the incumbent, or, while nothing has ever run, the configuration that came closest to running.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        advice: Advice,
        admissible: Callable[[Point], bool],
        others: Mapping[int, Advice] | None = None,
    ) -> None:
        """`advice`: the diagnosis of the incumbent; `others`: of trials that were steps from it, by number."""
        self.tracks, self.entries, self.settings = knowledge.tracks, knowledge.entries, knowledge.settings
        self._knowledge = knowledge
        self.crashes = [entry for entry in self.entries if entry.crashed]
        self.best = knowledge.incumbent
        self.origin = self.best or min(self.crashes or self.entries, key=lambda entry: entry.violation)
        self.advice: Advice = advice if self.best is not None else {k: (v, 1.0) for k, v in self.origin.cures.items()}
        self._others = others or {}
        self._by_number = {entry.number: entry for entry in self.entries}
        self._tried = {entry.point for entry in self.entries} | {entry.effective for entry in self.entries}
        self._admissible = admissible
        self._kept = [entry for entry in knowledge.measured if entry.violation == 0] or [self.origin]
        self._careful = len(self.crashes) + 1 > max(2.0, self.settings.crash_share * (len(self.entries) + 1))
        self._suspects = self._involved()

    def next(self, *, free: bool = True) -> Candidate | None:
        """The most promising step, repair, combination or second look; None when it is a free step's turn.

        Where no step promises enough, free steps and second looks take turns; `free`: whether there is one at all.
        """
        candidates = {
            c.point: c for c in (*self._steps(), *self._repairs(), *self._combinations(), *self._follow_ups())
        }
        steps = [candidate for candidate in candidates.values() if self.allowed(candidate.point)]
        looks = list(self._confirmations())
        chosen = [*steps, *looks]
        if not chosen:
            return None
        scores = self.scores([candidate.point for candidate in chosen], [candidate.promised for candidate in chosen])
        best = int(np.argmax(scores))
        if scores[best] < self.settings.least:
            kinds = [entry.kind for entry in self.entries]
            if not looks or (free and kinds.count(StepKind.CONFIRM) >= kinds.count(StepKind.FREE)):
                return None
            best = len(steps) + int(np.argmax(scores[len(steps) :]))
        return replace(chosen[best], reason=f"{chosen[best].reason}; {self.outlook(chosen[best].point)}")

    def free_due(self) -> bool:
        """Whether it is a free step's turn, whatever the steps promise: priors that are wrong never show it."""
        late = len(self.entries) - self.settings.first
        free = sum(entry.kind is StepKind.FREE for entry in self.entries)
        return late > 0 and free < self.settings.free_share * late

    def scores(self, points: Sequence[Point], promised: Sequence[float] | None = None) -> list[float]:
        """What a measurement of each point is expected to add to the best known, the diagnosis counted in.

        `promised`: by other diagnoses than the incumbent's.
        """
        surface = self._knowledge.surface
        _, sd = surface.predict(points)
        # What the diagnosis promises counts as far as nothing was measured there.
        open_share = np.minimum(1.0, (sd / surface.spread()) ** 2)
        more = np.zeros(len(points)) if promised is None else np.array(promised)
        gain = open_share * (np.array([self._promised(point) for point in points]) + more)
        known = list(dict.fromkeys(entry.effective or entry.point for entry in self._kept))
        return [float(value) for value in surface.learning(points, gain, known, self._knowledge.noise_of_one**2)]

    def hopes(self, points: Sequence[Point]) -> list[float]:
        """What each point may turn out to be, as a log objective: the upper end of what the measurements leave open.

        An upper confidence bound keeps looking where little is known (Srinivas et al. (2010), ICML, 1015).
        """
        mean, sd = self._knowledge.surface.predict(points)
        return [float(value) for value in mean + self.settings.optimism * sd]

    def outlook(self, point: Point) -> str:
        """What the measurements so far expect of a point against the incumbent, in words."""
        mean, sd = self._knowledge.surface.predict([point])
        change = float(mean[0]) - self._knowledge.expected(self.origin)
        return f"expected {math.expm1(change):+.1%} ± {float(sd[0]):.1%}"

    def allowed(self, point: Point) -> bool:
        """Not yet tried, refused by no rule, not behind a known crash, and safe while too many trials have crashed."""
        return (
            point not in self._tried
            and self.tracks.sound(point)
            and not any(self._dominates(point, crash) for crash in self.crashes)
            and (not self._careful or self.best is None or self._safe(point))
            and self._admissible(point)
        )

    # --- crashes ---------------------------------------------------------------------------------------------

    def _dominates(self, point: Point, crash: Entry) -> bool:
        """Whether `point` asks for at least as much of everything that made `crash` fail.

        What would have cured the crash is known by direction: a point that moved no cure in its direction crashes as
        well, unless it differs in something else that decides whether a configuration fits. Without a known cure
        only what is the same in every track does.
        """
        for track, mine, theirs in zip(self.tracks.tracks, point, crash.point, strict=True):
            cure = crash.cures.get(track.name)
            if cure is None:
                if mine != theirs and (track.name in FOOTPRINT or not crash.cures):
                    return False
            elif (mine - theirs) * _sign(cure) > 0:
                return False
        return True

    def _safe(self, point: Point) -> bool:
        """Whether everything that was ever part of a crash stands as in some configuration that ran."""
        ran = (entry.point for entry in self.entries if entry.state in (TrialState.COMPLETE, TrialState.SCREENED))
        return any(all(point[i] == other[i] for i in self._suspects) for other in ran)

    def _involved(self) -> frozenset[int]:
        """Tracks that a crash changed, or that would have cured it."""
        found: set[int] = set()
        for crash in self.crashes:
            base = self._by_number.get(crash.base) if crash.base is not None else None
            for i, track in enumerate(self.tracks.tracks):
                if track.name in crash.cures or (base is not None and base.point[i] != crash.point[i]):
                    found.add(i)
        return frozenset(found)

    # --- candidates ------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Candidate]:
        """Every value of every knob, from the origin; what is coupled to it moves along."""
        here = self.origin.point
        for i, track in enumerate(self.tracks.tracks):
            for index in range(len(track.values)):
                point = self.tracks.couple(replaced(here, i, index), i) if index != here[i] else None
                if point is None:
                    continue
                changed = _different(point, here)
                kind = StepKind.ONE if len(changed) == 1 else StepKind.COUPLED
                yield Candidate(point, kind, self._reason(i, index))

    def _reason(self, i: int, index: int) -> str:
        track, here = self.tracks.tracks[i], self.origin.point[i]
        move = f"{track.name} {track.shown(here)} → {track.shown(index)}"
        advice = self.advice.get(track.name)
        if advice is not None and track.ordered and (index - here) * _sign(advice[0]) > 0:
            return f"{move}: the diagnosis of the incumbent points {advice[0]}"
        known = [e for e in self.entries if e.point[i] != here and e.value is not None]
        return f"{move}: " + ("the measurements so far promise most here" if known else "not tried yet")

    def _promised(self, point: Point) -> float:
        total = 0.0
        for i, track in enumerate(self.tracks.tracks):
            advice = self.advice.get(track.name)
            notches = point[i] - self.origin.point[i]
            if advice is None or notches == 0 or not track.ordered:
                continue
            word, confidence = advice
            gain = self.settings.advice_gain * confidence * min(1.0, abs(notches) / 2)
            total += gain if notches * _sign(word) > 0 else -gain
        return total

    def _repairs(self) -> Iterator[Candidate]:
        """A crashed step of the incumbent again, with less memory, before its direction is given up."""
        memory = self.tracks.position(MEMORY)
        if memory is None:
            return
        track = self.tracks.tracks[memory]
        for crash in self.crashes:
            moved = {self.tracks.tracks[i].name for i in _different(crash.point, self.origin.point)}
            if crash.base != self.origin.number or not moved & {SEQUENCES, BUDGET}:
                continue
            direction = _sign(crash.cures.get(MEMORY, "down"))
            for notches in self.settings.repairs:
                index = crash.point[memory] + direction * notches
                if 0 <= index < len(track.values):
                    why = f"{', '.join(sorted(moved))} crashed; again with {track.name} {track.shown(index)}"
                    yield Candidate(replaced(crash.point, memory, index), StepKind.REPAIR, why)

    def _follow_ups(self) -> Iterator[Candidate]:
        """A step that only moved the bottleneck, together with what helps against the new one.

        More sequences alone end in preemption and more memory alone is not used: neither step gains anything, and the
        diagnosis of the first one names the second.
        """
        best, settings = self.best, self.settings
        if best is None:
            return
        target = self._knowledge.expected(best)
        for entry in self._kept:
            moved = _different(entry.point, best.point)
            if len(moved) != 1 or self._knowledge.expected(entry) < target - settings.bearable:
                continue
            mine = self.tracks.tracks[moved[0]].name
            for i, track in enumerate(self.tracks.tracks):
                word, confidence = self._others.get(entry.number, {}).get(track.name, ("", 0.0))
                known, surety = self.advice.get(track.name, ("", 0.0))
                # What the incumbent's own diagnosis says as surely is tried from the incumbent.
                if i in moved or not track.ordered or not word or (known == word and surety >= confidence):
                    continue
                for notches in settings.leaps:
                    index = min(len(track.values) - 1, max(0, entry.point[i] + _sign(word) * notches))
                    point = self.tracks.couple(replaced(entry.point, i, index), i)
                    if point is not None and index != entry.point[i]:
                        why = f"{mine} moved the bottleneck; its diagnosis points {word} for {track.name}"
                        gain = settings.advice_gain * confidence * min(1.0, notches / 2)
                        yield Candidate(point, StepKind.COMBINE, why, gain)

    def _confirmations(self) -> Iterator[Candidate]:
        """What may be the best, once more and in full: a lucky value is found out, an unlucky one is not given up.

        Also what one screening has dropped: a single probe is much noisier than a measurement.
        """
        replicates = _replicates(self.entries)
        broken = {entry.point for entry in self.crashes}
        looks = {
            point: f"measured {len(replicates[point])}×; once more"
            for point in dict.fromkeys(entry.point for entry in self._kept if entry.measured)
            if len(replicates[point]) < self.settings.looks
        }
        for entry in self.entries:
            if entry.state is TrialState.SCREENED and entry.point not in replicates and entry.point not in broken:
                looks[entry.point] = "was dropped by its screening; in full this time"
        least = self._knowledge.expected(self.best) if self.best is not None else -math.inf
        for (point, why), hope in zip(looks.items(), self.hopes(list(looks)), strict=True):
            if hope >= least:
                yield Candidate(point, StepKind.CONFIRM, why)

    def _combinations(self) -> Iterator[Candidate]:
        """Every knob whose own step from the incumbent is expected to gain, in one configuration."""
        best = self.best
        if best is None:
            return
        target = self._knowledge.expected(best)
        gains: dict[int, tuple[float, int]] = {}
        for entry in self.entries:
            moved = _different(entry.point, best.point)
            if len(moved) == 1 and entry.measured and entry.violation == 0:
                gain = self._knowledge.expected(entry) - target
                if gain > gains.get(moved[0], (0.0, 0))[0]:
                    gains[moved[0]] = (gain, entry.point[moved[0]])
        if len(gains) < 2:
            return
        point = best.point
        for i, (_, index) in gains.items():
            point = replaced(point, i, index)
        names = " and ".join(self.tracks.tracks[i].name for i in sorted(gains))
        yield Candidate(point, StepKind.COMBINE, f"{names} each gained a little")


def _sign(word: str) -> int:
    return 1 if word in ("up", "on") else -1


def _different(one: Point, other: Point) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
