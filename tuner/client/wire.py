"""The messages between `run_load` and its workers, and how they travel on a stream socket; both ends run this file."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import NamedTuple

_LENGTH = struct.Struct("=I")


class Item(NamedTuple):
    """A request as the worker needs it; its body lies in the shared memory file."""

    number: int  # LoadRequest.index
    scheduled_ns: int  # after the common start; closed loop: unused
    path: str
    body_offset: int
    body_bytes: int
    planned_output_tokens: int
    ignore_eos: bool


class Setup(NamedTuple):
    """Everything that a worker must know before the start. `slots` > 0: a closed loop, fed by `queue_fd`."""

    family: int
    address: tuple[object, ...]
    host: str
    headers: tuple[tuple[str, str], ...]
    items: tuple[Item, ...]
    bodies_fd: int
    queue_fd: int
    slots: int
    timeout_ns: int
    drain_ns: int
    last_ns: int  # the last scheduled send of all workers, after the start


class Ready(NamedTuple):
    """The worker has its setup and waits for the start."""


class Start(NamedTuple):
    """The common zero of the probe's clock, on CLOCK_MONOTONIC."""

    zero_ns: int


class Stop(NamedTuple):
    """Send nothing more, cancel what is under way, report."""


class Row(NamedTuple):
    """What happened to one request; times on CLOCK_MONOTONIC, 0 where there is none."""

    number: int  # LoadRequest.index
    status: str
    scheduled_ns: int
    sent_ns: int
    first_ns: int
    last_ns: int
    end_ns: int
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    gaps_us: bytes  # array("I")
    error: str


class Rows(NamedTuple):
    """Finished requests, as plain tuples in the order of `Row`; packed apart so that the receiver may unpack later."""

    size: int
    packed: bytes


class Done(NamedTuple):
    """The worker's last word: all its requests are reported."""

    cpu_share: float
    loop_lag_p99_ns: int
    loop_lag_max_ns: int
    peak_rss_bytes: int


Message = Setup | Ready | Start | Stop | Rows | Done


def pack(message: Message) -> bytes:
    """Length and pickle: both ends are this program."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def pack_rows(rows: list[Row]) -> Rows:
    return Rows(len(rows), pickle.dumps([tuple(row) for row in rows], protocol=pickle.HIGHEST_PROTOCOL))


def unpack_rows(rows: Rows) -> Iterator[Row]:
    return (Row(*row) for row in pickle.loads(rows.packed))


class Unpacker:
    """Cuts a byte stream back into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`."""
        self._data += data
        messages: list[Message] = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(pickle.loads(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return messages
