"""Owns what can be known before a launch: static rules and a memory estimate; it starts and measures nothing."""

from __future__ import annotations

from tuner.feasibility.calibration import Calibration, Start
from tuner.feasibility.memory import MemoryEstimate, memory_estimate, memory_failure
from tuner.feasibility.shape import ModelShape, model_shape, read_model_shape
from tuner.feasibility.static import check_static

__all__ = [
    "Calibration",
    "MemoryEstimate",
    "ModelShape",
    "Start",
    "check_static",
    "memory_estimate",
    "memory_failure",
    "model_shape",
    "read_model_shape",
]
