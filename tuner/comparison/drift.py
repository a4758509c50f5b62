"""What has changed since a configuration was exported, item by item; pure comparing, it looks at no machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tuner.comparison.lock import Lock
from tuner.records import ClassSlo, Config, EnvironmentFacts, Slo


class Weight(StrEnum):
    """What a difference means for the recorded capacities."""

    NOTHING = "nothing"  # worth knowing
    EXPLAINS = "explains"  # may be why a capacity differs
    FORBIDS = "forbids"  # recorded and measured capacities are of different things


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between the lock and now."""

    what: str
    before: str
    now: str
    weight: Weight

    def __str__(self) -> str:
        return f"{self.what}: {self.before or 'not recorded'} → {self.now or 'not known'}"


@dataclass(frozen=True, slots=True)
class Now:
    """The state that a lock is held against."""

    environment: EnvironmentFacts
    model: str
    model_revision: str
    config: Config  # every flag of the file, those that the user fixed included
    slo: Slo
    workload_digests: Mapping[str, str]
    variables: Mapping[str, str]  # that change how a server runs, set here


def drift_between(lock: Lock, promise: Slo, now: Now) -> tuple[Drift, ...]:
    """Every difference, those that forbid a comparison first. `promise`: as the lock records it."""
    found = [
        *_machine(lock.environment, now.environment),
        *_text("model", lock.model, now.model, Weight.EXPLAINS),
        *_known("model revision", lock.digests.get("model", ""), now.model_revision, Weight.EXPLAINS),
        *_config(lock.config, now.config),
        *_variables(lock.variables, now.variables),
        *_workloads(lock, now.workload_digests),
        *_promise(promise, now.slo),
    ]
    order = (Weight.FORBIDS, Weight.EXPLAINS, Weight.NOTHING)
    return tuple(sorted(found, key=lambda drift: order.index(drift.weight)))


def _machine(before: EnvironmentFacts, now: EnvironmentFacts) -> list[Drift]:
    device = Weight.FORBIDS
    found = [
        *_text("vLLM", before.vllm_version, now.vllm_version, Weight.EXPLAINS),
        *_text("GPU", " + ".join(before.gpus), " + ".join(now.gpus), device),
        *_text("driver", before.driver, now.driver, Weight.EXPLAINS),
        *_text("CUDA", before.cuda, now.cuda, Weight.EXPLAINS),
        *_known("Python", before.python_version, now.python_version, Weight.NOTHING),
        *_text("platform", before.platform, now.platform, Weight.NOTHING),
        *_text("CPU", before.cpu, now.cpu, Weight.EXPLAINS if before.gpus else device),
        *_text("CPU cores", str(before.cpu_count), str(now.cpu_count), Weight.EXPLAINS if before.gpus else device),
    ]
    if not _close(before.memory_bytes, now.memory_bytes, 0.02):
        found += _text("memory", _gib(before.memory_bytes), _gib(now.memory_bytes), Weight.NOTHING)
    if before.machine and now.machine and before.machine != now.machine:
        found.append(Drift("machine", before.host, now.host, Weight.EXPLAINS))
    return found


def _config(before: Config, now: Config) -> list[Drift]:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [Drift(f"flag --{name}", _shown(before.get(name)), _shown(now.get(name)), Weight.EXPLAINS) for name in names]


def _variables(before: Mapping[str, str], now: Mapping[str, str]) -> list[Drift]:
    """Those of the lock are set for its servers again, so only what is set here and not there can differ."""
    return [
        Drift(f"variable {name}", before.get(name, "unset"), value, Weight.EXPLAINS)
        for name, value in now.items()
        if before.get(name) != value
    ]


def _workloads(lock: Lock, now: Mapping[str, str]) -> list[Drift]:
    found: list[Drift] = []
    for name in lock.workloads:
        before = lock.digests.get(f"workload {name}", "")
        if name not in now:
            found.append(Drift(f"workload {name}", before, "not given", Weight.FORBIDS))
        else:
            found += _known(f"workload {name}", before, now[name], Weight.FORBIDS)
    return found


def _promise(before: Slo, now: Slo) -> list[Drift]:
    found: list[Drift] = []
    for name, promise in now.classes.items():
        old = before.classes.get(name)
        if old is None:
            continue
        ours, theirs = _limits(promise), _limits(old)
        for limit in {**theirs, **ours}:
            a, b = theirs.get(limit), ours.get(limit)
            if a is None or b is None or not _close(a, b, 1e-6):
                found.append(Drift(f"SLO {name}, {limit}", _number(a), _number(b), Weight.FORBIDS))
    return found


def _limits(promise: ClassSlo) -> dict[str, float]:
    limits = {f"{one.metric} p{one.percentile:g} in ms": one.limit_s * 1000 for one in promise.limits}
    return {**limits, "share answered": promise.success, "weight": promise.weight}


def _text(what: str, before: str, now: str, weight: Weight) -> list[Drift]:
    return [] if before == now else [Drift(what, before, now, weight)]


def _known(what: str, before: str, now: str, weight: Weight) -> list[Drift]:
    """As `_text`; where one of the two was never told, it is worth knowing and no more."""
    return _text(what, before, now, weight if before and now else Weight.NOTHING)


def _close(a: float, b: float, tolerance: float) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _shown(value: object) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
