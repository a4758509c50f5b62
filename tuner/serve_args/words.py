"""Between a configuration and the words of a command line, in the spelling of the installed vLLM; it starts nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tuner.errors import InputError
from tuner.records import Config, KnobValue
from tuner.serve_args.bounds import out_of_range
from tuner.serve_args.flags import Flag, ServeFlags, Takes, unknown_flag

RESERVED: Mapping[str, str] = {
    "model": "Give the model as `tune … --model`.",
    "config": "Give its flags here, so that the tuner knows what is set.",
    "help": "Run `vllm serve --help=all`.",
    **dict.fromkeys(
        ("host", "port", "uds"), "The tuner gives every server its own port on loopback; set it on deploying."
    ),
    **dict.fromkeys(
        ("api-key", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "enable-ssl-refresh", "root-path"),
        "The tuner's servers listen on loopback only, in plain HTTP; set it on deploying.",
    ),
    **dict.fromkeys(("headless", "node-rank", "nnodes"), "One server is one process tree on this machine."),
    "grpc": "The tuner measures the HTTP server.",
}
"""Flags that the tuner sets itself or cannot serve with, and what to do instead."""

_INTEGERS = (
    "max-num-seqs",
    "max-num-batched-tokens",
    "max-model-len",
    "max-num-active-seqs",
    "max-cudagraph-capture-size",
    "api-server-count",
    "block-size",
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
)
"""Flags whose default is None in the help, so that only their name says that they take whole numbers."""

_AUTO = ("max-model-len",)  # also takes `auto`, meaning −1
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_READABLE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kKmMgGtT])")
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?")


def to_argv(config: Config, flags: ServeFlags) -> tuple[str, ...]:
    """The words for `vllm serve MODEL …`; raises `InputError` for a knob that this version does not have.

    `name.key` entries and a JSON text under `name` are merged into one JSON argument, because vLLM lets a later one
    replace an earlier one as a whole.
    """
    words: list[str] = []
    check_known(config, flags)
    for name, value in merged(config).items():
        flag = flags.flags[name]
        spelling = f"--{name}"
        if flag.boolean:
            if not isinstance(value, bool):
                _fail("configuration", spelling, value, "is a switch and takes no value", "Use true or false.")
            if value or flag.negation:
                words.append(spelling if value else str(flag.negation))
        elif isinstance(value, bool):
            _fail("configuration", spelling, value, "takes a value, not true or false", "Give its value.")
        elif flag.takes is Takes.LIST:
            words += [spelling, *list_items(value)]
        else:
            words += [spelling, str(value)]
    return tuple(words)


def check_known(config: Config, flags: ServeFlags) -> None:
    """Raises `InputError` for the first knob that this version does not have."""
    for knob, value in config.items():
        if knob not in flags:
            rule = f"vLLM {flags.version} has no such flag"
            if knob.partition(".")[0] in flags:
                rule = "takes no keys"
            _fail("configuration", f"--{knob}", value, rule, unknown_flag(knob, flags))


def parse_argv(words: Sequence[str], flags: ServeFlags, where: str = "command line") -> dict[str, KnobValue]:
    """The user's own vLLM flags as a configuration; raises `InputError` for whatever vLLM would not accept.

    Knows `--flag=value`, `--flag value`, underscores, short spellings, switches and their opposites, lists, `-O3`,
    JSON (`--name '{…}'`) and dotted JSON (`--name.key value`, `--name.key+ value`), which end up merged under `name`.
    """
    config: dict[str, KnobValue] = {}
    objects: dict[str, dict[str, object]] = {}
    queue = list(words)
    while queue:
        entry = _entry(queue.pop(0), flags, where)
        flag = entry.flag
        if not entry.keys and (flag.name in config or flag.name in objects):
            _fail(where, entry.spelling, entry.spelling, "is given twice", "Keep one of the two.")
        if flag.boolean:
            if entry.value is not None:
                remedy = f"Write `{entry.spelling}`" + (f" or `{flag.negation}`." if flag.negation else ".")
                _fail(where, entry.spelling, entry.value, "is a switch and takes no value", remedy)
            config[flag.name] = entry.spelling != flag.negation
            continue
        values = _following(queue, flag) if entry.value is None else [entry.value]
        if not values and flag.takes is not Takes.OPTIONAL:
            _fail(where, entry.spelling, "", "needs a value", f"Write `{entry.spelling} VALUE`.")
        if flag.json:
            document = objects.setdefault(flag.name, {})
            if entry.keys and not entry.keys.endswith("+") and _holds(document, entry.keys):
                spelling = f"{entry.spelling}.{entry.keys}"
                _fail(where, spelling, spelling, "is given twice", "Keep one of the two.")
            _merge_json(document, flag, entry.keys, values[0], where)
        elif flag.takes is Takes.LIST:
            config[flag.name] = json.dumps([_value(flag, text, where) for text in values], ensure_ascii=False)
        else:
            config[flag.name] = _value(flag, values[0], where) if values else ""
            broken = out_of_range(flag.name, config[flag.name])
            if broken is not None:
                _fail(where, f"--{flag.name}", values[0], broken, "Choose another value.")
    return {**config, **{name: dump_object(document) for name, document in objects.items()}}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One word that begins with a dash, taken apart: `-cc.mode=3` has the keys `mode` and the value `3`."""

    flag: Flag
    spelling: str
    keys: str
    value: str | None


def _entry(word: str, flags: ServeFlags, where: str) -> _Entry:
    spelling, equals, value = word.partition("=")
    if re.fullmatch(r"-O\d", spelling):
        spelling, equals, value = "--optimization-level", "=", spelling[2:]
    elif spelling == "-O":
        spelling = "--optimization-level"
    if not spelling.startswith("-") or _NEGATIVE.fullmatch(spelling):
        _fail(where, word, word, "is no flag", "vLLM's flags start with `--`; the model is given by `--model`.")
    root, dot, keys = spelling.partition(".")
    if root.startswith("--"):
        root = "--" + root[2:].replace("_", "-")
    name = flags.spellings.get(root, root.lstrip("-"))
    if name in RESERVED:
        _fail(where, root, root, "cannot be set here", RESERVED[name])
    flag = flags.flags.get(name)
    if flag is None or root not in flags.spellings:
        _fail(where, root, word, f"vLLM {flags.version} has no such flag", unknown_flag(root, flags))
    if dot and not (flag.json and keys):
        _fail(where, spelling, word, f"`{root}` takes no keys", f"Write `{root} VALUE`.")
    return _Entry(flag, root, keys, value if equals else None)


def merged(config: Config) -> dict[str, KnobValue]:
    """The configuration with every `name.key` folded into the JSON text of `name`, in the order of first mention."""
    result: dict[str, KnobValue] = {}
    objects: dict[str, dict[str, object]] = {}
    for knob in config:
        name, dot, _ = knob.partition(".")
        result.setdefault(name, config.get(name, ""))
        if dot and name not in objects:
            objects[name] = _loads(str(config.get(name, "{}")), name, "configuration")
    for knob, value in config.items():
        name, _, keys = knob.partition(".")
        if keys:
            _update(objects[name], _nested(keys, _leaf(value)))
    return {**result, **{name: dump_object(document) for name, document in objects.items()}}


def dump_object(document: Mapping[str, object]) -> str:
    return json.dumps(document, sort_keys=True, ensure_ascii=False)


def list_items(value: KnobValue) -> list[str]:
    """The words of a list flag, whose value is the text of a JSON list or a single word."""
    if isinstance(value, str) and value.startswith("["):
        try:
            items = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
        return [item if isinstance(item, str) else json.dumps(item) for item in items]
    return [str(value)]


def number_of(text: str) -> int | float | None:
    """A number as vLLM's parser reads it: `8k` is 8,000 and `8K` is 8,192; None for anything else."""
    readable = _READABLE.fullmatch(text.strip())
    if readable:
        digits, unit = readable.groups()
        if unit in _DECIMAL:
            return int(float(digits) * _DECIMAL[unit])
        return int(digits) * _BINARY[unit] if digits.isdigit() else None
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return None


def _following(queue: list[str], flag: Flag) -> list[str]:
    values: list[str] = []
    limit = len(queue) if flag.takes is Takes.LIST else 1
    while queue and len(values) < limit and (not queue[0].startswith("-") or _NEGATIVE.fullmatch(queue[0])):
        values.append(queue.pop(0))
    return values


def _value(flag: Flag, text: str, where: str) -> KnobValue:
    spelling = f"--{flag.name}"
    if flag.choices:
        if text not in flag.choices:
            _fail(where, spelling, text, "is none of the choices", f"Write one of: {', '.join(flag.choices)}.")
        if not text.isdigit():
            return text
    readable = "human-readable integers" in flag.help
    if flag.name in _AUTO and text.lower() in ("auto", "-1"):
        return -1
    numeric = isinstance(flag.default, int | float) and not isinstance(flag.default, bool)
    number = number_of(text)
    if flag.name in _INTEGERS or readable or isinstance(flag.default, int):
        if not isinstance(number, int) or (not readable and not text.strip().lstrip("-").isdigit()):
            _fail(
                where,
                spelling,
                text,
                "must be a whole number",
                "Write digits" + (" (8k and 8K count)." if readable else "."),
            )
        return number
    if numeric:
        if number is None or number != number or not text.strip()[-1].isdigit():
            _fail(where, spelling, text, "must be a number", "Write a number.")
        return number
    # Without a number as default the type is not known: text that prints back the same may as well be a number.
    return number if number is not None and str(number) == text else text


def mistyped(flag: Flag, value: KnobValue) -> str | None:
    """The rule that a value breaks on a command line (`must be a whole number`, …); None where it breaks none."""
    if flag.boolean or flag.json or flag.takes is Takes.LIST:
        return None
    try:
        _value(flag, str(value), "")
    except InputError as error:
        return error.rule
    return None


def _merge_json(document: dict[str, object], flag: Flag, inner: str, text: str, where: str) -> None:
    if not inner:
        _update(document, _loads(text, flag.name, where))
        return
    if inner.endswith("+"):
        _update(document, _nested(inner[:-1], [_leaf(item) for item in text.split(",")]))
    else:
        _update(document, _nested(inner, _leaf(text)))


def _loads(text: str, name: str, where: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        _fail(where, f"--{name}", text, f"is not valid JSON ({error})", "Quote it: '{\"key\": value}'.")
    if not isinstance(document, dict):
        _fail(where, f"--{name}", text, "must be a JSON object", "Write '{\"key\": value}'.")
    return document


def _leaf(value: KnobValue) -> object:
    """A dotted value as vLLM reads it: JSON where it is JSON, a human-readable number, else text."""
    if not isinstance(value, str):
        return value
    try:
        leaf: object = json.loads(value)
    except (ValueError, RecursionError):
        number = number_of(value)
        return value if number is None else number
    return leaf


def _holds(document: Mapping[str, object], path: str) -> bool:
    """Whether the document has a value where the dotted path leads, or on the way to it."""
    place: object = document
    for key in path.split("."):
        if not isinstance(place, Mapping):
            return True
        if key not in place:
            return False
        place = place[key]
    return True


def _nested(path: str, value: object) -> dict[str, object]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def _update(document: dict[str, object], changes: Mapping[str, object]) -> None:
    for key, value in changes.items():
        present = document.get(key)
        if isinstance(present, dict) and isinstance(value, Mapping):
            _update(present, value)
        elif isinstance(present, list) and isinstance(value, list):
            document[key] = present + value
        else:
            document[key] = value


def _fail(where: str, field: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise InputError(where=where, field=field, value=value, rule=rule, remedy=remedy)
