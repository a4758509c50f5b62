"""Builds and runs `refserver.c` and reads its log; what the numbers mean is for the caller to say."""

from __future__ import annotations

import csv
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = Path(__file__).with_name("refserver.c")


@dataclass(frozen=True, slots=True)
class Served:
    """What the server says that it did for one request; seconds on CLOCK_MONOTONIC."""

    user: int  # the integer `user` of the request's body, -1 without
    kind: str  # `ok`, `http-error`, `early-close`, `stream-error`, `client-abort`
    body_bytes: int
    first_byte_s: float
    arrival_s: float  # the whole request was read
    tokens: int
    written_s: tuple[float, ...]  # when each token was written, counted from the arrival

    @property
    def ttft_s(self) -> float:
        return self.written_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.written_s[-1] - self.written_s[0]) / (len(self.written_s) - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self.written_s, self.written_s[1:], strict=False))


def build() -> Path:
    """The compiled server; compiled once for each state of the source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"vllm-tune-refserver-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / digest
    if not program.exists():
        fresh = program.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-O2", "-o", str(fresh), str(SOURCE)], check=True)
        fresh.replace(program)
    return program


class ReferenceServer:
    """One run of the server; `served` is filled when the block is left."""

    def __init__(self, *options: str, launcher: Sequence[str] = ()) -> None:
        """`options`: as in the head of refserver.c. `launcher`: words before it, such as `taskset -c 1`."""
        handle, name = tempfile.mkstemp(suffix=".csv")
        os.close(handle)
        self._log = Path(name)
        words = [*launcher, str(build()), "--port", "0", "--log", name, *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        self.served: list[Served] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        with self._log.open(encoding="ascii", newline="") as file:
            self.served = [_served(row) for row in csv.DictReader(file)]
        self._log.unlink()

    def by_user(self) -> dict[int, Served]:
        return {served.user: served for served in self.served}


def _served(row: dict[str, str]) -> Served:
    return Served(
        user=int(row["user"]),
        kind=row["kind"],
        body_bytes=int(row["body_bytes"]),
        first_byte_s=int(row["first_byte_ns"]) / 1e9,
        arrival_s=int(row["arrival_ns"]) / 1e9,
        tokens=int(row["tokens"]),
        written_s=tuple(int(value) / 1e6 for value in row["written_us"].split()),
    )
