"""What a study tells whoever watches it; the command line prints it, tests collect it, nothing depends on it."""

from __future__ import annotations

from typing import Protocol

from tuner.records import Proposal, TrialRecord


class Observer(Protocol):
    """Callbacks in the order of events, from the thread that runs the study."""

    def phase(self, name: str, detail: str) -> None:
        """A part of the study begins: `baseline`, `search`, `finish`, `ablation`, `verification`."""

    def trial_started(self, proposal: Proposal, replicate: int, position: str) -> None:
        """`position` says which of how many, as far as that is known."""

    def trial_ended(self, record: TrialRecord, objective: float | None, best: float | None, remaining_s: float) -> None:
        """`objective` and `best` are relative to the baseline; `remaining_s` is infinite without a time budget."""

    def note(self, message: str) -> None:
        """Something a reader of the log should know."""


class Silent:
    """An observer that says nothing."""

    def phase(self, name: str, detail: str) -> None: ...

    def trial_started(self, proposal: Proposal, replicate: int, position: str) -> None: ...

    def trial_ended(
        self, record: TrialRecord, objective: float | None, best: float | None, remaining_s: float
    ) -> None: ...

    def note(self, message: str) -> None: ...
