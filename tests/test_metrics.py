"""Known request times in, exact scores out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.synthetic import result, slo
from tuner.metrics import meets, outcome_of, overall, score, score_all
from tuner.records import Outcome, RequestStatus

WINDOW = (10.0, 20.0)
PROMISE = slo(ttft=(99, 0.5), tpot=(99, 0.05))


def fast(index: int, at: float, **changes: object):
    """TTFT 0.1 s, TPOT 0.02 s, 11 tokens."""
    return result(index, at, at + 0.1, at + 0.3, 11, **changes)


def failed(index: int, at: float, status: RequestStatus = RequestStatus.HTTP_ERROR):
    return fast(index, at, status=status, first_s=None, last_s=None, gaps_us=(), output_tokens=0, chunks=0)


def test_only_the_window_is_scored() -> None:
    requests = [fast(i, float(i)) for i in range(30)]
    metrics = score(requests, PROMISE, class_name="c", window=WINDOW)
    assert metrics.requests == 10  # scheduled at 10 … 19
    assert metrics.failed == 0
    assert metrics.latency["ttft"].p99.value == pytest.approx(0.1)
    assert metrics.latency["tpot"].mean == pytest.approx(0.02)
    assert metrics.latency["itl"].n == 100
    assert metrics.latency["e2e"].p50.value == pytest.approx(0.3)
    assert metrics.goodput_rps == 1.0
    assert metrics.throughput_rps == 1.0
    assert metrics.output_tps == pytest.approx(11.0)
    assert metrics.input_tps == pytest.approx(100.0)
    assert metrics.margin == pytest.approx(0.02 / 0.05 - 1)
    assert metrics.statuses == {"ok": 10}


def test_failures_miss_everywhere_but_stay_out_of_latency() -> None:
    requests = [fast(i, 10 + i / 100) for i in range(97)] + [failed(97 + i, 11.0) for i in range(3)]
    metrics = score(requests, slo(success=0.9, ttft=(99, 0.5)), class_name="c", window=WINDOW)
    assert (metrics.requests, metrics.failed) == (100, 3)
    assert metrics.success.value == metrics.attainment.value == pytest.approx(0.97)
    assert metrics.limits[0].observed_s == math.inf
    assert metrics.limits[0].share_within.value == pytest.approx(0.97)
    assert metrics.margin == math.inf
    assert metrics.latency["ttft"].n == 97
    assert metrics.latency["ttft"].p99.value == pytest.approx(0.1)
    assert metrics.statuses == {"ok": 97, "http-error": 3}
    assert metrics.goodput_rps == pytest.approx(9.7)


def test_a_failure_within_the_percentile_is_allowed_but_not_beyond_the_success_share() -> None:
    requests = [fast(i, 10 + i / 100) for i in range(99)] + [failed(99, 11.0)]
    assert score(requests, slo(success=0.98, ttft=(99, 0.5)), class_name="c", window=WINDOW).margin == pytest.approx(
        -0.8
    )
    assert score(requests, slo(success=0.999, ttft=(99, 0.5)), class_name="c", window=WINDOW).margin == math.inf


@pytest.mark.parametrize("status", [status for status in RequestStatus if status is not RequestStatus.OK])
def test_every_status_but_ok_misses_even_with_good_times(status: RequestStatus) -> None:
    metrics = score([fast(0, 11.0, status=status)], PROMISE, class_name="c", window=WINDOW)
    assert (metrics.failed, metrics.attainment.value, metrics.output_tps) == (1, 0.0, 0.0)
    assert metrics.latency == {}


def test_one_token_has_no_tpot_but_counts() -> None:
    one = result(0, 11.0, 11.1, 11.1, 1)
    slow = result(1, 12.0, 12.1, 13.1, 11)  # TPOT 0.1
    metrics = score([one, slow], PROMISE, class_name="c", window=WINDOW)
    ttft, tpot = metrics.limits
    assert (ttft.share_within.n, tpot.share_within.n) == (2, 1)
    assert metrics.latency["tpot"].n == 1
    assert metrics.attainment.value == 0.5
    assert meets(one, PROMISE)
    alone = score([one] * 400, PROMISE, class_name="c", window=WINDOW)
    assert alone.limits[1].share_within.n == 0
    assert alone.outcome is Outcome.MET
    assert alone.margin == pytest.approx(0.1 / 0.5 - 1)


@pytest.mark.parametrize("limit", [{"tpot": (99, 0.05)}, {"itl": (99, 0.05)}])
def test_a_failed_single_token_says_nothing_about_gaps(limit: dict[str, tuple[float, float]]) -> None:
    single = {"planned_output_tokens": 1}
    answers = [result(i, 10 + i / 100, 10.1 + i / 100, 10.1 + i / 100, 1, gaps_us=(), **single) for i in range(900)]
    requests = [*answers, failed(900, 15.0, RequestStatus.TIMEOUT)]
    requests[-1] = replace(requests[-1], planned_output_tokens=1)
    metrics = score(requests, slo(success=0.99, ttft=(99, 0.5), **limit), class_name="c", window=WINDOW)
    assert metrics.failed == 1
    assert metrics.limits[1].share_within.n == 0
    assert metrics.margin == pytest.approx(-0.8)


def test_latency_counts_from_the_scheduled_time() -> None:
    late = fast(0, 11.0, sent_s=13.0, first_s=13.1, last_s=13.3, end_s=13.3)
    metrics = score([late], PROMISE, class_name="c", window=WINDOW)
    assert metrics.latency["ttft"].p50.value == pytest.approx(2.1)
    assert metrics.latency["e2e"].p50.value == pytest.approx(2.3)
    assert metrics.attainment.value == 0.0


def test_pooled_gaps() -> None:
    promise = slo(success=0.5, itl=(90, 0.03))
    smooth = [fast(i, 11.0) for i in range(9)]
    stalled = fast(9, 12.0, gaps_us=(20_000,) * 8 + (500_000,) * 2)
    metrics = score([*smooth, stalled], promise, class_name="c", window=WINDOW)
    assert metrics.limits[0].observed_s == pytest.approx(0.02)  # 2 of 100 gaps are long
    assert metrics.limits[0].share_within.value == pytest.approx(0.98)
    assert metrics.limits[0].share_within.n == 10  # as many as requests, not as gaps
    assert metrics.attainment.value == 0.9  # the stalled request's own P90 is long
    with_failure = score([*smooth, failed(9, 12.0)], promise, class_name="c", window=WINDOW)
    assert with_failure.limits[0].share_within.value == pytest.approx(0.9)


def test_overload_shows_in_throughput_not_in_goodput() -> None:
    # One arrival a second, one completion every two.
    requests = [result(i, float(i), 2.0 * i + 2, 2.0 * i + 2, 1) for i in range(20)]
    metrics = score(requests, slo(ttft=(50, 100)), class_name="c", window=WINDOW)
    assert metrics.requests == 10
    assert metrics.throughput_rps == 0.5
    assert metrics.goodput_rps == 1.0


def test_tokens_are_counted_where_they_arrive() -> None:
    long = result(0, 5.0, 5.5, 15.5, 11)  # a token a second
    metrics = score([long, fast(1, 10.0)], PROMISE, class_name="c", window=(10.0, 14.0))
    assert metrics.output_tps == pytest.approx((4 + 11) / 4)  # 10.5, 11.5, 12.5, 13.5 and the fast one's 11


def test_outcomes_need_evidence() -> None:
    def outcome(good: int, bad: int) -> Outcome:
        requests = [fast(i, 11.0) for i in range(good)] + [result(i, 11.0, 12.0, 12.1, 11) for i in range(bad)]
        return score(requests, PROMISE, class_name="c", window=WINDOW).outcome

    assert outcome(60, 0) is Outcome.UNRESOLVED  # P99 from 60 requests proves nothing
    assert outcome(381, 0) is Outcome.MET
    assert outcome(58, 2) is Outcome.UNRESOLVED
    assert outcome(50, 10) is Outcome.MISSED
    assert outcome(0, 0) is Outcome.UNRESOLVED


def test_pooling_windows_resolves() -> None:
    scores = [score([fast(i, 11.0) for i in range(150)], PROMISE, class_name="c", window=WINDOW) for _ in range(4)]
    windows = [(s.limits, s.success) for s in scores]
    assert outcome_of(PROMISE, windows[:1]) is Outcome.UNRESOLVED
    assert outcome_of(PROMISE, windows) is Outcome.MET


def test_mixed_is_judged_class_by_class() -> None:
    requests = [fast(i, 11.0, class_name="chat") for i in range(400)]
    requests += [result(i, 11.0, 13.0, 14.0, 11, class_name="doc") for i in range(400)]
    promises = {"chat": PROMISE, "doc": slo(ttft=(99, 1.0), tpot=(99, 0.2))}
    classes = score_all(requests, promises, window=WINDOW)
    assert classes["chat"].outcome is Outcome.MET
    assert classes["doc"].outcome is Outcome.MISSED
    assert overall(classes) == (Outcome.MISSED, pytest.approx(1.0))
    assert overall({"chat": classes["chat"]})[0] is Outcome.MET


def test_a_class_without_requests_is_unresolved_and_no_obstacle() -> None:
    metrics = score([], PROMISE, class_name="c", window=WINDOW)
    assert (metrics.requests, metrics.margin, metrics.outcome) == (0, -1.0, Outcome.UNRESOLVED)
    assert math.isnan(metrics.success.value)


def test_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="empty window"):
        score([], PROMISE, class_name="c", window=(1.0, 1.0))
