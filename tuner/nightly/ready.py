"""From a profile to everything that a night needs, checked before a server starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.comparison import Lock, Traffic, divide, open_source
from tuner.documents import digest
from tuner.environment import model_revision
from tuner.errors import InputError
from tuner.nightly.profile import Profile
from tuner.records import Config, EnvironmentFacts
from tuner.serve_args import parse_argv
from tuner.server import VllmInstall
from tuner.slo import load_slo
from tuner.study import accepted_length, refuse_secrets, traffic


@dataclass(frozen=True, slots=True)
class Ready:
    """The checked inputs of a night."""

    profile: Profile
    install: VllmInstall
    other: VllmInstall | None  # a second vLLM that the incumbent is served with, too
    gpus: tuple[int, ...]
    traffic: Traffic
    workloads: tuple[str, ...]  # what is measured
    fixed: Config  # flags that every server has
    given: Config  # of the incumbent that the profile names, without these; empty: vLLM's defaults
    lock: Lock | None  # beside that incumbent

    @property
    def model_revision(self) -> str:
        revision = self.fixed.get("revision")
        return model_revision(self.profile.model, None if revision is None else str(revision))

    def series(self, environment: EnvironmentFacts) -> str:
        """What must agree for capacities of two nights to be comparable; the version of vLLM is what is watched."""
        return digest(
            [
                environment.machine,
                list(environment.gpus) or environment.cpu,
                self.profile.model,
                dict(self.fixed),
                self.profile.speed,
                self.traffic.slo.digest,
                {name: self.traffic.workloads[name].digest for name in self.workloads},
            ]
        )


def ready(profile: Profile, installs: Sequence[VllmInstall], gpus: tuple[int, ...]) -> Ready:
    """`installs`: one, or two to compare; InputError for whatever does not fit together."""
    install, where = installs[0], f"{profile.name}: flags"
    slo, workloads = traffic(profile.workloads, lambda classes: load_slo(profile.slo, classes))
    given = parse_argv(profile.flags, install.flags, where)
    source = None if profile.incumbent is None else open_source(str(profile.incumbent), install.flags)
    if source is not None and source.model not in (None, profile.model):
        raise InputError(
            where=profile.name,
            field="incumbent",
            value=source.model,
            rule=f"serves another model than the profile names ({profile.model})",
            remedy="Name the model of the incumbent, or another incumbent.",
        )
    fixed, configs = divide([source.config], given, [source.fixed]) if source is not None else (given, [{}])
    refuse_secrets({**configs[0], **fixed}, install.flags)
    accepted_length(profile.model, {**configs[0], **fixed}, workloads)
    return Ready(
        profile=profile,
        install=install,
        other=installs[1] if len(installs) > 1 else None,
        gpus=gpus,
        traffic=Traffic(slo, workloads),
        workloads=tuple(name for name in workloads if name in slo.classes or profile.mixed),
        fixed=fixed,
        given=configs[0],
        lock=None if source is None else source.lock,
    )
