"""How a server fails its user; what that means for the search is for `failures` to judge."""

from __future__ import annotations

from enum import StrEnum


class FailureReason(StrEnum):
    """What was seen, without a judgement."""

    EXITED = "exited"  # the process ended although nobody asked, whatever its exit code (vllm#48966)
    SILENT = "silent"  # not ready, and the log stopped advancing
    TIMEOUT = "timeout"  # not ready within the hard limit, though the log still advanced
    FOREIGN = "foreign"  # somebody else's server answers on our port
    WRONG_MODEL = "wrong-model"  # ready, but it serves another model
    STOPPED = "stopped"  # stop() was called meanwhile
    CONTROL = "control"  # a control call was refused or not answered


class ServerFailure(Exception):
    """Raised by `Server`; caught by `trial`, which adds the log and judges."""

    def __init__(self, reason: FailureReason, message: str, exit_code: int | None = None) -> None:
        self.reason, self.exit_code = reason, exit_code
        super().__init__(message)
