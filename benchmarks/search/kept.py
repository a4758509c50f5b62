"""Finished searches and finishes on disk: a long comparison goes on where it stopped, and stale ones are ignored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.search.finish import Finished
from benchmarks.search.study import Result
from tuner.finish import Decision
from tuner.sim.scenario import Scenario

ROOT = Path(__file__).resolve().parents[2]
MEASURED_BY = ("tuner/optimizer", "tuner/finish", "tuner/capacity", "tuner/diagnosis", "tuner/sim", "benchmarks/search")
"""Whatever changes here may change a result."""
OURS = ("tuner/optimizer", "tuner/finish", "tuner/diagnosis")
"""No other searcher uses these."""


class Kept:
    """One file an engine; a line a result."""

    def __init__(self, folder: Path, engine: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"results-{engine}.jsonl"
        self._code = _digest(MEASURED_BY)
        self._others = _digest([name for name in MEASURED_BY if name not in OURS])
        self._known: dict[str, dict[str, object]] = {}
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry["value"]

    def result(self, scenario: Scenario, searcher: str, seed: int, compute: Callable[[], Result]) -> Result:
        """The stored search, or the computed one, which is then stored."""
        code = self._code if searcher == "ours" else self._others
        stored = self._get(f"{code}/search/{searcher}/{seed}", scenario, lambda: asdict(compute()))
        return Result(**{**stored, "verdict": Decision(str(stored["verdict"]))})  # type: ignore[arg-type]

    def finishes(self, scenario: Scenario, name: str, compute: Callable[[], list[Finished]]) -> list[Finished]:
        """The stored finishes of one scenario and band, or the computed ones."""
        stored = self._get(
            f"{self._code}/finish/{name}", scenario, lambda: {"all": [asdict(item) for item in compute()]}
        )
        items = stored["all"]
        assert isinstance(items, list)
        return [Finished(**{**item, "decision": Decision(item["decision"])}) for item in items]

    def _get(self, name: str, scenario: Scenario, compute: Callable[[], dict[str, object]]) -> dict[str, object]:
        key = hashlib.sha256(f"{scenario.identity}/{name}".encode()).hexdigest()[:24]
        if key not in self._known:
            self._known[key] = compute()
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"key": key, "value": self._known[key]}) + "\n")
        return self._known[key]


def _digest(folders: Sequence[str]) -> str:
    """Of every source file that a result depends on, tables and this module left out."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("tables.py", "kept.py", "__main__.py", "held_out.py"):
                found.update(path.read_bytes())
    return found.hexdigest()
