"""A place whose servers are a formula, and vLLMs that exist on paper only, for tests of everything that compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tests.formula import FACTS, FormulaExecutor
from tuner.comparison import Servers, Traffic
from tuner.records import Config, EnvironmentFacts, TrialRecord
from tuner.serve_args import ServeFlags, parse_help
from tuner.server import VllmInstall
from tuner.store import ResultsFolder
from tuner.trial import TrialRequest

HELP = Path(__file__).parent / "recorded" / "help"

Truth = Callable[[str, Config], Mapping[str, float] | None]
"""vLLM version and whole configuration to the true capacity of each class; None where it does not start."""


@cache
def flags(version: str = "0.32.0") -> ServeFlags:
    return parse_help((HELP / "serve_help_0.33.0.txt").read_text(), version)


def install(version: str = "0.32.0") -> VllmInstall:
    return VllmInstall(f"/opt/vllm-{version}/bin/vllm", version, flags(version), "cpu", simulated=False)


@dataclass
class FormulaPlace:
    """Measures `truth` with log-normal noise per start. `events` may raise or change a record, by call number."""

    truth: Truth
    noise: float = 0.02
    events: dict[int, Callable[[TrialRecord], TrialRecord]] = field(default_factory=dict)
    calls: list[TrialRequest] = field(default_factory=list)
    machine: str = "machine-a"

    def facts(self, install: VllmInstall, gpus: Sequence[int]) -> EnvironmentFacts:
        return replace(FACTS, vllm_version=install.version, machine=self.machine, digest=f"kind-{install.version}")

    def executor(self, servers: Servers, traffic: Traffic, folder: ResultsFolder) -> _Executor:
        return _Executor(self, servers)

    def rules(self, servers: Servers, traffic: Traffic, folder: ResultsFolder) -> Callable[[Config, Config], bool]:
        return lambda config, defaults: True


@dataclass
class _Executor:
    place: FormulaPlace
    servers: Servers

    def run(self, request: TrialRequest) -> TrialRecord:
        place, version = self.place, self.servers.install.version
        place.calls.append(request)
        call = len(place.calls)
        one = FormulaExecutor(
            lambda config: place.truth(version, {**self.servers.fixed, **config}),
            noise=place.noise,
            machine=place.machine,
        )
        record = replace(one.run(request), simulated=False, seed=request.seed)
        return place.events[call](record) if call in place.events else record
