"""The thread that samples every source while a probe runs; it keeps samples and leaves arithmetic to `summary`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tuner.records import TelemetrySummary
from tuner.telemetry.devices import Devices
from tuner.telemetry.endpoint import MetricsEndpoint
from tuner.telemetry.host import ROLES, HostCpu, Pids
from tuner.telemetry.names import FAST_SAMPLES
from tuner.telemetry.prometheus import parse
from tuner.telemetry.summary import Sample, summarize

COMPLETE_PERIOD_S = 2.0
"""Between readings of all counters; also the period of every reading where the server cannot select (`endpoint`)."""


class Telemetry:
    """Samples between `start` and `stop`; one object a probe.

    `pids` gives the server's processes by role (`api`, `engine`, `worker`; `client` if the caller knows better than
    this process and its children); it is asked again every few seconds. `gpus` are NVML indices.
    """

    def __init__(self, metrics_url: str, pids: Pids, gpus: Sequence[int], period_s: float = 0.5) -> None:
        self._endpoint = MetricsEndpoint(metrics_url)
        self._devices = Devices(gpus)
        self._host = HostCpu(pids)
        self._period_s = period_s
        self._samples: list[Sample] = []
        self._absent: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._started_at = 0.0
        self._complete_at = float("-inf")
        self._tokens: float | None = None
        self._advanced_at = 0.0
        self._busy = False
        self._cpu_s = 0.0

    def start(self) -> None:
        """Take the first reading, from which every counter is differenced, and sample from then on."""
        self._started_at = self._advanced_at = time.monotonic()
        reason = self._devices.open()
        if reason is not None:
            self._absent.append(f"device ({reason})")
        self._sample(complete=True)
        self._thread.start()

    def stop(self) -> TelemetrySummary:
        """Take the last reading and end; the summary of everything since `start`."""
        self._done.set()
        self._thread.join()
        self._sample(complete=True)
        self._endpoint.close()
        self._devices.close()
        return self.summary()

    def summary(self, window: tuple[float, float] | None = None) -> TelemetrySummary:
        """The summary of a window in seconds since `start`, after `stop`; `absent` names sources that gave nothing."""
        samples = tuple(self._samples)
        absent = list(self._absent)
        if all(sample.metrics is None or sample.metrics.empty for sample in samples):
            absent.append("server (/metrics did not answer)")
        absent += [f"{role}_cpu (no such process)" for role in ROLES if not any(role in s.cpu for s in samples)]
        return summarize(samples, window, absent)

    @property
    def started_at(self) -> float:
        """Monotonic clock at `start`; offsets of windows count from here."""
        return self._started_at

    @property
    def stalled_s(self) -> float:
        """How long the server has had requests, or not answered, without producing a token; 0 when it is idle."""
        return time.monotonic() - self._advanced_at if self._busy else 0.0

    @property
    def own_cpu_s(self) -> float:
        """CPU seconds that sampling itself has taken."""
        return self._cpu_s

    def _run(self) -> None:
        due = time.monotonic() + self._period_s
        while not self._done.wait(max(0.0, due - time.monotonic())):
            self._sample(complete=time.monotonic() - self._complete_at >= COMPLETE_PERIOD_S)
            period_s = self._period_s if self._endpoint.selective else max(self._period_s, COMPLETE_PERIOD_S)
            due = max(due + period_s, time.monotonic())

    def _sample(self, *, complete: bool) -> None:
        cpu_before = time.thread_time()
        now = time.monotonic()
        if complete:
            self._complete_at = now
            self._host.refresh()
        text = self._endpoint.read(complete=complete)
        sample = Sample(
            t_s=now - self._started_at,
            metrics=None if text is None else parse(text, FAST_SAMPLES),
            text=text if complete or not self._endpoint.selective else None,
            device=self._devices.read(),
            cpu=self._host.read(),
        )
        self._samples.append(sample)
        self._watch_tokens(sample)
        self._cpu_s += time.thread_time() - cpu_before

    def _watch_tokens(self, sample: Sample) -> None:
        if sample.metrics is None:
            self._busy = True
            return
        tokens = sample.metrics.counters.get("generation_tokens")
        in_flight = sample.metrics.gauges.get("running", 0.0) + sample.metrics.gauges.get("waiting", 0.0)
        if tokens != self._tokens or in_flight == 0:
            self._advanced_at = time.monotonic()
        self._tokens, self._busy = tokens, in_flight > 0
