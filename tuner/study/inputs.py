"""Everything that a study is told: checked before anything starts, and kept so that the study can go on alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuner import __version__
from tuner.documents import read_yaml, shipped
from tuner.environment import gpus, model_revision
from tuner.errors import InputError
from tuner.feasibility import ModelShape, read_model_shape
from tuner.finish import FULL_ROUNDS, MOST_ROUNDS, affordable_rounds
from tuner.quality import PromptSet, load_prompts
from tuner.records import Budget, Config, Slo, StudyDefinition
from tuner.serve_args import RESERVED, ServeFlags, defaults, parse_argv, to_argv
from tuner.server import VllmInstall
from tuner.server.command import holds_secret
from tuner.slo import load_slo
from tuner.space import Space, load_space, restrict
from tuner.store import ResultsFolder, dumps, loads, read_text, write_atomic
from tuner.study.budget import limit_s
from tuner.study.speeds import SPEEDS
from tuner.study.values import Objective
from tuner.workload import Workload, class_names, load_workloads, longest, settle_mix

COMMAND_LINE = "command line"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Asked:
    """The words of the command line, not yet checked against anything."""

    model: str
    slo: Path
    workloads: Path | None = None  # None: the four classes that come with the tuner
    space: tuple[str, ...] = ("default",)
    baseline: tuple[str, ...] = ()  # `knob=value`, or one path of a YAML file
    fixed: tuple[str, ...] = ()  # after `--`
    vllm: str = "vllm"
    gpus: tuple[int, ...] = ()
    budget: Budget = field(default_factory=Budget)
    finish_rounds: int | None = None  # None: as the budget allows
    speed: str = "normal"
    objective: str = "capacity"
    rate_rps: float | None = None
    lossy_allowed: bool = False
    quality_prompts: Path | None = None  # None: those that come with the tuner
    mixed: bool = False
    seed: int = 1
    name: str = ""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The checked inputs of a study."""

    slo: Slo
    workloads: Mapping[str, Workload]  # also the classes that a mix is made of
    space: Space  # as restricted to the installed vLLM
    notes: tuple[str, ...] = ()  # what was left out of the space, and why
    prompts: PromptSet | None = None  # on which answers are compared; None: those that come with the tuner


def prepare(asked: Asked, install: VllmInstall) -> tuple[StudyDefinition, Inputs]:
    """Check everything against everything; InputError names the first thing that is wrong."""
    slo, workloads = traffic(asked.workloads, lambda classes: load_slo(asked.slo, classes))
    measured = tuple(name for name in workloads if name in slo.classes or asked.mixed)
    fixed = parse_argv(asked.fixed, install.flags, f"{COMMAND_LINE}, after `--`")
    baseline = _baseline(asked.baseline, install.flags, fixed)
    refuse_secrets({**baseline, **fixed}, install.flags)
    length = accepted_length(asked.model, {**baseline, **fixed}, workloads)
    prompts = load_prompts(asked.quality_prompts) if asked.quality_prompts is not None else None
    wanted = load_space(*asked.space)
    _refuse_reserved(wanted)
    space, notes = restrict(
        wanted,
        install.flags,
        fixed=fixed,
        devices=max(1, len(asked.gpus)),
        device_type=install.device,
        lossy_allowed=asked.lossy_allowed,
        max_model_len=length,
        assumed=_assumed(install, asked.gpus),
    )
    if not space.knobs:
        raise InputError(
            where=COMMAND_LINE,
            field="--space",
            value=", ".join(asked.space),
            rule="leaves no knob to search: " + ("; ".join(notes) or "the space is empty"),
            remedy="Name another space, or fix fewer flags after `--`.",
        )
    if asked.objective != Objective.CAPACITY:
        _refuse_closed(workloads, measured, asked.objective)
    rounds, most = _rounds(asked)
    definition = StudyDefinition(
        name=asked.name,
        model=asked.model,
        vllm=install.path,
        objective=asked.objective,
        workloads=measured,
        fixed=fixed,
        baseline=baseline,
        gpus=asked.gpus,
        budget=asked.budget,
        finish_rounds=rounds,
        most_finish_rounds=most,
        speed=asked.speed,
        lossy_allowed=asked.lossy_allowed,
        seed=asked.seed,
        slo_digest=slo.digest,
        workload_digests={name: workload.digest for name, workload in workloads.items()},
        space_digest=space.digest,
        created_at=time.time(),
        tuner_version=__version__,
        rate_rps=asked.rate_rps,
        model_revision=model_revision(asked.model, _text(fixed.get("revision"))),
    )
    return definition, Inputs(slo, workloads, space, notes, prompts)


def _rounds(asked: Asked) -> tuple[int, int]:
    """Rounds of the finish, and the most that a gain which they leave open may take."""
    if asked.finish_rounds is not None:
        return asked.finish_rounds, 0
    speed = SPEEDS[asked.speed]
    rounds = affordable_rounds(speed.guess_s * speed.run_factor, limit_s(asked.budget, len(asked.gpus)))
    return rounds, MOST_ROUNDS if rounds == FULL_ROUNDS else 0


def _refuse_closed(workloads: Mapping[str, Workload], measured: Sequence[str], objective: str) -> None:
    """A closed loop offers no rate, so nothing can be measured at one."""
    for name in measured:
        if workloads[name].arrivals.process == "closed":
            raise InputError(
                where=f"workload {name}",
                field="arrivals.process",
                value="closed",
                rule=f"offers no rate, but the objective {objective} is measured at one",
                remedy="Give it Poisson arrivals, or leave --objective out.",
            )


def traffic(workloads: Path | None, promise: Callable[[Sequence[str]], Slo]) -> tuple[Slo, dict[str, Workload]]:
    """The workloads of a folder or file (None: those that come with the tuner), and the promise for their classes."""
    loaded = load_workloads(workloads or shipped("workloads"))
    slo = promise(class_names(loaded.values()))
    return slo, settle_mix(loaded, {name: promised.weight for name, promised in slo.classes.items()})


def keep(folder: ResultsFolder, inputs: Inputs, slo_file: Path) -> None:
    """Into the study's folder: the SLO as written, and everything as read, from which the study continues."""
    write_atomic(folder.inputs / "slo.yaml", read_text(slo_file))
    write_atomic(folder.inputs / "inputs.json", dumps(inputs))


def kept(folder: ResultsFolder) -> Inputs:
    """What `keep` wrote."""
    path = folder.inputs / "inputs.json"
    if not path.is_file():
        raise InputError(
            where=str(folder.root),
            field="inputs/inputs.json",
            value=str(path),
            rule="is missing, so the study cannot be continued",
            remedy="Start it anew in another folder.",
        )
    return loads(Inputs, read_text(path), str(path))


def more_budget(definition: StudyDefinition, budget: Budget) -> StudyDefinition:
    """The study with the limits that were given again on `--resume`; the others stay."""
    old = definition.budget
    return replace(
        definition,
        budget=Budget(
            trials=old.trials if budget.trials is None else budget.trials,
            wall_s=old.wall_s if budget.wall_s is None else budget.wall_s,
            gpu_s=old.gpu_s if budget.gpu_s is None else budget.gpu_s,
        ),
    )


def _assumed(install: VllmInstall, indices: Sequence[int]) -> Config:
    """Defaults that vLLM decides at the start, by its own rule for this device."""
    devices = gpus(indices)
    return defaults(
        install.flags,
        device_type=install.device,
        device_bytes=min((gpu.total_bytes for gpu in devices), default=0),
        device_name=devices[0].name if devices else "",
        world_size=1,
    )


def _baseline(words: Sequence[str], flags: ServeFlags, fixed: Config) -> Config:
    """What the study starts from: `knob=value` words, or a file as `vllm serve --config` reads it."""
    argv: list[str] = []
    for word in words:
        if "=" in word and not Path(word).is_file():
            knob, _, value = word.partition("=")
            argv += _words(knob, value, flags)
        else:
            for knob, node in read_yaml(Path(word)).mapping().items():
                if knob not in ("model", "model_tag"):
                    argv += _words(str(knob), str(node.value), flags)
    config = parse_argv(argv, flags, f"{COMMAND_LINE}, --baseline")
    for knob in config:
        if knob in fixed:
            raise InputError(
                where=COMMAND_LINE,
                field="--baseline",
                value=knob,
                rule="is also fixed after `--`",
                remedy="Give it once: after `--` when it must not change, in --baseline when the search may change it.",
            )
    return config


def _refuse_reserved(space: Space) -> None:
    """Knobs that the tuner sets itself, or that are no matter of speed, cannot be searched."""
    for knob in space.knobs:
        if knob.name in RESERVED or holds_secret((f"--{knob.name}", "value")):
            raise InputError(
                where=COMMAND_LINE,
                field="--space",
                value=knob.name,
                rule="is set by the tuner for every server, or is a secret",
                remedy="Leave it out of the space.",
            )


def refuse_secrets(config: Config, flags: ServeFlags) -> None:
    """A study's files are shown around; what must not be there must not be in its flags."""
    for name, value in config.items():
        if holds_secret(to_argv({name: value}, flags)):
            raise InputError(
                where=COMMAND_LINE,
                field=f"--{name}",
                value="(hidden)",
                rule="is or holds a secret, and a study records its flags",
                remedy="Give it to vLLM by its environment variable (VLLM_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY).",
            )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _words(knob: str, value: str, flags: ServeFlags) -> list[str]:
    flag = flags.get(knob)
    if flag is not None and flag.boolean and value.lower() in ("true", "false"):
        return [f"--{knob}" if value.lower() == "true" else str(flag.negation)]
    return [f"--{knob}", value]


def _shape(model: str) -> ModelShape | None:
    """The model's shape where its files are here; None for a hub name, which only the server can resolve."""
    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file():
        return read_model_shape(path)
    if path.exists() or not _HUB_NAME.fullmatch(model) or model.startswith((".", "/", "~")):
        raise InputError(
            where=COMMAND_LINE,
            field="--model",
            value=model,
            rule="is neither a folder with a config.json nor a hub name such as `Qwen/Qwen3-8B` or `gpt2`",
            remedy="Check the path.",
        )
    return None


def accepted_length(model: str, config: Config, workloads: Mapping[str, Workload]) -> int | None:
    """Longest prompt + output that the server will accept, tokens (None: only it knows); InputError when too short."""
    length = _max_model_len(config, _shape(model))
    _check_lengths(workloads, length)
    return length


def _max_model_len(config: Config, shape: ModelShape | None) -> int | None:
    """Longest prompt + output that the server will accept, tokens; None where only the server knows."""
    given = config.get("max-model-len")
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    return shape.max_positions if shape is not None else None


def _check_lengths(workloads: Mapping[str, Workload], max_model_len: int | None) -> None:
    if max_model_len is None:
        return
    for name, workload in workloads.items():
        if workload.mix or workload.trace is not None:  # a mix has no lengths of its own; a trace reports what it skips
            continue
        tokens = sum(longest([workload]))
        if tokens > max_model_len:
            raise InputError(
                where=f"workload {name}",
                field="input_tokens.max + output_tokens.max",
                value=tokens,
                rule=f"exceeds the longest request that the server accepts (max-model-len {max_model_len})",
                remedy="Raise --max-model-len after `--`, or lower the maxima of this workload.",
            )
