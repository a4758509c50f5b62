"""Records to JSON and back, by the types of `tuner.records`; unknown or newer formats are refused with a clear error.

JSON here is Python's dialect: `Infinity` is a legal number, because a margin decided by failures is infinite.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tuner.documents import HALF_CHARACTER
from tuner.errors import InputError
from tuner.records import FORMAT_VERSION, RequestResult, RequestStatus
from tuner.store.files import read_bytes, write_atomic

T = TypeVar("T")

Migration = Callable[[dict[str, Any]], dict[str, Any]]
MIGRATIONS: dict[int, Migration] = {}
"""From format version N to N + 1, applied in order. Empty while version 1 is the only one."""

_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def dumps(record: object, *, indent: int | None = 1) -> str:
    """A record (frozen dataclass) as JSON text."""
    document = _adapter(type(record)).dump_python(record, mode="python")
    return json.dumps(document, indent=indent, ensure_ascii=False, default=_plain) + "\n"


def loads(kind: type[T], text: str, where: str) -> T:
    """The record in `text`; InputError when it is no record of this kind or of a newer format."""
    try:
        document = json.loads(text)
        escaped = "\\ud" in text.lower()  # most texts hold none and need no second look
        half = HALF_CHARACTER.search(json.dumps(document, ensure_ascii=False)) if escaped else None
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, "(file)", text[:60], f"is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _unreadable(where, "(file)", text[:60], "must be a JSON object")
    if half is not None:
        raise _unreadable(where, "(file)", half[0], "holds half of a character (a lone \\ud800 … \\udfff)")
    document = _migrated(document, where)
    try:
        record: T = _adapter(kind).validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(file)"
        raise _unreadable(where, field, first.get("input"), first["msg"].removeprefix("Value error, ")) from error
    return record


def write_requests(path: Path, requests: Iterable[RequestResult]) -> None:
    """Raw requests of one probe: a header line, then one JSON object a request, gzip."""
    lines = [json.dumps({"format_version": FORMAT_VERSION, "kind": "requests"})]
    lines += [json.dumps(asdict(request)) for request in requests]
    write_atomic(path, gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=5, mtime=0))


def read_requests(path: Path) -> tuple[RequestResult, ...]:
    """What `write_requests` wrote."""
    packed = read_bytes(path)
    try:
        lines = gzip.decompress(packed).decode().splitlines()
        header = json.loads(lines[0])
        if header.get("format_version", 0) > FORMAT_VERSION:
            raise _too_new(str(path), header["format_version"])
        return tuple(_request(json.loads(line)) for line in lines[1:])
    except (
        gzip.BadGzipFile,
        EOFError,
        zlib.error,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise _unreadable(str(path), "(file)", path.name, f"holds no raw requests ({error})") from error


def _request(row: dict[str, Any]) -> RequestResult:
    # Built by hand: pydantic costs ten times as much over the tens of thousands of rows of a study.
    known = {name: row[name] for name in _REQUEST_FIELDS if name in row}
    known["status"] = RequestStatus(known["status"])
    known["gaps_us"] = tuple(known.get("gaps_us", ()))
    return RequestResult(**known)


_REQUEST_FIELDS = tuple(field.name for field in fields(RequestResult))


def _migrated(document: dict[str, Any], where: str) -> dict[str, Any]:
    version = document.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _unreadable(where, "format_version", version, "must be a positive integer")
    if version > FORMAT_VERSION:
        raise _too_new(where, version)
    for step in range(version, FORMAT_VERSION):
        document = MIGRATIONS[step](document)
    return document


def _plain(value: object) -> object:
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} does not belong into a record")


def _too_new(where: str, version: object) -> InputError:
    return InputError(
        where=where,
        field="format_version",
        value=version,
        rule=f"is newer than this tuner reads ({FORMAT_VERSION})",
        remedy="Use the version of the tuner that wrote it, or a newer one.",
    )


def _unreadable(where: str, field: str, value: object, rule: str) -> InputError:
    remedy = "Restore the file from a backup."
    return InputError(where=where, field=field, value=value, rule=rule, remedy=remedy)
