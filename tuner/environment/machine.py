"""The machine under a measurement: processors, memory, limits and versions, as far as they can change a result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil

from tuner.environment.gpu import driver_versions, gpus
from tuner.records import EnvironmentFacts

_CGROUP = Path("/sys/fs/cgroup")


class Installed(Protocol):
    """What is asked of a `VllmInstall`."""

    @property
    def version(self) -> str: ...
    @property
    def python_version(self) -> str: ...


def facts(vllm: Installed, indices: Sequence[int]) -> EnvironmentFacts:
    """The machine and software that results on these GPUs belong to."""
    driver, cuda = driver_versions() if indices else ("", "")
    known = EnvironmentFacts(
        vllm_version=vllm.version,
        python_version=vllm.python_version,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_model(),
        cpu_count=cpu_count(),
        memory_bytes=memory_bytes(),
        gpus=tuple(map(str, gpus(indices))),
        driver=driver,
        cuda=cuda,
        host="",
        digest="",
    )
    host = socket.gethostname()
    # The cards tell the machine where there are any: a container's host name and machine id are new with every start.
    serials = [gpu.uuid for gpu in gpus(indices) if gpu.uuid]
    if not serials or len(serials) < len(indices):
        serials = [host, _machine_id(), *serials]
    return replace(known, host=host, digest=kind_digest(known), machine=_digest(serials))


def kind_digest(facts: EnvironmentFacts) -> str:
    """What makes machines comparable in kind: vLLM, devices, driver branch, and the processor where it is the device.

    Kernel release, exact driver and memory size are recorded but left out: they differ between machines that a cluster
    calls the same, and results of different machines are never compared with each other anyway.
    """
    return _digest(
        [
            facts.vllm_version,
            *facts.python_version.split(".")[:2],
            facts.driver.partition(".")[0],
            *(facts.gpus or (facts.cpu,)),
            str(facts.cpu_count),
        ]
    )


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _machine_id() -> str:
    """See machine-id(5); empty where there is none."""
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return ""


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """Whole cores that this process may use: affinity and cgroup quota both count."""
    allowed = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, IndexError):
        quota, period = _cgroup("cpu.max").split()[:2]
        if quota != "max":
            allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its cgroup's limit."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        limit = _cgroup("memory.max").strip()
        if limit != "max":
            total = min(total, int(limit))
    return total


def tunes_on_path() -> tuple[str, ...]:
    """Every `tune` on PATH, in the order in which the shell finds them."""
    found = (shutil.which("tune", path=folder) for folder in os.get_exec_path())
    return tuple(dict.fromkeys(path for path in found if path))


def _cgroup(file: str) -> str:
    """A limit of our own cgroup (version 2); containers see theirs as the root."""
    own = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].strip("/")
    for folder in (_CGROUP / own, _CGROUP):
        with contextlib.suppress(FileNotFoundError):
            return (folder / file).read_text()
    raise FileNotFoundError(file)
