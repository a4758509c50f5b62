"""The measuring presets of a study; no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.capacity import DEMO, FAST, FINISH, SEARCH, ProbeSettings


@dataclass(frozen=True, slots=True)
class Speed:
    """A measuring preset."""

    search: ProbeSettings
    finish: ProbeSettings
    baseline_replicates: int
    guess_s: float  # of one trial, before any was measured
    run_factor: float  # length of a run of the finish ÷ of a search trial


SPEEDS = {
    "quick": Speed(DEMO, DEMO, 1, 90.0, 1.0),
    "fast": Speed(FAST, FAST, 1, 300.0, 1.0),
    "normal": Speed(SEARCH, FINISH, 2, 480.0, 1.6),
    "careful": Speed(FINISH, FINISH, 3, 900.0, 1.0),
}
