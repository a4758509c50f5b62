"""`best.lock.json`, as the export wrote it beside a configuration; it reads it and judges nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuner.errors import InputError
from tuner.records import FORMAT_VERSION, Config, EnvironmentFacts, KnobValue, Rate, Slo, Speed
from tuner.secrecy import HIDDEN
from tuner.server.command import tunes, users_environment
from tuner.slo import parse_slo
from tuner.store import loads, read_text

LOCK_FILE = "best.lock.json"


@dataclass(frozen=True, slots=True)
class LockedFlag:
    """One flag of the exported configuration."""

    name: str
    value: KnobValue


@dataclass(frozen=True, slots=True)
class LockedRate:
    """Recorded capacity of one class; `value` is the geometric mean of `n` runs."""

    value: Rate
    low: float
    high: float | None  # None: unbounded
    n: int
    bound: str | None = None


@dataclass(frozen=True, slots=True)
class LockedRates:
    """Recorded capacities of one class."""

    baseline: LockedRate | None
    best: LockedRate | None


@dataclass(frozen=True, slots=True)
class Lock:
    """What a configuration was measured with (docs/export.md has the keys)."""

    study: str
    trial: int
    model: str
    verdict: str
    simulated: bool
    flags: tuple[LockedFlag, ...]
    capacity_rps: Mapping[str, LockedRates]
    slo: Mapping[str, Mapping[str, Mapping[str, object]]]
    environment: EnvironmentFacts
    digests: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    fixed: Config = field(default_factory=dict)
    baseline: Config = field(default_factory=dict)
    runs_rps: tuple[Mapping[str, Rate], ...] = ()
    speed: Speed = "normal"
    format_version: int = FORMAT_VERSION

    @property
    def config(self) -> Config:
        """Every exported flag, those that the user fixed included."""
        return {flag.name: flag.value for flag in self.flags}

    @property
    def workloads(self) -> tuple[str, ...]:
        """What the capacities were measured with, mixes included."""
        return tuple(self.capacity_rps)

    def promise(self, class_names: Sequence[str], where: str) -> Slo:
        """The SLO that the lock records for these classes; InputError for a class that it has none for."""
        known = self.slo.get("classes", {})
        for name in class_names:
            if name not in known:
                raise InputError(
                    where=where,
                    field="slo.classes",
                    value=name,
                    rule="records no promise for this workload class",
                    remedy="Give the workloads that the configuration was found with (--workloads), or a --slo.",
                )
        return parse_slo({"classes": {name: known[name] for name in class_names}}, where, class_names)


def lock_of(configuration: Path) -> Lock | None:
    """The lock beside a configuration file; None where there is none. InputError where it cannot be read."""
    path = configuration.with_name(LOCK_FILE)
    if not path.is_file():
        return None
    lock = loads(Lock, read_text(path), str(path))
    return replace(lock, variables=carried(lock.variables))


def carried(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that an export would have written; a lock may be a stranger's, and they reach servers (LD_PRELOAD, …)."""
    tuning = {
        name: value for name, value in variables.items() if tunes(name) and HIDDEN not in value and "\0" not in value
    }
    return users_environment(tuning)
