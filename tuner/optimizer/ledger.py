"""What Optuna hears of a record, and Optuna's storage; the records are the truth, never the copy."""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, create_trial
from optuna.trial import TrialState as OptunaState
from sqlalchemy.exc import SQLAlchemyError

from tuner.errors import EnvironmentFault
from tuner.optimizer.book import UNFINISHED, Told
from tuner.optimizer.sampler import distributions, parameters
from tuner.optimizer.tracks import Tracks
from tuner.records import Config, Step, TrialState

SPACE_KEY = "space"
CRASH = "starts"
"""Constraint that a configuration which cannot run violates; every trial has it (one without counts as feasible)."""

log = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.WARNING)  # a line of its own about every trial would double the study's


@dataclass(frozen=True, slots=True)
class Answer:
    """What Optuna hears of one trial."""

    state: OptunaState
    value: float | None
    estimate: float | None  # of a pruned trial, reported as an intermediate value so that TPE can order it
    constraints: Mapping[str, float]


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Whatever the storage refuses (a full disk, mostly) as EnvironmentFault; it is a copy, so nothing is lost."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        causes = [error, error.__cause__, getattr(error, "orig", None)]
        reason = next((str(cause) for cause in causes if isinstance(cause, sqlite3.Error)), str(error).splitlines()[0])
        raise EnvironmentFault(
            f"optuna.db cannot be written ({reason}); nothing finished was lost. Free space there and run again with "
            "--resume."
        ) from error


def judge(told: Told) -> Answer:
    """How a record is told (docs/search.md, the table of states).

    A crash must never look good: samplers skip FAIL and walk back into it, a trial without constraints counts as
    feasible, and an infinite value would be the best there is. So the configuration's own fault is PRUNED with a
    positive constraint, and only other faults are FAIL.
    """
    kept = {name: float(value) for name, value in told.constraints.items() if not math.isnan(value)}
    value = told.objective if told.objective is not None and math.isfinite(told.objective) else None
    state = told.record.state
    if state in UNFINISHED:
        return Answer(OptunaState.FAIL, None, None, {})
    if state is TrialState.INFEASIBLE or (state is TrialState.COMPLETE and value is None):
        failure = told.record.failure
        size = failure.violation if failure is not None else 1.0
        violation = min(10.0, size) if size > 0 else 1.0  # need over have can be huge; TPE sums violations
        return Answer(OptunaState.PRUNED, None, None, {**_capped(kept), CRASH: violation})
    if state is TrialState.SCREENED:
        return Answer(OptunaState.PRUNED, None, value, {**_capped(kept), CRASH: 0.0})
    return Answer(OptunaState.COMPLETE, value, None, {**_capped(kept), CRASH: 0.0})


def _capped(constraints: Mapping[str, float]) -> dict[str, float]:
    """Constraints of one scale: 1 is twice the limit, and nothing is worse than ten times it (TPE sums them)."""
    return {name: max(-1.0, min(10.0, value)) for name, value in sorted(constraints.items())}


def frozen(told: Told, tracks: Tracks | None) -> FrozenTrial:
    """The finished Optuna trial of one record; without parameters where its values are on no track."""
    answer, record = judge(told), told.record
    point = tracks.point(record.config) if tracks is not None else None
    return create_trial(
        state=answer.state,
        value=answer.value if answer.value is not None else answer.estimate,
        params=parameters(tracks, point) if tracks is not None and point is not None else {},
        distributions=distributions(tracks) if tracks is not None and point is not None else {},
        user_attrs=attributes(record.config, record.step),
        intermediate_values={0: answer.estimate} if answer.estimate is not None else {},
        constraints=dict(answer.constraints),
    )


def tell(study: optuna.Study, trial: optuna.Trial, answer: Answer) -> None:
    """Tell a running trial; constraints first, each once (a second call on the same key is ignored)."""
    for name, value in answer.constraints.items():
        trial.set_constraint(name, value)
    if answer.estimate is not None:
        trial.report(answer.estimate, step=0)
    study.tell(trial, answer.value, state=answer.state)


def gap() -> FrozenTrial:
    """A number that was asked for and never written."""
    return create_trial(state=OptunaState.FAIL)


def attributes(config: Config, step: Step) -> dict[str, Any]:
    """What the dashboard shows beside a trial."""
    return {"step": step.kind.value, "reason": step.reason, "config": dict(config)}


def open_study(storage: str | None, name: str, digest: str, trials: Sequence[FrozenTrial]) -> optuna.Study:
    """The Optuna study that holds exactly `trials`; recreated when the stored one says anything else.

    `storage`: an SQLAlchemy URL, None for memory. A damaged SQLite file is replaced: it is only a copy.
    """
    path = sqlite_path(storage)
    if path is not None and path.exists() and not intact(path):
        log.warning("%s is damaged; it is rebuilt from the trial records", path)
        path.unlink()
    backend = optuna.storages.RDBStorage(storage) if storage is not None else optuna.storages.InMemoryStorage()
    known = {summary.study_name for summary in optuna.get_all_study_summaries(backend)}
    if name in known:
        study = optuna.load_study(study_name=name, storage=backend)
        if _agrees(study, digest, trials):
            return study
        log.warning("the Optuna study %s disagrees with the trial records; it is rebuilt from them", name)
        optuna.delete_study(study_name=name, storage=backend)
    study = optuna.create_study(study_name=name, storage=backend, direction="maximize")
    study.set_user_attr(SPACE_KEY, digest)
    study.add_trials(trials)
    return study


def sqlite_path(storage: str | None) -> Path | None:
    """The file behind an SQLite URL."""
    prefix = "sqlite:///"
    return Path(storage.removeprefix(prefix)) if storage is not None and storage.startswith(prefix) else None


def intact(path: Path) -> bool:
    """Whether SQLite finds nothing wrong with a file."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            (answer,) = connection.execute("PRAGMA integrity_check").fetchone()
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError:
        return False
    return answer == "ok" and (not tables or {"studies", "trials"} <= tables)


def _agrees(study: optuna.Study, digest: str, trials: Sequence[FrozenTrial]) -> bool:
    # A trial that is still RUNNING was left by a killed process; TPE would be repelled by it for ever.
    if study.direction is not optuna.study.StudyDirection.MAXIMIZE or study.user_attrs.get(SPACE_KEY) != digest:
        return False
    stored = study.get_trials(deepcopy=False)
    return len(stored) == len(trials) and all(_same(a, b) for a, b in zip(stored, trials, strict=True))


def _same(one: FrozenTrial, other: FrozenTrial) -> bool:
    if one.state is not other.state:
        return False
    return one.state is OptunaState.FAIL or (
        one.values == other.values
        and one.params == other.params
        and one.distributions == other.distributions
        and one.constraints == other.constraints
    )
