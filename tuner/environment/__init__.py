"""The machine: facts that belong to a result, GPU state and holders, the idle baseline; it starts and ends nothing."""

from tuner.environment.gpu import (
    Gpu,
    GpuProcess,
    IdleBaseline,
    driver_versions,
    gpu_count,
    gpu_processes,
    gpus,
    idle_baseline,
    require_free,
    topology,
    visible_gpus,
    wait_idle,
)
from tuner.environment.machine import cpu_count, facts, memory_bytes, tunes_on_path
from tuner.environment.model import model_revision

__all__ = [
    "Gpu",
    "GpuProcess",
    "IdleBaseline",
    "cpu_count",
    "driver_versions",
    "facts",
    "gpu_count",
    "gpu_processes",
    "gpus",
    "idle_baseline",
    "memory_bytes",
    "model_revision",
    "require_free",
    "topology",
    "tunes_on_path",
    "visible_gpus",
    "wait_idle",
]
