"""`tune run`: a whole study, from the first start of a server to the exported configuration."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tuner.cli.asked import asked_of, budget_of, chosen_gpus, objective_of
from tuner.cli.options import add_study_arguments, refuse
from tuner.documents import strict_json
from tuner.errors import EnvironmentFault, ExitCode, InputError, Interrupted

if TYPE_CHECKING:
    from tuner.cli.live import Progress
    from tuner.records import StudyDefinition
    from tuner.server import VllmInstall
    from tuner.store import ResultsFolder
    from tuner.study import Inputs, StopSignals, StudyFile


_BEFORE_TRIALS = frozenset({"inputs", "run.json", "optuna.db", "optuna.db-journal"})
"""What a start that failed before its first trial may have left: the same command may be given again."""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="find the best configuration and prove it",
        description="Find the `vllm serve` configuration that carries the most traffic within the SLO. "
        "Flags for every vLLM server go after `--` and are never searched.",
        epilog="exit codes: 0 improved or kept, 2 bad input, 3 environment, 4 nothing keeps the SLO, 130 interrupted",
    )
    add_study_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="folder of the study (default: results/MODEL-TIME)")
    parser.add_argument("--resume", metavar="DIR", nargs="?", const="", help="go on with a study (default: the latest)")
    parser.add_argument("--yes", "-y", action="store_true", help="start without asking, also on a terminal")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    from tuner.server import find_vllm
    from tuner.store import ResultsFolder
    from tuner.study import StopSignals, kept, more_budget, prepare, read_study

    if arguments.resume is not None:
        folder = ResultsFolder(_resumed(arguments))
        file = read_study(folder)
        install = find_vllm(file.definition.vllm if arguments.vllm == "vllm" else arguments.vllm)
        inputs = kept(folder)
        definition = more_budget(file.definition, budget_of(arguments, default=False))
    else:
        folder = ResultsFolder(_new_folder(arguments))
        # What needs no vLLM is checked before vLLM is asked, which takes seconds.
        asked_of(arguments, (), folder.root.name, *objective_of(arguments))
        install = find_vllm(arguments.vllm)
        gpus = chosen_gpus(arguments, install)
        definition, inputs = prepare(asked_of(arguments, gpus, folder.root.name, *objective_of(arguments)), install)
    _check_devices(definition, install)
    if not _agreed(arguments, definition, inputs, folder):
        return int(ExitCode.OK)
    stream = sys.stderr if arguments.json else sys.stdout
    logging.getLogger("optuna").setLevel(logging.WARNING)  # its lines would break through the live view
    from tuner.cli.live import Progress

    expected = definition.budget.trials
    total = None if expected is None else expected + 3 * definition.finish_rounds
    with (
        Progress(stream, title=definition.name, expected_trials=total) as progress,
        StopSignals(progress.note) as signals,
    ):
        try:
            file = _study(definition, inputs, install, folder, signals, progress, arguments.slo)
        except Interrupted:
            _so_far(folder, stream)
            raise
    return _report(arguments, file, folder, install)


def _study(
    definition: StudyDefinition,
    inputs: Inputs,
    install: VllmInstall,
    folder: ResultsFolder,
    signals: StopSignals,
    progress: Progress,
    slo_file: str | None,
) -> StudyFile:
    """Everything that is held while trials run is taken here, and given back however it ends."""
    from tuner.environment import facts, idle_baseline, require_free
    from tuner.executor import LocalExecutor
    from tuner.ownership import DeviceLocks, Run, devices_of, remove_dead_runs
    from tuner.study import Study, keep, read_study, trial_context
    from tuner.trial import static_rules

    for removed in remove_dead_runs([folder.root]):
        if removed.anything:
            progress.note(f"removed what an earlier run had left: {removed}")
    with ExitStack() as held:
        held.enter_context(DeviceLocks(devices_of(definition.gpus), study=definition.name))
        if slo_file is not None:
            keep(folder, inputs, Path(slo_file))
        registry = held.enter_context(Run(definition.name, folder.root))
        require_free(definition.gpus)
        environment = facts(install, definition.gpus)
        baseline = idle_baseline(definition.gpus)
        context = trial_context(
            definition, inputs, install, folder, environment, baseline, registry, signals, progress.event
        )
        study = Study(
            definition,
            inputs.slo,
            inputs.space,
            folder,
            LocalExecutor(context),
            environment,
            signals,
            progress,
            prompts=inputs.prompts,
            rules=static_rules(context),
        )
        for note in inputs.notes:
            progress.note(f"space: {note}")
        study.run()
    return read_study(folder)


def _report(arguments: argparse.Namespace, file: StudyFile, folder: ResultsFolder, install: VllmInstall) -> int:
    from tuner.cli.summary import summary
    from tuner.export import write_best

    assert file.result is not None
    written = write_best(file, folder, install.flags)
    if arguments.json:
        print(strict_json(json.loads(folder.study_file.read_text())))
    else:
        print(summary(file, folder.root, written))
    return int(ExitCode.NO_FEASIBLE if file.result.conclusion.decision == "no-feasible" else ExitCode.OK)


def _so_far(folder: ResultsFolder, stream: TextIO) -> None:
    """What an interrupted study has found, unverified."""
    from tuner.cli.summary import summary
    from tuner.study import read_study

    if folder.study_file.exists():
        print(summary(read_study(folder), folder.root, ()), file=stream)


def _check_devices(definition: StudyDefinition, install: VllmInstall) -> None:
    if install.device == "cuda" and not install.simulated and not definition.gpus:
        raise EnvironmentFault(
            f"vLLM {install.version} is a CUDA build, but no GPU is visible. Check `nvidia-smi` and "
            "CUDA_VISIBLE_DEVICES, or name a CPU build by --vllm; `tune doctor` says more."
        )


def _agreed(arguments: argparse.Namespace, definition: StudyDefinition, inputs: Inputs, folder: ResultsFolder) -> bool:
    """On a terminal the plan is shown and confirmed; anywhere else, and with --yes, it is only shown."""
    from tuner.cli.plan import plan_text

    stream = sys.stderr if arguments.json else sys.stdout
    print(plan_text(definition, inputs, folder.root), file=stream, flush=True)
    if arguments.yes or arguments.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    return input("Start? [Y/n] ").strip().lower() in ("", "y", "yes")


def _new_folder(arguments: argparse.Namespace) -> Path:
    from tuner.store.files import disk_errors

    if arguments.out is not None:
        folder = Path(arguments.out)
        with disk_errors(folder):
            if (folder / "study.json").exists():
                remedy = f"Go on with it: --resume {arguments.out}."
                raise refuse("--out", arguments.out, "holds a study already", remedy)
            if folder.is_symlink() and not folder.exists():
                remedy = "Create its target, or name another."
                raise refuse("--out", arguments.out, "is a link that leads nowhere", remedy)
            if folder.is_dir() and not {path.name for path in folder.iterdir()} <= _BEFORE_TRIALS:
                remedy = "Name a new or an empty folder."
                raise refuse("--out", arguments.out, "holds files that are no study's", remedy)
            nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not nearest.is_dir():
                raise refuse("--out", arguments.out, f"cannot be a folder: {nearest} is a file", "Name another.")
            if not os.access(nearest, os.W_OK):
                raise EnvironmentFault(f"{folder}: cannot be written. Choose another --out.")
        return folder
    name = Path(str(arguments.model or "study")).name or "study"
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip(".-_") or "study"
    return Path("results") / f"{safe[:60]}-{time.strftime('%Y%m%d-%H%M%S')}"


def _resumed(arguments: argparse.Namespace) -> Path:
    for flag in ("model", "slo", "workloads", "space"):
        if getattr(arguments, flag) is not None:
            rule = "cannot be given with --resume: a study keeps what it was started with"
            raise refuse(f"--{flag}", getattr(arguments, flag), rule, "Leave it out, or start a new study.")
    kept = ("gpus", "seed", "speed", "finish_rounds", "objective", "rate", "mixed", "allow_lossy", "quality_prompts")
    for flag in kept:
        if getattr(arguments, flag):
            spelling = "--" + flag.replace("_", "-")
            raise refuse(spelling, getattr(arguments, flag), "is kept by the study", "Leave it out with --resume.")
    if arguments.fixed or arguments.baseline:
        raise refuse("--resume", arguments.resume, "keeps the flags of the study", "Leave --baseline and `--` out.")
    named = arguments.resume or arguments.out
    if named:
        return Path(named)
    studies = sorted(Path("results").glob("*/study.json"), key=lambda path: path.stat().st_mtime)
    if not studies:
        raise InputError(
            where="command line",
            field="--resume",
            value="",
            rule="finds no study under results/",
            remedy="Name its folder: --resume results/NAME.",
        )
    return studies[-1].parent
