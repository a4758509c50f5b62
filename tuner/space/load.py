"""Search spaces as users name them: a shipped name, a YAML file, or `knob=v1,v2,…`; it asks no vLLM."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tuner.documents import Node, read_yaml, shipped, suggestion
from tuner.records import KnobValue
from tuner.serve_args import number_of
from tuner.space.model import STAGES, Kind, Knob, Scale, Space, make_space, requirement

MAX_VALUES = 64
DEVICES = ("cuda", "cpu")

_KNOB_KEYS = (
    "stage", "kind", "scale", "range", "step", "values", "coupled", "lossy", "vllm", "devices", "gpus", "note",
)  # fmt: skip
_NAME = re.compile(r"[a-z][a-z0-9-]*(?:\.\w+)*")
_DEPTH = 8  # of `extends`


def shipped_spaces() -> dict[str, Path]:
    return {path.stem: path for path in sorted(shipped("search_spaces").glob("*.yaml"))}


def load_space(path_or_name: str, *more: str) -> Space:
    """The space of one or more words; later ones override knobs of earlier ones. Raises `InputError`.

    A word is the name of a shipped space, the path of a YAML file, or `knob=v1,v2,…`. Knobs that are only given inline
    make up the whole space; those after a name or a path are added to it.
    """
    words = (path_or_name, *more)
    knobs: dict[str, Knob] = {}
    names: list[str] = []
    for word in words:
        if "=" in word and not word.endswith((".yaml", ".yml")):
            knob = _inline(word)
            knobs[knob.name] = knob
            names.append(knob.name)
        else:
            path = _find(word)
            explicit = path not in shipped_spaces().values()
            knobs |= _load(path, explicit, 0)
            names.append(path.stem)
    return make_space("+".join(names), list(knobs.values()))


def parse_space(root: Node, explicit: bool, folder: Path, depth: int = 0) -> dict[str, Knob]:
    """The knobs of one document by name; `extends` names a shipped space or a file beside it."""
    top = root.mapping(("extends", "knobs", "description"))
    knobs: dict[str, Knob] = {}
    if "extends" in top:
        if depth >= _DEPTH:
            top["extends"].fail("extends itself, or too many others", "Write the knobs out.")
        knobs |= _load(_find(top["extends"].text(), folder, top["extends"]), False, depth + 1)
    entries = top["knobs"].mapping() if "knobs" in top else {}
    for name, node in entries.items():
        if not _NAME.fullmatch(name):
            node.fail("is not the name of a flag", "Write it in lower case without leading dashes: `max-num-seqs`.")
        if node.value is None:
            if name not in knobs:
                node.fail("removes a knob that the extended space does not have", suggestion(name, knobs))
            del knobs[name]
        else:
            knobs[name] = _knob(name, node, explicit)
    if not knobs:
        root.fail("holds no knob", "Add `knobs:` or `extends: default`.")
    return knobs


def _load(path: Path, explicit: bool, depth: int) -> dict[str, Knob]:
    return parse_space(read_yaml(path), explicit, path.parent, depth)


def _find(word: str, folder: Path | None = None, place: Node | None = None) -> Path:
    known = shipped_spaces()
    if word in known:
        return known[word]
    path = (folder or Path()) / word
    if path.is_file():
        return path
    (place or Node(word, "command line", "--space")).fail(
        "is neither a shipped search space nor a file", suggestion(word, known)
    )


def _knob(name: str, node: Node, explicit: bool) -> Knob:
    entries = node.mapping(_KNOB_KEYS, required=("stage",))
    scale = Scale(entries["scale"].text(tuple(Scale))) if "scale" in entries else None
    if ("range" in entries) == ("values" in entries):
        node.fail("needs either `range` or `values`", "Give one of them.")
    if "range" in entries:
        values: tuple[KnobValue, ...] = _range(entries, scale)
        scale = scale or Scale.LOG2
    else:
        if "step" in entries:
            entries["step"].fail("belongs to a `range`", "Remove it.")
        values = _listed(entries["values"])
        ordered = all(isinstance(value, int | float) for value in values)
        if scale in (Scale.LOG2, Scale.LINEAR) or (scale is Scale.ORDERED and not ordered):
            entries["scale"].fail("does not go with these `values`", "Leave it out.")
        scale = scale or (Scale.ORDERED if ordered else Scale.LIST)
        if scale is Scale.ORDERED:
            values = tuple(sorted(values, key=_numeric))
    kind = _kind(values)
    if "kind" in entries:
        wanted = Kind(entries["kind"].text(tuple(Kind)))
        if wanted is not kind and (wanted, kind) != (Kind.FLOAT, Kind.INT):
            entries["kind"].fail(f"the values are of kind {kind}", f"Write `kind: {kind}`, or leave it out.")
        kind = wanted
    return Knob(
        name=name,
        kind=kind,
        values=values,
        scale=scale,
        stage=STAGES.index(entries["stage"].text(STAGES)),
        coupled=tuple(item.text() for item in entries["coupled"].items()) if "coupled" in entries else (),
        lossy=entries["lossy"].boolean() if "lossy" in entries else False,
        note=entries["note"].text() if "note" in entries else "",
        devices=tuple(item.text(DEVICES) for item in entries["devices"].items()) if "devices" in entries else DEVICES,
        min_devices=entries["gpus"].integer(at_least=1, at_most=1024) if "gpus" in entries else 1,
        versions=requirement(entries["vllm"]) if "vllm" in entries else "",
        explicit=explicit,
    )


def _range(entries: Mapping[str, Node], scale: Scale | None) -> tuple[KnobValue, ...]:
    """Both ends and what lies between: doublings (log2) or steps (linear)."""
    node = entries["range"]
    ends = [item.number() for item in node.items()]
    if len(ends) != 2 or not ends[0] < ends[1]:
        node.fail("must hold two ascending numbers", "Write `[low, high]`.")
    low, high = ends
    values: list[float] = []
    if scale in (None, Scale.LOG2):
        if "step" in entries:
            entries["step"].fail("belongs to `scale: linear`", "Remove it.")
        if not low > 0 or low * 2**MAX_VALUES <= high:
            node.fail("a log2 range must begin above 0", "Begin at 1 or more, or list `values`.")
        values = [low * 2**power for power in range(math.floor(math.log2(high / low) + 1e-9) + 1)]
    elif scale is Scale.LINEAR:
        if "step" not in entries:
            node.fail("a linear range needs a `step`", "Add `step:`.")
        step = entries["step"].number(above=0.0)
        count = (high - low) / step
        if count >= MAX_VALUES:
            node.fail(f"would hold more than {MAX_VALUES} values", "Use a larger step.")
        values = [low + step * position for position in range(math.floor(count + 1e-9) + 1)]
    else:
        node.fail(f"does not go with `scale: {scale}`", "Use log2 or linear, or list `values`.")
    if not math.isclose(values[-1], high):
        values.append(high)
    rounded = [float(f"{value:.10g}") for value in values]
    if all(value.is_integer() for value in rounded):
        return tuple(int(value) for value in rounded)
    return tuple(rounded)


def _listed(node: Node) -> tuple[KnobValue, ...]:
    values: list[KnobValue] = []
    for item in node.items():
        value = item.value
        if not isinstance(value, bool | int | float | str):
            item.fail("is not a value", "Write a number, a word, true or false.")
        if not isinstance(value, bool | str):
            item.number()  # finite
        if any(type(value) is type(other) and value == other for other in values):
            item.fail("is listed twice", "Keep one of the two.")
        values.append(value)
    if not 1 <= len(values) <= MAX_VALUES:
        node.fail(f"must hold 1 to {MAX_VALUES} values", "List the values worth trying.")
    if len({isinstance(value, bool) for value in values}) > 1 or len({isinstance(value, str) for value in values}) > 1:
        node.fail("mixes values of different kinds", "Use numbers only, words only, or true and false.")
    return tuple(values)


def _kind(values: tuple[KnobValue, ...]) -> Kind:
    if all(isinstance(value, bool) for value in values):
        return Kind.BOOL
    if all(isinstance(value, int) for value in values):
        return Kind.INT
    return Kind.CHOICE if any(isinstance(value, str) for value in values) else Kind.FLOAT


def _numeric(value: KnobValue) -> float:
    return float(value)


def _inline(word: str) -> Knob:
    """`knob=v1,v2`: stage, coupling and the rest as the default space has them for that knob."""
    spelling, _, text = word.partition("=")
    flag, dot, key = spelling.strip().lstrip("-").partition(".")
    name = flag.replace("_", "-") + dot + key
    place = Node(word, "command line", "--space")
    if not _NAME.fullmatch(name):
        place.fail("does not begin with the name of a flag", "Write `max-num-seqs=64,128,256`.")
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not words:
        place.fail("names no value", "Write `max-num-seqs=64,128,256`.")
    root = Node([_read(part) for part in words], "command line", f"--space {name}")
    values = _listed(root)
    scale = Scale.ORDERED if all(isinstance(value, int | float) for value in values) else Scale.LIST
    if scale is Scale.ORDERED:
        values = tuple(sorted(values, key=_numeric))
    template = _load(shipped("search_spaces") / "default.yaml", False, 0).get(name)
    if template is None:
        template = Knob(name, Kind.CHOICE, (), scale, STAGES.index("execution"))
    return replace(
        template,
        values=values,
        kind=_kind(values),
        scale=scale,
        explicit=True,
        devices=DEVICES,
        min_devices=1,
        versions="",
    )


def _read(text: str) -> KnobValue:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = number_of(text)
    return text if number is None else number
