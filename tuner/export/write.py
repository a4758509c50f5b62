"""Which formats there are, and writing them with the lock beside them; what they say is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tuner.export.containers import compose, helm, kubernetes
from tuner.export.deployment import Deployment
from tuner.export.text import as_json, lock, shell, systemd, vllm_yaml
from tuner.serve_args import ServeFlags
from tuner.store import write_atomic

FORMATS: Mapping[str, tuple[str, Callable[[Deployment, ServeFlags], str]]] = {
    "vllm": ("best.yaml", vllm_yaml),
    "shell": ("best.sh", lambda deployment, _: shell(deployment)),
    "json": ("best.json", lambda deployment, _: as_json(deployment)),
    "systemd": ("vllm.service", lambda deployment, _: systemd(deployment)),
    "compose": ("compose.yaml", lambda deployment, _: compose(deployment)),
    "kubernetes": ("kubernetes.yaml", lambda deployment, _: kubernetes(deployment)),
    "helm": ("values.yaml", lambda deployment, _: helm(deployment)),
}
"""Format to its file name and writer."""

LOCK_FILE = "best.lock.json"


def write(deployment: Deployment, formats: Sequence[str], flags: ServeFlags, folder: Path) -> tuple[Path, ...]:
    """Write each format, and the lock beside them, into `folder`; returns the paths. `flags`: of the measured vLLM."""
    written = []
    for name in formats:
        file, render = FORMATS[name]
        write_atomic(folder / file, render(deployment, flags))
        if name == "shell":
            (folder / file).chmod(0o755)
        written.append(folder / file)
    write_atomic(folder / LOCK_FILE, lock(deployment))
    return (*written, folder / LOCK_FILE)
