"""The study loop over servers that are a formula: what runs when, what is kept, and what the verdict says."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.formula import FACTS, Formula, FormulaExecutor, crash, fault
from tests.synthetic import slo as class_slo
from tuner.errors import EnvironmentFault, HarnessError, Interrupted
from tuner.records import (
    Budget,
    Config,
    EnvironmentFacts,
    Slo,
    StepKind,
    StudyDefinition,
    TrialRecord,
    TrialState,
    Verdict,
)
from tuner.space import load_space
from tuner.store import ResultsFolder
from tuner.study import Silent, Status, StopSignals, Study, read_study
from tuner.trial import TrialRequest

CLASSES = ("short_in_short_out", "long_in_long_out")
SLO = Slo({name: class_slo(ttft=(99, 0.5), weight=0.5) for name in CLASSES}, "slo")
SPACE = load_space("max-num-seqs=1,4,16,64", "max-num-batched-tokens=512,2048,8192")


def better_with_seqs(config: Config) -> dict[str, float]:
    """Capacity grows threefold with the sequence limit and does not care about the budget."""
    seqs = config.get("max-num-seqs", 1)
    return dict.fromkeys(CLASSES, 2.0 * {1: 1.0, 4: 2.0, 16: 2.8, 64: 3.0}[int(seqs)])


def flat(config: Config) -> dict[str, float]:
    return dict.fromkeys(CLASSES, 5.0)


def definition(**changes: object) -> StudyDefinition:
    asked = StudyDefinition(
        name="study",
        model="m",
        vllm="vllm",
        objective="capacity",
        workloads=CLASSES,
        fixed={},
        baseline={"max-num-seqs": 1},
        gpus=(0,),
        budget=Budget(trials=8),
        finish_rounds=3,
        speed="normal",
        lossy_allowed=False,
        seed=1,
        slo_digest=SLO.digest,
        workload_digests={},
        space_digest=SPACE.digest,
        created_at=0.0,
        tuner_version="0",
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


class Bench:
    """A study in a folder, run again and again as after interruptions."""

    def __init__(self, root: Path, formula: Formula, **changes: object) -> None:
        self.folder = ResultsFolder(root)
        self.formula, self.definition = formula, definition(**changes)
        self.signals = StopSignals()

    def run(self, executor: FormulaExecutor | None = None, facts: EnvironmentFacts = FACTS) -> FormulaExecutor:
        executor = executor or FormulaExecutor(self.formula)
        study = Study(self.definition, SLO, SPACE, self.folder, executor, facts, self.signals, Silent(), pause_s=0.0)
        study.run()
        return executor

    @property
    def search(self) -> list[TrialRecord]:
        finish = (StepKind.FINALIST, StepKind.ABLATION)
        return [record for record in self.folder.trials() if record.step.kind not in finish]


def test_a_large_effect_is_found_proved_and_explained(tmp_path: Path) -> None:
    # Of flags that do nothing one in forty is kept by chance; with this seed none is.
    bench = Bench(tmp_path, better_with_seqs, seed=3)
    bench.run()
    result = read_study(bench.folder).result
    assert result is not None
    assert result.conclusion.decision == "improved"
    assert set(result.config) == {"max-num-seqs"}
    assert int(result.config["max-num-seqs"]) >= 16
    gain = result.conclusion.gain
    assert gain is not None
    assert gain.low < 3.0 * 1.05
    assert gain.low > 1.5
    assert [effect.flag for effect in result.effects if effect.matters] == ["max-num-seqs"]
    assert result.simulated


def test_nothing_better_keeps_the_baseline(tmp_path: Path) -> None:
    bench = Bench(tmp_path, flat)
    bench.run()
    result = read_study(bench.folder).result
    assert result is not None
    assert result.conclusion.decision == "keep-defaults"
    assert result.config == {"max-num-seqs": 1}


def test_the_trial_count_is_exact(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs, budget=Budget(trials=5))
    bench.run()
    assert len({record.number for record in bench.search}) == 5


def test_every_step_names_its_single_change(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs)
    bench.run()
    steps = [record.step for record in bench.search if record.step.kind is StepKind.ONE]
    assert steps
    assert all(len(step.changed) == 1 and step.reason and step.from_trial is not None for step in steps)


def test_the_finish_interleaves_on_fresh_seeds(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs)
    executor = bench.run()
    finish = [request for request in executor.asked if request.round is not None]
    rounds = {request.round for request in finish}
    for turn in rounds:
        assert len({request.seed for request in finish if request.round == turn}) == 1
    assert len({request.seed for request in finish}) == len(rounds)
    assert not {request.seed for request in finish} & {bench.definition.seed}
    orders = [[r.proposal.number for r in finish if r.round == turn] for turn in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


class Killed(Exception):
    """Stands for kill -9: the process is gone between two calls."""


@pytest.mark.parametrize("at", [1, 3, 8, 12])
def test_after_a_kill_at_any_trial_the_study_ends_as_if_nothing_had_happened(tmp_path: Path, at: int) -> None:
    whole = Bench(tmp_path / "whole", better_with_seqs)
    whole.run()

    def kill(record: TrialRecord) -> TrialRecord:
        raise Killed

    broken = Bench(tmp_path / "broken", better_with_seqs)
    with pytest.raises(Killed):
        broken.run(FormulaExecutor(better_with_seqs, events={at: kill}))
    before = broken.folder.trials()
    assert len(before) == at - 1
    broken.run()
    after = broken.folder.trials()
    assert after[: len(before)] or not before
    assert [r for r in after if (r.number, r.replicate) in {(b.number, b.replicate) for b in before}] == list(before)
    one, other = read_study(whole.folder).result, read_study(broken.folder).result
    assert one is not None
    assert other is not None
    assert one.conclusion.decision == other.conclusion.decision
    assert dict(one.config) == dict(other.config)
    assert one.search_trials == other.search_trials


def faulty(verdict: Verdict) -> Callable[[TrialRecord], TrialRecord]:
    return lambda record: replace(record, state=TrialState.FAULT, capacities={}, failure=fault(verdict))


def test_a_passing_fault_costs_no_trial_and_teaches_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs, budget=Budget(trials=5))
    bench.run(FormulaExecutor(better_with_seqs, events={1: faulty(Verdict.ENV), 4: faulty(Verdict.TRANSIENT)}))
    lasting = {record.number for record in bench.search if record.state is not TrialState.FAULT}
    assert len(lasting) == 5
    result = read_study(bench.folder).result
    assert result is not None
    assert result.conclusion.decision == "improved"


def test_a_lasting_fault_stops_the_study_and_keeps_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs)
    events = {call: faulty(Verdict.ENV) for call in range(4, 20)}
    with pytest.raises(EnvironmentFault, match="Free the GPU"):
        bench.run(FormulaExecutor(better_with_seqs, events=events))
    bench.run()
    assert read_study(bench.folder).status is Status.DONE


def test_a_fault_of_ours_is_called_that(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs)
    with pytest.raises(HarnessError):
        bench.run(FormulaExecutor(better_with_seqs, events={call: faulty(Verdict.HARNESS) for call in range(1, 9)}))


@pytest.mark.parametrize("at", [1, 4, 11])
def test_a_stop_keeps_everything_and_goes_on(tmp_path: Path, at: int) -> None:
    bench = Bench(tmp_path, better_with_seqs)

    def stop(record: TrialRecord) -> TrialRecord:
        bench.signals.stop.set()
        return replace(record, state=TrialState.INTERRUPTED, capacities={})

    with pytest.raises(Interrupted):
        bench.run(FormulaExecutor(better_with_seqs, events={at: stop}))
    assert len(bench.folder.trials()) == at
    bench.signals.stop.clear()
    bench.run()
    result = read_study(bench.folder).result
    assert result is not None
    assert result.conclusion.decision == "improved"


def test_another_machine_of_the_kind_measures_its_own_baseline_and_nothing_is_mixed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs)

    def kill(record: TrialRecord) -> TrialRecord:
        raise Killed

    with pytest.raises(Killed):
        bench.run(FormulaExecutor(better_with_seqs, events={11: kill}))
    # The second machine is a third slower in everything; the ratios must not notice.
    slower = FormulaExecutor(
        lambda config: {n: r / 3 for n, r in better_with_seqs(config).items()}, machine="machine-b"
    )
    bench.run(slower, replace(FACTS, host="host-b", machine="machine-b", driver="580.2"))
    assert slower.asked[0].proposal.step.kind is StepKind.BASELINE
    file = read_study(bench.folder)
    assert file.machines == ("machine-a", "machine-b")
    assert any("another machine" in note and "580.2" in note for note in file.notes)
    assert file.result is not None
    gain = file.result.conclusion.gain
    assert gain is not None
    assert 2.5 < gain.value < 3.3
    for turn in {record.round for record in bench.folder.trials() if record.round is not None}:
        of_round = [record for record in bench.folder.trials() if record.round == turn]
        by_machine = {m: {r.number for r in of_round if r.machine == m} for m in file.machines}
        assert any(numbers == {r.number for r in of_round} for numbers in by_machine.values())


def test_a_machine_of_another_kind_is_refused_with_the_difference(tmp_path: Path) -> None:
    bench = Bench(tmp_path, flat, budget=Budget(trials=2))
    bench.run()
    (tmp_path / "study.json").write_text(
        (tmp_path / "study.json").read_text().replace('"status": "done"', '"status": "searching"')
    )
    with pytest.raises(EnvironmentFault, match=r"vllm_version: 0\.32\.0 before, 0\.33\.0 here"):
        bench.run(facts=replace(FACTS, vllm_version="0.33.0", digest="other"))


def test_a_raised_budget_goes_on_searching(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs, budget=Budget(trials=3))
    bench.run()
    few = read_study(bench.folder).result
    bench.definition = replace(bench.definition, budget=Budget(trials=8))
    bench.run()
    more = read_study(bench.folder).result
    assert few is not None
    assert more is not None
    assert (few.search_trials, more.search_trials) == (3, 8)


def test_a_baseline_that_does_not_run_is_no_end(tmp_path: Path) -> None:
    def starts_with_few(config: Config) -> dict[str, float] | None:
        return None if config.get("max-num-seqs", 1) == 1 else better_with_seqs(config)

    bench = Bench(tmp_path, starts_with_few, budget=Budget(trials=6))
    bench.run()
    result = read_study(bench.folder).result
    assert result is not None
    assert result.conclusion.decision == "improved"
    assert result.conclusion.gain is None


def test_a_time_budget_leaves_room_for_the_finish(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs, budget=Budget(wall_s=2500.0))
    bench.run()
    records = bench.folder.trials()
    assert read_study(bench.folder).status is Status.DONE
    assert sum(record.ended_at - record.started_at for record in records) <= 2500.0
    assert len(bench.search) >= 4


def test_a_raised_budget_never_gives_one_number_to_two_configurations(tmp_path: Path) -> None:
    bench = Bench(tmp_path, both_matter, budget=Budget(trials=6))
    bench.run()
    bench.definition = replace(bench.definition, budget=Budget(trials=9))
    bench.run()
    configs: dict[int, set[str]] = {}
    for record in bench.folder.trials():
        configs.setdefault(record.number, set()).add(repr(sorted(record.config.items())))
    assert all(len(found) == 1 for found in configs.values())
    file = read_study(bench.folder)
    assert len(file.earlier) == 1
    assert any("finish 2" in note for note in file.notes)


def test_a_lowered_budget_keeps_the_verdict(tmp_path: Path) -> None:
    bench = Bench(tmp_path, better_with_seqs, budget=Budget(trials=5))
    bench.run()
    verdict = read_study(bench.folder).result
    bench.definition = replace(bench.definition, budget=Budget(trials=3))
    assert bench.run().asked == []
    assert read_study(bench.folder).result == verdict


def both_matter(config: Config) -> dict[str, float]:
    budget = {512: 1.5, 2048: 1.0, 8192: 0.9}[int(config.get("max-num-batched-tokens", 2048))]
    return {name: rate * budget for name, rate in better_with_seqs(config).items()}


def test_each_flag_that_matters_is_kept_with_its_effect(tmp_path: Path) -> None:
    bench = Bench(tmp_path, both_matter, budget=Budget(trials=10))
    bench.run()
    result = read_study(bench.folder).result
    assert result is not None
    by_flag = {effect.flag: effect for effect in result.effects}
    assert set(by_flag) == {"max-num-seqs", "max-num-batched-tokens"}
    assert all(effect.matters and effect.effect is not None for effect in by_flag.values())
    budget = by_flag["max-num-batched-tokens"].effect
    assert budget is not None
    assert 1.3 < budget.value < 1.7


def test_returning_to_vllms_default_is_a_change_like_any_other(tmp_path: Path) -> None:
    def best_by_default(config: Config) -> dict[str, float]:
        return dict.fromkeys(CLASSES, 9.0 if "max-num-seqs" not in config else 2.0)

    bench = Bench(tmp_path, best_by_default, budget=Budget(trials=6))
    bench.run()
    result = read_study(bench.folder).result
    assert result is not None
    assert result.conclusion.decision == "improved"
    assert "max-num-seqs" not in result.config
    assert [(effect.flag, effect.value) for effect in result.effects if effect.matters] == [("max-num-seqs", None)]


def test_a_winner_that_crashes_when_its_flags_are_examined_is_no_winner(tmp_path: Path) -> None:
    bench = Bench(tmp_path, both_matter, budget=Budget(trials=10))
    winner: list[Config] = []

    class Crashing(FormulaExecutor):
        def run(self, request: TrialRequest) -> TrialRecord:
            record = super().run(request)
            if request.proposal.step.kind is StepKind.ABLATION:
                file = read_study(bench.folder)
                assert file.plan is not None
                leader = max(file.plan.contenders, key=lambda contender: contender.search_value or 0.0)
                if request.proposal.config == leader.config:
                    winner.append(leader.config)
                    return replace(record, state=TrialState.INFEASIBLE, capacities={}, failure=crash())
            return record

    bench.run(Crashing(both_matter))
    result = read_study(bench.folder).result
    assert result is not None
    assert winner
    assert dict(result.config) != dict(winner[0])
    assert any("failed when its flags were examined" in note for note in result.conclusion.notes)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.stop.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.stop.wait(5.0)
            assert signals.abort.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("at", [0, 2])
def test_a_disk_that_refuses_optuna_stops_the_study_and_loses_nothing(tmp_path: Path, at: int) -> None:
    bench = Bench(tmp_path, better_with_seqs, budget=Budget(trials=4), finish_rounds=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(record: TrialRecord | None) -> TrialRecord | None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, before[1]))  # records fit, the database does not
        return record

    try:
        if at == 0:
            limit(None)
        with pytest.raises(EnvironmentFault, match=r"optuna.db cannot be written .*--resume"):
            bench.run(FormulaExecutor(better_with_seqs, events={at: limit}))  # type: ignore[dict-item]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = bench.folder.trials()
    assert len(kept) == at
    bench.run()
    after = bench.folder.trials()
    assert all(record in after for record in kept)
    assert read_study(bench.folder).status is Status.DONE


# --- what Optuna hears, whatever happens ---------------------------------------------------------------------------


def crashed(record: TrialRecord) -> TrialRecord:
    return replace(record, state=TrialState.INFEASIBLE, capacities={}, failure=crash())


def screened_out(record: TrialRecord) -> TrialRecord:
    if record.step.kind in (StepKind.BASELINE, StepKind.FINALIST, StepKind.ABLATION):
        return record
    return replace(record, state=TrialState.SCREENED, capacities={}, screened_against=0, predicted=-0.3)


def killed(record: TrialRecord) -> TrialRecord:
    raise Killed


EVENTS: dict[str, Callable[[TrialRecord], TrialRecord]] = {
    "measured": lambda record: record,
    "crashed": crashed,
    "screened": screened_out,
    "machine": faulty(Verdict.ENV),
    "passing": faulty(Verdict.TRANSIENT),
    "ours": faulty(Verdict.HARNESS),
    "interrupted": lambda record: replace(record, state=TrialState.INTERRUPTED, capacities={}),
    "killed": killed,
}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(outcomes=st.lists(st.sampled_from(sorted(EVENTS)), max_size=10))
def test_whatever_happens_optuna_hears_no_lie(outcomes: list[str]) -> None:
    """No crash as a good value, none without a constraint, no FAIL for what a configuration did itself."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # hundreds of writes that wait for the disk
    with tempfile.TemporaryDirectory(dir=memory) as root:
        bench = Bench(Path(root), better_with_seqs, budget=Budget(trials=5), finish_rounds=2)
        executor = FormulaExecutor(better_with_seqs, events={n: EVENTS[o] for n, o in enumerate(outcomes, 1)})
        for _ in range(len(outcomes) + 1):  # every event ends the study once at most
            with contextlib.suppress(Killed, EnvironmentFault, HarnessError):
                bench.run(executor)
                break
        assert read_study(bench.folder).status is Status.DONE
        first: dict[int, TrialRecord] = {}
        for record in bench.search:
            if record.round is None:
                first.setdefault(record.number, record)
        trials = optuna.load_study(study_name="study", storage=f"sqlite:///{bench.folder.database}").trials
        assert {trial.number for trial in trials} >= set(first)
        for trial in trials:
            record = first.get(trial.number)
            lasting = record is not None and record.state not in (TrialState.FAULT, TrialState.INTERRUPTED)
            assert (trial.state is not optuna.trial.TrialState.FAIL) is lasting
            if record is None or not lasting:
                continue
            assert trial.constraints, "a trial without constraints counts as feasible"
            good = trial.state is optuna.trial.TrialState.COMPLETE
            assert good is (record.state is TrialState.COMPLETE)
            if record.state is TrialState.INFEASIBLE:
                assert trial.value is None
                assert max(trial.constraints.values()) > 0
