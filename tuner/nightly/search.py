"""Whether a night goes on searching, and the search itself: a study that is warm-started from those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.comparison import Place, Servers, Traffic
from tuner.documents import digest
from tuner.export import write_best
from tuner.finish import Decision
from tuner.nightly.ready import Ready
from tuner.nightly.record import Event, History, Night, Searched, SearchFolder
from tuner.records import FORMAT_VERSION, Budget, Config, EnvironmentFacts, StudyDefinition
from tuner.store import ResultsFolder, dumps, loads, read_text, write_atomic
from tuner.study import (
    Asked,
    Inputs,
    Observer,
    StopSignals,
    Study,
    StudyFile,
    keep,
    kept,
    prepare,
    read_study,
)
from tuner.study.runner import PAUSE_S

MOST_ENQUEUED = 3
"""Winners of earlier searches that a new one tries first."""


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """Content of a night's `search.json`: decided once, so that a night that was killed goes on with the same."""

    reasons: tuple[str, ...]
    folder: SearchFolder
    budget: Budget
    baseline: Config
    enqueued: tuple[Config, ...]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to; `candidate` is None where it found nothing better than what it started from."""

    searched: Searched
    candidate: Config | None
    study: StudyFile


def reasons(
    ready: Ready, nights: Sequence[Night], config: Config, environment: EnvironmentFacts, events: Sequence[Event]
) -> tuple[str, ...]:
    """Why better is likely; empty where nothing has changed since the last search."""
    wanted, profile = ready.profile.search.when, ready.profile
    last = next((night for night in reversed(nights) if night.searched is not None), None)
    first = last or (nights[0] if nights else None)
    before = ready.lock.environment.vllm_version if first is None and ready.lock is not None else None
    version = first.environment.vllm_version if first is not None else before
    revision = first.model_revision if first is not None else ""
    found = []
    if last is None and not config:
        found.append("no-incumbent")
    if version is not None and version != environment.vllm_version:
        found.append("new-vllm")
    if revision and ready.model_revision and revision != ready.model_revision:
        found.append("new-model")
    if any(event.kind == "regression" for event in events):
        found.append("drift")
    chosen = [reason for reason in found if reason in wanted]
    since = len(nights) + 1 - (nights.index(last) + 1 if last is not None else 0)
    if profile.search.every and since >= profile.search.every and not chosen:
        chosen.append(f"every {profile.search.every} nights")
    return tuple(chosen)


def plan_search(
    ready: Ready,
    history: History,
    nights: Sequence[Night],
    config: Config,
    environment: EnvironmentFacts,
    why: tuple[str, ...],
) -> SearchPlan:
    """Go on with the study of this very machine, vLLM, model and promise; else a new one that knows earlier winners."""
    key = digest(
        [
            environment.digest,
            ready.series(environment),
            ready.model_revision,
            list(ready.profile.search.space),
        ]
    )
    name, search = f"searches/{key}", ready.profile.search
    folder = ResultsFolder(history.root / name)
    if folder.study_file.is_file():
        file = read_study(folder)
        tried = 0 if file.result is None else file.result.search_trials
        spent_s = 0.0 if file.result is None else file.result.wall_s
        wall_s = None if search.wall_s is None else spent_s + search.wall_s
        budget = Budget(trials=tried + search.trials, wall_s=wall_s)
        return SearchPlan(why, name, budget, file.definition.baseline, _enqueued_of(folder))
    winners = [night.candidate.config for night in reversed(nights) if night.candidate is not None]
    known = [night.config for night in reversed(nights)]
    enqueued: list[Config] = []
    for one in [*winners, *known, ready.given]:
        servable = all(knob in ready.install.flags for knob in one)
        if one and servable and one != config and one not in enqueued:
            enqueued.append(one)
    budget = Budget(trials=search.trials, wall_s=search.wall_s)
    return SearchPlan(why, name, budget, config, tuple(enqueued[:MOST_ENQUEUED]))


def search(
    plan: SearchPlan,
    ready: Ready,
    history: History,
    place: Place,
    environment: EnvironmentFacts,
    variables: Mapping[str, str],
    signals: StopSignals,
    observer: Observer,
    pause_s: float = PAUSE_S,
) -> Found:
    """Run the study of a plan to its verdict; what has run already is not run again."""
    folder = ResultsFolder(history.root / plan.folder)
    definition, inputs = _study_of(plan, ready, folder)
    for note in inputs.notes:
        observer.note(f"space: {note}")
    servers = Servers(ready.install, definition.model, definition.fixed, definition.gpus, variables)
    traffic = Traffic(inputs.slo, inputs.workloads)
    executor = place.executor(servers, traffic, folder)
    study = Study(
        definition,
        inputs.slo,
        inputs.space,
        folder,
        executor,
        environment,
        signals,
        observer,
        pause_s=pause_s,
        rules=place.rules(servers, traffic, folder),
        enqueued=plan.enqueued,
    )
    result = study.run()
    file = read_study(folder)
    write_best(file, folder, ready.install.flags)
    improved = result.conclusion.decision is Decision.IMPROVED
    searched = Searched(plan.reasons, plan.folder, str(result.conclusion.decision), result.search_trials)
    return Found(searched, dict(result.config) if improved else None, file)


def kept_plan(path: Path) -> SearchPlan | None:
    return loads(SearchPlan, read_text(path), str(path)) if path.is_file() else None


def keep_plan(path: Path, plan: SearchPlan) -> None:
    write_atomic(path, dumps(plan))


def _study_of(plan: SearchPlan, ready: Ready, folder: ResultsFolder) -> tuple[StudyDefinition, Inputs]:
    if folder.study_file.is_file():
        return replace(read_study(folder).definition, budget=plan.budget), kept(folder)
    profile = ready.profile
    asked = Asked(
        model=profile.model,
        slo=profile.slo,
        workloads=profile.workloads,
        space=profile.search.space,
        fixed=profile.flags,
        vllm=ready.install.path,
        gpus=ready.gpus,
        budget=plan.budget,
        speed=profile.speed,
        mixed=profile.mixed,
        name=folder.root.name,
    )
    definition, inputs = prepare(asked, ready.install)
    keep(folder, inputs, profile.slo)
    write_atomic(folder.inputs / "plan.json", dumps(plan))
    return replace(definition, fixed=ready.fixed, baseline=plan.baseline), inputs


def _enqueued_of(folder: ResultsFolder) -> tuple[Config, ...]:
    plan = kept_plan(folder.inputs / "plan.json")
    return () if plan is None else plan.enqueued
