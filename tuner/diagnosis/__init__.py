"""Owns why a server was not faster: from one probe's evidence to ranked limiters; it measures and changes nothing."""

from __future__ import annotations

from tuner.diagnosis.evidence import Evidence, from_probe
from tuner.diagnosis.rules import Finding, combine, diagnose, suggested_moves

__all__ = ["Evidence", "Finding", "combine", "diagnose", "from_probe", "suggested_moves"]
