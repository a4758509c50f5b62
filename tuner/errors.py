"""The exceptions that a user may see, one exit code each; nothing else leaves the tuner on purpose.

    TunerError
    ├── InputError          2  a file, flag or value that the user can mend
    ├── EnvironmentFault    3  the machine: GPU taken, disk full, vLLM missing or broken
    ├── RegressionFound     5  a verified configuration no longer holds (`verify`, `nightly`, `compare`)
    ├── HarnessError        6  our own defect or a measurement that cannot be trusted
    └── Interrupted       130  the user, or the machine, asked us to stop

Exit code 0 is a verdict (`improved`, `keep-defaults`, `better`, `same`, `holds`), 4 is the verdict `no-feasible`, 7
says that a comparison could not tell; none of them is an exception. 1 is no verdict: Python ends with it when it
crashes.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes are part of the interface."""

    OK = 0
    INPUT = 2
    ENVIRONMENT = 3
    NO_FEASIBLE = 4
    REGRESSION = 5
    HARNESS = 6
    UNRESOLVED = 7
    INTERRUPTED = 130


class TunerError(Exception):
    """Base of every error that is shown to the user as one message without a traceback."""

    exit_code: ExitCode = ExitCode.HARNESS


class InputError(TunerError):
    """Something the user wrote breaks a rule; names where, what, the rule and the remedy."""

    exit_code = ExitCode.INPUT

    def __init__(self, *, where: str, field: str, value: object, rule: str, remedy: str) -> None:
        """`where` is a file path or "command line"; `field` is dotted (`slo.ttft.p99`) or a flag (`--trials`)."""
        self.where, self.field, self.value, self.rule, self.remedy = where, field, value, rule, remedy
        super().__init__(f"{where}: {field} = {_shown(value)}: {rule}. {remedy}")


class EnvironmentFault(TunerError):
    """The machine is not in a state in which a measurement would mean anything."""

    exit_code = ExitCode.ENVIRONMENT


class RegressionFound(TunerError):
    """A configuration that once held no longer does."""

    exit_code = ExitCode.REGRESSION


class HarnessError(TunerError):
    """The tuner itself is at fault."""

    exit_code = ExitCode.HARNESS


class Interrupted(TunerError):
    """Stop was asked for; what was finished is kept."""

    exit_code = ExitCode.INTERRUPTED


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
