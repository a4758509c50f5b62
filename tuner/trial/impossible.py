"""What is certain about a configuration before a launch: it breaks a rule of vLLM's, or nothing lets it fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from tuner.environment import Gpu, gpus
from tuner.feasibility import check_static, memory_estimate, memory_failure
from tuner.records import Config, Failure, KnobValue
from tuner.serve_args import defaults, merged
from tuner.server.command import users_environment
from tuner.trial.context import TrialContext


def static_rules(context: TrialContext) -> Callable[[Config, Config], bool]:
    """Whether a configuration breaks none of vLLM's rules, given the defaults that the baseline's log has shown.

    Depends on its arguments alone, not on what this process has learned: a resumed search must ask the same.
    """
    devices, install = gpus(context.gpus), context.install

    @lru_cache(maxsize=65536)
    def keeps(config: frozenset[tuple[str, KnobValue]], shown: frozenset[tuple[str, KnobValue]]) -> bool:
        broken = check_static(
            dict(config),
            fixed=context.fixed,
            defaults={**_assumed(context), **dict(shown)},
            model=context.shape,
            devices=len(devices),
            version=install.version,
            device_type=install.device,
            capability=_capability(devices),
            environment=_environment(context),
        )
        return broken is None

    return lambda config, shown: keeps(frozenset(config.items()), frozenset(shown.items()))


def impossible(config: Config, context: TrialContext) -> Failure | None:
    """What is certain before a launch: a broken rule of vLLM's own, or memory that no reading of the sizes allows."""
    install, devices, known = context.install, gpus(context.gpus), known_defaults(context)
    broken = check_static(
        config,
        fixed=context.fixed,
        defaults=known,
        model=context.shape,
        devices=len(context.gpus),
        version=install.version,
        device_type=install.device,
        capability=_capability(devices),
        environment=_environment(context),
    )
    if broken is not None or context.shape is None or not devices:
        return broken
    estimate = memory_estimate(
        context.shape,
        merged({**context.fixed, **config}),
        min(gpu.total_bytes for gpu in devices),
        context.learned.calibration,
        defaults=known,
        free_bytes=min(context.idle.free_bytes.values(), default=None),
        device_type=install.device,
        environment=_environment(context),
    )
    return memory_failure(estimate)


def known_defaults(context: TrialContext) -> dict[str, KnobValue]:
    """What vLLM does without an override: as its own log has said, else by its rules for this device."""
    return {**_assumed(context), **context.learned.defaults}


def _assumed(context: TrialContext) -> dict[str, KnobValue]:
    devices = gpus(context.gpus)
    return dict(
        defaults(
            context.install.flags,
            device_type=context.install.device,
            device_bytes=min((gpu.total_bytes for gpu in devices), default=0),
            device_name=devices[0].name if devices else "",
        )
    )


def _capability(devices: Sequence[Gpu]) -> tuple[int, int] | None:
    """The least of the study's GPUs; None where one does not tell."""
    told = [gpu.capability for gpu in devices if gpu.capability is not None]
    return min(told) if told and len(told) == len(devices) else None


def _environment(context: TrialContext) -> Mapping[str, str]:
    """Variables that every server of the study is given."""
    return {**users_environment(os.environ), **context.extra_environment}
