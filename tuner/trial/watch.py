"""Ends a load early when going on is useless: the server is dead, stuck, or the user wants to stop at once."""

from __future__ import annotations

import math
import threading
import time

from tuner.server import Liveness, Server
from tuner.telemetry import Telemetry
from tuner.trial.broken import Broken, Stopped

_PERIOD_S = 0.5
_DYING_S = 3.0  # between the first failed answers of a dying server and the end of its process


class Watch(threading.Thread):
    """Sets `halt`, which `run_load` obeys, when there is a reason; `check` raises it.

    `limit_s` ends the load too, for no fault of anybody's, once `least` requests have finished and a token has come.

    Liveness is token progress and the process table, never an HTTP status: /health says 200 over a dead engine
    (vllm#39863), and no answer to it under a burst proves nothing (ray#54070). `suspended` tells afterwards whether a
    process of the server was seen suspended (SIGSTOP): it lives, and its times mean nothing.
    """

    def __init__(
        self,
        server: Server,
        telemetry: Telemetry,
        *,
        stall_s: float,
        abort: threading.Event,
        limit_s: float | None = None,
        least: int = 0,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.halt = threading.Event()
        self.suspended = False
        self._limit_s, self._least = limit_s, least
        self._finished = 0
        self._server, self._telemetry, self._stall_s, self._abort = server, telemetry, stall_s, abort
        self._done = threading.Event()
        self._reason: Broken | Stopped | None = None

    def run(self) -> None:
        started, enough = time.monotonic(), False
        while self._reason is None and not self._done.wait(_PERIOD_S):
            self._reason = self._look()
            lasted_s = time.monotonic() - started
            left_s = math.inf if self._limit_s is None else self._limit_s - lasted_s
            if (left_s <= 0 and enough) or self._reason is not None:
                self.halt.set()
            # Seen a period before the cut: a token that the server has counted still has to arrive.
            enough = enough or (left_s <= _PERIOD_S and self._enough(lasted_s))

    def progress(self, finished: int, total: int) -> None:
        """For `run_load` to call."""
        self._finished = finished

    def finish(self) -> None:
        self._done.set()
        self.join()

    def check(self, answered: int, lasted_s: float) -> None:
        """After the load: raise what ended it, or what has ended the server since.

        `answered`: how many requests got a token. After none, a process that is about to end is waited for, and a load
        that lasted long enough is a stall; the server's own gauges may have stood still with its engine.
        """
        if self._reason is not None:
            raise self._reason
        deadline = time.monotonic() + (0.0 if answered else _DYING_S)
        while (reason := self._look()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if reason is not None:
            raise reason
        if not answered and lasted_s >= self._stall_s:
            raise Broken(f"not one token came within {lasted_s:.0f} s", no_progress=True)

    def _enough(self, lasted_s: float) -> bool:
        if self._finished < self._least:
            return False
        if lasted_s >= self._stall_s:
            return True  # nothing is worth a longer wait; `check` says what it means that no token came
        tokens = [count for count in self._telemetry.summary().series.get("generation_tokens", ()) if count == count]
        return bool(tokens) and tokens[-1] > tokens[0]

    def _look(self) -> Broken | Stopped | None:
        if self._abort.is_set():
            return Stopped("stopped at once, as asked")
        state = self._server.liveness()
        self.suspended = self.suspended or state is Liveness.SUSPENDED
        if state in (Liveness.MAIN_DEAD, Liveness.ENGINE_DEAD, Liveness.STOPPED):
            return Broken(f"the server's processes: {state.value}")
        if self._telemetry.stalled_s > self._stall_s:
            silent_s = self._telemetry.stalled_s
            return Broken(f"requests were open and no token came for {silent_s:.0f} s", no_progress=True)
        return None
