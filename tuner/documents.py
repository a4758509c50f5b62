"""Reading of the files that people write: safe YAML in, `Node`s with exact complaints out; it knows no schema.

A `Node` is one place in a document. Its methods either return a value of the type asked for or raise the one
`InputError` that tells the reader which file, line, field, value and rule, and how to mend it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tuner.errors import InputError

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
"""A hand-written document is far smaller; anything larger is the wrong file."""

MAX_DEPTH = 32
_STANDARD = "tag:yaml.org,2002:"
_TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp")
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""JSON and YAML can write it, and no file or request can then hold it (it is not UTF-8)."""

_LISTED = 20  # names that a reader can still look through


def suggestion(word: str, known: Collection[str]) -> str:
    """A sentence that names the likeliest spelling, or the whole choice where nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean `{near[0]}`?"
    if len(known) > _LISTED:
        return "Nothing here is called like that."
    return f"Known here: {', '.join(sorted(known))}." if known else "Nothing can be named here."


@dataclass(frozen=True, slots=True)
class Node:
    """One value in a document and where it stands. `path` is dotted; `lines` maps paths to line numbers (from 1)."""

    value: object
    where: str
    path: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)

    def fail(self, rule: str, remedy: str) -> NoReturn:
        line = self.lines.get(self.path)
        where = self.where if line is None else f"{self.where}, line {line}"
        raise InputError(where=where, field=self.path or "document", value=self.value, rule=rule, remedy=remedy)

    def child(self, key: str, value: object) -> Node:
        return Node(value, self.where, f"{self.path}.{key}" if self.path else key, self.lines)

    def mapping(self, known: Collection[str] | None = None, *, required: Collection[str] = ()) -> dict[str, Node]:
        """The entries by key; with `known`, any other key is an error that suggests the right one."""
        if not isinstance(self.value, Mapping):
            self.fail("must be a mapping of keys to values", "Write `key: value` lines below it.")
        entries = {str(key): self.child(str(key), value) for key, value in self.value.items()}
        if known is not None:
            for key, entry in entries.items():
                if key not in known:
                    entry.fail("this key is unknown", suggestion(key, known))
        for key in required:
            if key not in entries:
                self.child(key, None).fail("this key is required", "Add it.")
        return entries

    def items(self) -> list[Node]:
        if not isinstance(self.value, Sequence) or isinstance(self.value, str):
            self.fail("must be a list", "Write it as `[a, b, c]` or as `- a` lines.")
        return [
            Node(value, self.where, f"{self.path}[{position}]", self.lines) for position, value in enumerate(self.value)
        ]

    def number(
        self, *, above: float | None = None, at_least: float | None = None, at_most: float | None = None
    ) -> float:
        """A finite number within the bounds; booleans and quoted numbers are refused."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            remedy = "Write a number without quotes and without a unit."
            self.fail("must be a number", remedy)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail("must be a finite number", "Write an ordinary number.")
        if above is not None and not number > above:
            self.fail(f"must be greater than {above:g}", f"Write a number greater than {above:g}.")
        if at_least is not None and number < at_least:
            self.fail(f"must be at least {at_least:g}", f"Write a number of {at_least:g} or more.")
        if at_most is not None and number > at_most:
            self.fail(f"must be at most {at_most:g}", f"Write a number of {at_most:g} or less.")
        return number

    def integer(self, *, at_least: int | None = None, at_most: int | None = None) -> int:
        number = self.number(at_least=at_least, at_most=at_most)
        if not number.is_integer():
            self.fail("must be a whole number", f"Write {round(number)}.")
        return int(number)

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            self.fail("must be true or false", "Write `true` or `false` without quotes.")
        return self.value

    def text(self, choices: Collection[str] | None = None) -> str:
        if not isinstance(self.value, str) or not self.value.strip():
            remedy = "Write a word." if choices is None else f"Write one of: {', '.join(choices)}."
            self.fail("must be text", remedy)
        if choices is not None and self.value not in choices:
            self.fail("is none of the choices", suggestion(self.value, choices))
        if HALF_CHARACTER.search(self.value):
            self.fail("holds half of a character (a lone \\ud800 … \\udfff)", "Write the whole one, or remove it.")
        return self.value


def read_text(path: Path, *, max_bytes: int = MAX_BYTES, what: str = "file") -> str:
    """The whole of a text file in UTF-8; raises `InputError` for anything else, and for more than `max_bytes`."""
    try:
        if not path.is_file():
            state = "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is no ordinary file"
            _refuse(path, f"the {what} {state}", "Check the path.")
        size = os.stat(path).st_size
        if size > max_bytes:
            _refuse(
                path, f"the {what} has {size} bytes, more than {max_bytes}", "Give the right file, or a part of it."
            )
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(path, f"the {what} is not UTF-8 text (byte {error.start})", "Save it as UTF-8.")
    except (OSError, ValueError) as error:
        # ValueError: a path with a null byte.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _refuse(path, f"the {what} cannot be read ({reason})", "Check the path and its permissions.")


def read_yaml(path: Path) -> Node:
    """The document of a YAML file. Only plain values are built; duplicate keys, anchors and tags are refused."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str) -> Node:
    """As `read_yaml`, from text."""
    import yaml

    if len(text) > MAX_BYTES:
        Node(f"{len(text)} characters", where).fail(f"a document has at most {MAX_BYTES} characters", "Shorten it.")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = where if mark is None else f"{where}, line {mark.line + 1}"
        problem = " ".join((error.problem or error.context or "it cannot be parsed").split())
        raise InputError(
            where=place,
            field="document",
            value=_line_of(text, mark.line if mark else 0),
            rule=f"is not valid YAML: {problem}",
            remedy="Check indentation, colons, brackets and quotes there.",
        ) from None
    except yaml.YAMLError as error:
        Node(str(error), where).fail("is not valid YAML", "Remove the character that YAML does not allow.")
    except RecursionError:
        Node(_line_of(text, 0), where).fail("is nested too deeply", f"Use at most {MAX_DEPTH} levels.")
    lines: dict[str, int] = {}
    if root is None:
        return Node(None, where)
    document = _Builder(where, lines).build(root, "", 0)
    if "&" in text:
        _refuse_anchors(text, where)
    return Node(document, where, "", lines)


def _refuse_anchors(text: str, where: str) -> None:
    """Of no use without aliases, so that one was meant to do something that it does not."""
    import yaml

    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            place = where if event.start_mark is None else f"{where}, line {event.start_mark.line + 1}"
            Node(f"&{event.anchor}", place).fail("defines an anchor (`&name`), which is not supported", "Remove it.")


class _Builder:
    """Turns composed YAML nodes into plain values, noting the line of every path."""

    def __init__(self, where: str, lines: dict[str, int]) -> None:
        import yaml

        self._yaml = yaml
        self._scalars = yaml.constructor.SafeConstructor()
        self._where, self._lines = where, lines
        self._seen: set[int] = set()

    def build(self, node: yaml.Node, path: str, depth: int) -> object:
        yaml = self._yaml
        self._lines[path] = node.start_mark.line + 1
        place = Node(None, self._where, path, self._lines)
        if id(node) in self._seen:
            place.fail("uses an alias (`*name`), which is not supported", "Write the value out.")
        self._seen.add(id(node))
        if depth > MAX_DEPTH:
            place.fail("is nested too deeply", f"Use at most {MAX_DEPTH} levels.")
        if node.tag.removeprefix(_STANDARD) not in _TAGS:
            place.fail(f"has the tag `{node.tag}`, which is not supported", "Remove the tag.")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, f"{path}[{position}]", depth + 1) for position, item in enumerate(node.value)]
        return self._scalar(node, place)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, object]:
        entries: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, self._yaml.ScalarNode) or id(key_node) in self._seen:
                Node(None, self._where, path, self._lines).fail("has a key that is not a word", "Use plain keys.")
            self._seen.add(id(key_node))
            key = str(key_node.value)
            inner = f"{path}.{key}" if path else key
            if key in entries:
                self._lines[inner] = key_node.start_mark.line + 1
                Node(key, self._where, inner, self._lines).fail("this key appears twice", "Keep one of the two.")
            entries[key] = self.build(value_node, inner, depth + 1)
        return entries

    def _scalar(self, node: yaml.Node, place: Node) -> object:
        if ":" in node.value and node.tag.endswith((":int", ":float")):
            return node.value  # YAML 1.1 would read 1:30 as 90
        try:
            value: object = self._scalars.construct_object(node)
        except (self._yaml.YAMLError, ValueError, OverflowError, LookupError):
            place.fail(f"`{node.value[:60]}` is not a value of its kind", "Write a number, a word, true or false.")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(node.value)  # dates and the like: nothing here means a date


def digest(value: object) -> str:
    """A short identity of anything that JSON can hold; equal values give equal digests."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def strict_json(document: object) -> str:
    """JSON that every parser reads, unlike Python's own: numbers without a finite value become null."""
    return json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _refuse(path: Path, rule: str, remedy: str) -> NoReturn:
    raise InputError(where=str(path), field="file", value=str(path), rule=rule, remedy=remedy)


def _line_of(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number].strip()[:80] if number < len(lines) else ""


def shipped(folder: str) -> Path:
    """Where the files that come with the tuner lie: beside the package in a checkout, else under the prefix."""
    beside = Path(__file__).resolve().parents[1] / folder
    return beside if beside.is_dir() else Path(sys.prefix) / "share" / "vllm-tune" / folder
