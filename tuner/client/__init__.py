"""The load generator: sends planned requests on time and stamps what comes back; it judges nothing and retries nothing.

`load` is the caller's side, `worker` the processes that do the sending; between them `wire`. The names below are loaded
on first use, so that a worker, which imports this package too, starts without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.client.load import Crew, LoadRequest, run_load

__all__ = ["Crew", "LoadRequest", "run_load"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from tuner.client import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
