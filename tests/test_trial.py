"""Whole trials on the simulated vLLM: real processes, HTTP and load; only the tokens are made up."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.formula import FormulaExecutor
from tests.synthetic import result, slo
from tuner.capacity import DEMO, SEARCH, ProbeSettings, Reference
from tuner.cli.bench_own import told
from tuner.environment import Gpu, facts, idle_baseline
from tuner.errors import EnvironmentFault, HarnessError, InputError
from tuner.feasibility import model_shape
from tuner.metrics import score_all
from tuner.ownership import MARKER
from tuner.records import (
    Bound,
    Config,
    Decision,
    Failure,
    Outcome,
    Proposal,
    RequestStatus,
    Slo,
    Step,
    StepKind,
    TrialRecord,
    TrialState,
    Validity,
    Verdict,
)
from tuner.server import Control, ReadyLimits, Server, VllmInstall, find_vllm
from tuner.store import ResultsFolder
from tuner.trial import Learned, ProgressEvent, TrialContext, TrialRequest, bench, run_trial, seed_for
from tuner.trial.broken import Broken
from tuner.trial.context import in_order
from tuner.trial.evidence import state_of
from tuner.trial.fixed_rate import hardest_promise, requests_to_prove, window_at
from tuner.trial.impossible import impossible
from tuner.trial.sending import drain_s
from tuner.trial.warm import Speed, check_proof
from tuner.validity import judge_validity
from tuner.workload import Arrivals, Vocabulary, Workload, constant

ROOT = Path(__file__).resolve().parents[1]
QUICK = replace(
    DEMO,
    window_s=0.8,
    min_requests=10,
    window_cap_s=1.0,
    min_ramp_s=0.2,
    max_ramp_s=0.2,
    drain_s=6.0,
    stall_s=20.0,
    warm_up_s=0.5,
    warm_up_concurrency=8,
    proof_s=0.5,
    max_shifts=2,
    max_probes=2,
    precision=1.0,
)
CHAT, LONG = "chat", "long"
WORKLOADS = {
    CHAT: Workload(CHAT, constant(32), constant(8), seed=1, digest="a"),
    LONG: Workload(LONG, constant(200), constant(8), seed=2, digest="b"),
}
PROMISE = Slo({CHAT: slo(0.9, 0.5, ttft=(95, 0.3)), LONG: slo(0.9, 0.5, ttft=(95, 0.5))}, "digest")


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> VllmInstall:
    """An executable `vllm` that is the simulator, on a simulated CPU."""
    folder = tmp_path_factory.mktemp("vllm")
    executable = folder / "vllm"
    executable.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tuner.sim.http "$@"\n')
    executable.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SIM_PROFILE", "cpu2-small")
        return find_vllm(str(executable), cache=folder / "cache")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test ends with no process of any server on the machine."""
    yield
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie that an earlier test's server has left to us
            if MARKER in process.environ():
                left.append(process.cmdline())
    assert left == []


@pytest.fixture(autouse=True)
def any_client_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes as short as these on a busy machine are often invalid, rightly; what that means has its own tests."""

    def judge(*arguments: Any, **more: Any) -> Validity:
        return replace(judge_validity(*arguments, **more), valid=True, reasons=())

    monkeypatch.setattr("tuner.trial.probing.judge_validity", judge)


@pytest.fixture
def context(install: VllmInstall, tmp_path: Path) -> TrialContext:
    return TrialContext(
        install=install,
        model="/models/some",
        fixed={},
        gpus=(),
        workloads=WORKLOADS,
        slo=PROMISE,
        folder=ResultsFolder(tmp_path / "study"),
        environment=facts(install, ()),
        idle=idle_baseline(()),
        vocabulary=Vocabulary(4096),
        ready_limits=ReadyLimits(silent_s=5.0, cap_s=10.0),
        extra_environment=simulated(),
    )


def simulated(fault: str = "") -> dict[str, str]:
    return {
        "VLLM_SIM_PROFILE": "cpu2-small",
        "VLLM_SIM_START_S": "0.3",
        "VLLM_SIM_SEED": "1",
        "VLLM_SIM_FAULT": fault,
    }


def asked(
    config: Config | None = None,
    *,
    kind: StepKind = StepKind.ONE,
    settings: ProbeSettings = QUICK,
    workloads: tuple[str, ...] = (CHAT,),
    **more: object,
) -> TrialRequest:
    config = config or {}
    step = Step(kind, {name: (None, value) for name, value in config.items()}, 0, "a test")
    request = TrialRequest(
        proposal=Proposal(1, config, step),
        replicate=0,
        seed=7,
        workloads=workloads,
        weights={name: 1 / len(workloads) for name in workloads},
        settings=settings,
    )
    return replace(request, **more)


def test_a_trial_from_launch_to_record(context: TrialContext) -> None:
    events: list[ProgressEvent] = []
    record = run_trial(
        asked(
            {"max-num-seqs": 32},
            workloads=(CHAT, LONG),
            start_rates={LONG: 20.0},
            settings=replace(QUICK, max_shifts=4, max_probes=3),
        ),
        replace(context, progress=events.append),
    )
    assert (record.state, record.failure) == (TrialState.COMPLETE, None)
    assert set(record.capacities) == {CHAT, LONG}
    chat, long = record.capacities[CHAT], record.capacities[LONG]
    assert min(chat.rate_rps, long.rate_rps) > 0.5
    assert long.probes[0].rate_rps == 20.0
    assert record.effective["max-num-seqs"] == 32
    assert record.simulated
    assert record.machine == context.environment.machine
    assert "--max-num-seqs" in record.command
    # Every phase took its time, and they add up to the trial.
    assert record.phases.total_s == pytest.approx(record.ended_at - record.started_at, abs=3.0)
    assert min(record.phases.launch_s, record.phases.warm_up_s, record.phases.measure_s) > 0.3
    # What is no part of a capacity is kept too, and nothing twice.
    assert [probe.purpose for probe in record.probes] == ["warm-up", "warm-up", "memory-proof"]
    seeds = [probe.seed for probe in (*record.probes, *chat.probes, *long.probes)]
    assert len(set(seeds)) == len(seeds)
    assert {event.phase for event in events} == {"launch", "warm-up", "memory-proof", "probe", "stop"}
    # The record survives the disk, and every score recomputes from the raw requests.
    context.folder.write_trial(record)
    (again,) = context.folder.trials()
    assert replace(again, probes=(), capacities={}) == replace(record, probes=(), capacities={})
    assert [probe.classes for probe in again.capacities[CHAT].probes] == [probe.classes for probe in chat.probes]
    for probe in chat.probes:
        requests = context.folder.requests(again, probe.requests_file)
        window = (probe.ramp_s, probe.ramp_s + probe.window_s)
        assert score_all(requests, {CHAT: PROMISE.classes[CHAT]}, window=window) == probe.classes
        assert probe.validity.valid
        assert probe.telemetry is not None


def test_a_probe_during_which_the_server_was_suspended_counts_for_nothing(context: TrialContext) -> None:
    hit = threading.Event()

    def suspend() -> None:
        servers = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if MARKER in process.environ():
                    servers.append(process)
        for process in servers:
            process.suspend()
        time.sleep(1.5)
        for process in servers:
            process.resume()

    def at_the_first_probe(event: ProgressEvent) -> None:
        if event.phase == "probe" and not hit.is_set():
            hit.set()
            threading.Timer(0.6, suspend).start()

    record = run_trial(asked(), replace(context, progress=at_the_first_probe))
    assert record.state is TrialState.COMPLETE
    probes = record.capacities[CHAT].probes + record.probes
    suspended = [probe for probe in probes if any("suspended" in reason for reason in probe.validity.reasons)]
    assert suspended
    assert {probe.outcome for probe in suspended} == {Outcome.INVALID}


def test_equal_seeds_send_equal_requests_and_no_prompt_twice(context: TrialContext) -> None:
    def lengths(record: TrialRecord) -> list[tuple[float, int]]:
        first = record.capacities[CHAT].probes[0]
        return [
            (round(r.scheduled_s, 9), r.planned_output_tokens)
            for r in context.folder.requests(record, first.requests_file)
        ]

    one = run_trial(asked(start_rates={CHAT: 30.0}, ramps={CHAT: 0.4}), context)
    requests_one = lengths(one)
    two = run_trial(asked({"max-num-seqs": 64}, start_rates={CHAT: 30.0}, ramps={CHAT: 0.4}, replicate=1), context)
    assert lengths(two) == requests_one
    assert all(probe.ramp_s == 0.4 for probe in (*one.capacities[CHAT].probes, *two.capacities[CHAT].probes))
    hits = [
        probe.telemetry.counters.get("prefix_hits", 0.0)
        for probe in one.capacities[CHAT].probes
        if probe.telemetry is not None
    ]
    assert sum(hits) == 0
    assert seed_for(7, CHAT, "capacity", 0) != seed_for(7, CHAT, "capacity", 0, round_=1)


def test_screening_ends_a_clearly_worse_trial_early(context: TrialContext) -> None:
    better = {name: Reference(8.0, 5, -0.99, 2.5, 8.0, 0.3) for name in (CHAT, LONG)}
    worse = run_trial(asked({"max-num-seqs": 1}, workloads=(CHAT, LONG), incumbent=better, incumbent_number=3), context)
    assert worse.state is TrialState.SCREENED
    assert worse.screened_against == 3
    assert worse.predicted is not None
    assert worse.predicted < -0.03
    assert worse.capacities == {}
    assert [probe.purpose for probe in worse.probes if probe.workload != "longest"][2:] == ["screen"] * 2
    screening = worse.probes[-1]
    assert (screening.rate_rps, screening.seed, screening.ramp_s) == (8.0, 5, 0.3)


def test_a_screening_probe_is_the_first_of_the_capacity(context: TrialContext) -> None:
    equal = {CHAT: Reference(20.0, 5, 1.0, 2.5, 20.0)}
    record = run_trial(asked(incumbent=equal, incumbent_number=3), context)
    assert record.state is TrialState.COMPLETE
    assert [probe.purpose for probe in record.capacities[CHAT].probes][:2] == ["screen", "capacity"]
    assert all(probe.purpose != "screen" for probe in record.probes)
    assert record.predicted is not None
    assert record.predicted > 0


@pytest.mark.parametrize(
    ("fault", "verdict", "kind", "phase"),
    [
        ("start:kv-cache-none", Verdict.INFEASIBLE, "kv-cache-none", "launch"),
        ("oom-under-load:30", Verdict.RUNTIME, None, None),
        ("dead-health:30", Verdict.RUNTIME, None, None),
        ("stuck:30", Verdict.RUNTIME, "no-progress", None),
    ],
)
def test_faults_of_a_configuration(
    context: TrialContext,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    verdict: Verdict,
    kind: str | None,
    phase: str | None,
) -> None:
    monkeypatch.setattr(Control.__init__, "__defaults__", (3.0,))  # an engine that is stuck answers no call
    began = time.monotonic()
    record = run_trial(asked({"max-num-seqs": 64}), replace(context, extra_environment=simulated(fault)))
    assert record.failure is not None
    assert record.state is TrialState.INFEASIBLE, record.failure
    assert record.failure.verdict is verdict
    assert record.failure.violation > 0
    assert kind is None or record.failure.kind == kind
    assert record.failure.phase == phase or (phase is None and record.failure.phase in ("warm-up", "measure"))
    assert record.capacities == {}
    # Well before any request would have timed out.
    assert time.monotonic() - began < QUICK.request_timeout_s


def test_a_start_that_hangs_is_tried_again(context: TrialContext) -> None:
    limits = ReadyLimits(silent_s=1.5, cap_s=10.0)
    record = run_trial(asked(), replace(context, ready_limits=limits, extra_environment=simulated("hang-at-start")))
    assert record.failure is not None
    assert record.failure.kind == "start-hang"
    attempts = sorted(path.name for path in (context.folder.root / "trials").iterdir())
    assert attempts == ["0001-0", "0001-0.attempt1"]
    assert (context.folder.root / "trials" / attempts[1] / "trial.json").is_file()
    assert context.folder.trials() == ()  # a record is written by whoever asked for the trial


def test_the_second_try_of_a_passing_fault_succeeds(context: TrialContext) -> None:
    """The environment is mended after the first failure, as when another process lets go of the GPU."""
    variables = simulated("start:memory-profiling-disturbed")

    def mend(event: ProgressEvent) -> None:
        if event.phase == "retry":
            variables["VLLM_SIM_FAULT"] = ""

    record = run_trial(asked(), replace(context, extra_environment=variables, progress=mend))
    assert (record.state, record.failure) == (TrialState.COMPLETE, None)


def test_a_spoilt_compile_cache_is_passed_by_once(context: TrialContext, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = simulated("start:kv-cache-none")
    roots: list[Path | None] = []

    def blame(*_: object, **__: object) -> Failure:
        variables["VLLM_SIM_FAULT"] = ""
        return Failure(Verdict.TRANSIENT, "compile-cache", "launch", "a stale cache", "", "")

    def start(*arguments: Any, **more: Any) -> Server:
        roots.append(more["cache_root"])
        return Server(*arguments, **more)

    monkeypatch.setattr("tuner.trial.run.judge_server", blame)
    monkeypatch.setattr("tuner.trial.run.Server", start)
    record = run_trial(asked(), replace(context, extra_environment=variables))
    assert record.state is TrialState.COMPLETE
    assert roots[0] is None
    assert roots[1] is not None
    assert not roots[1].exists()


def test_a_broken_rule_costs_no_launch(context: TrialContext) -> None:
    record = run_trial(asked({"max-num-batched-tokens": 16, "max-num-seqs": 256}), context)
    assert record.state is TrialState.INFEASIBLE
    assert record.failure is not None
    assert record.failure.verdict is Verdict.STATIC
    assert record.failure.phase == "prepare"
    assert record.command == ()
    assert record.phases.launch_s == 0


def test_answers_that_fail_are_misses_not_faults(context: TrialContext) -> None:
    record = run_trial(asked(), replace(context, extra_environment=simulated("early-close:2")))
    assert record.state is TrialState.COMPLETE
    capacity = record.capacities[CHAT]
    assert capacity.bound is Bound.BELOW
    assert Outcome.MISSED in {probe.outcome for probe in capacity.probes} <= {Outcome.MISSED, Outcome.UNRESOLVED}
    assert all(probe.classes[CHAT].statuses["early-close"] > 0 for probe in capacity.probes)


@pytest.mark.parametrize("fault", ["http-500:1 if max-num-seqs==64", "stream-error:1 if max-num-seqs==64"])
def test_errors_for_the_longest_requests_fail_the_memory_proof(
    context: TrialContext, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("tuner.trial.run.warm_up", lambda *_: {CHAT: Speed(10.0, 0.1)})
    record = run_trial(asked({"max-num-seqs": 64}), replace(context, extra_environment=simulated(fault)))
    assert record.state is TrialState.INFEASIBLE, record.failure
    assert record.failure is not None
    assert (record.failure.verdict, record.failure.phase) == (Verdict.RUNTIME, "warm-up")
    assert "longest requests were refused" in record.failure.cause
    assert record.failure.violation > 0
    assert record.capacities == {}


def test_what_the_answers_of_the_memory_proof_mean() -> None:
    good, begun = result(0, 0.0, 0.1, 0.2, 8), result(1, 0.0, 0.1, 0.2, 2, status=RequestStatus.CANCELLED)
    lost = replace(begun, first_s=None, last_s=None, chunks=0)
    bad = replace(lost, status=RequestStatus.HTTP_ERROR, error="HTTP 400: too long")
    broken = replace(lost, status=RequestStatus.HTTP_ERROR, error="HTTP 500: out of order")
    check_proof([good, lost])
    check_proof([begun, lost])  # cut off while answers came
    with pytest.raises(HarnessError, match="1 of 2 of the longest requests"):
        check_proof([good, bad])
    with pytest.raises(Broken, match="HTTP 500: out of order") as refusal:
        check_proof([good, broken, bad])
    assert refusal.value.refuses
    with pytest.raises(Broken, match="no token") as silence:
        check_proof([lost])
    assert silence.value.no_progress


def test_a_memory_proof_that_is_cut_says_so(context: TrialContext) -> None:
    endless = replace(WORKLOADS[CHAT], output_tokens=constant(400))
    settings = replace(QUICK, warm_up_concurrency=2, drain_s=0.5)
    stop = threading.Event()
    record = run_trial(
        asked(settings=settings, start_rates={CHAT: 5.0}),
        replace(context, workloads={CHAT: endless}, stop=stop, progress=on_event("probe", stop.set)),
    )
    proof = next(probe for probe in record.probes if probe.purpose == "memory-proof")
    assert any(note.startswith("cut short after ") for note in proof.notes), (record.failure, proof.notes)
    requests = context.folder.requests(record, proof.requests_file)
    assert any(request.first_s is not None for request in requests)


def test_what_the_client_spoilt_is_repeated_with_more_workers_and_never_scored(
    context: TrialContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.trial.probing.judge_validity", lambda *_, **__: Validity(False, ("late",), 0, 0, 0))
    record = run_trial(asked(start_rates={CHAT: 10.0}), context)
    assert record.state is TrialState.FAULT
    assert record.failure is not None
    assert (record.failure.verdict, record.failure.kind) == (Verdict.HARNESS, "measurement")
    assert "late" in record.failure.cause
    cores = len(os.sched_getaffinity(0))
    spoilt = [probe for probe in record.probes if probe.purpose == "capacity"]
    assert [(probe.attempt, probe.client.workers) for probe in spoilt[:3]] == [
        (0, 1),
        (1, 2 if cores > 1 else 1),
        (2, 4 if cores > 2 else min(cores, 2)),
    ]
    assert len({probe.seed for probe in spoilt[:3]}) == 1
    assert {probe.outcome for probe in spoilt} == {Outcome.INVALID}
    assert {probe.classes[CHAT].outcome for probe in spoilt} == {Outcome.INVALID}


def test_what_a_failure_makes_of_a_trial() -> None:
    changed, unchanged = asked({"max-num-seqs": 8}), asked({"max-num-seqs": 8}, kind=StepKind.BASELINE)

    def state(verdict: Verdict, retries: int, request: TrialRequest) -> TrialState:
        return state_of(Failure(verdict, "kind", "launch", "", "", ""), retries, request)

    for verdict in (Verdict.STATIC, Verdict.INFEASIBLE, Verdict.RUNTIME):
        assert state(verdict, 0, unchanged) is TrialState.INFEASIBLE
    for verdict in (Verdict.ENV, Verdict.HARNESS, Verdict.TRANSIENT):
        assert state(verdict, 1, changed) is TrialState.FAULT
    assert state(Verdict.UNKNOWN, 0, changed) is TrialState.FAULT
    assert state(Verdict.UNKNOWN, 1, changed) is TrialState.INFEASIBLE
    assert state(Verdict.UNKNOWN, 1, unchanged) is TrialState.FAULT


def test_the_wait_for_late_answers_follows_the_limits() -> None:
    promise = slo(ttft=(99, 2.0), tpot=(99, 0.1))
    assert drain_s([promise], 100, 60.0) == pytest.approx(36.0)
    assert drain_s([promise], 100, 20.0) == 20.0
    assert drain_s([slo(ttft=(99, 0.1), tpot=(99, 0.01))], 10, 60.0) == 10.0
    assert drain_s([slo(ttft=(99, 0.1)), promise], 100, 60.0) == 60.0
    assert drain_s([slo(e2e=(95, 8.0))], 100, 60.0) == pytest.approx(24.0)


def test_classes_take_turns_from_round_to_round_only() -> None:
    assert in_order(("a", "b", "c"), None) == ("a", "b", "c")
    assert in_order(("a", "b", "c"), 1) == ("b", "c", "a")
    assert in_order((), 1) == ()


def test_a_defect_of_the_tuner_costs_one_trial_and_shows_itself(context: TrialContext) -> None:
    def broken(event: ProgressEvent) -> None:
        if event.phase == "probe":
            raise RuntimeError("a defect")

    record = run_trial(asked(), replace(context, progress=broken))
    assert record.state is TrialState.FAULT
    assert record.failure is not None
    assert (record.failure.verdict, record.failure.kind) == (Verdict.HARNESS, "defect")
    assert record.failure.phase == "measure"
    assert "a defect" in record.failure.cause
    assert any("test_trial.py" in line for line in record.failure.evidence)


def later(event: threading.Event) -> None:
    """While the probe that was just announced is running."""
    threading.Timer(0.5, event.set).start()


def on_event(phase: str, act: Callable[[], None], count: int = 1) -> Callable[[ProgressEvent], None]:
    seen = 0

    def progress(event: ProgressEvent) -> None:
        nonlocal seen
        seen += event.phase == phase
        if event.phase == phase and seen == count:
            act()

    return progress


def test_stop_finishes_the_probe_and_keeps_it(context: TrialContext) -> None:
    stop = threading.Event()
    record = run_trial(
        asked(workloads=(CHAT, LONG)), replace(context, stop=stop, progress=on_event("probe", lambda: later(stop)))
    )
    assert record.state is TrialState.INTERRUPTED
    assert record.failure is None
    assert record.capacities == {}
    assert record.probes[-1].purpose == "capacity"
    assert record.probes[-1].classes[CHAT].failed == 0


def test_abort_ends_at_once(context: TrialContext) -> None:
    stop, abort = threading.Event(), threading.Event()

    def both() -> None:
        stop.set()
        abort.set()

    long_window = replace(QUICK, window_s=60.0, window_cap_s=60.0)
    began = time.monotonic()
    record = run_trial(
        asked(settings=long_window), replace(context, stop=stop, abort=abort, progress=on_event("probe", both))
    )
    assert record.state is TrialState.INTERRUPTED
    assert time.monotonic() - began < 20


def test_stop_while_starting(context: TrialContext) -> None:
    stop = threading.Event()
    slow = {**simulated(), "VLLM_SIM_START_S": "30"}
    began = time.monotonic()
    record = run_trial(
        asked(),
        replace(context, stop=stop, extra_environment=slow, progress=on_event("launch", stop.set)),
    )
    assert record.state is TrialState.INTERRUPTED
    assert record.failure is None
    assert time.monotonic() - began < 10


def test_stop_while_the_gpu_is_not_idle(context: TrialContext, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    def busy(*_: object, **__: object) -> tuple[str, ...]:
        stop.set()
        return ("GPU 0: 3.00 GiB above its idle baseline",)

    monkeypatch.setattr("tuner.trial.run.wait_idle", busy)
    record = run_trial(asked(), replace(context, stop=stop))
    assert record.state is TrialState.INTERRUPTED
    assert record.command == ()
    monkeypatch.setattr("tuner.trial.run._IDLE_WAIT_S", 0.0)
    monkeypatch.setattr("tuner.trial.run.wait_idle", lambda *_, **__: ("GPU 0: 3.00 GiB above",))
    record = run_trial(asked(), context)
    assert record.failure is not None
    assert (record.failure.verdict, record.failure.phase) == (Verdict.ENV, "prepare")


def test_abort_while_stopping_waits_for_no_grace(context: TrialContext) -> None:
    stop, abort = threading.Event(), threading.Event()
    began = 0.0

    def again() -> None:
        nonlocal began
        began = time.monotonic()
        threading.Timer(0.5, abort.set).start()

    def progress(event: ProgressEvent) -> None:
        if event.phase == "memory-proof":
            stop.set()
        elif event.phase == "stop":
            again()

    stubborn = simulated("ignore-sigterm")
    record = run_trial(asked(), replace(context, stop=stop, abort=abort, extra_environment=stubborn, progress=progress))
    assert record.state is TrialState.INTERRUPTED
    assert time.monotonic() - began < 15  # of 25 s of grace


@pytest.mark.parametrize("concurrency", [4, 48], ids=["few slots", "more slots than requests"])
def test_a_closed_loop_is_scored_by_its_goodput(context: TrialContext, concurrency: int) -> None:
    closed = replace(WORKLOADS[CHAT], arrivals=Arrivals("closed", concurrency=concurrency))
    record = run_trial(asked(), replace(context, workloads={CHAT: closed}))
    assert record.state is TrialState.COMPLETE
    capacity = record.capacities[CHAT]
    assert len(capacity.probes) == QUICK.min_probes
    for probe in capacity.probes:
        requests = context.folder.requests(record, probe.requests_file)
        carried = sum(request.ok for request in requests) / max(request.end_s for request in requests)
        assert len(requests) >= 5 * concurrency
        assert probe.classes[CHAT].throughput_rps == pytest.approx(carried, rel=0.25)
        assert probe.classes[CHAT].goodput_rps <= 1.25 * carried


def test_a_mix_is_judged_class_by_class(context: TrialContext) -> None:
    mixed = Workload("mixed", None, None, mix={CHAT: 0.5, LONG: 0.5}, seed=3, digest="c")
    record = run_trial(asked(workloads=("mixed",)), replace(context, workloads={**WORKLOADS, "mixed": mixed}))
    assert record.state is TrialState.COMPLETE
    assert all(set(probe.classes) == {CHAT, LONG} for probe in record.capacities["mixed"].probes)


def test_bench_at_a_fixed_rate(context: TrialContext) -> None:
    record = bench(
        {"max-num-seqs": 32}, context, workloads=(CHAT,), seed=1, settings=QUICK, rates={CHAT: 20.0}, looks=2
    )
    assert record.state is TrialState.COMPLETE
    scored = [probe for probe in record.probes if probe.purpose == "bench"]
    assert 1 <= len(scored) <= 2
    assert all(probe.rate_rps == 20.0 for probe in scored)
    assert record.capacities == {}
    decision = record.decided[CHAT]
    assert (decision.rate_rps, decision.windows, decision.percentile) == (20.0, len(scored), 95.0)
    assert decision.requests == sum(probe.classes[CHAT].requests for probe in scored)
    # Two windows of 1 s cannot hold the 96 requests that a P95 takes at two looks.
    assert decision.needed == 96
    assert decision.outcome in (Outcome.UNRESOLVED, Outcome.MISSED)
    context.folder.write_trial(record)
    assert context.folder.trials()[0].decided == record.decided


def test_bench_that_stays_invalid_is_no_verdict(
    context: TrialContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tuner.trial.probing.judge_validity", lambda *_, **__: Validity(False, ("late",), 0, 0, 0))
    settings = replace(QUICK, max_attempts=1)
    record = bench({}, context, workloads=(CHAT,), seed=1, settings=settings, rates={CHAT: 20.0})
    assert record.decided[CHAT].outcome is Outcome.INVALID
    with pytest.raises(HarnessError, match="the measurement of chat is not valid: late"):
        told(record, {}, as_json=False)
    assert "chat: invalid at 20 requests/s" in capsys.readouterr().out


def test_a_decision_says_what_it_lacks(context: TrialContext, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench({"max-num-batched-tokens": 16, "max-num-seqs": 256}, context, workloads=(CHAT,), seed=1)
    with pytest.raises(
        InputError, match=r"command line: the server's flags = .*\(256\)\. vLLM \S+ refuses that.* Raise"
    ):
        told(record, record.config, as_json=False)
    assert record.failure is not None
    for verdict, kind, error in (
        (Verdict.ENV, "nccl", EnvironmentFault),
        (Verdict.HARNESS, "measurement", HarnessError),
    ):
        with pytest.raises(error):
            told(replace(record, failure=replace(record.failure, verdict=verdict, kind=kind)), {}, as_json=False)
    measured = replace(record, state=TrialState.COMPLETE, failure=None)
    for decision, said in (
        (Decision(Outcome.UNRESOLVED, 2.0, 4, 480, 99.0, 618), "(windows: 4, requests: 480): P99 needs 618 requests"),
        (Decision(Outcome.UNRESOLVED, 2.0, 4, 700, 99.0, 618), "too close to the limit to tell"),
        (Decision(Outcome.UNRESOLVED, 2.0, 4, 700, 100.0, None), "no number of requests proves P100"),
        (Decision(Outcome.MET, 2.0, 4, 700, 99.0, 618), "chat: met at 2 requests/s (windows: 4, requests: 700)\n"),
    ):
        assert told(replace(measured, decided={CHAT: decision}), {}, as_json=False) == 0
        assert said in capsys.readouterr().out


def test_windows_at_a_rate_hold_what_a_verdict_takes() -> None:
    assert [requests_to_prove(q, 1) for q in (95.0, 99.0, 99.9)] == [73, 381, 3838]
    assert requests_to_prove(99.0, 4) == 618
    assert requests_to_prove(100.0, 4) is None
    p99, p95 = slo(ttft=(99, 1.0)), slo(ttft=(95, 1.0))
    assert hardest_promise({CHAT: p99}, {CHAT: 1.0}, 4) == (99.0, 618)
    assert hardest_promise({CHAT: p99, LONG: p95}, {CHAT: 0.9, LONG: 0.1}, 4) == (95.0, 1190)
    assert hardest_promise({CHAT: slo()}, {CHAT: 1.0}, 4) == (None, 0)
    assert hardest_promise({CHAT: slo(ttft=(100, 1.0))}, {CHAT: 1.0}, 4) == (100.0, None)
    assert window_at(10.0, 618, 4, SEARCH) == pytest.approx(2 * 618 / 4 / 10)
    assert window_at(100.0, 618, 4, SEARCH) == SEARCH.window_s
    assert window_at(0.1, 618, 4, SEARCH) == SEARCH.window_cap_s
    assert window_at(0.1, None, 4, SEARCH) == SEARCH.window_cap_s


def test_what_a_server_does_not_honour_is_in_the_record_and_no_failure(context: TrialContext, tmp_path: Path) -> None:
    line = "WARNING 10-03 09:12:40 [vllm.py:810] Async scheduling will be disabled because a test says so"
    script = tmp_path / "vllm"
    script.write_text(f'#!/bin/sh\necho "{line}"\nexec "{context.install.path}" "$@"\n')
    script.chmod(0o755)
    install = replace(context.install, path=str(script))
    record = run_trial(asked({"async-scheduling": True}), replace(context, install=install))
    assert (record.state, record.failure) == (TrialState.COMPLETE, None)
    assert any(text.startswith("async-scheduling: ") and "a test says so" in text for text in record.degraded)


def test_a_study_that_goes_on_knows_what_its_servers_have_told() -> None:
    def started(config: Config, at: float, effective: Config, weights: float) -> TrialRecord:
        request = asked(config)
        record = FormulaExecutor(lambda config: {CHAT: 1.0}).run(request)
        return replace(record, started_at=at, effective=effective, startup={"weights_gib": weights})

    later = started({}, 3.0, {"max-num-seqs": 64}, 15.2)
    earlier = started({}, 1.0, {"max-num-seqs": 128}, 15.0)
    other = started({"quantization": "fp8"}, 2.0, {"max-num-seqs": 64, "quantization": "fp8"}, 8.0)
    never = replace(later, started_at=4.0, effective={}, startup={})
    learned = Learned.of([later, earlier, other, never], {})
    assert learned.defaults == {"max-num-seqs": 64}
    assert learned.calibration.weights_gib({}) == 15.2
    assert learned.calibration.weights_gib({"quantization": "fp8"}) == 8.0
    assert Learned.of([other], {"quantization": "fp8"}).defaults == {}
    assert Learned.of([], {}) == Learned()


def test_capability_and_environment_reach_the_rules(context: TrialContext, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0, "GPU-0", "Tesla T4", 16 << 30, 0, 16 << 30, (7, 5))
    monkeypatch.setattr("tuner.trial.impossible.gpus", lambda indices: (gpu,))
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = model_shape({**config, "vocab_size": 512, "max_position_embeddings": 1024})
    old = replace(context, install=replace(context.install, device="cuda"), gpus=(0,), shape=shape)

    def kind(config: Config) -> str | None:
        failure = impossible(config, old)
        return None if failure is None else failure.kind

    assert kind({"dtype": "bfloat16"}) == "dtype-unsupported"
    assert kind({"dtype": "half"}) is None
    assert kind({"max-model-len": 4096}) == "length-beyond-model"
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert kind({"max-model-len": 4096}) is None
