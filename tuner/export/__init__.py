"""Writes a verified configuration in the formats that start servers; it measures nothing and exports no secret."""

from tuner.export.deployment import (
    NOT_SHOWN,
    Deployment,
    ExportedFlag,
    ReturnedFlag,
    answers_text,
    deployment,
    effect_text,
    ratio_text,
)
from tuner.export.rates import ALONE, POINT_ESTIMATES, Rate, RatePair, Wording, rate_pairs, standing, wording
from tuner.export.study import AT_THE_END, export, write_best
from tuner.export.write import FORMATS, LOCK_FILE, write

__all__ = [
    "ALONE",
    "AT_THE_END",
    "FORMATS",
    "LOCK_FILE",
    "NOT_SHOWN",
    "POINT_ESTIMATES",
    "Deployment",
    "ExportedFlag",
    "Rate",
    "RatePair",
    "ReturnedFlag",
    "Wording",
    "answers_text",
    "deployment",
    "effect_text",
    "export",
    "rate_pairs",
    "ratio_text",
    "standing",
    "wording",
    "write",
    "write_best",
]
