"""Machine facts, and GPU state against an NVML whose answers are known."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from tuner.environment import (
    IdleBaseline,
    cpu_count,
    driver_versions,
    facts,
    gpu_count,
    gpu_processes,
    gpus,
    idle_baseline,
    memory_bytes,
    require_free,
    topology,
    tunes_on_path,
    visible_gpus,
    wait_idle,
)
from tuner.environment import gpu as gpu_room
from tuner.environment.gpu import GIB, MIB
from tuner.errors import EnvironmentFault, InputError

INSTALLED = SimpleNamespace(version="0.32.0+cpu", python_version="3.12.4")


@dataclass
class Nvml:
    """Two H200 whose memory in use follows `used` (GiB a look, the last one for ever)."""

    used: dict[int, list[float]]
    holders: dict[int, list[tuple[int, int | None]]] = field(default_factory=dict)
    lost: bool = False

    def module(self) -> ModuleType:
        class NVMLError(Exception):
            pass

        def memory(handle: int) -> SimpleNamespace:
            if self.lost:
                raise NVMLError("GPU is lost")
            samples = self.used[handle]
            used = int(samples.pop(0) * GIB) if len(samples) > 1 else int(samples[0] * GIB)
            return SimpleNamespace(total=140 * GIB, used=used, free=140 * GIB - used)

        def refused(handle: int) -> list[SimpleNamespace]:
            raise NVMLError("Not Supported")

        module = ModuleType("pynvml")
        answers = {
            "NVMLError": NVMLError,
            "NVMLLibraryMismatchError": NVMLError,
            "NVML_NVLINK_MAX_LINKS": 18,
            "NVML_P2P_CAPS_INDEX_NVLINK": 2,
            "nvmlDeviceGetCount": lambda: len(self.used),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}abc",
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlSystemGetDriverVersion": lambda: "580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.holders.get(handle, [])
            ],
            "nvmlDeviceGetGraphicsRunningProcesses": refused,
            "nvmlDeviceGetNvLinkState": lambda handle, link: 1,
            "nvmlDeviceGetP2PStatus": lambda one, other, caps: 0,
        }
        for name, answer in answers.items():
            setattr(module, name, answer)
        return module


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    known = Nvml({0: [0.5], 1: [0.5]})
    monkeypatch.setattr(gpu_room, "_library", known.module)
    monkeypatch.setattr(gpu_room, "_POLL_S", 0.001)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return known


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_room, "_library", lambda: None)


@pytest.mark.usefixtures("no_nvml")
def test_without_a_gpu() -> None:
    assert (driver_versions(), gpu_count(), visible_gpus()) == (("", ""), 0, ())
    assert (gpus(()), gpu_processes(()), topology(())) == ((), (), ())
    baseline = idle_baseline(())
    assert baseline == IdleBaseline({}, {})
    assert wait_idle(baseline, timeout_s=0) == ()
    with pytest.raises(InputError, match="no GPU that NVML can see"):
        gpus([0])
    known = facts(INSTALLED, ())
    assert (known.gpus, known.driver, known.vllm_version, known.python_version) == ((), "", "0.32.0+cpu", "3.12.4")
    assert facts(INSTALLED, ()) == known


def test_facts_of_another_vllm_are_other_facts() -> None:
    other = SimpleNamespace(version="0.33.0+cpu", python_version="3.12.4")
    assert facts(other, ()).digest != facts(INSTALLED, ()).digest


def test_the_compute_capability_of_a_gpu(nvml: Nvml) -> None:
    assert [gpu.capability for gpu in gpus([0, 1])] == [(9, 0), (9, 0)]


def test_facts_with_gpus(nvml: Nvml) -> None:
    known = facts(INSTALLED, (0, 1))
    assert (known.gpus, known.driver, known.cuda) == (("NVIDIA H200 140 GiB",) * 2, "580.95.05", "13.0")
    assert known.digest != facts(INSTALLED, (0,)).digest


def test_the_cards_tell_a_machine_and_its_host_name_only_without_them(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_pod(name: str) -> tuple[str, str, str]:
        monkeypatch.setattr(socket, "gethostname", lambda: name)
        return tuple(facts(INSTALLED, gpus).machine for gpus in ((0,), (1,), ()))  # type: ignore[return-value]

    tonight, tomorrow = in_pod("vllm-nightly-28-x7k2p"), in_pod("vllm-nightly-29-q9f4d")
    assert tonight[:2] == tomorrow[:2]  # a CronJob's pod has a new name every night
    assert tonight[2] != tomorrow[2]
    assert tonight[0] != tonight[1]


@pytest.mark.parametrize(
    ("variable", "visible"),
    [(None, (0, 1)), ("1", (1,)), ("1,0", (1, 0)), ("GPU-1abc", (1,)), ("", ()), ("0,7,1", (0,)), ("-1", ())],
)
def test_visible_gpus(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, variable: str | None, visible: Sequence[int]
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == visible


def test_gpu_that_is_not_there_or_lost(nvml: Nvml) -> None:
    with pytest.raises(InputError, match=r"this machine has 2 GPUs.*Choose from 0 to 1"):
        gpus([2])
    nvml.lost = True
    with pytest.raises(EnvironmentFault, match="GPU 0 does not answer"):
        gpus([0])


def test_who_holds_a_gpu(nvml: Nvml) -> None:
    nvml.holders = {0: [(os.getpid(), 5 * GIB), (2**22 + 1, None)]}
    mine, hidden = gpu_processes([0, 1], ours=frozenset([os.getpid()]))
    assert (mine.pid, mine.ours, mine.used_bytes) == (os.getpid(), True, 5 * GIB)
    assert "5120 MiB" in str(mine)
    assert (hidden.name, hidden.ours, hidden.used_bytes) == ("?", False, None)


def test_a_held_gpu_is_refused(nvml: Nvml) -> None:
    nvml.holders = {0: [(os.getpid(), 300 * MIB)]}
    require_free((0, 1))
    nvml.holders[1], nvml.used[1] = [(os.getpid(), 60 * GIB)], [60.5]
    with pytest.raises(EnvironmentFault, match=f"GPU 1 .* held by pid {os.getpid()} .* 61440 MiB"):
        require_free((0, 1))
    nvml.holders, nvml.used = {}, {0: [80]}
    with pytest.raises(EnvironmentFault, match="held by a process that is not visible here"):
        require_free((0,))


def test_topology(nvml: Nvml) -> None:
    assert topology((0, 1)) == ("0-1 NVLink, 18 links",)


def test_baseline_waits_until_memory_stands_still(nvml: Nvml) -> None:
    nvml.used = {0: [60, 40, 20, 2, 0.5, 0.5, 0.5, 0.5], 1: [0.5]}
    baseline = idle_baseline((0, 1))
    assert baseline.stable
    assert baseline.used_bytes == {0: GIB // 2, 1: GIB // 2}
    assert baseline.free_bytes[0] == 140 * GIB - GIB // 2


def test_baseline_that_never_settles(nvml: Nvml) -> None:
    nvml.used = {0: [float(number % 5) for number in range(10_000)]}
    assert not idle_baseline((0,), timeout_s=0.05).stable


def test_settling(nvml: Nvml) -> None:
    baseline = IdleBaseline({0: GIB // 2}, {0: 139 * GIB})
    nvml.used = {0: [80, 30, 5, 0.6], 1: [0.5]}
    assert wait_idle(baseline, timeout_s=5) == (), "100 MiB above is the driver's own movement"
    nvml.used[0] = [20]
    nvml.holders = {0: [(os.getpid(), 19 * GIB)]}
    (left,) = wait_idle(baseline, timeout_s=0.02)
    assert left.startswith("GPU 0: 19.50 GiB above its idle baseline; pid ")
    assert wait_idle(baseline, timeout_s=0, tolerance_bytes=20 * GIB) == ()


def test_limits_of_this_process() -> None:
    assert 1 <= cpu_count() <= len(os.sched_getaffinity(0))
    assert memory_bytes() > 64 * MIB


def test_tunes_on_path(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [os.path.join(tmp_path, name) for name in ("a", "b", "c")]
    for folder in folders[:2]:
        os.makedirs(folder)
        path = os.path.join(folder, "tune")
        with open(path, "w") as file:
            file.write("#!/bin/sh\n")
        os.chmod(path, 0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([*folders, folders[0]]))
    assert tunes_on_path() == tuple(os.path.join(folder, "tune") for folder in folders[:2])
