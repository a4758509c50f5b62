"""Imports go downwards only, and vLLM is never imported (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tuner"

FLOORS: dict[str, int] = {
    **dict.fromkeys(["errors", "records", "secrecy"], 0),
    **dict.fromkeys(
        [
            "slo",
            "workload",
            "space",
            "pacing",
            "metrics",
            "stats",
            "serve_args",
            "feasibility",
            "failures",
            "diagnosis",
        ],
        1,
    ),
    **dict.fromkeys(["documents", "validity", "quality"], 1),
    **dict.fromkeys(["server", "client", "telemetry", "environment", "store", "ownership"], 2),
    **dict.fromkeys(["trial", "capacity"], 3),
    **dict.fromkeys(["study", "optimizer", "executor", "finish", "comparison"], 4),
    **dict.fromkeys(["report", "export", "nightly"], 5),
    **dict.fromkeys(["cli", "__main__"], 6),
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name in imports_of(path):
        parts = name.split(".")
        assert parts[0] != "vllm", f"{path} imports vLLM; it must be run, never imported"
        if parts[0] != "tuner" or len(parts) < 2 or parts[1] in (room, "__version__"):
            continue
        if parts[1] == "sim":
            pytest.fail(f"{path} imports the simulator; it is reached by command line and HTTP only")
        other = FLOORS[parts[1]]
        if room == "sim":
            assert other <= 1, f"{path} imports tuner.{parts[1]}: the simulator may use floors 0 and 1 only"
        else:
            assert other <= FLOORS[room], f"{path} (floor {FLOORS[room]}) imports tuner.{parts[1]} (floor {other})"


def test_only_the_optimizer_knows_optuna() -> None:
    users = {room_of(path) for path in MODULES if any(name.split(".")[0] == "optuna" for name in imports_of(path))}
    assert users <= {"optimizer"}


def test_only_the_trial_catches_broadly() -> None:
    broad = [
        str(path.relative_to(PACKAGE))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
    ]
    assert [path for path in broad if not path.startswith("trial")] == []
