"""Owns what a failure means: from log, exit code, phase and machine state to a verdict; it never acts on one.

`classify` judges a server that failed, `not_honoured` one that runs. The tables are in `memory`, `configuration`,
`environment` and `running`; docs/failures.md lists every kind.
"""

from __future__ import annotations

from tuner.failures.classify import TABLE, classify
from tuner.failures.degraded import not_honoured
from tuner.failures.log import plain, was_ready
from tuner.failures.rule import FailureFacts, Rule

__all__ = ["TABLE", "FailureFacts", "Rule", "classify", "not_honoured", "plain", "was_ready"]
