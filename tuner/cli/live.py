"""Progress of a running study: a live view on a terminal, plain lines elsewhere; it decides nothing."""

from __future__ import annotations

import math
import os
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tuner.records import Proposal, StepKind, TrialRecord, TrialState

if TYPE_CHECKING:
    from tuner.trial import ProgressEvent

STATES = {
    TrialState.COMPLETE: "measured",
    TrialState.SCREENED: "clearly worse",
    TrialState.INFEASIBLE: "does not run",
    TrialState.FAULT: "not its fault",
    TrialState.INTERRUPTED: "interrupted",
}


class _Console(Console):
    """A console whose reader may go away (`| head`): the study goes on without output, instead of ending with it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What is still buffered must not fail again when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Progress:
    """Observer of a study and receiver of the events inside a trial; thread-safe, as telemetry may report too."""

    def __init__(self, stream: TextIO, *, title: str, expected_trials: int | None) -> None:
        self._console = _Console(file=stream, highlight=False, soft_wrap=True)
        self._live = (
            Live(console=self._console, refresh_per_second=4, transient=True) if self._console.is_terminal else None
        )
        self._title, self._expected = title, expected_trials
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._phase = self._trial = self._inside = ""
        self._best: float | None = None
        self._durations: list[float] = []
        self._remaining_s = math.inf
        self._done = 0

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    # --- observer --------------------------------------------------------------------------------------------

    def phase(self, name: str, detail: str) -> None:
        self._phase = name
        self._say(f"{name}: {detail}", style="bold")

    def trial_started(self, proposal: Proposal, replicate: int, position: str) -> None:
        self._trial = f"trial {proposal.number} ({position}): {describe(proposal)}"
        self._inside = "starting"
        if self._live is None:
            self._say(f"  {self._trial}")
        self._refresh()

    def trial_ended(self, record: TrialRecord, objective: float | None, best: float | None, remaining_s: float) -> None:
        self._durations.append(record.ended_at - record.started_at)
        self._best = best if best is not None else self._best
        self._remaining_s = remaining_s
        self._done += 1
        outcome = STATES[record.state]
        value = "" if objective is None else f", {objective:.2f}× the baseline"
        reason = f": {record.failure.cause[:160]}" if record.failure is not None else ""
        self._say(f"  {self._trial} → {outcome}{value}{reason}  [{seconds(self._durations[-1])}]")
        self._refresh()

    def note(self, message: str) -> None:
        self._say(f"  {message}", style="yellow")

    # --- inside a trial --------------------------------------------------------------------------------------

    def event(self, event: ProgressEvent) -> None:
        rate = "" if event.rate_rps is None else f" at {event.rate_rps:.3g} requests/s"
        workload = f" {event.workload}{rate}" if event.workload else ""
        text = f"{event.phase}{workload}" + (f": {event.message}" if event.message else "")
        if self._live is None and text != self._inside:
            self._say(f"    {text}")
        self._inside = text
        self._refresh()

    # --- drawing ---------------------------------------------------------------------------------------------

    def _say(self, text: str, style: str = "") -> None:
        with self._lock:
            self._console.print(Text(text, style=style))

    def _refresh(self) -> None:
        if self._live is None:
            return
        best = "–" if self._best is None else f"{self._best:.2f}× the baseline"
        lines = [
            Text(
                f"{self._title} · {self._phase} · {seconds(time.monotonic() - self._began)} · ETA {self._eta()}",
                style="bold",
            ),
            Text(f"  {self._trial}"),
            Text(f"    {self._inside}"),
            Text(f"  best so far: {best}"),
        ]
        with self._lock:
            self._live.update(Group(*lines))

    def _eta(self) -> str:
        """From the mean trial so far and the trials that the budget leaves; unknown before one has ended."""
        if not self._durations:
            return "unknown"
        mean = sum(self._durations) / len(self._durations)
        left = max(0, self._expected - self._done) * mean if self._expected is not None else math.inf
        left = min(left, self._remaining_s)
        return "unknown" if math.isinf(left) else seconds(max(0.0, left))


def describe(proposal: Proposal) -> str:
    """The step in a few words: `max-num-seqs 128 → 256`, `baseline`, `free: …`."""
    step = proposal.step
    changes = ", ".join(f"{knob} {shown(old)} → {shown(new)}" for knob, (old, new) in step.changed.items())
    if step.kind in (StepKind.BASELINE, StepKind.FINALIST, StepKind.ABLATION):
        flags = " ".join(f"{knob}={value}" for knob, value in proposal.config.items()) or "defaults"
        return f"{step.kind.value} {flags}"
    return changes if step.kind is StepKind.ONE else f"{step.kind.value}: {changes}"


def shown(value: object) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def seconds(value: float) -> str:
    """`48s`, `3m10s`, `2h05m`."""
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
