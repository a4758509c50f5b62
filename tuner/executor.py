"""Where trials run: this process, one after the other, on the GPUs of the study; it chooses none of them."""

from __future__ import annotations

from typing import Protocol

from tuner.records import TrialRecord
from tuner.trial import TrialContext, TrialRequest, run_trial


class Executor(Protocol):
    """Anything that turns a request into a record: this machine, a simulated one, another host."""

    def run(self, request: TrialRequest) -> TrialRecord:
        """Run one replicate to its record; failures of the configuration or the machine are records too."""


class LocalExecutor:
    """Trials in this process, on this machine."""

    def __init__(self, context: TrialContext) -> None:
        self._context = context

    def run(self, request: TrialRequest) -> TrialRecord:
        return run_trial(request, self._context)
