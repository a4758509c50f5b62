"""Comparisons: configurations or versions of vLLM against each other, or against their own record, in whole rounds."""

from tuner.comparison.asked import Asked, chosen_model, chosen_traffic, define, prepare
from tuner.comparison.drift import Drift, Now, Weight, drift_between
from tuner.comparison.hold import TOLERANCE, ClassHold, Held, Verified, hold
from tuner.comparison.lock import LOCK_FILE, Lock, lock_of
from tuner.comparison.place import BySide, Place, Servers, ThisMachine, Traffic, held
from tuner.comparison.record import Comparison, Definition, Result, kept_traffic, read_comparison, require_sides
from tuner.comparison.rounds import compare
from tuner.comparison.sides import Side, Source, divide, open_source, read_configuration
from tuner.comparison.verdict import MARGIN, Contrast, Judgement, SideRate, Standing, contrast, objective
from tuner.comparison.verify import VERIFIED_FILE, Verification, prepare_verification, resume_verification, verify

__all__ = [
    "LOCK_FILE",
    "MARGIN",
    "TOLERANCE",
    "VERIFIED_FILE",
    "Asked",
    "BySide",
    "ClassHold",
    "Comparison",
    "Contrast",
    "Definition",
    "Drift",
    "Held",
    "Judgement",
    "Lock",
    "Now",
    "Place",
    "Result",
    "Servers",
    "Side",
    "SideRate",
    "Source",
    "Standing",
    "ThisMachine",
    "Traffic",
    "Verification",
    "Verified",
    "Weight",
    "chosen_model",
    "chosen_traffic",
    "compare",
    "contrast",
    "define",
    "divide",
    "drift_between",
    "held",
    "hold",
    "kept_traffic",
    "lock_of",
    "objective",
    "open_source",
    "prepare",
    "prepare_verification",
    "read_comparison",
    "read_configuration",
    "require_sides",
    "resume_verification",
    "verify",
]
