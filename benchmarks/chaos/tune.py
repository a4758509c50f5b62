"""The tuner's own command line with very short windows and pauses, so that a whole study takes seconds.

The campaign runs it as a process of its own, and hits it. What `--speed quick` means, and how long a fault of the
machine or a silent start is waited out, are all that differs from `tune`.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace

import tuner.study
import tuner.study.context
from tuner.capacity import ProbeSettings
from tuner.cli import main
from tuner.server import ReadyLimits
from tuner.study import SPEEDS
from tuner.trial import TrialContext

BRIEF = ProbeSettings(
    window_s=0.8,
    min_requests=12,
    window_cap_s=3.0,
    resolution=0.3,
    min_probes=1,
    max_probes=2,
    max_shifts=5,
    precision=0.3,
    leap=3.0,
    min_ramp_s=0.1,
    max_ramp_s=0.2,
    drain_s=1.0,
    request_timeout_s=10.0,
    stall_s=6.0,
    warm_up_s=0.2,
    warm_up_concurrency=16,
    proof_s=0.2,
    proof_concurrency=16,
)
PAUSE_S = 1.0
SILENT_S = "TUNE_CHAOS_SILENT_S"
"""Environment variable: how long a server that starts may say nothing."""

if __name__ == "__main__":
    limits = ReadyLimits(silent_s=float(os.environ[SILENT_S]))
    SPEEDS["quick"] = replace(SPEEDS["quick"], search=BRIEF, finish=BRIEF, guess_s=5.0)
    vars(tuner.study)["Study"] = functools.partial(tuner.study.Study, pause_s=PAUSE_S)
    vars(tuner.study.context)["TrialContext"] = functools.partial(TrialContext, ready_limits=limits)
    sys.exit(main())
