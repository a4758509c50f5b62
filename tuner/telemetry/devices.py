"""GPU readings through NVML; without NVIDIA's library or device it says so once and stays silent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pynvml

POWER_CAP = pynvml.nvmlClocksEventReasonSwPowerCap
HELD_BACK = (
    pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonSwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
)
"""Clocks below what the board is built for: heat, or power withheld from outside. The board's own power limit is apart,
because a well-used GPU reaches it in normal work."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """All GPUs of the server together; how each is combined stands in docs/telemetry.md."""

    util: float  # 0..1, mean
    mem_used_bytes: float  # fullest
    power_w: float  # sum
    sm_clock_mhz: float  # slowest
    temperature_c: float  # hottest
    throttled: bool
    power_capped: bool


class Devices:
    """NVML on the GPUs with these indices (PCI order, as `nvidia-smi` numbers them)."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self._gpus = tuple(gpus)
        self._handles: tuple[object, ...] = ()

    def open(self) -> str | None:
        """None when readings will come, otherwise why not."""
        if not self._gpus:
            return "no GPU in use"
        try:
            pynvml.nvmlInit()
            self._handles = tuple(pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in self._gpus)
        except pynvml.NVMLError as error:
            return f"NVML: {error}"
        return None

    def close(self) -> None:
        if self._handles:
            self._handles = ()
            pynvml.nvmlShutdown()

    def read(self) -> DeviceReading | None:
        """None where the device does not answer (it fell off the bus, or was never there)."""
        if not self._handles:
            return None
        try:
            readings = [_read(handle) for handle in self._handles]
        except pynvml.NVMLError:
            return None
        return DeviceReading(
            util=sum(reading.util for reading in readings) / len(readings),
            mem_used_bytes=max(reading.mem_used_bytes for reading in readings),
            power_w=sum(reading.power_w for reading in readings),
            sm_clock_mhz=min(reading.sm_clock_mhz for reading in readings),
            temperature_c=max(reading.temperature_c for reading in readings),
            throttled=any(reading.throttled for reading in readings),
            power_capped=any(reading.power_capped for reading in readings),
        )


def _read(handle: object) -> DeviceReading:
    reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return DeviceReading(
        util=pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        mem_used_bytes=float(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        power_w=pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        sm_clock_mhz=float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        temperature_c=float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        throttled=bool(reasons & HELD_BACK),
        power_capped=bool(reasons & POWER_CAP),
    )
