"""Owns what a simulated server takes from its environment, so that its command line stays vLLM's; it starts nothing.

VLLM_SIM_PROFILE     machine and model: a name of `profiles.PROFILES` or `scenario:NAME` (default `h200-8b`)
VLLM_SIM_TIME_SCALE  real seconds per simulated second (default 1)
VLLM_SIM_START_S     real seconds from launch to healthy (default 2)
VLLM_SIM_SEED        the luck of this start; without it every start has its own
VLLM_SIM_FAULT       scripted faults (`faults`)
VLLM_SIM_VERSION     what `--version` says (default `0.32.0+simulated`)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.errors import InputError
from tuner.sim.faults import Fault, parse_faults
from tuner.sim.held_out import HELD_OUT
from tuner.sim.profile import Profile
from tuner.sim.profiles import PROFILES
from tuner.sim.scenarios import SCENARIOS

VERSION = "0.32.0"


@dataclass(frozen=True, slots=True)
class Options:
    """The environment of one simulated server, read."""

    profile: Profile
    time_scale: float
    start_s: float
    seed: int
    faults: tuple[Fault, ...]
    version: str


def read_options(environment: Mapping[str, str]) -> Options:
    """InputError for a value that breaks a rule."""
    profile = _profile(environment.get("VLLM_SIM_PROFILE", "h200-8b"))
    suffix = "+cpu.simulated" if profile.machine.device == "cpu" else "+simulated"
    seed = environment.get("VLLM_SIM_SEED")
    return Options(
        profile=profile,
        time_scale=_positive(environment, "VLLM_SIM_TIME_SCALE", 1.0),
        start_s=_positive(environment, "VLLM_SIM_START_S", 2.0),
        seed=int.from_bytes(os.urandom(4), "big") if seed is None else _whole(seed),
        faults=parse_faults(environment.get("VLLM_SIM_FAULT", "")),
        version=environment.get("VLLM_SIM_VERSION", VERSION + suffix),
    )


def _profile(name: str) -> Profile:
    scenarios = {f"scenario:{scenario.name}": scenario.profile for scenario in (*SCENARIOS, *HELD_OUT)}
    known = {**PROFILES, **scenarios}
    if name not in known:
        raise InputError(
            where="environment",
            field="VLLM_SIM_PROFILE",
            value=name,
            rule="not a simulated machine",
            remedy=f"Use one of: {', '.join(known)}.",
        )
    return known[name]


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e6:
        raise InputError(
            where="environment", field=name, value=text, rule="must be a positive number", remedy="Write seconds, or 1."
        )
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise InputError(
            where="environment",
            field="VLLM_SIM_SEED",
            value=text,
            rule="must be a whole number",
            remedy="Write 1, or leave it out.",
        )
    return int(text)
