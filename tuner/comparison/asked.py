"""From the words of a command line to a comparison that can start: everything is checked before a server is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner import __version__
from tuner.comparison.lock import Lock
from tuner.comparison.place import Traffic
from tuner.comparison.record import Definition
from tuner.comparison.sides import DEFAULTS, Side, Source, against, divide, open_source
from tuner.documents import shipped
from tuner.environment import model_revision
from tuner.errors import InputError
from tuner.records import Config, Slo
from tuner.serve_args import parse_argv
from tuner.server import VllmInstall
from tuner.slo import load_slo
from tuner.study import accepted_length, kept, read_study, refuse_secrets
from tuner.workload import Workload, class_names, load_workloads, settle_mix

NAMES = ("A", "B")
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Asked:
    """The words of the command line, checked for form only."""

    words: tuple[str, ...]  # what is compared; may be fewer than two when two executables are
    vllms: tuple[str, ...]  # as given; one or two
    model: str | None = None
    slo: Path | None = None
    workloads: Path | None = None
    given: tuple[str, ...] = ()  # after `--`
    gpus: tuple[int, ...] = ()
    rounds: int = 5
    speed: str = "normal"
    margin: float = 0.05
    mixed: bool = False
    seed: int = 1
    name: str = ""


def prepare(asked: Asked, installs: Sequence[VllmInstall]) -> tuple[Definition, Traffic, tuple[str, ...]]:
    """The comparison, its traffic, and what a reader should know. `installs`: of `asked.vllms`, in their order."""
    words, pair = _paired(asked, installs)
    sources = [open_source(word, install.flags) for word, install in zip(words, pair, strict=True)]
    given = parse_argv(asked.given, pair[0].flags, f"{COMMAND_LINE}, after `--`")
    wholes = [against(sources[0], sources[1]), against(sources[1], sources[0])]
    for whole, install in zip(wholes, pair, strict=True):
        refuse_secrets({**whole, **given}, install.flags)
    fixed, configs = divide(wholes, given, [source.fixed for source in sources])
    model = chosen_model(asked.model, sources)
    traffic, measured = chosen_traffic(asked.slo, asked.workloads, sources, asked.mixed)
    for config in configs:
        accepted_length(model, {**config, **fixed}, traffic.workloads)
    sides = tuple(
        Side(name, _described(word, install, words, pair), install.path, install.version, config, source.variables)
        for name, word, install, config, source in zip(NAMES, words, pair, configs, sources, strict=True)
    )
    definition = define(asked, sides, fixed, model, traffic, measured)
    alike = configs[0] == configs[1] and pair[0].path == pair[1].path
    notes = ("both sides are the same: what is found shows the noise",) if alike else ()
    return definition, traffic, notes


def define(
    asked: Asked, sides: tuple[Side, ...], fixed: Config, model: str, traffic: Traffic, measured: tuple[str, ...]
) -> Definition:
    """A comparison of any number of sides, as it is recorded."""
    revision = fixed.get("revision")
    return Definition(
        name=asked.name,
        model=model,
        model_revision=model_revision(model, None if revision is None else str(revision)),
        sides=sides,
        fixed=fixed,
        workloads=measured,
        gpus=asked.gpus,
        rounds=asked.rounds,
        speed=asked.speed,
        margin=asked.margin,
        seed=asked.seed,
        slo_digest=traffic.slo.digest,
        workload_digests={name: workload.digest for name, workload in traffic.workloads.items()},
        created_at=time.time(),
        tuner_version=__version__,
    )


def chosen_model(asked: str | None, sources: Sequence[Source]) -> str:
    """The one model of all sides; InputError where there is none, or more than one."""
    named = dict.fromkeys(source.model for source in sources if source.model is not None)
    if asked is not None:
        return asked
    if len(named) != 1:
        raise InputError(
            where=COMMAND_LINE,
            field="--model",
            value=", ".join(named) or None,
            rule="differs between the sides" if named else "is told by none of the sides",
            remedy="Name the model that both are to serve: --model MODEL.",
        )
    return next(iter(named))


def chosen_traffic(
    slo: Path | None, workloads: Path | None, sources: Sequence[Source], mixed: bool
) -> tuple[Traffic, tuple[str, ...]]:
    """What is sent and promised, and which of it is measured.

    What the user names goes first, then the inputs that the study of a side has kept, then what its lock records.
    """
    study = next((s.study for s in sources if s.study and (s.study.inputs / "inputs.json").is_file()), None)
    lock, where = next(((s.lock, f"the lock of {s.word}") for s in sources if s.lock is not None), (None, ""))
    if workloads is None and study is not None:
        inputs = kept(study)
        loaded, told = dict(inputs.workloads), read_study(study).definition.workloads
        promise = inputs.slo if slo is None else load_slo(slo, class_names(loaded.values()))
    else:
        loaded, told = load_workloads(workloads or shipped("workloads")), ()
        if slo is not None:
            promise = load_slo(slo, class_names(loaded.values()))
        elif lock is not None:
            loaded, told = _as_locked(loaded, lock, where), lock.workloads
            promise = lock.promise(class_names(loaded.values()), where)
        else:
            raise InputError(
                where=COMMAND_LINE,
                field="--slo",
                value=None,
                rule="is missing, and no side comes with a study or a lock that tells it",
                remedy="Write the promise into a file (docs/inputs.md): --slo slo.yaml.",
            )
    measured = tuple(name for name in loaded if name in promise.classes or mixed or name in told)
    return Traffic(promise, _settled(loaded, promise)), measured


def _settled(loaded: Mapping[str, Workload], promise: Slo) -> dict[str, Workload]:
    return settle_mix(loaded, {name: promised.weight for name, promised in promise.classes.items()})


def _as_locked(loaded: Mapping[str, Workload], lock: Lock, where: str) -> dict[str, Workload]:
    """The classes that the lock was measured with, and the mixes of nothing else."""
    missing = [name for name in lock.workloads if name not in loaded]
    if missing:
        raise InputError(
            where=COMMAND_LINE,
            field="--workloads",
            value=", ".join(missing),
            rule=f"{where} was measured with these workloads, and they are not here",
            remedy="Give the folder that they come from: --workloads DIR.",
        )
    classes = {name for name in lock.workloads if not loaded[name].mix}
    return {n: w for n, w in loaded.items() if n in classes or (w.mix and set(w.mix) <= classes)}


def _paired(asked: Asked, installs: Sequence[VllmInstall]) -> tuple[tuple[str, str], tuple[VllmInstall, VllmInstall]]:
    """Both sides as (word, vLLM); one word is served by both executables, none means vLLM's defaults."""
    words = asked.words
    if len(installs) == 2 and len(words) < 2:
        word = words[0] if words else DEFAULTS
        return (word, word), (installs[0], installs[1])
    if len(words) != 2:
        raise InputError(
            where=COMMAND_LINE,
            field="configurations",
            value=" ".join(words) or None,
            rule="need two sides to compare",
            remedy="Name two, or one with two executables.",
        )
    return (words[0], words[1]), (installs[0], installs[-1])


def _described(word: str, install: VllmInstall, words: tuple[str, str], pair: tuple[VllmInstall, VllmInstall]) -> str:
    if pair[0].path == pair[1].path:
        return word
    same = pair[0].version == pair[1].version
    vllm = f"vLLM {install.version}" + (f" ({install.path})" if same else "")
    return vllm if words[0] == words[1] else f"{word}, {vllm}"
