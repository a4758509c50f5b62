"""The vLLM process: which one is installed, starting it, knowing it, and leaving nothing of it; it measures nothing."""

from tuner.server.command import cache_root, telling_environment
from tuner.server.control import Control, ServedModel
from tuner.server.failure import FailureReason, ServerFailure
from tuner.server.install import VllmInstall, find_vllm
from tuner.server.process import Identity, Liveness, Server, StopReport
from tuner.server.ready import ReadyLimits

__all__ = [
    "Control",
    "FailureReason",
    "Identity",
    "Liveness",
    "ReadyLimits",
    "ServedModel",
    "Server",
    "ServerFailure",
    "StopReport",
    "VllmInstall",
    "cache_root",
    "find_vllm",
    "telling_environment",
]
