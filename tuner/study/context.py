"""From the inputs of a study to what its trials share; it opens nothing and starts nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tuner.environment import IdleBaseline
from tuner.feasibility import read_model_shape
from tuner.ownership import Run
from tuner.records import EnvironmentFacts, StudyDefinition
from tuner.server import VllmInstall
from tuner.store import ResultsFolder
from tuner.study.inputs import Inputs
from tuner.study.signals import StopSignals
from tuner.trial import Learned, ProgressEvent, TrialContext
from tuner.workload import ordinary_vocabulary


def trial_context(
    definition: StudyDefinition,
    inputs: Inputs,
    install: VllmInstall,
    folder: ResultsFolder,
    environment: EnvironmentFacts,
    idle: IdleBaseline,
    run: Run,
    signals: StopSignals,
    progress: Callable[[ProgressEvent], None],
) -> TrialContext:
    """What every trial of this study is given on this machine."""
    local = Path(definition.model)
    return TrialContext(
        install=install,
        model=definition.model,
        fixed=definition.fixed,
        gpus=definition.gpus,
        workloads=inputs.workloads,
        slo=inputs.slo,
        folder=folder,
        environment=environment,
        idle=idle,
        vocabulary=ordinary_vocabulary(local) if local.is_dir() else None,
        shape=read_model_shape(local) if local.is_dir() else None,
        run=run,
        learned=Learned.of(folder.trials(), definition.fixed),
        stop=signals.stop,
        abort=signals.abort,
        progress=progress,
    )
