"""One configuration from launch to record; it chooses no configuration and compares none."""

from tuner.trial.context import Learned, ProgressEvent, TrialContext, TrialRequest, seed_for
from tuner.trial.examine import Examination
from tuner.trial.impossible import static_rules
from tuner.trial.run import run_trial
from tuner.trial.single import bench

__all__ = [
    "Examination",
    "Learned",
    "ProgressEvent",
    "TrialContext",
    "TrialRequest",
    "bench",
    "run_trial",
    "seed_for",
    "static_rules",
]
