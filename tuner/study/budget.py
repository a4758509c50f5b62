"""How much a study may still spend, and what the finish needs of it; pure arithmetic on trial durations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.finish import reserve_s
from tuner.records import Budget


@dataclass(frozen=True, slots=True)
class Spent:
    """What earlier runs and this one have used, servers' starts included."""

    search_trials: int
    wall_s: float
    gpus: int
    trial_s: Sequence[float]  # wall seconds of each full trial of the search so far


def trial_estimate_s(spent: Spent, guess_s: float) -> float:
    """Expected duration of the next full trial: the mean so far, or the guess before anything ran."""
    return sum(spent.trial_s) / len(spent.trial_s) if spent.trial_s else guess_s


def limit_s(budget: Budget, gpus: int) -> float:
    """Wall seconds that the wall and GPU limits allow in all; infinite without either."""
    by_gpu = math.inf if budget.gpu_s is None else budget.gpu_s / max(1, gpus)
    return min(math.inf if budget.wall_s is None else budget.wall_s, by_gpu)


def remaining_s(budget: Budget, spent: Spent) -> float:
    return limit_s(budget, spent.gpus) - spent.wall_s


def finish_s(budget: Budget, gpus: int, run_s: float, rounds: int, flags: int) -> float:
    """Wall seconds kept for the finish: rounds, ablation of `flags` flags, verification of what is left of them.

    Where that is more than half of everything, the rounds of baseline and one finalist alone: the proof itself is never
    given up, the examination of each flag is.
    """
    whole = reserve_s(run_s, rounds, flags=flags)
    return whole if whole <= limit_s(budget, gpus) / 2 else run_s * rounds * 2


def may_start(budget: Budget, spent: Spent, *, guess_s: float, rounds: int, flags: int, run_factor: float) -> bool:
    """Whether one more search trial fits before the finish has to begin.

    `flags`: how many the winner may have. `run_factor`: length of a run of the finish ÷ of a search trial.
    """
    if budget.trials is not None and spent.search_trials >= budget.trials:
        return False
    trial_s = trial_estimate_s(spent, guess_s)
    kept_s = finish_s(budget, spent.gpus, trial_s * run_factor, rounds, flags)
    return remaining_s(budget, spent) >= trial_s + kept_s


def grown(before: Budget, now: Budget) -> bool:
    """Whether any limit allows more than it did."""
    pairs = ((before.trials, now.trials), (before.wall_s, now.wall_s), (before.gpu_s, now.gpu_s))
    return any(old is not None and (new is None or new > old) for old, new in pairs)
