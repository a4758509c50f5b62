"""Checks of the machine before a study, each with its evidence and a remedy; it changes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from tuner.environment.gpu import GIB, MIB, busy, driver_versions, gpus, topology
from tuner.environment.machine import cpu_count, tunes_on_path
from tuner.errors import EnvironmentFault
from tuner.ownership import dead_runs, devices_of, holders
from tuner.ownership.processes import SHARED_MEMORY
from tuner.server.command import free_port
from tuner.server.install import VllmInstall, cache_home

TESTED = ((0, 26), (0, 33))
"""Oldest and newest vLLM whose flags and logs the tests know."""

_SAMPLE_S = 0.5
_NOFILE = 8192  # one descriptor a connection, at both ends
_DISK_FAIL, _DISK_WARN = 1 * GIB, 10 * GIB
# vLLM's rings between engine and workers are 400 MiB for one worker (0.32) and grow with each; NCCL adds its own
_SHM_FAIL, _SHM_WARN = 512 * MIB, 4 * GIB
_LATE_WARN_S = 0.003  # p99 of a sleeping thread's lateness, when nothing is measured yet


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # a study runs, but its result may suffer
    FAIL = "fail"  # a study would not run, or mean nothing


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    status: Status
    evidence: str
    remedy: str = ""  # empty when nothing is wrong


def check_vllm(install: VllmInstall) -> Check:
    numbers = re.match(r"(\d+)\.(\d+)", install.version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    evidence = f"{install.version} for {install.device}, {len(install.flags.flags)} flags, {install.path}"
    if install.simulated:
        remedy = "This is the simulator: nothing measured on it is a result about vLLM."
        return Check("vllm", Status.WARN, evidence, remedy)
    if not TESTED[0] <= release <= TESTED[1]:
        known = " to ".join(".".join(map(str, version)) for version in TESTED)
        return Check(
            "vllm", Status.WARN, evidence, f"Flags and logs of {known} are tested; look at `tune knobs` first."
        )
    return Check("vllm", Status.OK, evidence)


def check_model(model: str) -> Check:
    """A folder must hold a model; a hub name is looked up in the local cache only."""
    folder = Path(model)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return Check("model", Status.OK, f"{model} holds a config.json")
        return Check("model", Status.FAIL, f"{model} holds no config.json", "Name the folder that has it.")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith((".", "/", "~")):
        return Check("model", Status.FAIL, f"{model} is no folder", "Name a folder or a hub name (org/name, name).")
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if (hub / f"models--{model.replace('/', '--')}" / "snapshots").is_dir():
        return Check("model", Status.OK, f"{model} lies in {hub}")
    return Check(
        "model", Status.WARN, f"{model} is not in {hub}", "Download it first, or the first start will have to."
    )


def check_gpus(indices: Sequence[int]) -> list[Check]:
    """Each GPU, and who holds it."""
    checks = []
    driver, cuda = driver_versions()
    if indices:
        checks.append(Check("driver", Status.OK, ", ".join([f"{driver}, CUDA {cuda}", *topology(indices)])))
    for gpu in gpus(indices):
        evidence = f"{gpu}, {gpu.free_bytes / GIB:.1f} GiB free"
        if held := busy(gpu):
            remedy = "End what holds it, or choose other GPUs with --gpus."
            checks.append(Check(f"gpu {gpu.index}", Status.FAIL, f"{evidence}, held by {held}", remedy))
        else:
            checks.append(Check(f"gpu {gpu.index}", Status.OK, f"{evidence}, nobody holds it"))
    return checks


def check_locks(indices: Sequence[int]) -> Check:
    wanted = devices_of(indices)
    held = [holder for holder in holders() if holder.device in wanted]
    if held:
        evidence = "; ".join(f"{holder.device}: {holder.text}" for holder in held)
        return Check("locks", Status.FAIL, evidence, "Another study runs there: wait for it, or choose other devices.")
    return Check("locks", Status.OK, f"no other study holds {', '.join(wanted)}")


def check_earlier_runs(out: Path) -> Check:
    dead = {record.study: record for record in dead_runs([out]).values()}
    if not any(record.servers for record in dead.values()):
        return Check("earlier runs", Status.OK, "none died and left a server")
    evidence = ", ".join(f"{name} ({len(record.servers)} servers)" for name, record in dead.items() if record.servers)
    return Check("earlier runs", Status.WARN, f"died: {evidence}", "The next `tune run` removes what they left.")


def check_limits() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    evidence = f"open files: {'unlimited' if unlimited else soft}"
    if unlimited or soft >= _NOFILE:
        return Check("ulimits", Status.OK, evidence)
    return Check("ulimits", Status.WARN, f"{evidence} (hard limit {hard})", f"`ulimit -n {_NOFILE}` before starting.")


def check_port() -> Check:
    try:
        return Check("port", Status.OK, f"127.0.0.1:{free_port()} can be bound")
    except EnvironmentFault as error:
        return Check("port", Status.FAIL, str(error), "Free ports on loopback; sandboxes must allow to listen there.")


def check_disk(out: Path) -> list[Check]:
    """Where results, compile caches and temporary files go."""
    checks = []
    for name, path in (("results", out), ("cache", cache_home()), ("temporary", Path(tempfile.gettempdir()))):
        place = _existing(path)
        free = shutil.disk_usage(place).free
        evidence = f"{name}: {free / GIB:.1f} GiB free at {place}"
        if not place.is_dir():
            checks.append(Check("disk", Status.FAIL, f"{name}: {place} is a file", "Name a folder by --out."))
        elif not os.access(place, os.W_OK):
            checks.append(Check("disk", Status.FAIL, f"{name}: {place} is not writable", "Choose another place."))
        elif free < _DISK_WARN:
            status = Status.FAIL if free < _DISK_FAIL else Status.WARN
            checks.append(Check("disk", status, evidence, "Free space there; logs, raw requests and caches grow."))
        else:
            checks.append(Check("disk", Status.OK, evidence))
    return checks


def check_shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check("shared memory", Status.FAIL, "/dev/shm is missing", "Mount a tmpfs there.")
    free = shutil.disk_usage(SHARED_MEMORY).free
    evidence = f"{free / GIB:.1f} GiB free in /dev/shm"
    if free >= _SHM_WARN:
        return Check("shared memory", Status.OK, evidence)
    remedy = "Give more (docker run --shm-size=16g or --ipc=host); servers with several workers fail or hang without."
    return Check("shared memory", Status.FAIL if free < _SHM_FAIL else Status.WARN, evidence, remedy)


def check_memory() -> Check:
    memory = psutil.virtual_memory()
    evidence = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if memory.available < 4 * GIB:
        return Check("memory", Status.WARN, evidence, "End other programs; a server that swaps measures the disk.")
    return Check("memory", Status.OK, evidence)


def check_client(sample_s: float = _SAMPLE_S) -> Check:
    """Whether the load generator would get its share: idle cores, and how late a sleeping thread wakes up."""
    psutil.cpu_percent()
    late = []
    deadline = time.monotonic() + sample_s
    while time.monotonic() < deadline:
        before = time.perf_counter()
        time.sleep(0.001)
        late.append(time.perf_counter() - before - 0.001)
    idle = cpu_count() * (1 - psutil.cpu_percent() / 100)
    late_s = statistics.quantiles(late, n=100)[98] if len(late) > 1 else sample_s
    evidence = f"{idle:.1f} of {cpu_count()} cores idle, timers {late_s * 1e3:.1f} ms late at P99 over {sample_s} s"
    if idle < 1 or late_s > _LATE_WARN_S:
        return Check("client", Status.WARN, evidence, "End other work on this machine, or latency will include it.")
    return Check("client", Status.OK, evidence)


def check_clock() -> Check:
    info = time.get_clock_info("monotonic")
    source = "unknown"
    with contextlib.suppress(OSError):
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    evidence = f"{info.implementation}, source {source}, resolution {info.resolution:.0e} s"
    if not info.monotonic or info.resolution > 1e-5 or source in ("hpet", "acpi_pm", "jiffies"):
        return Check("clock", Status.WARN, evidence, "Use the tsc or the hypervisor's clock source; this one is slow.")
    return Check("clock", Status.OK, evidence)


def check_name() -> Check:
    """Ray installs a console script called `tune` as well."""
    found = tunes_on_path()
    foreign = [path for path in found if not _is_ours(Path(path))]
    if found and found[0] in foreign:
        remedy = f"Use `vllm-tune`, or `{Path(sys.executable).name} -m tuner`; they are the same program."
        return Check("name", Status.WARN, f"`tune` on PATH is another program: {found[0]}", remedy)
    if foreign:
        return Check("name", Status.OK, f"`tune` is ours; {', '.join(foreign)} comes later on PATH")
    return Check("name", Status.OK, f"`tune` is {found[0]}" if found else "no `tune` on PATH; run as a module")


def _is_ours(script: Path) -> bool:
    """Whether a console script starts this package."""
    with contextlib.suppress(OSError):
        return b"tuner.cli" in script.read_bytes()[:4096]
    return False


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
