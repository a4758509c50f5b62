"""What a server is started with: command line, environment and port; pure except for trying ports; never a shell."""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.errors import EnvironmentFault
from tuner.ownership import MARKER
from tuner.secrecy import HIDDEN, names_secret, without_secrets
from tuner.server.install import VllmInstall, cache_home

HOST = "127.0.0.1"

_DROPPED = (
    *("VLLM_API_KEY", "VLLM_PORT", "VLLM_RPC_BASE_PATH"),
    # The log is read: for progress while it starts, for the values in effect and for the cause of a failure.
    *("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_PREFIX", "VLLM_LOGGING_STREAM"),
)
_TUNING = re.compile(r"(VLLM|NCCL|TORCH|PYTORCH|OMP|KMP|FLASHINFER)_\w+")
_MEASURING = re.compile(
    r"VLLM_(SERVER_DEV_MODE|CACHE_ROOT|NO_USAGE_STATS|CONFIG_ROOT|ASSETS_CACHE|API_KEY|TUNE_\w+)|TORCHINDUCTOR_.*"
)
_TELLING = re.compile(r"(VLLM|CUDA|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|MKL|KMP|FLASHINFER|HF|LD)_\w+$")


def command(install: VllmInstall, model: str, flags: Sequence[str], port: int) -> tuple[str, ...]:
    """`flags` as from `serve_args.to_argv`; the address comes last, so that nothing overrides it."""
    return (install.path, "serve", model, *flags, "--host", HOST, "--port", str(port))


def environment(
    base: Mapping[str, str],
    *,
    marker: str,
    gpus: Sequence[int] | None,
    cache_root: Path,
    temporary: Path,
    extra: Mapping[str, str] = {},
) -> dict[str, str]:
    """The server's environment: the user's own (`HF_*` offline settings included), and what isolation needs.

    `gpus` are NVML indices; None leaves the choice to CUDA.
    """
    kept = users_environment(base)
    ours = {
        MARKER: marker,
        "SPT_NOENV": "1",  # setproctitle must not overwrite the environment in which the marker stands
        "VLLM_CACHE_ROOT": str(cache_root),
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "TMPDIR": str(temporary),
        "PYTHONUNBUFFERED": "1",  # the log is also the sign of progress
    }
    if "TORCHINDUCTOR_CACHE_DIR" not in kept:
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(cache_root / "torchinductor")  # its default lies in TMPDIR
    if gpus is not None:
        ours["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return {**kept, **ours, **extra}


def tunes(name: str) -> bool:
    """Whether a recorded variable belongs to a configuration, and not to the tuner's measuring or to the machine."""
    return _TUNING.fullmatch(name) is not None and _MEASURING.fullmatch(name) is None


def users_environment(base: Mapping[str, str]) -> dict[str, str]:
    """What of the user's own environment reaches a server."""
    kept = {name: value for name, value in base.items() if name not in _DROPPED}
    if kept.get("VLLM_LOGGING_LEVEL", "INFO").upper() not in ("INFO", "DEBUG"):
        del kept["VLLM_LOGGING_LEVEL"]
    return kept


def cache_root(install: VllmInstall, model: str, device: str) -> Path:
    """Compile cache shared by all trials of this vLLM, model and device, so that later starts are cheaper."""
    base = os.environ.get("VLLM_CACHE_ROOT")
    root = Path(base) / "vllm-tune" if base else cache_home() / "vllm"
    digest = hashlib.sha256("\0".join((install.path, install.version, model, device)).encode()).hexdigest()[:12]
    readable = re.sub(r"[^\w.+-]+", "-", f"{install.version}-{Path(model).name}")
    return root / f"{readable}-{digest}"


def redacted(words: Sequence[str]) -> tuple[str, ...]:
    """A command line without secrets: values of flags and of JSON keys that name one, tokens, users in URLs."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            secret = names_secret(flag)
            shown.append(flag + (f"={HIDDEN if secret else without_secrets(value)}" if equals else ""))
            hide_next = secret and not equals
        else:
            shown.append(HIDDEN if hide_next else without_secrets(word))
    return tuple(shown)


def holds_secret(words: Sequence[str]) -> bool:
    """Whether a command line says something that must not be recorded."""
    return redacted(words) != tuple(words)


def telling_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how a server runs, for the record; secrets hidden."""
    return {
        name: HIDDEN if names_secret(name) else without_secrets(value)
        for name, value in sorted(variables.items())
        if _TELLING.match(name) and name != MARKER
    }


def free_port() -> int:
    """A port on loopback that nobody listens on.

    From below the ephemeral range: a port from it could be taken as somebody's client port before vLLM, seconds later,
    binds it. Whether our server really got it is checked once it answers.
    """
    lowest = 20_000
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            highest = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        highest = 32_768
    if highest - lowest < 1000:
        lowest, highest = 10_000, 65_536
    chooser = random.SystemRandom()
    for _ in range(200):
        port = chooser.randrange(lowest, highest)
        if port_free(port):
            return port
    raise EnvironmentFault("no free port on 127.0.0.1 among 200 tried; end what holds them and run again.")


def port_free(port: int) -> bool:
    """Whether a listener could bind the port now (connections that linger after a close do not count)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
