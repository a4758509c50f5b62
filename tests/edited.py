"""Records that somebody has edited by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def put(document: Any, path: Sequence[str | int], value: object) -> None:
    """Replace what lies at `path` of a JSON document."""
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value
