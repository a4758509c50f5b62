"""Fit the constants of the simulated H200 to measurements of a real one, and say how close it comes.

    python -m benchmarks.calibrate_sim            # closeness of the constants as they are, class by class
    python -m benchmarks.calibrate_sim --fit 120  # fit for about that many seconds first

Measured: one H200, vLLM 0.26.0, 8B bf16, --max-model-len 16384, open-loop Poisson, lengths ±20 %, windows of 12 s from
an idle server, one run each. Milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import dataclass, replace

import numpy as np

from tuner.records import PlannedRequest
from tuner.sim.engine import simulate
from tuner.sim.profile import Profile
from tuner.sim.profiles import H200_8B

WINDOW_S = 12.0
SEEDS = (1, 2, 3, 4, 5)
FREE = (
    "bandwidth",
    "flops",
    "attention_flops",
    "knee",
    "step_s",
    "step_seq_s",
    "piecewise_s",
    "mixed_s",
    "cpu_step_s",
    "cpu_seq_s",
    "request_s",
    "prompt_token_s",
    "chunk_s",
    "turns",
    "latency_s",
)
BOUNDS = {
    "bandwidth": (3.0e12, 4.8e12),
    "flops": (500e12, 790e12),
    "attention_flops": (200e12, 790e12),
    "knee": (1.0, 6.0),
    "step_s": (0.1e-3, 3e-3),
    "step_seq_s": (0.1e-6, 30e-6),
    "mixed_s": (0.05e-3, 8e-3),
    "turns": (0.2, 12.0),
    "piecewise_s": (2e-3, 12e-3),
    "cpu_step_s": (0.2e-3, 5e-3),
    "cpu_seq_s": (1e-6, 60e-6),
    "request_s": (0.1e-3, 5e-3),
    "prompt_token_s": (0.05e-6, 3e-6),
    "chunk_s": (4e-6, 100e-6),
    "latency_s": (1e-3, 15e-3),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured window: percentiles in milliseconds, nan where not reached."""

    input_tokens: int
    output_tokens: int
    rate_rps: float
    budget: int | None
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float


MEASURED = (
    Cell(256, 64, 60, None, 38, 101, 8.4, 13.5),
    Cell(256, 64, 90, None, 79, 145, 15.7, 22.0),
    Cell(256, 64, 120, None, 163, 422, 42.4, 50.2),
    Cell(256, 64, 60, 2048, 32, 78, 7.9, 10.6),
    Cell(256, 64, 90, 2048, 59, 117, 13.2, 20.0),
    Cell(256, 64, 120, 2048, 166, 283, 44.0, 51.3),
    Cell(256, 768, 20, None, 39, 80, 8.2, 8.9),
    Cell(256, 768, 30, None, 71, 346, 14.3, 16.2),
    Cell(256, 768, 40, None, 141, 756, 20.4, 23.9),
    Cell(256, 768, 20, 2048, 37, 65, 8.2, 8.9),
    Cell(256, 768, 30, 2048, 61, 283, 14.5, 16.6),
    Cell(256, 768, 40, 2048, 116, 604, 19.9, 22.4),
    Cell(4096, 64, 5, None, 122, 570, 8.5, 22.8),
    Cell(4096, 64, 6.5, None, 134, 535, 13.4, 34.7),
    Cell(4096, 64, 8, None, 592, 1307, 30.2, 96.2),
    Cell(4096, 64, 5, 2048, 133, 557, 8.7, 22.0),
    Cell(4096, 64, 6.5, 2048, 158, 528, 12.8, 30.5),
    Cell(4096, 64, 8, 2048, 596, 1400, 30.2, 55.8),
    Cell(4096, 512, 4, None, 125, 249, 10.4, 11.5),
    Cell(4096, 512, 5.5, None, 135, 452, 13.1, 16.6),
    Cell(4096, 512, 7, None, 399, 1138, 28.8, 39.5),
    Cell(4096, 512, 4, 2048, 140, 247, 10.4, 11.3),
    Cell(4096, 512, 5.5, 2048, 173, 496, 12.9, 16.2),
)
WEIGHTS = (1.0, 0.3, 1.5, 0.7)
"""Of the four percentiles: one window pins a median better than a tail, and TPOT better than TTFT."""


def window(cell: Cell, seed: int) -> list[PlannedRequest]:
    rng = np.random.default_rng((seed, cell.input_tokens, cell.output_tokens))
    count = int(cell.rate_rps * WINDOW_S * 1.5) + 20
    times = np.cumsum(rng.exponential(1.0, count)) / cell.rate_rps
    inputs, outputs = (np.rint(rng.uniform(0.8, 1.2, count) * n) for n in (cell.input_tokens, cell.output_tokens))
    return [
        PlannedRequest(i, "c", at, (), int(a), int(b))
        for i, (at, a, b) in enumerate(zip(times.tolist(), inputs.tolist(), outputs.tolist(), strict=True))
        if at < WINDOW_S
    ]


def simulated(profile: Profile, cell: Cell, seeds: tuple[int, ...]) -> np.ndarray:
    """Mean over windows of the logs of the four percentiles; a row of logs for each seed."""
    rows = []
    for seed in seeds:
        config = {} if cell.budget is None else {"max-num-batched-tokens": cell.budget}
        result = simulate(profile, config, window(cell, seed), seed=seed, start_seed=seed, gaps=False)
        ttft = [row.ttft_s for row in result.requests if row.ttft_s is not None]
        tpot = [row.tpot_s for row in result.requests if row.tpot_s is not None]
        rows.append([*np.percentile(ttft, (50, 99)), *np.percentile(tpot, (50, 99))])
    return np.log(np.array(rows) * 1e3)


def errors(profile: Profile, seeds: tuple[int, ...]) -> np.ndarray:
    """log(simulated ÷ measured), one row a cell."""
    return np.array(
        [
            simulated(profile, cell, seeds).mean(axis=0)
            - np.log([cell.ttft_p50, cell.ttft_p99, cell.tpot_p50, cell.tpot_p99])
            for cell in MEASURED
        ]
    )


def fit(profile: Profile, seconds: float) -> Profile:
    """Nelder–Mead over the logs of the constants, inside their bounds, until the time is used up."""
    from scipy.optimize import minimize

    deadline = time.monotonic() + seconds
    lows = np.log([BOUNDS[name][0] for name in FREE])
    highs = np.log([BOUNDS[name][1] for name in FREE])
    best: tuple[float, Profile] = (np.inf, profile)

    def build(x: np.ndarray) -> Profile:
        values = dict(zip(FREE, np.exp(np.clip(x, lows, highs)).tolist(), strict=True))
        return replace(profile.quiet(), machine=replace(profile.machine, **values))

    def loss(x: np.ndarray) -> float:
        nonlocal best
        if time.monotonic() > deadline:
            raise StopIteration
        outside = np.sum(np.maximum(lows - x, 0) + np.maximum(x - highs, 0))
        candidate = build(x)
        # A soft corner: a tail of one window may be off by a factor without any constant being wrong.
        value = float(np.sum(np.array(WEIGHTS) * np.log1p((errors(candidate, SEEDS[:2]) / 0.15) ** 2)) + 100 * outside)
        if value < best[0]:
            best = (value, candidate)
        return value

    start = np.log([getattr(profile.machine, name) for name in FREE])
    simplex = np.vstack([start, start + np.diag(np.full(len(FREE), 0.25))])
    with contextlib.suppress(StopIteration):
        minimize(loss, start, method="Nelder-Mead", options={"initial_simplex": simplex, "maxfev": 10**6})
    print(f"loss {best[0]:.2f}")
    for name in FREE:
        print(f"    {name}={getattr(best[1].machine, name):.4g},")
    return replace(profile, machine=best[1].machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=float, default=0.0, metavar="SECONDS")
    arguments = parser.parse_args()
    profile = H200_8B
    if arguments.fit:
        profile = fit(profile, arguments.fit)
    rows = errors(profile, SEEDS)
    print("simulated ÷ measured, mean over 5 simulated windows (the spread of one window in brackets)")
    print("| class | rate | budget | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 |\n|---|---|---|---|---|---|---|")
    for cell, row in zip(MEASURED, rows, strict=True):
        spread = simulated(profile, cell, SEEDS).std(axis=0, ddof=1)
        shown = " | ".join(f"{np.exp(e):.2f} (±{s:.2f})" for e, s in zip(row, spread, strict=True))
        budget = cell.budget or "default"
        print(f"| {cell.input_tokens}/{cell.output_tokens} | {cell.rate_rps:g} | {budget} | {shown} |")
    print("typical factor: " + ", ".join(f"{v:.2f}" for v in np.exp(np.median(np.abs(rows), axis=0))))


if __name__ == "__main__":
    main()
