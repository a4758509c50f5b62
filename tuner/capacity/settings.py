"""How long, how often and how finely a capacity is measured; presets, no behaviour beyond the length of one window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """The measuring protocol of one trial. Defaults are those of the search (docs/measurement.md has the evidence)."""

    window_s: float = 15.0  # least scored window
    min_requests: int = 50  # expected in a window; it grows until they fit
    window_cap_s: float = 120.0  # but never beyond this
    resolution: float = 0.10  # relative; a step smaller than half of it is not worth another probe
    min_probes: int = 3
    max_probes: int = 4  # once the capacity lies between two of them
    max_shifts: int = 10  # probes spent on finding such two
    precision: float = 0.05  # standard deviation of log(capacity) at which adding windows stops
    leap: float = 2.0  # largest factor between two rates while looking for the other side
    min_ramp_s: float = 1.0
    max_ramp_s: float = 30.0  # an end-to-end time beyond it is not waited for
    drain_s: float = 60.0  # after the last scheduled request, before what is left counts as cancelled
    request_timeout_s: float = 300.0
    stall_s: float = 60.0  # no token at all for this long with requests open: the server is stuck
    warm_up_s: float = 8.0  # for each class, at most
    warm_up_concurrency: int = 32
    proof_s: float = 10.0  # of sustained concurrency with the longest requests
    proof_concurrency: int = 256  # at most; `max-num-seqs` where that is smaller
    max_attempts: int = 3  # of a probe that the client spoilt

    def window_for(self, rate_rps: float) -> float:
        """Seconds of scored window at a rate."""
        return min(self.window_cap_s, max(self.window_s, self.min_requests / rate_rps))


SEARCH = ProbeSettings()
FINISH = ProbeSettings(
    window_s=20.0, min_requests=100, window_cap_s=180.0, resolution=0.05, precision=0.04, max_probes=6
)
FAST = ProbeSettings(
    window_s=8.0,
    min_requests=40,
    window_cap_s=30.0,
    min_probes=2,
    max_probes=3,
    max_shifts=6,
    max_ramp_s=15.0,
    drain_s=30.0,
    request_timeout_s=120.0,
    warm_up_s=4.0,
    proof_s=6.0,
)
"""For a GPU that is paid by the minute: two thirds of a search trial; a P99 of 40 requests is their maximum."""
DEMO = ProbeSettings(
    window_s=4.5,
    min_requests=12,
    window_cap_s=10.0,
    min_probes=2,
    max_probes=2,
    max_shifts=6,
    precision=0.15,
    leap=3.0,
    max_ramp_s=4.0,
    drain_s=20.0,
    request_timeout_s=60.0,
    stall_s=60.0,
    warm_up_s=1.0,
    warm_up_concurrency=16,
    proof_s=1.0,
)
"""Short windows for a small model on a CPU; the noise that this costs shows in the intervals."""
