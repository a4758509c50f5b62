"""From parsed arguments to what the study room understands; shared by `run` and `plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.options import MOST_S, duration_s, existing_file, gpu_list, positive, refuse, whole
from tuner.records import Budget

if TYPE_CHECKING:
    from tuner.server import VllmInstall
    from tuner.study import Asked

DEFAULT_TRIALS = 25


def budget_of(arguments: argparse.Namespace, *, default: bool = True) -> Budget:
    """The limits as given; `DEFAULT_TRIALS` where none is."""
    trials = None if arguments.trials is None else whole("--trials", arguments.trials, at_least=1, at_most=100_000)
    wall_s = None if arguments.wall is None else duration_s("--wall", arguments.wall)
    gpu_s = None if arguments.gpu_hours is None else positive("--gpu-hours", arguments.gpu_hours) * 3600
    if gpu_s is not None and gpu_s > 1024 * MOST_S:
        raise refuse("--gpu-hours", arguments.gpu_hours, "is more than 1024 GPUs give in a year", "Give less.")
    if default and trials is None and wall_s is None and gpu_s is None:
        trials = DEFAULT_TRIALS
    return Budget(trials, wall_s, gpu_s)


def asked_of(
    arguments: argparse.Namespace,
    gpus: tuple[int, ...],
    name: str,
    objective: str = "capacity",
    rate_rps: float | None = None,
) -> Asked:
    """Everything but the machine, checked for form; `objective` and `rate_rps` as `objective_of` reads them."""
    from tuner.study import Asked

    if arguments.model is None:
        raise refuse("--model", None, "is missing", "Name the model: --model FOLDER or --model org/name.")
    if arguments.slo is None:
        raise refuse("--slo", None, "is missing", "Write the promise into a file (docs/inputs.md): --slo slo.yaml.")
    workloads = None
    if arguments.workloads is not None:
        workloads = Path(arguments.workloads)
        if not workloads.exists():
            raise refuse("--workloads", arguments.workloads, "is neither a folder nor a file", "Check the path.")
    return Asked(
        model=arguments.model,
        slo=existing_file("--slo", arguments.slo),
        workloads=workloads,
        space=tuple(arguments.space or ("default",)),
        baseline=tuple(arguments.baseline),
        fixed=tuple(arguments.fixed),
        vllm=arguments.vllm,
        gpus=gpus,
        budget=budget_of(arguments),
        finish_rounds=_finish_rounds(arguments),
        objective=objective,
        rate_rps=rate_rps,
        speed=arguments.speed or "normal",
        lossy_allowed=arguments.allow_lossy,
        quality_prompts=_quality_prompts(arguments),
        mixed=arguments.mixed,
        seed=whole("--seed", arguments.seed or "1", at_least=0, at_most=2**31 - 1),
        name=name,
    )


def _finish_rounds(arguments: argparse.Namespace) -> int | None:
    given = arguments.finish_rounds
    return None if given is None else whole("--finish-rounds", given, at_least=2, at_most=50)


def objective_of(arguments: argparse.Namespace) -> tuple[str, float | None]:
    """What to improve and the offered rate, requests/s; capacity has none, the other objectives need one."""
    objective = arguments.objective or "capacity"
    at_rate = objective != "capacity"
    if at_rate and arguments.rate is None:
        rule = f"is missing: {objective} is measured at a rate"
        raise refuse("--rate", None, rule, "Give the requests a second that each class is offered, such as --rate 4.")
    if not at_rate and arguments.rate is not None:
        remedy = "Add --objective goodput, throughput or latency, or leave --rate out."
        raise refuse("--rate", arguments.rate, "has no meaning for the objective capacity", remedy)
    return objective, None if arguments.rate is None else positive("--rate", arguments.rate)


def _quality_prompts(arguments: argparse.Namespace) -> Path | None:
    given = getattr(arguments, "quality_prompts", None)
    if given is None:
        return None
    if not arguments.allow_lossy:
        remedy = "Give --allow-lossy too, or leave it out."
        raise refuse("--quality-prompts", given, "has no meaning when nothing may change the answers", remedy)
    return existing_file("--quality-prompts", given)


def chosen_gpus(arguments: argparse.Namespace, install: VllmInstall) -> tuple[int, ...]:
    """The GPUs of a study: as named, else the first visible one; none for a CPU build or a simulated one."""
    from tuner.environment import visible_gpus

    if install.device != "cuda" or install.simulated:
        if arguments.gpus is not None and not install.simulated:
            raise refuse("--gpus", arguments.gpus, f"vLLM {install.version} is a CPU build", "Leave --gpus out.")
        return ()
    visible = visible_gpus()
    if arguments.gpus is None:
        return visible[:1]
    named = gpu_list("--gpus", arguments.gpus)
    for index in named:
        if index not in visible:
            shown = ", ".join(map(str, visible)) or "none"
            raise refuse(
                "--gpus", arguments.gpus, f"GPU {index} is not visible here (visible: {shown})", "Name visible GPUs."
            )
    return named
