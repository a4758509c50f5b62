"""What the finish measures, in which order and what that costs; pure planning, the study executes it.

Search values are the luckiest of many noisy ones, so nothing of the search is reported: finalists and baseline are
measured again on fresh servers with requests that no configuration has seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.finish.contrast import CONFIDENCE, dunnett
from tuner.records import Config, KnobValue

MOST_FINALISTS = 2
FULL_ROUNDS, SHORT_ROUNDS, MOST_ROUNDS = 5, 3, 10
"""Rounds are fixed beforehand: looking after three and going on to five doubled the false claims (docs/search.md)."""
TWO_LOOKS = (0.98, 0.97)
"""Confidence of each of two looks; their errors add up to 5 % at most (Bonferroni)."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration of the finish."""

    number: int  # trial number; its runs are further replicates of that trial
    config: Config
    search_value: float | None = None  # geometric mean of its objective in the search, relative to the baseline


@dataclass(frozen=True, slots=True)
class Run:
    """One fresh server of the finish."""

    number: int
    round: int
    seed: int  # of the requests; the same for everyone in a round, never used before


@dataclass(frozen=True, slots=True)
class Look:
    """When the runs are judged, and with which confidence; fixed before the first run."""

    rounds: int  # so far
    confidence: float


@dataclass(frozen=True, slots=True)
class Removal:
    """The winner without one of its flags (and without what is refused without that flag)."""

    flag: str
    value: KnobValue | None  # None: the winner leaves out a flag of the baseline, which returns to vLLM's default
    config: Config


def choose_finalists(
    measured: Sequence[Contender], incumbent: int | None, noise: float, most: int = MOST_FINALISTS
) -> tuple[Contender, ...]:
    """The incumbent and what cannot be told from the best, best first, `most` at most; the baseline is none.

    `measured`: configurations that kept the SLO in the search, the baseline left out. `noise`: relative spread of one
    value; two single values differ by √2 of it, and what lies within twice that may be the best.
    """
    by_config = {repr(sorted(c.config.items())): c for c in reversed(measured)}  # one that was measured twice is one
    ranked = sorted(
        (c for c in by_config.values() if c.search_value is not None and c.search_value > 0),
        key=lambda c: (-(c.search_value or 0.0), len(c.config), c.number),
    )
    best = max([1.0, *(c.search_value or 0.0 for c in ranked)])
    near = [c for c in ranked if math.log(best / (c.search_value or best)) <= 2 * math.sqrt(2) * noise]
    chosen = near[:most]
    leader = next((c for c in ranked if c.number == incumbent), None)
    if leader is not None and leader not in chosen:
        chosen = [*chosen[: most - 1], leader]
    return tuple(chosen)


def plan_rounds(numbers: Sequence[int], rounds: int, seed: int, first: int = 0) -> tuple[Run, ...]:
    """Every configuration once a round, the order rotated and turned from round to round, fresh requests each round.

    `first`: index of the first round, so that later stages continue the count (and never repeat requests).
    """
    runs: list[Run] = []
    for turn in range(first, first + rounds):
        shift = turn % len(numbers)
        order = [*numbers[shift:], *numbers[:shift]]
        turned = turn // len(numbers) % 2 == 1  # rotation alone never puts a follower before its predecessor
        runs.extend(Run(number, turn, round_seed(seed, turn)) for number in (order[::-1] if turned else order))
    return tuple(runs)


def plan_looks(rounds: int, most: int) -> tuple[Look, ...]:
    """One look after `rounds`; a second one after `most` rounds where that is more, each with its share of the error.

    Whatever decides between them whether to go on, no more than 5 % of verdicts are false and no more than 5 % of
    intervals miss (repeated confidence intervals: Jennison and Turnbull (2000), chapter 9).
    """
    if most <= rounds:
        return (Look(rounds, CONFIDENCE),)
    return tuple(Look(*pair) for pair in zip((rounds, most), TWO_LOOKS, strict=True))


def worth_more(gain: float, log_sd: float, contenders: int, last: Look) -> bool:
    """Whether a gain that is not proved yet might be at the last look: it exceeds half of what that could just claim.

    `gain`: of the best contender, 1.0 is none; `contenders`: the baseline left out.
    """
    if not gain > 1 or math.isnan(log_sd):
        return False
    df = contenders * (last.rounds - 1)
    claim = dunnett(contenders, df, last.confidence) * log_sd * math.sqrt(2 / last.rounds)
    return math.log(gain) >= claim / 2


def round_seed(seed: int, turn: int) -> int:
    """Seed of a round's requests; far from the small seeds that the search uses."""
    return (seed * 0x9E3779B1 + (turn + 1) * 0x85EBCA77) % 2**31 | 2**31


def removals(
    winner: Config, baseline: Config, refused: Mapping[str, Sequence[str]] | None = None
) -> tuple[Removal, ...]:
    """The winner without each of its flags in turn; empty when it has one only (without it, it is the baseline).

    `refused`: flag to the flags that cannot stay without it (a coupling), which are then removed with it.
    """
    flags = sorted(changed_flags(winner, baseline))
    if len(flags) < 2:
        return ()
    found: list[Removal] = []
    for flag in flags:
        gone = {flag, *(refused or {}).get(flag, ())}
        kept = {name: value for name, value in winner.items() if name not in gone}
        restored = {name: baseline[name] for name in gone if name in baseline}
        found.append(Removal(flag, winner.get(flag), {**kept, **restored}))
    return tuple(found)


def changed_flags(config: Config, baseline: Config) -> tuple[str, ...]:
    """Flags in which a configuration differs from the baseline, those that it leaves out included."""
    return tuple(name for name in {**baseline, **config} if config.get(name) != baseline.get(name))


def ablation_rounds(rounds: int) -> int:
    """Rounds of the ablation, and of the verification of a reduced winner."""
    return max(2, (rounds + 1) // 2)


def reserve_s(run_s: float, rounds: int, finalists: int = MOST_FINALISTS, flags: int = 3) -> float:
    """Wall seconds that the search leaves to the finish: rounds, ablation, and verification of a reduced winner.

    `run_s`: measured mean duration of one full trial.
    """
    later = ablation_rounds(rounds)
    return run_s * (rounds * (1 + finalists) + later * (1 + flags) + later * 3)


def affordable_rounds(run_s: float, budget_s: float) -> int:
    """Five rounds where the budget leaves at least half of itself to the search, otherwise three."""
    return FULL_ROUNDS if reserve_s(run_s, FULL_ROUNDS) <= budget_s / 2 else SHORT_ROUNDS
