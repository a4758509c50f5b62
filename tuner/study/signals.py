"""What a stop signal means: the first asks for a clean end, the second to stop now; nothing is left either way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, stop signals set `stop`, and a second one `abort`; the old handlers come back on exit.

    SIGTERM and SIGHUP come from a machine that will not wait (systemd, Slurm, a closed terminal), so they set both. A
    SIGHUP that is ignored (nohup) stays so.
    """

    def __init__(self, notify: Callable[[str], None] = lambda message: None) -> None:
        self.stop = threading.Event()
        self.abort = threading.Event()
        self.received: signal.Signals | None = None
        self._notify = notify
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.stop.is_set() or number != signal.SIGINT:
            self.stop.set()
            self.abort.set()
            self._notify(f"{self.received.name}: stopping now; finished trials are kept, servers are being stopped")
        else:
            self.stop.set()
            self._notify("stopping after the current probe; everything measured is kept. Ctrl-C again stops now")
