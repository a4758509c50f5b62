"""An exported configuration against its own lock: measured again on fresh servers, with what has changed named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuner.comparison.asked import Asked, chosen_model, chosen_traffic, define
from tuner.comparison.drift import Now, drift_between
from tuner.comparison.hold import TOLERANCE, Verified, hold
from tuner.comparison.lock import LOCK_FILE, Lock, carried
from tuner.comparison.place import Place, Traffic
from tuner.comparison.record import Comparison, Definition, kept_traffic, read_comparison, require_sides
from tuner.comparison.rounds import compare
from tuner.comparison.sides import Side, Source, divide, open_source
from tuner.errors import InputError
from tuner.records import FORMAT_VERSION, Slo
from tuner.serve_args import parse_argv
from tuner.server import VllmInstall
from tuner.store import ResultsFolder, dumps, write_atomic
from tuner.study import Observer, StopSignals, accepted_length, refuse_secrets
from tuner.study.runner import PAUSE_S

VERIFIED_FILE = "verify.json"


@dataclass(frozen=True, slots=True)
class Verification:
    """The content of `verify.json`."""

    configuration: str
    lock: Lock
    comparison: Comparison
    verified: Verified
    format_version: int = FORMAT_VERSION


def locked(word: str, install: VllmInstall) -> tuple[Source, Lock]:
    """A configuration file and the lock beside it; InputError where there is none."""
    source = open_source(word, install.flags)
    if source.lock is None:
        raise InputError(
            where=word,
            field=LOCK_FILE,
            value=None,
            rule="does not lie beside the configuration, so nothing is known of what it was measured with",
            remedy="Name an exported best.yaml with its lock beside it (`tune export` writes both).",
        )
    return source, source.lock


def prepare_verification(asked: Asked, install: VllmInstall) -> tuple[Definition, Traffic, Lock]:
    """`asked.words` names the one configuration; InputError for whatever does not fit together."""
    source, lock = locked(asked.words[0], install)
    model = chosen_model(asked.model, [replace(source, model=source.model or lock.model)])
    given = parse_argv(asked.given, install.flags, "command line, after `--`")
    refuse_secrets({**source.config, **given}, install.flags)
    fixed, configs = divide([source.config], given, [source.fixed])
    traffic, measured = chosen_traffic(asked.slo, asked.workloads, [source], asked.mixed)
    if not set(measured) & set(traffic.slo.classes):
        raise InputError(
            where=f"the lock of {source.word}",
            field="capacity_rps",
            value=list(lock.workloads),
            rule="names no workload that could be measured with this promise",
            remedy="Name the promise and the workloads yourself: --slo FILE --workloads DIR.",
        )
    _promise(lock, traffic)
    accepted_length(model, {**configs[0], **fixed}, traffic.workloads)
    side = Side("configuration", source.word, install.path, install.version, configs[0], source.variables)
    return define(asked, (side,), fixed, model, traffic, measured), traffic, lock


def resume_verification(asked: Asked, install: VllmInstall, folder: ResultsFolder) -> tuple[Definition, Traffic, Lock]:
    """What was begun in `folder`, where `asked` names the same thing; InputError otherwise.

    The verdict is about the file that is named, so it must be the one that the finished runs have measured. Paths may
    differ; flags, variables and the model may not.
    """
    comparison = read_comparison(folder)
    require_sides(comparison, 1, folder.root, "tune verify")
    kept = comparison.definition
    side = kept.sides[0]
    source, lock = locked(asked.words[0], install)
    given = parse_argv(asked.given, install.flags, "command line, after `--`")
    fixed, configs = divide([source.config], given, [source.fixed])
    model = chosen_model(asked.model, [replace(source, model=source.model or lock.model)])
    pairs: list[tuple[str, object, object]] = [
        ("model", model, kept.model),
        ("flags", dict(configs[0]), dict(side.config)),
        ("flags of every server", dict(fixed), dict(kept.fixed)),
        ("variables", dict(source.variables), carried(side.variables)),
    ]
    for what, now, then in pairs:
        if now != then:
            raise InputError(
                where=asked.words[0],
                field=what,
                value=now,
                rule=f"is not what was measured in {folder.root}: {then}",
                remedy="Name the same file, --model and words after `--` as at first, or begin anew without --resume.",
            )
    traffic = kept_traffic(folder)
    _promise(lock, traffic)
    return kept, traffic, lock


def _promise(lock: Lock, traffic: Traffic) -> Slo:
    """What the lock promises for the classes that are measured; InputError where it cannot be read."""
    recorded = [name for name in traffic.slo.classes if name in lock.slo.get("classes", {})]
    return lock.promise(sorted(recorded), "the lock")


def verify(
    definition: Definition,
    traffic: Traffic,
    lock: Lock,
    install: VllmInstall,
    folder: ResultsFolder,
    place: Place,
    variables: Mapping[str, str],
    signals: StopSignals,
    observer: Observer,
    *,
    tolerance: float = TOLERANCE,
    pause_s: float = PAUSE_S,
) -> Verification:
    """Measure what is missing, judge, and keep `verify.json`. `variables`: set here and telling (server.command)."""
    comparison = compare(
        definition, traffic, {install.path: install}, folder, place, signals, observer, pause_s=pause_s
    )
    result, side = comparison.result, definition.sides[0]
    assert result is not None
    now = Now(
        environment=comparison.environments[0],
        model=definition.model,
        model_revision=definition.model_revision,
        config={**definition.fixed, **side.config},
        slo=traffic.slo,
        workload_digests=definition.workload_digests,
        variables=variables,
    )
    promise = _promise(lock, traffic)
    verified = hold(
        lock,
        result.values[0],
        result.rates[0],
        result.failures[0],
        result.weights,
        drift_between(lock, promise, now),
        tolerance,
    )
    verification = Verification(side.source, lock, comparison, verified)
    write_atomic(folder.root / VERIFIED_FILE, dumps(verification))
    return verification
