"""The GPUs as NVML sees them: what they are, who holds them and when they are idle; without NVML there are none."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil

from tuner.errors import EnvironmentFault, InputError

MIB = 1 << 20
GIB = 1 << 30
_TOLERANCE_BYTES = 256 * MIB  # the driver itself moves by tens of MiB
_OWN_BYTES = 1 * GIB  # the driver's, a display's and a monitoring tool's use of an idle card stay below
_POLL_S = 0.25
_STABLE_SAMPLES = 4  # within one second

# NVML's GPU topology levels (nvml.h, nvmlGpuTopologyLevel_t), nearest first
_LEVELS = {0: "same board", 10: "one PCIe switch", 20: "PCIe switches", 30: "PCIe host bridge", 40: "one NUMA node"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device now."""

    index: int  # NVML's, which is CUDA's under CUDA_DEVICE_ORDER=PCI_BUS_ID
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None  # compute capability; None where the driver does not tell

    def __str__(self) -> str:
        return f"{self.name} {self.total_bytes / GIB:.0f} GiB"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    gpu: int
    pid: int
    name: str  # `?` where its pid means nothing here (another container)
    user: str
    used_bytes: int | None  # None where the driver does not tell
    ours: bool

    def __str__(self) -> str:
        size = "" if self.used_bytes is None else f", {self.used_bytes / MIB:.0f} MiB"
        return f"pid {self.pid} {self.name} of {self.user}{size}"


@dataclass(frozen=True, slots=True)
class IdleBaseline:
    """Memory of the study's GPUs while no server runs, by index; empty on a machine without."""

    used_bytes: Mapping[int, int]
    free_bytes: Mapping[int, int]
    stable: bool = True


@functools.cache
def _library() -> ModuleType | None:
    """NVML, initialised once for this process; None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    module: ModuleType = pynvml
    return module


def driver_versions() -> tuple[str, str]:
    """(driver, highest CUDA that it supports); empty without a GPU."""
    nvml = _library()
    if nvml is None:
        return "", ""
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    return str(nvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"


def gpu_count() -> int:
    nvml = _library()
    return 0 if nvml is None else int(nvml.nvmlDeviceGetCount())


def visible_gpus() -> tuple[int, ...]:
    """Indices that CUDA_VISIBLE_DEVICES leaves to this user, all where it is unset."""
    everything = tuple(range(gpu_count()))
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not everything:
        return everything
    by_uuid = {gpu.uuid: gpu.index for gpu in gpus(everything)}
    chosen = []
    for word in filter(None, map(str.strip, wanted.split(","))):
        named = [index for uuid, index in by_uuid.items() if uuid.startswith(word)]
        index = int(word) if word.isdigit() else named[0] if len(named) == 1 else -1
        if index not in everything:
            break  # CUDA too stops at the first that it does not know
        chosen.append(index)
    return tuple(chosen)


def gpus(indices: Sequence[int]) -> tuple[Gpu, ...]:
    """State of these devices; InputError when one does not exist."""
    return tuple(_gpu(index) for index in indices)


def gpu_processes(indices: Sequence[int], ours: frozenset[int] = frozenset()) -> tuple[GpuProcess, ...]:
    """Who holds memory of these devices; `ours` are pids of the tuner's own servers."""
    nvml = _library()
    found: dict[tuple[int, int], GpuProcess] = {}
    for index in indices if nvml is not None else ():
        assert nvml is not None
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        for entry in (*_running(nvml, "Compute", handle), *_running(nvml, "Graphics", handle)):
            pid, used = int(entry.pid), entry.usedGpuMemory
            name, user = _who(pid)
            found[index, pid] = GpuProcess(index, pid, name, user, None if used is None else int(used), pid in ours)
    return tuple(found.values())


def busy(gpu: Gpu) -> str:
    """Who keeps the device from being measured on; empty when it is free."""
    if gpu.used_bytes <= _OWN_BYTES:
        return ""
    return "; ".join(map(str, gpu_processes([gpu.index]))) or "a process that is not visible here"


def require_free(indices: Sequence[int]) -> None:
    """EnvironmentFault that names who holds one of these devices."""
    for gpu in gpus(indices):
        if held := busy(gpu):
            raise EnvironmentFault(
                f"GPU {gpu.index} ({gpu}, {gpu.free_bytes / GIB:.1f} GiB free) is held by {held}. End what holds it, "
                "or choose other GPUs with --gpus."
            )


def topology(indices: Sequence[int]) -> tuple[str, ...]:
    """How each pair of devices is connected, e.g. `0-1 NVLink, 18 links`."""
    nvml = _library()
    if nvml is None:
        return ()
    return tuple(f"{one}-{other} {_connection(nvml, one, other)}" for one, other in itertools.combinations(indices, 2))


def idle_baseline(indices: Sequence[int], *, timeout_s: float = 20.0) -> IdleBaseline:
    """Memory in use once it has stood still for a second; not `stable` when it never does within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    samples = [gpus(indices)]
    while indices and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        samples = [*samples, gpus(indices)][-_STABLE_SAMPLES:]
        if len(samples) == _STABLE_SAMPLES and _spread(samples) <= MIB:
            break
    last = samples[-1]
    return IdleBaseline(
        used_bytes={gpu.index: gpu.used_bytes for gpu in last},
        free_bytes={gpu.index: gpu.free_bytes for gpu in last},
        stable=not indices or (len(samples) == _STABLE_SAMPLES and _spread(samples) <= MIB),
    )


def wait_idle(baseline: IdleBaseline, *, timeout_s: float, tolerance_bytes: int = _TOLERANCE_BYTES) -> tuple[str, ...]:
    """Wait until memory in use is back at the baseline; what is not after `timeout_s`, with its holders."""
    indices = tuple(baseline.used_bytes)
    deadline = time.monotonic() + timeout_s
    while True:
        above = {gpu.index: gpu.used_bytes - baseline.used_bytes[gpu.index] for gpu in gpus(indices)}
        above = {index: excess for index, excess in above.items() if excess > tolerance_bytes}
        if not above or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return tuple(
        f"GPU {index}: {excess / GIB:.2f} GiB above its idle baseline"
        + "".join(f"; {holder}" for holder in gpu_processes([index]))
        for index, excess in above.items()
    )


def _capability(nvml: ModuleType, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return None
    return int(major), int(minor)


def _gpu(index: int) -> Gpu:
    nvml = _library()
    count = gpu_count()
    if nvml is None or not 0 <= index < count:
        raise InputError(
            where="command line",
            field="--gpus",
            value=index,
            rule=f"this machine has {count} GPUs" if count else "this machine has no GPU that NVML can see",
            remedy=f"Choose from 0 to {count - 1}." if count else "Leave --gpus out, or check the NVIDIA driver.",
        )
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return Gpu(
            index=index,
            uuid=str(nvml.nvmlDeviceGetUUID(handle)),
            name=str(nvml.nvmlDeviceGetName(handle)),
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            free_bytes=int(memory.free),
            capability=_capability(nvml, handle),
        )
    except nvml.NVMLError as error:
        raise EnvironmentFault(
            f"GPU {index} does not answer ({error}). Look at `nvidia-smi` and `dmesg`; a lost card needs a reset."
        ) from error


def _running(nvml: ModuleType, kind: str, handle: object) -> Sequence[Any]:
    """NVML's process entries; none where the driver will not tell (WSL, some virtual GPUs)."""
    try:
        entries: Sequence[Any] = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle)
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
        return ()
    return entries


def _who(pid: int) -> tuple[str, str]:
    try:
        process = psutil.Process(pid)
        return process.name(), process.username()
    except psutil.Error:
        return "?", "?"


def _connection(nvml: ModuleType, one: int, other: int) -> str:
    first, second = nvml.nvmlDeviceGetHandleByIndex(one), nvml.nvmlDeviceGetHandleByIndex(other)
    links = _nvlinks(nvml, first)
    try:
        if links and nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
            return f"NVLink, {links} links"
        return _LEVELS.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)), "across NUMA nodes")
    except nvml.NVMLError:
        return "unknown"


def _nvlinks(nvml: ModuleType, handle: object) -> int:
    count = 0
    for link in range(int(nvml.NVML_NVLINK_MAX_LINKS)):
        try:
            count += int(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break
    return count


def _spread(samples: Sequence[Sequence[Gpu]]) -> int:
    """Largest movement of one device's memory in use over the samples, bytes."""
    return max(
        (
            max(values) - min(values)
            for values in zip(*([gpu.used_bytes for gpu in one] for one in samples), strict=True)
        ),
        default=0,
    )
