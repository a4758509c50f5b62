"""slo.yaml: what each class ends up promising."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.errors import InputError
from tuner.records import Limit, Metric
from tuner.slo import load_slo, parse_slo

CLASSES = ("short", "long", "other")

DOCUMENT = """
slo:
  ttft: {p99: 500, p50: 200}
  tpot: {p99: 40}
  e2e:  {p95: 20000}
  success: 0.99
classes:
  long: {ttft: {p99: 1500}, e2e: null, weight: 0.5, success: 0.9}
"""


def test_class_limits_replace_the_default_of_that_metric_and_keep_the_others(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(DOCUMENT)
    slo = load_slo(path, CLASSES)
    assert slo.classes["short"].limits == (
        Limit(Metric.TTFT, 50.0, 0.2),
        Limit(Metric.TTFT, 99.0, 0.5),
        Limit(Metric.TPOT, 99.0, 0.04),
        Limit(Metric.E2E, 95.0, 20.0),
    )
    assert slo.classes["long"].limits == (Limit(Metric.TTFT, 99.0, 1.5), Limit(Metric.TPOT, 99.0, 0.04))
    assert (slo.classes["short"].success, slo.classes["long"].success) == (0.99, 0.9)


def test_weights_left_out_share_what_is_left() -> None:
    slo = parse_slo({"slo": {"ttft": {"p99": 1}}, "classes": {"long": {"weight": 0.5}}}, "test", CLASSES)
    assert {name: promise.weight for name, promise in slo.classes.items()} == {
        "short": 0.25,
        "long": 0.5,
        "other": 0.25,
    }


def test_weights_for_every_class_are_relative() -> None:
    weights = {"short": 1, "long": 2, "other": 5}
    document = {"slo": {"itl": {"max": 1}}, "classes": {name: {"weight": weight} for name, weight in weights.items()}}
    slo = parse_slo(document, "test", CLASSES)
    assert [promise.weight for promise in slo.classes.values()] == [0.125, 0.25, 0.625]


def test_without_weights_all_classes_count_alike_and_max_is_the_hundredth_percentile() -> None:
    slo = parse_slo({"slo": {"itl": {"max": 250, "p99.9": 200}}}, "test", CLASSES)
    assert sum(promise.weight for promise in slo.classes.values()) == pytest.approx(1.0)
    assert slo.classes["other"].limits == (Limit(Metric.ITL, 99.9, 0.2), Limit(Metric.ITL, 100.0, 0.25))
    assert slo.classes["other"].success == 0.999


def test_the_digest_follows_the_promise_and_not_the_spelling() -> None:
    one = parse_slo({"slo": {"ttft": {"p99": 500, "p50": 100}}}, "a.yaml", CLASSES)
    same = parse_slo({"classes": {}, "slo": {"ttft": {"p50": 100.0, "p99": 500.0}}}, "b.yaml", CLASSES)
    other = parse_slo({"slo": {"ttft": {"p99": 501, "p50": 100}}}, "a.yaml", CLASSES)
    assert one.digest == same.digest != other.digest


def test_an_error_names_file_line_field_value_rule_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text("slo:\n  ttft:\n    p99: -5\n")
    with pytest.raises(InputError) as caught:
        load_slo(path, CLASSES)
    error = caught.value
    assert (error.where, error.field, error.value) == (f"{path}, line 3", "slo.ttft.p99", -5)
    assert "greater than 0" in error.rule
    assert error.remedy


def test_a_class_that_loses_every_limit_is_refused() -> None:
    document = {"slo": {"ttft": {"p99": 1}}, "classes": {"long": {"ttft": None}}}
    with pytest.raises(InputError, match="`long` has no latency limit"):
        parse_slo(document, "test", CLASSES)
