"""Which files a model is made of, as far as a change of them would change a result; it loads none of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

_SMALL = 1 << 20
"""Bytes that are read of each end of a file: configurations as a whole, weights by their header and their last part."""

_COUNTED = (".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".model", ".txt", ".jinja")


def model_revision(model: str, revision: str | None = None) -> str:
    """`commit …` of a model of the hub that is in the cache, `files …` of a folder; empty where it cannot be told.

    The digest of a folder covers names, sizes and both ends of every file, so that other weights in files of the same
    size are noticed without reading all of them.
    """
    folder = Path(model)
    if folder.is_dir():
        return f"files {_digest(folder)}"
    with contextlib.suppress(OSError):
        return f"commit {(_hub_cache() / _hub_name(model) / 'refs' / (revision or 'main')).read_text().strip()}"
    return f"commit {revision}" if revision else ""


def _hub_cache() -> Path:
    """Where huggingface_hub keeps its files (its documentation, "Environment variables")."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    # os.path's own leaves `~` where there is no home; Path's raises.
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")))


def _hub_name(model: str) -> str:
    return "models--" + model.replace("/", "--")


def _digest(folder: Path) -> str:
    seen = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _COUNTED or not path.is_file():
            continue
        size = path.stat().st_size
        seen.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            seen.update(file.read(_SMALL))
            file.seek(max(0, size - _SMALL))
            seen.update(file.read(_SMALL))
    return seen.hexdigest()[:16]
