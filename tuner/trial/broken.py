"""How a trial ends before its measurement does: exceptions of this room, caught by `run_trial` and by nobody else."""

from __future__ import annotations


class Stopped(Exception):
    """The user asked to stop; what was measured is kept."""


class Broken(Exception):
    """The server died, or is alive and gets nothing done; what that means is judged from its log."""

    def __init__(self, message: str, *, no_progress: bool = False, refuses: bool = False) -> None:
        self.no_progress = no_progress
        self.refuses = refuses  # it lives, and answers requests with errors of its own
        super().__init__(message)
