"""One configuration by itself, with the protocol of a trial: what `tune bench` does with a server of its own."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.capacity import FINISH, ProbeSettings
from tuner.records import Config, Proposal, Step, StepKind, TrialRecord
from tuner.trial.context import TrialContext, TrialRequest
from tuner.trial.run import run_trial


def bench(
    config: Config,
    context: TrialContext,
    *,
    workloads: tuple[str, ...],
    seed: int,
    settings: ProbeSettings = FINISH,
    rates: Mapping[str, float] | None = None,
    looks: int = 4,
    replicate: int = 0,
) -> TrialRecord:
    """The capacity of every workload on one fresh server, or (`rates`, requests/s by workload) its scores at a rate.

    At a rate the record's probes with purpose `bench` hold the scores: windows are added, `looks` at most, until the
    SLO is met or missed beyond doubt.
    """
    step = Step(StepKind.USER, {name: (None, value) for name, value in config.items()}, None, "asked for by the user")
    request = TrialRequest(
        proposal=Proposal(0, config, step),
        replicate=replicate,
        seed=seed,
        workloads=workloads,
        weights={name: 1 / len(workloads) for name in workloads},
        settings=settings,
        fixed_rates=rates or {},
        looks=looks,
    )
    return run_trial(request, context)
