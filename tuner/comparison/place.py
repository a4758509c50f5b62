"""Where comparisons run: this machine with its locks and run file, or anything that a test puts in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuner.environment import IdleBaseline, facts, idle_baseline, require_free
from tuner.errors import EnvironmentFault
from tuner.executor import Executor, LocalExecutor
from tuner.feasibility import read_model_shape
from tuner.ownership import DeviceLocks, Run, devices_of, remove_dead_runs
from tuner.records import Config, EnvironmentFacts, Slo, TrialRecord
from tuner.server import VllmInstall
from tuner.store import ResultsFolder
from tuner.trial import ProgressEvent, TrialContext, TrialRequest, static_rules
from tuner.workload import Workload, ordinary_vocabulary


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent and what is promised for it."""

    slo: Slo
    workloads: Mapping[str, Workload]  # also the classes that a mix is made of


@dataclass(frozen=True, slots=True)
class Servers:
    """Everything that the servers of one side have in common."""

    install: VllmInstall
    model: str
    fixed: Config
    gpus: tuple[int, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


Rules = Callable[[Config, Config], bool]


class Place(Protocol):
    """Somewhere that servers can be started and measured."""

    def facts(self, install: VllmInstall, gpus: Sequence[int]) -> EnvironmentFacts:
        """The machine, with this vLLM."""

    def executor(self, servers: Servers, traffic: Traffic, folder: ResultsFolder) -> Executor:
        """What measures one side and keeps its raw data in `folder`."""

    def rules(self, servers: Servers, traffic: Traffic, folder: ResultsFolder) -> Rules:
        """Whether a configuration may start at all, given the defaults that a server has shown."""


class BySide:
    """An executor that hands each configuration to the executor of its own side."""

    def __init__(self, sides: Mapping[int, Executor]) -> None:
        self._sides = sides

    def run(self, request: TrialRequest) -> TrialRecord:
        return self._sides[request.proposal.number].run(request)


class ThisMachine:
    """Real servers on this machine; made by `held`, which owns what they need."""

    def __init__(
        self,
        idle: IdleBaseline,
        registry: Run,
        stop: threading.Event,
        abort: threading.Event,
        progress: Callable[[ProgressEvent], None],
    ) -> None:
        self._idle, self._registry = idle, registry
        self._stop, self._abort, self._progress = stop, abort, progress

    def facts(self, install: VllmInstall, gpus: Sequence[int]) -> EnvironmentFacts:
        return facts(install, gpus)

    def executor(self, servers: Servers, traffic: Traffic, folder: ResultsFolder) -> Executor:
        return LocalExecutor(self._context(servers, traffic, folder))

    def rules(self, servers: Servers, traffic: Traffic, folder: ResultsFolder) -> Rules:
        return static_rules(self._context(servers, traffic, folder))

    def _context(self, servers: Servers, traffic: Traffic, folder: ResultsFolder) -> TrialContext:
        local = Path(servers.model)
        return TrialContext(
            install=servers.install,
            model=servers.model,
            fixed=servers.fixed,
            gpus=servers.gpus,
            workloads=traffic.workloads,
            slo=traffic.slo,
            folder=folder,
            environment=facts(servers.install, servers.gpus),
            idle=self._idle,
            vocabulary=ordinary_vocabulary(local) if local.is_dir() else None,
            shape=read_model_shape(local) if local.is_dir() else None,
            run=self._registry,
            extra_environment=servers.variables,
            stop=self._stop,
            abort=self._abort,
            progress=self._progress,
        )


@contextmanager
def held(
    name: str,
    root: Path,
    gpus: tuple[int, ...],
    installs: Sequence[VllmInstall],
    stop: threading.Event,
    abort: threading.Event,
    progress: Callable[[ProgressEvent], None],
    note: Callable[[str], None],
) -> Iterator[ThisMachine]:
    """This machine, locked for us while the context lasts; what an earlier, dead run left is removed first."""
    for install in installs:
        if install.device == "cuda" and not install.simulated and not gpus:
            raise EnvironmentFault(
                f"vLLM {install.version} is a CUDA build, but no GPU is visible. Check `nvidia-smi` and "
                "CUDA_VISIBLE_DEVICES, or name a CPU build by --vllm; `tune doctor` says more."
            )
    for removed in remove_dead_runs([root]):
        if removed.anything:
            note(f"removed what an earlier run had left: {removed}")
    with DeviceLocks(devices_of(gpus), study=name), Run(name, root) as registry:
        require_free(gpus)
        yield ThisMachine(idle_baseline(gpus), registry, stop, abort, progress)
