"""The search as the study sees it: what is asked, what Optuna hears, and that nothing of it is lost."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState as OptunaState

from tests.optimizer_world import DEFAULTS, OUT_OF_MEMORY, SPACE, World, effective, fits, optimizer, record, truth
from tuner.optimizer import Optimizer, Told
from tuner.optimizer.ledger import CRASH, judge
from tuner.records import Config, Failure, KnobValue, Proposal, Step, StepKind, TrialState, Verdict
from tuner.space import make_space

BEST = truth({"max-num-batched-tokens": 2048, "max-num-seqs": 512, "performance-mode": "throughput"})
PROPOSAL = Proposal(3, {"max-num-seqs": 64}, Step(StepKind.ONE, {"max-num-seqs": (None, 64)}, 0, "test"))


# --- what Optuna hears -------------------------------------------------------------------------------------------


@given(
    state=st.sampled_from(TrialState),
    objective=st.none() | st.floats(allow_nan=True, allow_infinity=True),
    constraints=st.dictionaries(st.sampled_from(["runs", "slo.chat", "slo.batch"]), st.floats(allow_nan=True)),
    violation=st.floats(-10, 1e9),
)
def test_a_crash_is_never_told_as_good_nor_forgotten(
    state: TrialState, objective: float | None, constraints: dict[str, float], violation: float
) -> None:
    failure = Failure(Verdict.INFEASIBLE, "oom", "launch", "", "", "", violation=violation)
    told = Told(record(PROPOSAL, state, failure=failure), objective, constraints)
    answer = judge(told)
    own_fault = state not in (TrialState.FAULT, TrialState.INTERRUPTED)
    # Samplers skip FAIL: it must never stand for what the configuration itself did, and always for what it did not.
    assert (answer.state is OptunaState.FAIL) is not own_fault
    if own_fault:
        assert CRASH in answer.constraints  # a trial without constraints counts as feasible
    if state is TrialState.INFEASIBLE:
        assert (answer.state, answer.value, answer.estimate) == (OptunaState.PRUNED, None, None)
        assert answer.constraints[CRASH] > 0
    if answer.state is OptunaState.COMPLETE:
        assert answer.value is not None
        assert math.isfinite(answer.value)
    assert all(math.isfinite(value) and value <= 10.0 for value in answer.constraints.values())


def test_an_slo_that_no_rate_keeps_is_complete_with_its_excess() -> None:
    answer = judge(Told(record(PROPOSAL, TrialState.COMPLETE), 0.4, {"slo.chat": 0.3}))
    assert (answer.state, answer.value, answer.constraints["slo.chat"]) == (OptunaState.COMPLETE, 0.4, 0.3)


def test_a_screened_trial_is_pruned_with_its_prediction() -> None:
    answer = judge(Told(record(PROPOSAL, TrialState.SCREENED), 0.9, {}))
    assert (answer.state, answer.value, answer.estimate) == (OptunaState.PRUNED, None, 0.9)
    assert answer.constraints[CRASH] == 0.0


outcomes = st.lists(st.sampled_from(["good", "bad", "screened", "crash", "fault", "missed"]), min_size=8, max_size=14)


@settings(max_examples=25, deadline=None)
@given(outcomes=outcomes, seed=st.integers(0, 1000))
def test_any_sequence_of_outcomes_leaves_a_sound_study(outcomes: list[str], seed: int) -> None:
    search = optimizer(seed)
    asked = 0
    for outcome in ["good", *outcomes]:
        proposal = search.ask()
        if proposal is None:
            break
        asked += 1
        told = {
            "good": Told(record(proposal, TrialState.COMPLETE), 1.1, {"slo.chat": -0.1}),
            "bad": Told(record(proposal, TrialState.COMPLETE), 0.7, {"slo.chat": 0.0}),
            "screened": Told(record(proposal, TrialState.SCREENED), 0.9, {}),
            "crash": Told(record(proposal, TrialState.INFEASIBLE, failure=OUT_OF_MEMORY), None, {"runs": 0.2}),
            "fault": Told(record(proposal, TrialState.FAULT), None, {}),
            "missed": Told(record(proposal, TrialState.COMPLETE), 5.0, {"slo.chat": 0.5}),
        }[outcome]
        search.tell(told.record, told.objective, told.constraints)
    table = search.trials_table()
    assert list(table["number"]) == list(range(asked))  # one trial an ask, none hidden
    assert not (table["state"] == "RUNNING").any()
    best = search.incumbent
    assert best is not None
    assert all(value <= 0 for told in search.told(best) for value in told.constraints.values())


# --- what is asked -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_step_names_its_single_change(seed: int) -> None:
    world, search = World(seed), optimizer(seed)
    asked = {proposal.number: proposal for proposal in world.search(search, 30)}
    assert asked[0].step.kind is StepKind.BASELINE
    assert asked[0].config == {}
    for proposal in list(asked.values())[1:]:
        step = proposal.step
        assert step.from_trial is not None
        before, after = effective(asked[step.from_trial].config), effective(proposal.config)
        changed = {name for name in before if before[name] != after[name]}
        assert set(step.changed) == changed
        for name, (old, new) in step.changed.items():
            assert (old, new) == (asked[step.from_trial].config.get(name), proposal.config.get(name))
        assert step.reason
        if step.kind is StepKind.ONE:
            assert len(changed) == 1
            assert next(iter(changed)) in step.reason
        if step.kind is StepKind.COUPLED:
            assert changed == {"max-num-seqs", "max-num-batched-tokens"}


def test_sequences_beyond_the_budget_move_the_budget_along() -> None:
    world, search = World(), optimizer(baseline={"max-num-batched-tokens": 512})
    coupled = [p for p in world.search(search, 40) if p.step.kind is StepKind.COUPLED]
    assert coupled
    for proposal in coupled:
        own = effective(proposal.config)
        assert own["max-num-batched-tokens"] >= own["max-num-seqs"]  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(4))
def test_no_effective_configuration_is_asked_twice(seed: int) -> None:
    world, search = World(seed), optimizer(seed)
    proposals = [p for p in world.search(search, 60) if p.step.kind is not StepKind.CONFIRM]
    asked = [tuple(sorted(effective(p.config).items(), key=str)) for p in proposals]
    assert len(asked) == len(set(asked)) >= 30


def test_what_may_be_the_best_is_measured_again_but_not_for_ever() -> None:
    world, search = World(noise=0.08), optimizer()
    asked = world.search(search, 60)
    known: dict[str, int] = {}
    for proposal in asked:
        key = str(sorted(proposal.config.items()))
        if proposal.step.kind is StepKind.CONFIRM:
            assert known[key] >= 1
            assert "once more" in proposal.step.reason or "in full this time" in proposal.step.reason
        known[key] = known.get(key, 0) + 1
    assert 1 < max(known.values()) <= 4
    assert sum(p.step.kind is StepKind.CONFIRM for p in asked) <= 30


def test_noise_is_learned_from_second_looks_in_other_trials() -> None:
    calm, noisy = optimizer(), optimizer()
    World(noise=0.01).search(calm, 40)
    World(noise=0.1).search(noisy, 40)
    assert noisy.noise > 1.7 * calm.noise


def test_a_value_that_vllm_turns_into_another_is_not_asked_again() -> None:
    search = optimizer()
    world = World()
    world.search(search, 1)
    proposal = search.ask()
    assert proposal is not None
    turned = {**effective(proposal.config), "performance-mode": "throughput"}  # whatever was asked, this ran
    search.tell(record(proposal, TrialState.COMPLETE, reported=turned), 1.0, {"runs": -1.0})
    asked = world.search(search, 60)
    assert turned not in [effective(p.config) for p in asked]


@pytest.mark.parametrize("seed", range(6))
def test_a_region_that_crashes_costs_a_quarter_at_most(seed: int) -> None:
    world, search = World(seed, limit=0.925), optimizer(seed)
    asked = world.search(search, 30)
    crashes = sum(not fits(proposal.config, world.limit) for proposal in asked)
    assert len(asked) >= 12
    assert crashes <= len(asked) / 4


def test_a_crashed_step_is_repaired_with_memory() -> None:
    kinds = {}
    for seed in range(8):
        world, search = World(seed, limit=0.935), optimizer(seed)
        kinds |= {p.step.kind: p for p in world.search(search, 40)}
    repair = kinds[StepKind.REPAIR]
    assert repair.config["gpu-memory-utilization"] < 0.92  # type: ignore[operator]
    assert {"max-num-seqs", "max-num-batched-tokens"} & set(repair.step.changed)


def test_what_asks_for_more_than_a_crash_is_skipped() -> None:
    world, search = World(limit=0.925), optimizer()
    crashed: list[dict[str, KnobValue]] = []
    names = ("gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens")
    for proposal in world.search(search, 40):
        own = effective(proposal.config)
        for other in crashed:
            alike = other["performance-mode"] == own["performance-mode"]
            assert not (alike and all(own[name] >= other[name] for name in names))  # type: ignore[operator]
        if not fits(proposal.config, world.limit):
            crashed.append(own)


def test_the_diagnosis_decides_the_first_step() -> None:
    for direction, better in (("up", lambda seqs: seqs > 256), ("down", lambda seqs: seqs < 256)):
        world, search = World(), optimizer()
        world.search(search, 1)
        search.advise({"max-num-seqs": (direction, 1.0)})
        proposal = search.ask()
        assert proposal is not None
        assert list(proposal.step.changed) == ["max-num-seqs"]
        assert better(proposal.config["max-num-seqs"])
        assert f"points {direction}" in proposal.step.reason


def test_the_search_finds_the_best_region_despite_noise() -> None:
    found = []
    for seed in range(6):
        world, search = World(seed), optimizer(seed)
        asked = world.search(search, 25)
        best = search.incumbent
        assert best is not None
        found.append(truth(asked[best].config))
    assert sum(value >= 0.97 * BEST for value in found) >= 5


def test_free_steps_come_when_no_single_step_promises_anything() -> None:
    world, search = World(), optimizer()
    asked = world.search(search, 60)
    kinds = [proposal.step.kind for proposal in asked]
    assert StepKind.FREE in kinds
    assert kinds.index(StepKind.FREE) > 5
    assert any(len(p.step.changed) > 1 for p in asked if p.step.kind is StepKind.FREE)


def test_a_small_space_ends() -> None:
    space = make_space("two", [knob for knob in SPACE.knobs if knob.name == "enable-prefix-caching"])
    search = Optimizer(space, name="two", seed=0)
    asked = World().search(search, 30)
    assert len({str(proposal.config) for proposal in asked}) == 2
    assert len(asked) <= 8  # second looks included
    assert search.ask() is None


def test_what_is_known_to_be_impossible_is_never_asked() -> None:
    world = World()
    search = optimizer(admissible=lambda config: config.get("max-num-seqs") != 1024)
    assert all(p.config.get("max-num-seqs") != 1024 for p in world.search(search, 60))


def test_a_baseline_that_does_not_run_is_left_by_its_own_cures() -> None:
    world = World(limit=0.90)
    search = optimizer()
    asked = world.search(search, 8)
    assert not fits(asked[0].config, world.limit)
    assert search.incumbent is not None
    assert fits(asked[search.incumbent].config, world.limit)


def test_the_users_configurations_come_right_after_the_baseline() -> None:
    own: list[Config] = [{"max-num-seqs": 48}, {"max-num-batched-tokens": 4096}]
    asked = World().search(optimizer(enqueued=own), 4)
    assert [p.config for p in asked[1:3]] == own
    assert {p.step.kind for p in asked[1:3]} == {StepKind.USER}


def test_a_baseline_between_the_values_is_a_value_of_its_own() -> None:
    world, search = World(), optimizer(baseline={"max-num-seqs": 200})
    asked = world.search(search, 20)
    assert asked[0].config == {"max-num-seqs": 200}
    first = [p for p in asked if p.step.from_trial == 0 and p.step.kind is StepKind.ONE]
    assert all(p.config.get("max-num-seqs") == 200 for p in first if "max-num-seqs" not in p.step.changed)
    assert any(p.step.changed["max-num-seqs"][0] == 200 for p in asked if "max-num-seqs" in p.step.changed)


# --- what is believed --------------------------------------------------------------------------------------------


def test_the_luckiest_measurement_is_not_believed() -> None:
    world, search = World(), optimizer()
    world.search(search, 12)
    best = search.incumbent
    proposal = search.ask()
    assert best is not None
    assert proposal is not None
    before = search.value(best)
    assert before is not None
    search.tell(record(proposal, TrialState.COMPLETE), 1.1 * before, {"runs": -1.0})
    measured, expected = search.value(proposal.number), search.expected(proposal.number)
    assert measured is not None
    assert expected is not None
    assert before < expected < 0.99 * measured


def test_replicates_sharpen_and_set_the_noise() -> None:
    search = optimizer()
    proposal = search.ask()
    assert proposal is not None
    quiet = search.noise
    for replicate, value in enumerate((1.0, 1.1, 0.9, 1.12, 0.88)):
        search.tell(record(proposal, TrialState.COMPLETE, replicate=replicate), value, {"runs": -1.0})
    assert search.noise > 1.5 * quiet
    assert search.value(0) == pytest.approx((1.0 * 1.1 * 0.9 * 1.12 * 0.88) ** 0.2)
    assert len(search.told(0)) == 5
    assert len(search.trials_table()) == 1


def test_screening_allows_for_the_incumbents_luck() -> None:
    world, search = World(noise=0.0), optimizer()
    world.search(search, 6)
    calm = search.screen_below
    proposal = search.ask()
    assert proposal is not None
    search.tell(record(proposal, TrialState.COMPLETE), 2.0, {"runs": -1.0})
    assert search.incumbent == proposal.number
    assert search.screen_below < calm <= -0.02


def test_importances_name_what_matters() -> None:
    world, search = World(noise=0.01), optimizer()
    assert search.importances() == {}
    world.search(search, 40)
    shares = search.importances()
    assert set(shares) == set(DEFAULTS)
    assert max(shares, key=lambda name: shares[name]) in ("max-num-batched-tokens", "max-num-seqs")


# --- faults and resuming -----------------------------------------------------------------------------------------


def test_a_fault_is_tried_again_and_then_left_alone() -> None:
    world = World(faults=lambda proposal: proposal.config.get("max-num-seqs") == 512)
    search = optimizer()
    asked = world.search(search, 40)
    faulty = [p for p in asked if p.config.get("max-num-seqs") == 512]
    attempts = Counter(str(sorted(p.config.items())) for p in faulty)
    assert len(attempts) > 1
    assert set(list(attempts.values())[:-1]) == {3}  # the last one's may still be going on
    assert max(attempts.values()) == 3
    states = search.trials_table()["state"]
    assert all((states[p.number] == "FAIL") for p in faulty)


def test_a_baseline_fault_is_tried_again() -> None:
    search = optimizer()
    first = search.ask()
    assert first is not None
    search.tell(record(first, TrialState.FAULT), None, {})
    again = search.ask()
    assert again is not None
    assert (again.number, again.config, again.step.kind) == (1, {}, StepKind.BASELINE)


@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_study_goes_on_as_it_would_have(seed: int) -> None:
    world, search = World(seed), optimizer(seed)
    for _ in range(24):
        resumed = optimizer(seed, history=list(world.history))
        advice = {"max-num-seqs": ("up", 0.5)}
        search.advise(advice)
        resumed.advise(advice)
        proposal = search.ask()
        assert resumed.ask() == proposal
        assert proposal is not None
        told = world.answer(proposal)
        search.tell(told.record, told.objective, told.constraints)
        assert optimizer(seed, history=list(world.history)).incumbent == search.incumbent


def test_several_trials_may_run_at_once() -> None:
    world, search = World(), optimizer()
    world.search(search, 3)
    asked = [search.ask() for _ in range(4)]
    configs = [proposal.config for proposal in asked if proposal is not None]
    assert len({str(sorted(config.items())) for config in configs}) == 4
    for proposal in reversed(asked):
        assert proposal is not None
        told = world.answer(proposal)
        search.tell(told.record, told.objective, told.constraints)
    assert not (search.trials_table()["state"] == "RUNNING").any()


def stored(path: Path) -> optuna.Study:
    return optuna.load_study(study_name="toy", storage=f"sqlite:///{path}")


def test_the_storage_holds_what_was_told_and_opens_in_the_dashboard(tmp_path: Path) -> None:
    path = tmp_path / "optuna.db"
    world, search = World(limit=0.925), optimizer(storage=f"sqlite:///{path}")
    asked = world.search(search, 12)
    study = stored(path)
    assert len(study.trials) == len(asked)
    assert study.best_trial.constraints[CRASH] <= 0
    for trial, told in zip(study.trials, world.history, strict=True):
        assert trial.state is judge(told).state
        assert trial.constraints == judge(told).constraints
        assert trial.user_attrs["reason"] == told.record.step.reason
    dashboard = pytest.importorskip("optuna_dashboard")
    application = dashboard.wsgi(f"sqlite:///{path}")
    heads: list[str] = []
    environ: dict[str, object] = {"PATH_INFO": "/api/studies"}
    setup_testing_defaults(environ)
    body = b"".join(application(environ, lambda status, headers, error=None: heads.append(status)))
    assert heads[0].startswith("200")
    assert b'"toy"' in body


@pytest.mark.parametrize("damage", ["none", "deleted", "torn", "garbage", "running", "other-value", "other-space"])
def test_a_storage_that_disagrees_is_rebuilt_from_the_records(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "optuna.db"
    url = f"sqlite:///{path}"
    world, search = World(), optimizer(storage=url)
    world.search(search, 6)
    expected = search.ask()  # asked and never told: what a killed process leaves behind
    history = list(world.history)
    if damage == "deleted":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "garbage":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "running":
        stored(path).ask()
    elif damage == "other-value":
        history[-1] = Told(history[-1].record, 0.123, history[-1].constraints)
    elif damage == "other-space":
        stored(path).set_user_attr("space", "another")
    resumed = optimizer(storage=url, history=history)
    study = stored(path)
    assert [trial.state for trial in study.trials] == [judge(told).state for told in history]
    assert [trial.value for trial in study.trials] == [judge(told).value for told in history]
    if damage != "other-value":
        assert resumed.ask() == expected


def test_a_number_that_left_no_record_is_a_gap_that_no_sampler_sees() -> None:
    world, search = World(), optimizer()
    world.search(search, 5)
    history = [told for told in world.history if told.record.number != 3]
    resumed = optimizer(history=history)
    assert list(resumed.trials_table()["state"])[3] == "FAIL"
    proposal = resumed.ask()
    assert proposal is not None
    assert proposal.number == 5
