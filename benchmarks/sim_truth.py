"""The best configuration of every simulated scenario, by going through its whole grid without noise.

    python -m benchmarks.sim_truth [NAME…]     # computes what is missing or outdated in benchmarks/sim_optima.json
    python -m benchmarks.sim_truth --table     # prints what is known as docs/simulator.md shows it

Every configuration is measured coarsely (one seed, capacities to 2 %); those within 5 % of the best are measured as
`Truth` does (four pooled seeds, half a percent). Values are kept in .cache/bench-search, where the comparison of
searches finds them too, so that it can be stopped and started again; SIM_CACHE names another folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tuner.records import KnobValue
from tuner.sim.held_out import HELD_OUT
from tuner.sim.scenario import Scenario
from tuner.sim.scenarios import SCENARIOS
from tuner.sim.truth import SEEDS, Truth

FILE = Path(__file__).with_name("sim_optima.json")
CACHE = Path(os.environ.get("SIM_CACHE", Path(__file__).parents[1] / ".cache" / "bench-search"))
NEAR = 0.95
FINE = "fine"
"""Folder of the exact values, below the coarse ones."""
SAVE_S = 20.0


def digest(scenario: Scenario) -> str:
    return hashlib.sha256(scenario.identity.encode()).hexdigest()[:16]


def optimum(scenario: Scenario) -> tuple[dict[str, KnobValue], float]:
    """Best configuration and its objective, from the file; KeyError when the scenario has changed since."""
    entry = json.loads(FILE.read_text(encoding="utf-8"))[scenario.name]
    if entry["digest"] != digest(scenario):
        raise KeyError(f"{scenario.name}: changed; run python -m benchmarks.sim_truth {scenario.name}")
    return entry["config"], entry["objective"]


def compute(scenario: Scenario) -> dict[str, object]:
    begun = time.monotonic()
    coarse = Truth(scenario, CACHE, seeds=SEEDS[:1], resolution=0.02)
    feasible = scenario.feasible()
    rough = []
    saved = begun
    for config in feasible:
        rough.append((coarse.objective(config), config))
        if time.monotonic() - saved > SAVE_S:
            coarse.save()
            saved = time.monotonic()
    coarse.save()
    rough.sort(key=lambda pair: -pair[0])
    near = [config for value, config in rough if value >= NEAR * rough[0][0]]
    fine = Truth(scenario, CACHE / FINE)
    scored = sorted(((fine.objective(config), config) for config in near), key=lambda pair: (-pair[0], len(pair[1])))
    fine.save()
    # Differences below the resolution of a capacity are none: the fewest overrides among equals.
    top = scored[0][0]
    best = min((pair for pair in scored if pair[0] >= 0.997 * top), key=lambda pair: (len(pair[1]), -pair[0]))
    return {
        "digest": digest(scenario),
        "config": best[1],
        "objective": round(top, 4),
        "capacities": {load.name: round(fine.capacity(best[1], load.name), 3) for load in scenario.loads},
        "defaults": {load.name: round(fine.capacity({}, load.name), 3) for load in scenario.loads},
        "configurations": len(scenario.configs()),
        "starting": len(feasible),
        "dying": sum(value <= 0.0 for value, _ in rough),
        "within_3_percent": sum(value >= 0.97 * top for value, _ in scored),
        "seconds": round(time.monotonic() - begun),
    }


def _stored() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def table() -> str:
    """Markdown: every scenario with its size, what limits its defaults and what can be gained."""
    known = _stored()
    lines = [
        "| scenario | limited by | grid (starts, dies under load) | best | gain | within 3 % |",
        "|---|---|---|---|---|---|",
    ]
    for scenario in (*SCENARIOS, *HELD_OUT):
        entry = known.get(scenario.name)
        if entry is None or entry["digest"] != digest(scenario):
            continue
        best = ", ".join(f"`{name}` {value}" for name, value in entry["config"].items()) or "defaults"
        size = f"{entry['configurations']} ({entry['starting']}, {entry['dying']})"
        gain = f"{100 * (entry['objective'] - 1):.1f} %"
        if scenario in HELD_OUT:
            best = "–"  # not shown, so that nobody designs on it by accident
        lines.append(
            f"| {scenario.name} | {scenario.limiter} | {size} | {best} | {gain} | {entry['within_3_percent']} |"
        )
    return "\n".join(lines)


def main() -> None:
    names = sys.argv[1:]
    if names == ["--table"]:
        print(table())
        return
    for scenario in (*SCENARIOS, *HELD_OUT):
        if names and scenario.name not in names:
            continue
        known = _stored()
        if known.get(scenario.name, {}).get("digest") != digest(scenario):
            found = compute(scenario)
            known = {**_stored(), scenario.name: found}  # another process may have added to it
            FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(scenario.name, json.dumps(known[scenario.name]), flush=True)


if __name__ == "__main__":
    main()
