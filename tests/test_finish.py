"""The finish keeps its word: false claims, power and coverage over simulated finishes; flags, order and cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.finish import (
    Contender,
    Decision,
    Look,
    Measured,
    Removal,
    affordable_rounds,
    choose_finalists,
    class_winners,
    dunnett,
    effects,
    judge,
    layout,
    plan_looks,
    plan_rounds,
    reduced_stands,
    removals,
    reserve_s,
    round_seed,
    worth_more,
)

CLASSES = {"chat": 0.7, "batch": 0.3}


def runs(
    gains: dict[int, float], rounds: int, seed: int, sd: float = 0.03, drift: float = 0.02, first: int = 0
) -> list[Measured]:
    """Configuration to true log gain; every run has the luck of its start, every round its own weather."""
    draw = np.random.default_rng(seed)
    found = []
    for turn in range(first, first + rounds):
        weather = drift * draw.normal()
        for number, gain in gains.items():
            start = sd * draw.normal()
            values = {
                name: rate * math.exp(gain + weather + start + 0.01 * draw.normal())
                for name, rate in (("chat", 20.0), ("batch", 3.0))
            }
            found.append(Measured(number, turn, values, {"chat ttft p99": -0.02}))
    return found


def finishes(low: float, high: float, count: int, rounds: int) -> tuple[float, float]:
    """Shares of finishes that said `improved`, and whose interval held the truth of the configuration they named."""
    draw = np.random.default_rng(7)
    improved = covered = named = 0
    for i in range(count):
        top = math.log1p(draw.uniform(low, high))
        gains = {0: 0.0, 4: top, 9: top - abs(0.01 * draw.normal())}
        verdict = judge(runs(gains, rounds, i), 0, CLASSES)
        improved += verdict.decision is Decision.IMPROVED
        best = max(verdict.gains, key=lambda number: verdict.gains[number].value)
        named += 1
        covered += verdict.gains[best].low <= math.exp(gains[best]) <= verdict.gains[best].high
    return improved / count, covered / named


def test_no_gain_is_rarely_called_improved_and_intervals_hold() -> None:
    improved, covered = finishes(0.0, 0.005, 500, 5)
    assert improved <= 0.04
    assert covered >= 0.93


def test_a_real_gain_is_found_and_intervals_hold() -> None:
    improved, covered = finishes(0.08, 0.15, 500, 5)
    assert improved >= 0.95
    assert covered >= 0.93


def test_three_rounds_still_make_no_false_claims() -> None:
    improved, covered = finishes(0.0, 0.005, 500, 3)
    assert improved <= 0.04
    assert covered >= 0.93


def two_looks(low: float, high: float, count: int, sd: float) -> tuple[float, float, float]:
    """Shares of `improved` and of intervals that hold the truth, and the mean number of rounds."""
    draw = np.random.default_rng(11)
    improved = covered = rounds = 0
    looks = plan_looks(5, 10)
    for i in range(count):
        top = math.log1p(draw.uniform(low, high))
        gains = {0: 0.0, 4: top, 9: top - abs(0.01 * draw.normal())}
        everything = runs(gains, 10, i, sd=sd)
        for look in looks:
            so_far = [run for run in everything if run.round < look.rounds]
            verdict = judge(so_far, 0, CLASSES, confidence=look.confidence)
            assert verdict.gain is not None
            done = verdict.decision is Decision.IMPROVED
            if done or not worth_more(verdict.gain.value, verdict.log_sd, 2, looks[-1]):
                break
        improved += done
        rounds += verdict.rounds
        best = max(verdict.gains, key=lambda number: verdict.gains[number].value)
        covered += verdict.gains[best].low <= math.exp(gains[best]) <= verdict.gains[best].high
    return improved / count, covered / count, rounds / count


@pytest.mark.parametrize("sd", [0.03, 0.06])
def test_a_second_look_makes_no_false_claims(sd: float) -> None:
    improved, covered, _ = two_looks(0.0, 0.005, 500, sd)
    assert improved <= 0.04
    assert covered >= 0.93


def test_a_second_look_finds_what_noise_hides_and_is_rarely_needed_without() -> None:
    once, _ = finishes(0.08, 0.15, 300, 5)
    found, covered, rounds = two_looks(0.08, 0.15, 300, 0.03)
    assert found >= 0.97
    assert covered >= 0.93
    assert rounds < 6
    noisy, _, more = two_looks(0.08, 0.15, 300, 0.05)
    assert noisy >= 0.9
    assert 6 < more < 10
    assert once >= 0.95


def test_looks_share_the_error() -> None:
    assert plan_looks(5, 5) == plan_looks(5, 0) == (Look(5, 0.95),)
    first, last = plan_looks(5, 10)
    assert (first.rounds, last.rounds) == (5, 10)
    assert 1 - first.confidence + 1 - last.confidence == pytest.approx(0.05)
    assert not worth_more(0.99, 0.03, 2, last)
    assert not worth_more(1.01, 0.05, 2, last)
    assert worth_more(1.05, 0.05, 2, last)


@pytest.mark.parametrize(("k", "df", "published"), [(2, 10, 2.57), (3, 10, 2.76), (3, 20, 2.54), (5, 30, 2.66)])
def test_critical_values_are_dunnetts(k: int, df: int, published: float) -> None:
    """Two-sided 5 % points of Dunnett (1964), Biometrics 20, 482, table II."""
    assert dunnett(k, df) == pytest.approx(published, abs=0.012)


def test_what_a_round_shares_cancels_out() -> None:
    calm = layout({(n, r): [v * (1 + 0.01 * ((n + r) % 3))] for n, v in ((0, 10.0), (1, 11.0)) for r in range(4)})
    stormy = layout(
        {(n, r): [v * (1 + 0.01 * ((n + r) % 3)) * 1.5**r] for n, v in ((0, 10.0), (1, 11.0)) for r in range(4)}
    )
    assert stormy.ratio(1, 0).value == pytest.approx(calm.ratio(1, 0).value)
    assert stormy.log_sd == pytest.approx(calm.log_sd)
    assert calm.df == 3


def test_one_round_claims_nothing() -> None:
    verdict = judge(runs({0: 0.0, 1: 0.5}, 1, 1), 0, CLASSES)
    assert verdict.decision is Decision.KEEP_DEFAULTS
    assert verdict.gain is not None
    assert verdict.gain.low == 0.0
    assert math.isinf(verdict.gain.high)


def test_a_contender_that_once_missed_the_slo_cannot_win() -> None:
    measured = runs({0: 0.0, 1: 0.3, 2: 0.15}, 5, 3)
    last = measured[-2]
    assert last.number == 1
    measured[-2] = Measured(1, last.round, last.values, {"chat ttft p99": 0.1})
    verdict = judge(measured, 0, CLASSES)
    assert verdict.winner == 2
    assert "trial 1 missed the SLO in 1 of 5 runs" in verdict.notes[0]


def test_a_contender_that_once_crashed_cannot_win() -> None:
    measured = [*runs({0: 0.0, 1: 0.3}, 5, 3), Measured(1, 5, {}, {}, ran=False)]
    verdict = judge(measured, 0, CLASSES)
    assert (verdict.decision, verdict.winner) == (Decision.KEEP_DEFAULTS, 0)
    assert "did not run" in verdict.notes[0]


def test_nothing_keeps_the_slo() -> None:
    measured = [
        Measured(n, r, {"chat": 1.0, "batch": 1.0}, {"chat ttft p99": 0.5 - 0.1 * n, "batch tpot p99": 0.1})
        for n in (0, 1, 2)
        for r in range(3)
    ]
    verdict = judge(measured, 0, CLASSES)
    assert verdict.decision is Decision.NO_FEASIBLE
    assert verdict.winner is None
    assert verdict.nearest is not None
    assert (verdict.nearest.number, verdict.nearest.limit) == (2, "chat ttft p99")
    assert verdict.nearest.excess == pytest.approx(0.3)


def test_a_baseline_that_cannot_run_is_improved_on_without_a_gain() -> None:
    measured = [*runs({1: 0.0}, 3, 1), *(Measured(0, r, {}, {}, ran=False) for r in range(3))]
    verdict = judge(measured, 0, CLASSES)
    assert (verdict.decision, verdict.winner, verdict.gain) == (Decision.IMPROVED, 1, None)


def test_classes_have_winners_and_the_compromise_its_regret() -> None:
    measured = []
    for turn in range(5):
        for number, chat, batch in ((0, 10.0, 2.0), (1, 13.0, 2.2), (2, 10.5, 2.6)):
            wobble = 1 + 0.004 * ((number * 7 + turn * 3) % 5)
            measured.append(Measured(number, turn, {"chat": chat * wobble, "batch": batch * wobble}, {"x": -0.1}))
    verdict = judge(measured, 0, CLASSES)
    assert verdict.winner == 1
    assert verdict.classes["chat"].best == 1
    assert verdict.classes["chat"].regret == 0
    assert verdict.classes["batch"].best == 2
    assert verdict.classes["batch"].regret == pytest.approx(1 - 2.2 / 2.6, abs=0.02)
    gain = verdict.classes["chat"].gain
    assert gain is not None
    assert gain.low < 1.3 < gain.high
    assert class_winners({1: {"chat": 13.0, "batch": 2.2}, 2: {"chat": 10.5, "batch": 2.6}}) == {"chat": 1, "batch": 2}


def test_ablation_tells_flags_that_matter_from_those_that_do_not() -> None:
    removed = {5: Removal("max-num-seqs", 64, {}), 6: Removal("block-size", 32, {}), 7: Removal("max-model-len", 1, {})}
    measured = runs({4: 0.2, 5: 0.05, 6: 0.2}, 5, 11, sd=0.02)
    measured += [Measured(7, turn, {}, {}, ran=False) for turn in range(5)]
    found = {effect.flag: effect for effect in effects(measured, 4, removed, CLASSES)}
    assert found["max-num-seqs"].matters
    assert not found["block-size"].matters
    assert found["max-model-len"].matters
    assert found["max-model-len"].effect is None
    effect = found["max-num-seqs"].effect
    assert effect is not None
    assert effect.low <= math.exp(0.15) <= effect.high


def test_a_reduced_winner_must_still_win_and_lose_nothing() -> None:
    first = runs({0: 0.0, 4: 0.2}, 5, 1, sd=0.01)
    assert reduced_stands([*first, *runs({0: 0.0, 4: 0.2, 8: 0.2}, 3, 2, sd=0.01, first=5)], 0, 4, 8, CLASSES)
    assert not reduced_stands([*first, *runs({0: 0.0, 4: 0.2, 8: 0.1}, 3, 2, sd=0.01, first=5)], 0, 4, 8, CLASSES)
    assert not reduced_stands([*first, *runs({0: 0.0, 4: 0.2, 8: 0.0}, 3, 2, sd=0.01, first=5)], 0, 4, 8, CLASSES)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True), st.integers(1, 7), st.integers(0, 2**31))
def test_rounds_are_balanced_rotated_and_fresh(numbers: list[int], rounds: int, seed: int) -> None:
    planned = plan_rounds(numbers, rounds, seed)
    by_round = [[run.number for run in planned if run.round == turn] for turn in range(rounds)]
    assert all(sorted(order) == sorted(numbers) for order in by_round)
    assert len({run.seed for run in planned}) == rounds
    if len(numbers) > 1 and rounds > 1:
        assert by_round[0] != by_round[1]
    later = plan_rounds(numbers, rounds, seed, first=rounds)
    assert not {run.seed for run in later} & {run.seed for run in planned}


def test_round_seeds_lie_outside_those_of_the_search() -> None:
    assert all(round_seed(seed, turn) >= 2**31 for seed in range(50) for turn in range(20))


def test_finalists_are_what_cannot_be_told_from_the_best_and_the_incumbent() -> None:
    def contender(number: int, value: float, flags: int = 1) -> Contender:
        return Contender(number, {f"f{i}": number for i in range(flags)}, value)

    measured = [contender(1, 1.2), contender(2, 1.19), contender(3, 1.02), contender(4, 1.18)]
    assert [c.number for c in choose_finalists(measured, 1, 0.02)] == [1, 2]
    assert [c.number for c in choose_finalists(measured, 3, 0.02)] == [1, 3]
    assert [c.number for c in choose_finalists(measured, 1, 0.001)] == [1]
    assert [c.number for c in choose_finalists(measured, 1, 0.02, most=3)] == [1, 2, 4]
    assert [c.number for c in choose_finalists([contender(1, 1.1, 2), contender(2, 1.1, 1)], 1, 0.0, most=1)] == [1]
    assert choose_finalists([contender(1, 0.8)], None, 0.02) == ()
    assert choose_finalists([], None, 0.02) == ()


def test_a_configuration_that_was_measured_twice_is_one_finalist() -> None:
    twice = [Contender(1, {"a": 1}, 1.2), Contender(2, {"b": 1}, 1.1), Contender(5, {"a": 1}, 1.2)]
    assert [c.number for c in choose_finalists(twice, 5, 0.04)] == [1, 2]


def test_removals_take_what_cannot_stay_along() -> None:
    winner = {"max-num-seqs": 2048, "max-num-batched-tokens": 4096, "block-size": 32}
    found = removals(winner, {}, {"max-num-batched-tokens": ["max-num-seqs"]})
    assert {r.flag: r.config for r in found} == {
        "max-num-seqs": {"max-num-batched-tokens": 4096, "block-size": 32},
        "max-num-batched-tokens": {"block-size": 32},
        "block-size": {"max-num-seqs": 2048, "max-num-batched-tokens": 4096},
    }
    assert removals({"block-size": 32}, {}) == ()
    kept = removals({"a": 2, "b": 3}, {"a": 1})
    assert kept[0].config == {"a": 1, "b": 3}


def test_more_rounds_only_where_they_leave_time_to_search() -> None:
    assert reserve_s(300, 5) > reserve_s(300, 3)
    assert affordable_rounds(300, 20 * 3600) == 5
    assert affordable_rounds(300, 2 * 3600) == 3


def test_a_baseline_that_kept_the_slo_in_some_runs_is_still_compared_with() -> None:
    def run(number: int, turn: int, value: float, excess: float = -0.1) -> Measured:
        return Measured(number, turn, {"a": value}, {"slo.a": excess})

    baseline = [run(0, 0, 1.0), run(0, 1, 1.0), run(0, 2, 0.98, excess=0.01)]
    worse = [run(5, turn, value) for turn, value in enumerate((0.90, 0.91, 0.90))]
    verdict = judge([*baseline, *worse], 0, {"a": 1.0})
    assert verdict.decision is Decision.KEEP_DEFAULTS
    assert any("1 of 3" in note for note in verdict.notes)


def test_no_gain_is_claimed_over_a_capacity_known_from_below_only() -> None:
    open_ended = [Measured(0, turn, {"a": 1.0}, {"slo.a": -0.5}, True, frozenset({"a"})) for turn in range(3)]
    better = [Measured(5, turn, {"a": 2.0}, {"slo.a": -0.1}) for turn in range(3)]
    verdict = judge([*open_ended, *better], 0, {"a": 1.0})
    assert verdict.decision is Decision.KEEP_DEFAULTS
    assert any("known from below only" in note for note in verdict.notes)


def test_when_nothing_that_may_be_judged_keeps_the_slo_nothing_is_feasible() -> None:
    missed = [Measured(number, 0, {"a": 1.0}, {"slo.a": 0.2}) for number in (0, 7)]
    stood = [Measured(5, 0, {"a": 1.0}, {"slo.a": -0.1})]
    assert judge([*missed, *stood], 0, {"a": 1.0}, only=7).decision is Decision.NO_FEASIBLE
