"""Deletes the raw data of old nights; records, the CSV and whatever an incumbent came from stay."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tuner.nightly.record import History, Night

_RAW = ("trials",)


def rotate(history: History, nights: Sequence[Night], keep: int) -> tuple[Path, ...]:
    """Remove trials and raw requests of all but the latest `keep` nights; returns what went.

    Nights that were abandoned are older attempts and go with the night that replaced them.
    """
    gone: list[Path] = []
    old = {f"{night.number:04d}" for night in nights[:-keep]} if keep > 0 else set()
    for folder in sorted((history.root / "nights").glob("*")):
        name = folder.name.partition(".")[0]
        if name not in old or not re.fullmatch(r"\d{4,}", name):
            continue
        if folder.name != name:
            gone.append(_removed(folder))
        else:
            gone += [_removed(raw) for raw in sorted(folder.rglob("*")) if raw.name in _RAW and raw.is_dir()]
    gone += _old_searches(history, nights, keep)
    return tuple(gone)


def _old_searches(history: History, nights: Sequence[Night], keep: int) -> list[Path]:
    """Searches that no kept night used and that are not the latest one, which the next search may go on with."""
    searches = [night.searched.folder for night in nights if night.searched is not None]
    kept = {night.searched.folder for night in nights[-keep:] if night.searched is not None} | set(searches[-1:])
    return [
        _removed(history.root / name / "trials")
        for name in dict.fromkeys(searches)
        if name not in kept and (history.root / name / "trials").is_dir()
    ]


def _removed(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder
