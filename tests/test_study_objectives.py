"""What a study makes larger: objectives at a given rate, all classes at once, and what each class alone would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.formula import FACTS, FormulaExecutor, capacity
from tests.optimizer_world import record
from tests.test_study import CLASSES, SLO, SPACE, better_with_seqs, definition
from tuner.cli.summary import summary
from tuner.records import (
    ClassMetrics,
    Config,
    Decision,
    Estimate,
    Outcome,
    Probe,
    Proposal,
    Step,
    StepKind,
    StudyDefinition,
    TrialRecord,
    TrialState,
)
from tuner.report import Material, build
from tuner.report.html import html
from tuner.report.markdown import markdown
from tuner.report.study import in_order
from tuner.store import ResultsFolder
from tuner.study import Silent, StopSignals, Study, StudyResult, read_study
from tuner.study.values import WINDOWS, Objective, excess, saturated, values
from tuner.trial import TrialRequest

Rates = dict[str, float]


class AtRate(FormulaExecutor):
    """Measures at the rates that a request gives: what is carried on time, and how far the limit is."""

    def run(self, request: TrialRequest) -> TrialRecord:
        found = super().run(request)
        if not request.fixed_rates:
            return found
        assert request.looks == request.least_looks == WINDOWS
        probes, decided = [], {}
        for name, own in found.capacities.items():
            rate = request.fixed_rates[name]
            probe = window(name, rate, own.rate_rps)
            probes += [replace(probe, seed=i) for i in range(request.looks)]
            decided[name] = Decision(probe.outcome, rate, request.looks, 100, 99.0, 100)
        return replace(found, capacities={}, probes=tuple(probes), decided=decided)


def window(name: str, rate: float, carries: float) -> Probe:
    margin = rate / carries - 1
    carried = min(rate, carries)
    outcome, share = Outcome.MET if margin <= 0 else Outcome.MISSED, Estimate(1.0, 1.0, 1.0, 100)
    scores = ClassMetrics(
        class_name=name,
        requests=100,
        failed=0,
        success=share,
        attainment=share,
        limits=(),
        margin=margin,
        latency={},
        goodput_rps=carried,
        throughput_rps=carried,
        output_tps=0.0,
        input_tps=0.0,
        statuses={},
        outcome=outcome,
    )
    return replace(
        capacity(name, rate).probes[0], purpose="bench", classes={name: scores}, outcome=outcome, margin=margin
    )


def study(
    root: Path,
    executor: FormulaExecutor,
    rules: Callable[[Config, Config], bool] = lambda config, defaults: True,
    **changes: object,
) -> StudyResult:
    asked: StudyDefinition = definition(**changes)
    folder = ResultsFolder(root)
    return Study(asked, SLO, SPACE, folder, executor, FACTS, StopSignals(), Silent(), pause_s=0.0, rules=rules).run()


@pytest.mark.parametrize("objective", [Objective.GOODPUT, Objective.LATENCY])
def test_an_objective_at_a_rate_is_searched_proved_and_told(tmp_path: Path, objective: str) -> None:
    rate = 9.0 if objective == Objective.GOODPUT else 1.9  # a latency is compared among what keeps the promise
    result = study(tmp_path, AtRate(better_with_seqs), objective=objective, rate_rps=rate)
    assert result.conclusion.decision == "improved"
    assert int(result.config["max-num-seqs"]) >= 16
    assert result.conclusion.gain is not None
    assert 2.5 < result.conclusion.gain.value < 3.3
    rates = result.rates[CLASSES[0]]
    assert rates.baseline_rps == pytest.approx(2.0 if objective == Objective.GOODPUT else 2.0 / rate, rel=0.1)
    assert not result.notes
    report = build(Material(read_study(ResultsFolder(tmp_path)), SLO, in_order(ResultsFolder(tmp_path).trials()), {}))
    assert all(row.objective is not None for row in report.trials if row.state == "complete")
    assert report.time_s["scored windows"] > 0
    noun, unit = (
        ("goodput", "requests/s") if objective == Objective.GOODPUT else ("latency headroom", "limit ÷ observed")
    )
    said = summary(read_study(ResultsFolder(tmp_path)), tmp_path, ())
    for text in (markdown(report), html(report), said):
        assert "SLO capacity" not in text
        assert "A capacity is" not in text
        assert noun in text
        assert unit in text
        assert f"Measured at {rate:g} requests/s" in text


def test_a_load_that_the_baseline_carries_whole_is_told(tmp_path: Path) -> None:
    result = study(tmp_path, AtRate(better_with_seqs), objective="goodput", rate_rps=0.5)
    assert result.conclusion.decision == "keep-defaults"
    assert any("carries all of the offered load" in note and "--rate" in note for note in result.notes)


def test_values_at_a_rate() -> None:
    probes = (window("chat", 4.0, 2.0), window("chat", 4.0, 2.0))
    decided = {"chat": Decision(Outcome.MISSED, 4.0, 2, 100, 99.0, 100)}
    proposal = Proposal(0, {}, Step(StepKind.BASELINE, {}, None, "test"))
    found = replace(record(proposal, TrialState.COMPLETE), probes=probes, decided=decided)
    assert values(found, "goodput") == values(found, "throughput") == {"chat": pytest.approx(2.0)}
    assert values(found, "latency") == {"chat": pytest.approx(0.5)}
    assert excess(found, "chat", "goodput") < 0
    assert excess(found, "chat", "throughput") == excess(found, "chat", "latency") == pytest.approx(1.0)
    assert saturated(found, "goodput") == ()
    assert saturated(replace(found, probes=(window("chat", 4.0, 8.0),)), "goodput") == ("chat",)


def test_all_classes_at_once_are_measured_in_the_end_and_are_no_part_of_the_verdict(tmp_path: Path) -> None:
    def formula(config: Config) -> Rates:
        own = better_with_seqs(config)
        return {**own, "mixed": 3.0 if config.get("max-num-seqs", 1) == 1 else 2.4}  # worse together

    digests = {**dict.fromkeys(CLASSES, "d"), "mixed": "m"}
    executor = FormulaExecutor(formula)
    result = study(tmp_path, executor, workload_digests=digests)
    assert result.conclusion.decision == "improved"
    assert set(result.conclusion.classes) == set(CLASSES)
    mixed = result.mixed["mixed"]
    assert mixed.baseline_rps == pytest.approx(3.0, rel=0.1)
    assert mixed.best_rps == pytest.approx(2.4, rel=0.1)
    assert mixed.gain is not None
    assert mixed.gain.value < 1
    asked = [request for request in executor.asked if request.workloads == ("mixed",)]
    assert len(asked) == 4
    assert {request.proposal.config.get("max-num-seqs") for request in asked} == {1, result.config["max-num-seqs"]}
    earlier = {request.round for request in executor.asked if request.workloads != ("mixed",)}
    assert not earlier & {request.round for request in asked}


def test_a_class_alone_would_take_something_else_and_at_what_price(tmp_path: Path) -> None:
    def formula(config: Config) -> Rates:
        """One class wants many sequences, the other a small budget that costs the first one dearly."""
        small = config.get("max-num-batched-tokens") == 512
        first, second = CLASSES
        return {first: better_with_seqs(config)[first] * (0.5 if small else 1.0), second: 3.0 if small else 2.0}

    result = study(tmp_path, FormulaExecutor(formula), budget=replace(definition().budget, trials=12))
    first, second = (result.class_bests[name] for name in CLASSES)
    assert second.config.get("max-num-batched-tokens") == 512
    assert second.gain > 1.3
    assert second.regret > 0.05
    assert abs(first.regret) < 0.1


def test_what_breaks_a_rule_costs_no_trial(tmp_path: Path) -> None:
    seen: list[Config] = []

    def rules(config: Config, defaults: Config) -> bool:
        seen.append(defaults)
        return config.get("max-num-seqs") != 64

    executor = FormulaExecutor(better_with_seqs)
    study(tmp_path, executor, rules)
    assert 64 not in {request.proposal.config.get("max-num-seqs") for request in executor.asked}
    # The baseline's own override is no default; what its log has shown beside it is one.
    assert {repr(sorted(defaults.items())) for defaults in seen} == {repr([("max-num-batched-tokens", 2048)])}
