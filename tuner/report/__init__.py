"""The report of a study: built from its stored records, rendered as HTML, Markdown or JSON; it measures nothing."""

from tuner.report.build import Material, build
from tuner.report.model import Report
from tuner.report.recompute import Recomputed, recompute
from tuner.report.study import FORMATS, TABLE_FORMATS, check, load, write

__all__ = [
    "FORMATS",
    "TABLE_FORMATS",
    "Material",
    "Recomputed",
    "Report",
    "build",
    "check",
    "load",
    "recompute",
    "write",
]
