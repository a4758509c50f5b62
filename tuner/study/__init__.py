"""The study: from checked inputs through baseline, search and finish to a verdict; the trials themselves run below."""

from tuner.study.context import trial_context
from tuner.study.inputs import (
    Asked,
    Inputs,
    accepted_length,
    keep,
    kept,
    more_budget,
    prepare,
    refuse_secrets,
    traffic,
)
from tuner.study.loop import Study
from tuner.study.observer import Observer, Silent
from tuner.study.planning import limits_text, plan_of
from tuner.study.result import (
    ClassBest,
    ClassRates,
    FinishPlan,
    Status,
    StudyFile,
    StudyResult,
    read_study,
    write_study,
)
from tuner.study.rounds import Rounds, measured
from tuner.study.runner import Runner
from tuner.study.signals import StopSignals
from tuner.study.speeds import SPEEDS

__all__ = [
    "SPEEDS",
    "Asked",
    "ClassBest",
    "ClassRates",
    "FinishPlan",
    "Inputs",
    "Observer",
    "Rounds",
    "Runner",
    "Silent",
    "Status",
    "StopSignals",
    "Study",
    "StudyFile",
    "StudyResult",
    "accepted_length",
    "keep",
    "kept",
    "limits_text",
    "measured",
    "more_budget",
    "plan_of",
    "prepare",
    "read_study",
    "refuse_secrets",
    "traffic",
    "trial_context",
    "write_study",
]
