"""When two configurations are the same and when one was not honoured; assumed defaults where no log speaks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tuner.records import Config, KnobValue
from tuner.serve_args.flags import ServeFlags, version_tuple
from tuner.serve_args.words import merged

GIB = 1 << 30

_SAME = {("kv-cache-dtype", "fp8"): "fp8_e4m3"}  # two spellings of one thing
_FREE = ("auto", -1, "default")  # asked for, these leave the choice to vLLM


def degraded(asked: Config, effective: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """One sentence for every knob that was asked for and is not in effect (CASES A31); unknown knobs count as kept."""
    return tuple(
        f"{knob}: asked for {_shown(value)}, in effect {_shown(effective[knob])}"
        for knob, value in flattened(asked).items()
        if knob in effective and value not in _FREE and not same(knob, value, effective[knob])
    )


def canonical(config: Config, fixed: Config, effective_defaults: Mapping[str, KnobValue]) -> str:
    """The identity of a trial: every override that differs from the default in effect, sorted, as JSON."""
    kept = {
        knob: _normal(knob, value)
        for knob, value in flattened({**fixed, **config}).items()
        if knob not in effective_defaults or not same(knob, value, effective_defaults[knob])
    }
    return json.dumps(kept, sort_keys=True)


def flattened(config: Config) -> dict[str, KnobValue]:
    """The configuration with JSON objects taken apart into `name.key` entries; lists stay JSON text."""
    result: dict[str, KnobValue] = {}
    for name, value in merged(config).items():
        document = _object(value)
        result |= {name: value} if document is None else dict(_leaves(name, document))
    return result


def same(knob: str, one: KnobValue, other: KnobValue) -> bool:
    return _normal(knob, one) == _normal(knob, other)


def defaults(
    flags: ServeFlags, *, device_type: str, device_bytes: int = 0, device_name: str = "", world_size: int = 1
) -> dict[str, KnobValue]:
    """Defaults before any log: those of the help, and for what vLLM decides at the start its rule for the API server.

    The rule is that of `EngineArgs.get_batch_defaults` (vLLM 0.26–0.33): by device memory, A100 counted as small. An
    unknown device gets no guess; a log's own values (`effective_values`) come first wherever there is one.
    """
    known = {name: flag.default for name, flag in flags.flags.items() if flag.default is not None and not flag.json}
    result: dict[str, KnobValue] = dict(known)
    if device_type == "cpu":
        result |= {
            "max-num-batched-tokens": 2048 * world_size,
            "max-num-seqs": 128 * world_size,
            "async-scheduling": False,
        }
    elif device_type == "cuda" and device_bytes:
        large = device_bytes >= 70 * GIB and "a100" not in device_name.lower()
        if device_bytes < 160 * GIB:
            result["max-num-batched-tokens"] = 8192 if large else 2048
        elif version_tuple(flags.version) >= (0, 32, 0):  # the rule for such devices is younger than 0.26
            result["max-num-batched-tokens"] = 16384
        result["max-num-seqs"] = 1024 if large else 256
    if device_type in ("cpu", "cuda"):
        result |= {"enable-chunked-prefill": True, "enable-prefix-caching": True, "api-server-count": 1}
    return result


def _object(value: KnobValue) -> dict[str, object] | None:
    try:
        document = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _leaves(name: str, value: object) -> Iterator[tuple[str, KnobValue]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, value if isinstance(value, bool | int | float | str) else json.dumps(value)


def _normal(knob: str, value: KnobValue) -> KnobValue:
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        return _SAME.get((knob, value), value)
    return value


def _shown(value: KnobValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
