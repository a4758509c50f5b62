"""Owns how the API server and its engine processes talk and log; it knows neither requests nor steps."""

from __future__ import annotations

import ctypes
import marshal
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any

from tuner.sim.startup import Line

_HEAD = struct.Struct("<I")
_PR_SET_NAME = 15

Message = tuple[Any, ...]
"""First the kind, then its fields; plain Python values only."""


def send(connection: socket.socket, message: Message) -> None:
    """Blocking; the peer reads as fast as we write."""
    connection.sendall(pack(message))


def pack(message: Message) -> bytes:
    body = marshal.dumps(message)
    return _HEAD.pack(len(body)) + body


class Unpacker:
    """Turns bytes as they come into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._rest += data
        found: list[Message] = []
        while len(self._rest) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._rest)
            end = _HEAD.size + size
            if len(self._rest) < end:
                break
            found.append(marshal.loads(bytes(self._rest[_HEAD.size : end])))
            del self._rest[:end]
        return found


class Log:
    """Writes lines with the prefix of one process, as vLLM does."""

    def __init__(self, name: str) -> None:
        self._prefix = f"({name} pid={os.getpid()}) "

    def write(self, level: str, source: str, message: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        self.raw(f"{level} {stamp} [{source}] {message}")

    def lines(self, lines: Iterable[Line]) -> None:
        for level, source, message in lines:
            self.write(level, source, message)

    def errors(self, source: str, lines: Iterable[str]) -> None:
        for line in lines:
            self.write("ERROR", source, line)

    def raw(self, text: str) -> None:
        # One write a line: several processes share the file.
        os.write(1, (self._prefix + text + "\n").encode())


def name_process(name: str) -> None:
    """What `ps` shows; the kernel keeps 15 bytes, so that an engine appears as `VLLM::EngineCor`, as vLLM's does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
