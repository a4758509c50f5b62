"""A space cut down to what the installed vLLM, the machine and the user's own flags leave; each cut is said aloud."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tuner.errors import InputError
from tuner.records import Config, KnobValue
from tuner.serve_args import Flag, ServeFlags, defaults, flattened, mistyped, out_of_range, unknown_flag
from tuner.space.model import Knob, Space, make_space, version_fits

PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")

_OVERRULED = {"gpu-memory-utilization": "kv-cache-memory-bytes"}
"""A knob that does nothing once the user has fixed the other."""


def restrict(
    space: Space,
    flags: ServeFlags,
    *,
    fixed: Config,
    devices: int,
    device_type: str,
    lossy_allowed: bool,
    max_model_len: int | None,
    assumed: Mapping[str, KnobValue] | None = None,
) -> tuple[Space, tuple[str, ...]]:
    """The knobs that can be searched here, with their defaults, and one sentence for each cut.

    `devices` is how many of them one server may use. `assumed` are the defaults that `serve_args.defaults` knows for
    this very device; without it those for any device of the type count, because vLLM's log does not tell all of them.
    Raises `InputError` where a knob or value that the user named does not exist in this vLLM.
    """
    known = defaults(flags, device_type=device_type) if assumed is None else assumed
    kept: list[Knob] = []
    notes: list[str] = []
    for knob in space.knobs:
        flag = flags.get(knob.name)
        reason = _left_out(space.name, knob, flag, flags, fixed, devices, device_type, lossy_allowed)
        if reason is not None or flag is None:
            notes.append(f"{knob.name}: left out, {reason}")
            continue
        values, dropped = _possible(space.name, knob, flag, flags, devices, max_model_len)
        notes += dropped
        default = known.get(knob.name)
        if not [value for value in values if value != default]:
            notes.append(f"{knob.name}: left out, no value other than the default remains")
            continue
        kept.append(replace(knob, values=values, default=default))
    return make_space(space.name, kept), tuple(notes)


def _left_out(
    space: str,
    knob: Knob,
    flag: Flag | None,
    flags: ServeFlags,
    fixed: Config,
    devices: int,
    device_type: str,
    lossy_allowed: bool,
) -> str | None:
    if not version_fits(flags.version, knob.versions):
        return f"it is meant for vLLM {knob.versions} and this is {flags.version}"
    if flag is None:
        if knob.explicit:
            raise InputError(
                where=f"search space {space}",
                field=knob.name,
                value=knob.values,
                rule=f"vLLM {flags.version} has no flag `--{knob.name}`",
                remedy=unknown_flag(knob.name, flags),
            )
        return f"vLLM {flags.version} has no such flag"
    if _is_fixed(knob.name, fixed):
        return "you have fixed it"
    if _OVERRULED.get(knob.name) in fixed:
        return f"your --{_OVERRULED[knob.name]} overrules it"
    if device_type not in knob.devices:
        return f"it is meant for {' and '.join(knob.devices)}, not {device_type}"
    if devices < knob.min_devices:
        return f"it needs {knob.min_devices} devices and there are {devices}"
    if knob.lossy and not lossy_allowed:
        return "it can change the answers, which was not allowed"
    return None


def _is_fixed(name: str, fixed: Config) -> bool:
    """Also when the user has set the whole of a JSON flag's entry, or a part of it."""
    return any(name == knob or name.startswith(f"{knob}.") or knob.startswith(f"{name}.") for knob in flattened(fixed))


def _possible(
    space: str, knob: Knob, flag: Flag, flags: ServeFlags, devices: int, max_model_len: int | None
) -> tuple[tuple[KnobValue, ...], list[str]]:
    values: list[KnobValue] = []
    notes: list[str] = []
    for value in knob.values:
        reason = _impossible(space, knob, value, flag, flags, devices, max_model_len)
        if reason is None:
            values.append(value)
        else:
            notes.append(f"{knob.name}: value {value} left out, {reason}")
    return tuple(values), notes


def _impossible(
    space: str, knob: Knob, value: KnobValue, flag: Flag, flags: ServeFlags, devices: int, max_model_len: int | None
) -> str | None:
    plain = "." not in knob.name
    wrong = None
    if plain and flag.boolean != isinstance(value, bool):
        wrong = "is a switch: true or false" if flag.boolean else "takes a value, not true or false"
    elif plain and flag.choices and str(value) not in flag.choices:
        wrong = f"takes one of: {', '.join(flag.choices)}"
    elif plain and (rule := mistyped(flag, value)) is not None:
        wrong = rule
    elif (bound := out_of_range(knob.name, value)) is not None:
        wrong = bound
    if wrong is not None:
        if knob.explicit:
            raise InputError(
                where=f"search space {space}",
                field=knob.name,
                value=value,
                rule=f"`--{knob.name}` of vLLM {flags.version} {wrong}",
                remedy="Remove or mend the value.",
            )
        return f"`--{knob.name}` {wrong}"
    if knob.name in PARALLEL and isinstance(value, int) and value > devices:
        return f"there are {devices} devices"
    if knob.name == "long-prefill-token-threshold" and max_model_len is not None and _above(value, max_model_len):
        return f"it exceeds the model length of {max_model_len}"
    return None


def _above(value: KnobValue, bound: int) -> bool:
    return isinstance(value, int | float) and value > bound
