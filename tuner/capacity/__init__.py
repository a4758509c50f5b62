"""From probes to SLO capacity: which rate to probe next and what the probes say; it knows no server."""

from tuner.capacity.estimate import Fit, Point, fit, point
from tuner.capacity.screening import THRESHOLD, Reference, Screening, objective, reference, screen
from tuner.capacity.search import Prober, decide, find_capacity, next_rate
from tuner.capacity.settings import DEMO, FAST, FINISH, SEARCH, ProbeSettings

__all__ = [
    "DEMO",
    "FAST",
    "FINISH",
    "SEARCH",
    "THRESHOLD",
    "Fit",
    "Point",
    "ProbeSettings",
    "Prober",
    "Reference",
    "Screening",
    "decide",
    "find_capacity",
    "fit",
    "next_rate",
    "objective",
    "point",
    "reference",
    "screen",
]
