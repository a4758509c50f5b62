"""`tune plan`: what `tune run` would do and what it would cost, without starting anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.asked import asked_of, chosen_gpus, objective_of
from tuner.cli.live import seconds
from tuner.cli.options import add_study_arguments
from tuner.documents import strict_json

if TYPE_CHECKING:
    from tuner.records import Config, StudyDefinition
    from tuner.study import Inputs


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan", help="show what `run` would do and cost", description="The plan of a study, without a GPU."
    )
    add_study_arguments(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    from tuner.server import find_vllm
    from tuner.study import plan_of, prepare

    asked_of(arguments, (), "plan", *objective_of(arguments))
    install = find_vllm(arguments.vllm)
    gpus = chosen_gpus(arguments, install)
    definition, inputs = prepare(asked_of(arguments, gpus, "plan", *objective_of(arguments)), install)
    if arguments.json:
        print(strict_json(plan_of(definition, inputs)))
    else:
        print(plan_text(definition, inputs, None))
    return 0


def plan_text(definition: StudyDefinition, inputs: Inputs, folder: Path | None) -> str:
    """The plan for people."""
    from tuner.study import plan_of

    plan = plan_of(definition, inputs)
    lines = [f"{'model':10}{definition.model}", f"{'vLLM':10}{definition.vllm}"]
    lines.append(f"{'devices':10}" + (", ".join(f"GPU {gpu}" for gpu in definition.gpus) or "CPU"))
    fixed = flags_text(definition.fixed)
    lines.append(f"{'fixed':10}{fixed or 'nothing'}")
    base = flags_text(definition.baseline)
    lines.append(f"{'baseline':10}{base or 'vLLM defaults'}")
    lines.append(f"{'classes':10}{', '.join(definition.workloads)}")
    for name, limits in plan["slo"].items():
        lines.append(f"{'':10}{name}: {limits}")
    lines.append(
        f"{'space':10}{inputs.space.name}: {plan['combinations']:,} combinations of {len(inputs.space.knobs)} knobs"
    )
    lines += [f"{'':10}{knob.name}: {', '.join(map(str, knob.values))}" for knob in inputs.space.knobs]
    cost = plan["cost"]
    lines.append(f"{'search':10}{cost['search']}")
    lines.append(f"{'finish':10}{cost['finish']}")
    lines.append(f"{'cost':10}about {seconds(cost['trial_s'])} a trial before any is measured; {cost['total']}")
    if folder is not None:
        lines.append(f"{'results':10}{folder}")
    return "\n".join(lines)


def flags_text(config: Config) -> str:
    """`--max-num-seqs 64 --enforce-eager async-scheduling=off`: readable, not for a shell."""
    words = []
    for name, value in config.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"{name}=off")
        else:
            words.append(f"--{name} {value}")
    return " ".join(words)
