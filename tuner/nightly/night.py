"""One night from its first server to its record; a night that was killed goes on where its records end.

Everything is kept as it is found: rounds, confirmation, search and promotion each in a folder of their own below the
night's. The night exists once `night.json` is written; until then the next call takes the same night up again.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner import __version__
from tuner.comparison import (
    LOCK_FILE,
    Comparison,
    Contrast,
    Definition,
    Lock,
    Now,
    Place,
    Side,
    Standing,
    Weight,
    compare,
    drift_between,
    lock_of,
)
from tuner.errors import EnvironmentFault
from tuner.nightly.hooks import Told, tell
from tuner.nightly.judge import DEFAULTS, Runs, Tonight, judge_confirmed
from tuner.nightly.ready import Ready
from tuner.nightly.record import Event, History, Night, Promoted, SideRuns, State
from tuner.nightly.report import junit, markdown
from tuner.nightly.rotate import rotate
from tuner.nightly.search import Found, SearchPlan, keep_plan, kept_plan, plan_search, reasons, search
from tuner.records import FORMAT_VERSION, Config, EnvironmentFacts, Index, Moment
from tuner.serve_args import to_argv
from tuner.server import VllmInstall
from tuner.store import ResultsFolder, dumps, loads, read_text, write_atomic
from tuner.study import Observer, StopSignals
from tuner.study.runner import PAUSE_S

INCUMBENT = "incumbent"
STALE_S = 12 * 3600.0
"""A night that was begun longer ago is left: rounds of two days are not interleaved."""

EXPORTED = ("best.yaml", "best.sh", "best.json", LOCK_FILE)


@dataclass(frozen=True, slots=True)
class Begun:
    """Content of `begun.json`: what a night started with."""

    number: Index
    started_at: Moment
    environments: tuple[str, ...]  # digests, one a vLLM
    incumbent: Index
    config: Config
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Outcome:
    """A night and what became of telling it."""

    night: Night
    told: tuple[Told, ...]
    folder: Path


class Nightly:
    """The nights of one profile on one place."""

    def __init__(
        self,
        ready: Ready,
        place: Place,
        signals: StopSignals,
        observer: Observer,
        *,
        accept: bool = False,
        searching: bool = True,
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`accept`: tonight's level is the new reference. `searching`: False never searches, whatever the profile."""
        self._ready, self._place, self._signals, self._observer = ready, place, signals, observer
        self._accept, self._searching, self._pause_s, self._clock = accept, searching, pause_s, clock
        self._history = History(ready.profile.results)

    def run(self) -> Outcome:
        """The next night, or the one that was begun. Interrupted and EnvironmentFault leave it to be taken up again."""
        nights = self._history.nights()
        self._finish_last(nights)
        environment = self._place.facts(self._ready.install, self._ready.gpus)
        begun = self._begun(nights, environment)
        folder = self._history.folder(begun.number)
        self._observer.phase("night", f"{begun.number} of {self._ready.profile.name}")
        comparison = self._measure(begun, folder / "rounds", self._ready.profile.rounds)
        wall = [comparison]

        def more() -> Tonight:
            self._observer.note("tonight is unlike the nights before; measuring further rounds before saying so")
            again = self._measure(begun, folder / "confirm", self._ready.profile.regression.confirm_rounds)
            wall.append(again)
            return self._tonight(begun, again, environment)

        tonight = self._tonight(begun, comparison, environment)
        history = () if self._accept else nights
        tonight, judged = judge_confirmed(
            history,
            tonight,
            more,
            () if self._accept else self._recorded(begun, environment),
            self._ready.profile.regression,
        )
        events, notes = list(judged.events), list(judged.notes)
        version = self._version(comparison, events)
        found, candidate = None, None
        if tonight.runs or tonight.defaults:
            found, candidate = self._search_and_promote(begun, nights, environment, events, notes, folder)
        else:
            notes.append("nothing ran tonight, so nothing was searched")
        night = Night(
            number=begun.number,
            series=tonight.series,
            incumbent=begun.incumbent,
            config=begun.config,
            given=self._ready.given,
            started_at=begun.started_at,
            ended_at=self._clock(),
            environment=environment,
            model_revision=self._ready.model_revision,
            weights=tonight.weights,
            sides=self._sides(comparison, tonight),
            changes=judged.changes,
            state=judged.state,
            events=tuple(events),
            drift=_drift(nights, environment, self._ready),
            version=version,
            searched=None if found is None else found.searched,
            candidate=candidate,
            accepted=self._accept,
            simulated=any(one.result is not None and one.result.simulated for one in wall),
            wall_s=sum(one.result.wall_s for one in wall if one.result is not None),
            notes=tuple(notes),
        )
        self._history.write(night)
        return Outcome(night, self._finish(night), folder)

    # --- measuring -------------------------------------------------------------------------------------------

    def _measure(self, begun: Begun, folder: Path, rounds: int) -> Comparison:
        ready, install = self._ready, self._ready.install
        variables = self._variables(begun)
        sides = [_side(INCUMBENT, install, begun.config, variables)]
        if begun.config:
            sides.append(_side(DEFAULTS, install, {}, variables))
        if ready.other is not None:
            name = f"{INCUMBENT} on vLLM {ready.other.version}"
            sides.append(_side(name, ready.other, begun.config, variables))
        return self._compare(begun, tuple(sides), folder, rounds, ready.profile.promotion.minimum_gain)

    def _compare(self, begun: Begun, sides: tuple[Side, ...], folder: Path, rounds: int, margin: float) -> Comparison:
        ready = self._ready
        installs = {one.path: one for one in (ready.install, ready.other) if one is not None}
        name = f"{ready.profile.name}, night {begun.number}"
        definition = Definition(
            name=name,
            model=ready.profile.model,
            model_revision=ready.model_revision,
            sides=sides,
            fixed=ready.fixed,
            workloads=ready.workloads,
            gpus=ready.gpus,
            rounds=rounds,
            speed=ready.profile.speed,
            margin=margin,
            seed=zlib.crc32(f"{name}/{folder.name}".encode()) % 2**31,
            slo_digest=ready.traffic.slo.digest,
            workload_digests={name: workload.digest for name, workload in ready.traffic.workloads.items()},
            created_at=self._clock(),
            tuner_version=__version__,
        )
        return compare(
            definition,
            ready.traffic,
            installs,
            ResultsFolder(folder),
            self._place,
            self._signals,
            self._observer,
            pause_s=self._pause_s,
        )

    def _tonight(self, begun: Begun, comparison: Comparison, environment: EnvironmentFacts) -> Tonight:
        result = comparison.result
        assert result is not None
        names = [side.name for side in comparison.definition.sides]
        control = names.index(DEFAULTS) if DEFAULTS in names else None
        return Tonight(
            begun.number,
            self._ready.series(environment),
            begun.config,
            result.weights,
            result.values[0],
            result.failures[0],
            () if control is None else result.values[control],
            "" if control is None else result.failures[control],
        )

    def _sides(self, comparison: Comparison, tonight: Tonight) -> tuple[SideRuns, ...]:
        """Every side's runs; of incumbent and defaults those of the confirmation too."""
        result = comparison.result
        assert result is not None
        whole: dict[str, Runs] = {INCUMBENT: tonight.runs, DEFAULTS: tonight.defaults}
        return tuple(
            SideRuns(
                name=side.name,
                vllm_version=side.vllm_version,
                values=tuple(whole.get(side.name, values)),
                at_least=tuple(name for name, rate in rates.items() if rate.at_least),
                failure=tonight.failure if side.name == INCUMBENT else failure,
            )
            for side, values, rates, failure in zip(
                comparison.definition.sides, result.values, result.rates, result.failures, strict=True
            )
        )

    def _version(self, comparison: Comparison, events: list[Event]) -> Contrast | None:
        """The incumbent on the second vLLM against the first."""
        if self._ready.other is None:
            return None
        assert comparison.result is not None
        contrast = comparison.result.against_first[len(comparison.definition.sides) - 1].overall
        if contrast.standing is Standing.WORSE:
            ratio = "" if contrast.ratio is None else f": {contrast.ratio.value:.3f} times the capacity"
            versions = f"vLLM {self._ready.other.version} is worse than {self._ready.install.version}"
            events.append(Event("version", versions + (ratio or f": {contrast.reason}")))
        return contrast

    # --- what the night starts with --------------------------------------------------------------------------

    def _begun(self, nights: Sequence[Night], environment: EnvironmentFacts) -> Begun:
        """The night that was begun, where it can still be gone on with; else a new one."""
        number = nights[-1].number + 1 if nights else 1
        folder, installs = self._history.folder(number), (self._ready.install, self._ready.other)
        digests = tuple(
            self._place.facts(install, self._ready.gpus).digest for install in installs if install is not None
        )
        incumbent, config = incumbent_of(nights, self._ready.given)
        for install in installs:
            if install is not None:
                to_argv({**self._ready.fixed, **config}, install.flags)  # InputError for a flag that it does not have
        path = folder / "begun.json"
        if path.is_file():
            begun = loads(Begun, read_text(path), str(path))
            fresh = self._clock() - begun.started_at <= STALE_S
            if fresh and begun.environments == digests and begun.config == config:
                self._observer.note(f"going on with night {number}, which had begun")
                return begun
            self._observer.note(f"night {number} had begun on another day, vLLM or incumbent; it begins anew")
        if folder.exists():
            _set_aside(folder)
        begun = Begun(number, self._clock(), digests, incumbent, config)
        write_atomic(path, dumps(begun))
        return begun

    def _recorded(self, begun: Begun, environment: EnvironmentFacts) -> Runs:
        """The runs behind the incumbent's lock, where they were measured here and with the same inputs."""
        lock = self._lock(begun)
        if lock is None or lock.simulated or lock.environment.machine != environment.machine:
            return ()
        classes = [name for name in self._ready.traffic.slo.classes if name in lock.slo.get("classes", {})]
        now = Now(
            environment=environment,
            model=self._ready.profile.model,
            model_revision=self._ready.model_revision,
            config={**self._ready.fixed, **begun.config},
            slo=self._ready.traffic.slo,
            workload_digests={n: w.digest for n, w in self._ready.traffic.workloads.items()},
            variables={},
        )
        drift = drift_between(lock, lock.promise(classes, LOCK_FILE), now)
        same_flags = not any(item.what.startswith("flag ") for item in drift)
        comparable = same_flags and not any(item.weight is Weight.FORBIDS for item in drift)
        return lock.runs_rps if comparable and lock.speed == self._ready.profile.speed else ()

    def _lock(self, begun: Begun) -> Lock | None:
        if begun.incumbent == 0:
            return self._ready.lock
        return lock_of(self._incumbents(begun.incumbent) / "best.yaml")

    def _variables(self, begun: Begun) -> Mapping[str, str]:
        """Those that the incumbent was found with; every side has them, as every trial of its study had."""
        lock = self._lock(begun)
        return {} if lock is None else lock.variables

    # --- search and promotion --------------------------------------------------------------------------------

    def _search_and_promote(
        self,
        begun: Begun,
        nights: Sequence[Night],
        environment: EnvironmentFacts,
        events: list[Event],
        notes: list[str],
        folder: Path,
    ) -> tuple[Found | None, Promoted | None]:
        """A fault of the machine ends this part and not the night, whose rounds are measured."""
        plan = self._plan(begun, nights, environment, events, folder / "search.json")
        if plan is None:
            return None, None
        found = None
        try:
            self._observer.phase("search", f"going on because of {', '.join(plan.reasons)}")
            found = search(
                plan,
                self._ready,
                self._history,
                self._place,
                environment,
                self._variables(begun),
                self._signals,
                self._observer,
                self._pause_s,
            )
            return found, self._promote(begun, found, events, folder / "promotion")
        except EnvironmentFault as fault:
            notes.append(f"the search or promotion ended early: {fault}")
            return found, None

    def _plan(
        self,
        begun: Begun,
        nights: Sequence[Night],
        environment: EnvironmentFacts,
        events: Sequence[Event],
        path: Path,
    ) -> SearchPlan | None:
        if (plan := kept_plan(path)) is not None:
            return plan
        why = reasons(self._ready, nights, begun.config, environment, events) if self._searching else ()
        if not why:
            return None
        plan = plan_search(self._ready, self._history, nights, begun.config, environment, why)
        keep_plan(path, plan)
        return plan

    def _promote(self, begun: Begun, found: Found, events: list[Event], folder: Path) -> Promoted | None:
        """The candidate against the incumbent in rounds of their own; only `better` promotes."""
        candidate, rules = found.candidate, self._ready.profile.promotion
        if candidate is None or candidate == begun.config:
            return None
        install, variables = self._ready.install, self._variables(begun)
        sides = (_side(INCUMBENT, install, begun.config, variables), _side("candidate", install, candidate, variables))
        self._observer.phase("promotion", "the candidate against the incumbent")
        comparison = self._compare(begun, sides, folder, rules.rounds, rules.minimum_gain)
        assert comparison.result is not None
        contrast = comparison.result.against_first[1].overall
        if contrast.standing is not Standing.BETTER or not rules.allowed:
            return Promoted(candidate, False, contrast, None)
        number = begun.incumbent + 1
        target = self._incumbents(number)
        for name in EXPORTED:
            write_atomic(target / name, (self._history.root / found.searched.folder / name).read_bytes())
        gain = "" if contrast.ratio is None else f": {contrast.ratio.value:.3f} times the capacity of the old one"
        events.append(Event("promotion", f"a new incumbent, {target / 'best.yaml'}{gain}"))
        return Promoted(candidate, True, contrast, number)

    def _incumbents(self, number: int) -> Path:
        return self._history.root / "incumbents" / f"{number:04d}"

    # --- afterwards ------------------------------------------------------------------------------------------

    def _finish_last(self, nights: Sequence[Night]) -> None:
        """What a tuner that was killed after its record had still to do."""
        if nights and not (self._history.folder(nights[-1].number) / "told.json").is_file():
            self._history.write_csv()
            self._finish(nights[-1])

    def _finish(self, night: Night) -> tuple[Told, ...]:
        """Reports, the incumbent's files, rotation, hooks. Everything here may be done twice, hooks at least once."""
        profile, folder = self._ready.profile, self._history.folder(night.number)
        summary = markdown(profile.name, night)
        write_atomic(folder / "summary.md", summary)
        write_atomic(folder / "junit.xml", junit(profile.name, night))
        standing = self._incumbents(night.standing_incumbent)
        for name in EXPORTED:
            if (standing / name).is_file():
                write_atomic(self._history.root / name, (standing / name).read_bytes())
        rotate(self._history, self._history.nights(), profile.keep_raw_nights)
        told = tell(profile.hooks, profile.name, night, summary)
        write_atomic(folder / "told.json", dumps(_Calls(told)))
        return told


@dataclass(frozen=True, slots=True)
class _Calls:
    """Content of `told.json`."""

    told: tuple[Told, ...]
    format_version: int = FORMAT_VERSION


def incumbent_of(nights: Sequence[Night], given: Config) -> tuple[int, Config]:
    """Number and configuration of the next night: what was promoted last, or the profile's where that is new."""
    if not nights:
        return 0, given
    last = nights[-1]
    if last.given != given:
        return last.standing_incumbent + 1, given
    if last.candidate is not None and last.candidate.promoted:
        return last.standing_incumbent, last.candidate.config
    return last.incumbent, last.config


def _side(name: str, install: VllmInstall, config: Config, variables: Mapping[str, str]) -> Side:
    return Side(name, name, install.path, install.version, config, variables)


def _drift(nights: Sequence[Night], now: EnvironmentFacts, ready: Ready) -> tuple[str, ...]:
    """What changed since the night before, in words."""
    if not nights:
        return ()
    before = nights[-1]
    pairs: Mapping[str, tuple[str, str]] = {
        "vLLM": (before.environment.vllm_version, now.vllm_version),
        "driver": (before.environment.driver, now.driver),
        "CUDA": (before.environment.cuda, now.cuda),
        "GPU": (" + ".join(before.environment.gpus), " + ".join(now.gpus)),
        "platform": (before.environment.platform, now.platform),
        "host": (before.environment.host, now.host),
        "model revision": (before.model_revision, ready.model_revision),
    }
    found = [f"{name}: {old or 'unknown'} → {new or 'unknown'}" for name, (old, new) in pairs.items() if old != new]
    if before.series != ready.series(now):
        found.append("machine, model, SLO, workloads, flags or speed changed: nights before are not compared with")
    return tuple(found)


def _set_aside(folder: Path) -> None:
    attempt = 1
    while (aside := folder.with_name(f"{folder.name}.abandoned{attempt}")).exists():
        attempt += 1
    folder.rename(aside)


def exit_state(night: Night) -> bool:
    """Whether the night calls for attention: a loss that stands, or a second vLLM that is worse."""
    worse = night.version is not None and night.version.standing is Standing.WORSE
    return night.state is State.REGRESSED or worse
