"""The capacity search on servers whose capacity is known, and screening."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from tests.synthetic import Serve, as_probe, batching, prober, queue, result, slo
from tuner.capacity import DEMO, FINISH, SEARCH, Reference, decide, find_capacity, objective, reference, screen
from tuner.errors import HarnessError
from tuner.records import Bound, Capacity, ClassSlo, Outcome, Probe, RequestStatus

PROMISE = slo(ttft=(99, 1.0))
Curve = Callable[[float, random.Random], float]


def flat(curve: Curve, *, fails_above: float = math.inf, invalid_above: float = math.inf) -> Callable[..., Probe]:
    """Every request of a probe has the TTFT that `curve(rate, generator)` says; the limit is 1 s."""

    def probe(workload: str, rate: float, seed: int, purpose: str, window_s: float) -> Probe:
        ttft = curve(rate, random.Random(seed))
        times = [2.0 + i / rate for i in range(max(1, round(rate * window_s)))]
        results = [result(i, at, at + ttft, at + ttft, 1, class_name=workload) for i, at in enumerate(times)]
        if rate > fails_above:
            results = [replace(r, status=RequestStatus.HTTP_ERROR) for r in results]
        made = as_probe(results, PROMISE, workload, rate, seed, purpose, 2.0, window_s)
        if rate > invalid_above:
            made = replace(
                made, outcome=Outcome.INVALID, validity=replace(made.validity, valid=False, reasons=("lag",))
            )
        return made

    return probe


def power(capacity: float, slope: float, noise: float = 0.0) -> Curve:
    return lambda rate, rng: (rate / capacity) ** slope * math.exp(rng.gauss(0, noise) if noise else 0.0)


def seeds(start: int = 0) -> Iterator[int]:
    return itertools.count(start)


@pytest.mark.parametrize("slope", [0.8, 2.5, 8.0])
@pytest.mark.parametrize("start", [0.05, 0.5, 0.9, 1.0, 1.1, 2.0, 20.0])
def test_a_clean_curve_is_found_from_anywhere(slope: float, start: float) -> None:
    capacity = find_capacity(flat(power(12.0, slope)), "c", start_rps=12 * start, settings=SEARCH, seeds=seeds())
    assert capacity.bound is Bound.BRACKETED
    assert capacity.rate_rps == pytest.approx(12.0, rel=0.05)
    assert len(capacity.probes) <= (8 if 0.5 <= start <= 2 else 12)
    assert len({probe.seed for probe in capacity.probes}) == len(capacity.probes)


def test_the_cliff_of_a_saturated_server_is_found() -> None:
    """Half the limit up to 12 requests/s, a hundred times the limit beyond."""
    cliff = flat(lambda rate, rng: 0.5 if rate < 12 else 100.0)
    capacity = find_capacity(cliff, "c", start_rps=8.0, settings=FINISH, seeds=seeds())
    assert capacity.rate_rps == pytest.approx(12.0, rel=0.1)


def test_noise_is_stated_as_it_is() -> None:
    errors, claims, probes = [], [], []
    for i in range(60):
        capacity = find_capacity(
            flat(power(12.0, 2.5, noise=0.2)), "c", start_rps=11.0, settings=SEARCH, seeds=seeds(1000 * i)
        )
        errors.append(math.log(capacity.rate_rps / 12))
        claims.append(capacity.log_sd)
        probes.append(len(capacity.probes))
    assert abs(fmean(errors)) < 0.02
    assert stdev(errors) < 0.07
    assert 0.6 < stdev(errors) / fmean(claims) < 1.4
    assert 3 <= fmean(probes) <= 6
    assert max(probes) <= SEARCH.max_probes + 2


@pytest.mark.parametrize(
    ("serve", "promise", "truth"),
    [
        # The rate at which the median 15 s window just keeps the limit; long windows see rarer bursts and find less.
        (queue(0.02), slo(ttft=(95, 0.1)), 34.8),
        (batching(32, 0.01, 0.0005, 64), slo(ttft=(99, 0.3), tpot=(99, 0.025)), 15.0),
    ],
)
def test_queues(serve: Serve, promise: ClassSlo, truth: float) -> None:
    errors, claims = [], []
    for i in range(24):
        probe = prober(serve, promise)
        capacity = find_capacity(probe, "c", start_rps=truth * 0.9, settings=SEARCH, seeds=seeds(100 * i))
        errors.append(math.log(capacity.rate_rps / truth))
        claims.append(capacity.log_sd)
        assert capacity.bound is Bound.BRACKETED
    assert abs(fmean(errors)) < 0.04
    assert stdev(errors) < 0.09
    assert stdev(errors) < 2.5 * fmean(claims)  # requests that share a busy period are fewer than they seem


def test_same_seeds_make_the_comparison_sharper_than_either_capacity() -> None:
    """A server 12 % faster, measured with the same requests and with others."""
    promise = slo(ttft=(95, 0.1))

    def ratio(i: int, other: int) -> float:
        slow = find_capacity(prober(queue(0.02), promise), "c", start_rps=34, settings=SEARCH, seeds=seeds(i))
        fast = find_capacity(
            prober(queue(0.02 / 1.12), promise), "c", start_rps=34, settings=SEARCH, seeds=seeds(other)
        )
        return math.log(fast.rate_rps / slow.rate_rps)

    paired = [ratio(100 * i, 100 * i) for i in range(12)]
    unpaired = [ratio(100 * i, 100 * i + 50) for i in range(12)]
    assert fmean(paired) == pytest.approx(math.log(1.12), abs=0.05)
    assert stdev(paired) < stdev(unpaired)


def test_missed_everywhere_is_an_upper_bound() -> None:
    capacity = find_capacity(flat(lambda rate, rng: 3.0), "c", start_rps=4.0, settings=SEARCH, seeds=seeds())
    assert capacity.bound is Bound.BELOW
    assert capacity.rate_rps == pytest.approx(min(probe.rate_rps for probe in capacity.probes))
    # At 0.25 requests in the server on average there is nobody left to wait for; going on would only cost time.
    assert 0.02 < capacity.rate_rps < 0.25 / 3.0
    assert len(capacity.probes) <= SEARCH.max_shifts


def test_kept_everywhere_is_a_lower_bound() -> None:
    capacity = find_capacity(flat(lambda rate, rng: 0.1), "c", start_rps=1.0, settings=DEMO, seeds=seeds())
    assert capacity.bound is Bound.ABOVE
    assert len(capacity.probes) == DEMO.max_shifts
    assert capacity.rate_rps == pytest.approx(max(probe.rate_rps for probe in capacity.probes))


def test_failures_are_a_miss_of_any_size() -> None:
    capacity = find_capacity(
        flat(lambda rate, rng: 0.6, fails_above=12.0), "c", start_rps=6.0, settings=FINISH, seeds=seeds()
    )
    assert capacity.bound is Bound.BRACKETED
    assert capacity.rate_rps == pytest.approx(12.0, rel=0.1)
    assert any(probe.margin == math.inf for probe in capacity.probes)
    assert math.isfinite(capacity.log_sd)
    assert math.isfinite(capacity.slope)


def test_a_rate_beyond_the_client_is_never_scored() -> None:
    """A bound that the client sets is none of the server's; a bracket below it stands."""
    with pytest.raises(HarnessError, match="the client could not measure c up to its limit: lag"):
        find_capacity(flat(power(12.0, 2.5), invalid_above=9.0), "c", start_rps=4.0, settings=SEARCH, seeds=seeds())
    beyond = flat(power(12.0, 2.5), invalid_above=14.0)
    known = [beyond("c", 20.0, 99, "screen", 15.0)]
    assert known[0].outcome is Outcome.INVALID
    capacity = find_capacity(beyond, "c", start_rps=11.0, settings=SEARCH, seeds=seeds(), known=known)
    assert capacity.bound is Bound.BRACKETED
    assert capacity.rate_rps == pytest.approx(12.0, rel=0.05)
    # What ends by itself on one side is the server's bound, whatever the client spoilt on the way.
    idle = flat(lambda rate, rng: 3.0, invalid_above=3.0)
    known = [idle("c", 4.0, 99, "screen", 15.0)]
    capacity = find_capacity(idle, "c", start_rps=2.0, settings=SEARCH, seeds=seeds(), known=known)
    assert capacity.bound is Bound.BELOW
    with pytest.raises(HarnessError, match="no probe of c was valid: lag"):
        find_capacity(flat(power(12.0, 2.5), invalid_above=0.0), "c", start_rps=4.0, settings=SEARCH, seeds=seeds())


def test_a_rate_at_which_nothing_arrives_ends_the_search() -> None:
    def silent(workload: str, rate: float, seed: int, purpose: str, window_s: float) -> Probe:
        return as_probe([], PROMISE, workload, rate, seed, purpose, 2.0, window_s)

    with pytest.raises(HarnessError, match="no request was scored"):
        find_capacity(silent, "c", start_rps=0.001, settings=SEARCH, seeds=seeds())


def test_known_probes_are_used_not_repeated() -> None:
    probe = flat(power(12.0, 2.5))
    known = probe("c", 11.5, 999, "screen", 15.0)
    capacity = find_capacity(probe, "c", start_rps=11.5, settings=SEARCH, seeds=seeds(), known=[known])
    assert capacity.probes[0] is known
    assert capacity.probes[1].rate_rps != pytest.approx(11.5, rel=0.001)
    assert [p.purpose for p in capacity.probes[1:]] == ["capacity"] * (len(capacity.probes) - 1)


def test_time_is_accounted_for() -> None:
    capacity = find_capacity(flat(power(2.0, 2.5)), "c", start_rps=2.0, settings=SEARCH, seeds=seeds())
    assert capacity.measuring_s == pytest.approx(sum(probe.window_s for probe in capacity.probes))
    assert capacity.waiting_s == pytest.approx(3.0 * len(capacity.probes))
    # 50 requests at about 2 requests/s take longer than the 15 s that are the least.
    assert all(20 < probe.window_s < 32 for probe in capacity.probes)


def test_a_search_ends_where_its_prober_does() -> None:
    def broken(*_: object) -> Probe:
        raise HarnessError("stop")

    with pytest.raises(HarnessError, match="stop"):
        find_capacity(broken, "c", start_rps=1.0, settings=SEARCH, seeds=seeds())


def capacity_of(rate: float, slope: float = 2.5, start: float | None = None) -> Capacity:
    return find_capacity(flat(power(rate, slope)), "c", start_rps=start or rate, settings=SEARCH, seeds=seeds())


def test_screening_predicts_a_better_and_a_worse_candidate() -> None:
    incumbent = reference(capacity_of(12.0))
    assert incumbent is not None
    for truth, proceeds in ((12.0, True), (13.0, True), (11.9, True), (11.0, False)):
        probe = flat(power(truth, 2.5))("c", incumbent.rate_rps, incumbent.seed, "screen", 15.0)
        screening = screen({"c": probe}, {"c": incumbent}, {"c": 1.0})
        assert screening.predicted["c"] == pytest.approx(math.log(truth / 12.0), abs=0.02)
        assert screening.proceed is proceeds


def test_screening_allows_one_class_to_pay_for_another() -> None:
    incumbent = {name: Reference(10.0, 1, 0.0, 2.5, 10.0) for name in ("a", "b")}
    saturated = flat(lambda rate, rng: 50.0)("a", 10.0, 1, "screen", 15.0)
    better = flat(power(12.0, 2.5))("b", 10.0, 1, "screen", 15.0)
    weights = {"a": 0.5, "b": 0.5}
    both = screen({"a": saturated, "b": better}, incumbent, weights)
    assert both.predicted == {"a": -0.15, "b": pytest.approx(0.15)}
    assert both.proceed
    # Before the other class is probed it counts at its best case, so a single miss rejects nothing.
    assert screen({"a": saturated}, incumbent, weights).proceed
    assert not screen({"a": saturated}, incumbent, {"a": 0.8, "b": 0.2}).proceed


def test_screening_ignores_invalid_probes() -> None:
    invalid = flat(lambda rate, rng: 50.0, invalid_above=0.0)("c", 10.0, 1, "screen", 15.0)
    screening = screen({"c": invalid}, {"c": Reference(10.0, 1, 0.0, 2.5, 10.0)}, {"c": 1.0})
    assert screening.predicted == {}
    assert screening.proceed


def test_objective_is_the_weighted_geometric_mean() -> None:
    value = objective({"a": 20.0, "b": 5.0}, {"a": 10.0, "b": 10.0}, {"a": 0.75, "b": 0.25})
    assert value == pytest.approx(2**0.75 * 0.5**0.25)
    assert objective({"a": 3.0}, {"a": 3.0}, {"a": 1.0}) == 1.0


def test_a_fixed_rate_is_decided_by_pooling_windows() -> None:
    def verdict(ttft: float, looks: int) -> tuple[Outcome, int]:
        outcome, probes = decide(
            flat(lambda rate, rng: ttft),
            "c",
            10.0,
            slos={"c": PROMISE},
            seeds=seeds(),
            window_s=15.0,
            looks=looks,
            purpose="verify",
        )
        return outcome, len(probes)

    assert verdict(0.5, 2) == (Outcome.UNRESOLVED, 2)  # 300 requests cannot prove a P99
    assert verdict(0.5, 8) == (Outcome.MET, 5)  # 750 can, at the confidence that eight looks leave
    assert verdict(2.0, 8) == (Outcome.MISSED, 1)
