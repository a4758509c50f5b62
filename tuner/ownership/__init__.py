"""What is ours: recorded processes and segments, run files, device locks; it ends only what it can prove to be ours."""

from tuner.ownership.locks import DeviceLocks, Holder, devices_of, holders
from tuner.ownership.processes import ProcessId, ProcessInfo, Segment
from tuner.ownership.runs import MARKER, Removed, Run, RunRecord, ServerEntry, dead_runs, remove_dead_runs

__all__ = [
    "MARKER",
    "DeviceLocks",
    "Holder",
    "ProcessId",
    "ProcessInfo",
    "Removed",
    "Run",
    "RunRecord",
    "Segment",
    "ServerEntry",
    "dead_runs",
    "devices_of",
    "holders",
    "remove_dead_runs",
]
