"""How long a start may take: judged by whether the log still advances; it touches no process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tuner.server.failure import FailureReason, ServerFailure

_WAITING = re.compile(rb"Waiting for|No available shared memory broadcast block|still waiting", re.I)
"""Lines that a start which hangs goes on writing (vllm#8908, #17676): no progress."""


@dataclass(frozen=True, slots=True)
class ReadyLimits:
    """A start goes on for as long as its log says something new every `silent_s`, at most `cap_s`.

    The defaults leave room for a cold torch.compile, which may be quiet for minutes and took 37 of them in
    vllm#34399; vLLM's own VLLM_ENGINE_READY_TIMEOUT_S bounds nothing (vllm#48031).
    """

    silent_s: float = 600.0
    cap_s: float = 3600.0

    def judge(self, elapsed_s: float, silent_s: float) -> ServerFailure | None:
        if silent_s >= self.silent_s:
            message = f"not ready after {elapsed_s:.0f} s, and its log has said nothing new for {silent_s:.0f} s"
            return ServerFailure(FailureReason.SILENT, message)
        if elapsed_s >= self.cap_s:
            return ServerFailure(FailureReason.TIMEOUT, f"not ready after {elapsed_s:.0f} s, though its log advances")
        return None


READY_LIMITS = ReadyLimits()


class Progress:
    """Follows a log and knows when it last said something new; times are monotonic seconds."""

    def __init__(self, path: Path, started: float) -> None:
        self._path, self._offset, self._last = path, 0, started
        self._partial = b""

    def silent_s(self, now: float) -> float:
        """Seconds since the last line that is not merely waiting (reads what was appended)."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            fresh = b""
        self._offset += len(fresh)
        # A progress bar rewrites its line with \r: that is news too.
        *lines, self._partial = re.split(rb"[\r\n]", self._partial + fresh)
        if any(line.strip() and not _WAITING.search(line) for line in lines):
            self._last = now
        return now - self._last
