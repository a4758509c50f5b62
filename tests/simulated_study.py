"""A whole study on the simulator, written to a folder through the real rooms, for tests of report and export."""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuner import __version__
from tuner.capacity import ProbeSettings, find_capacity
from tuner.finish import Contender, Decision, Measured, Removal, effects, judge, plan_rounds
from tuner.metrics import overall, score_all
from tuner.records import (
    Bound,
    Budget,
    ClientEvidence,
    Config,
    EnvironmentFacts,
    KnobValue,
    PhaseTimes,
    Probe,
    Step,
    StepKind,
    StudyDefinition,
    TrialRecord,
    TrialState,
    Validity,
)
from tuner.sim.profile import Profile
from tuner.sim.profiles import H200, LLAMA_8B
from tuner.sim.scenario import Load, Scenario
from tuner.sim.virtual import VirtualServer
from tuner.space import Kind, Knob, Scale, make_space
from tuner.store import ResultsFolder, dumps, write_atomic
from tuner.study.inputs import Inputs
from tuner.study.result import ClassRates, FinishPlan, Status, StudyFile, StudyResult, write_study

SETTINGS = ProbeSettings(window_s=6.0, min_requests=40, min_probes=2, max_probes=3, max_shifts=5)
STARTED_AT = 1_796_000_000.0

SCENARIO = Scenario(
    name="long-prompts",
    profile=Profile(H200, LLAMA_8B),
    loads=(
        Load("long_in_short_out", 4096, 64, ttft_ms=1500, tpot_ms=45, start_rps=6.0),
        Load("long_in_long_out", 4096, 512, ttft_ms=1500, tpot_ms=30, start_rps=5.0),
    ),
    knobs={"max-num-batched-tokens": (512, 2048, 8192), "max-num-seqs": (16, 64, 256, 1024)},
    limiter="queueing",
    note="Started from a sequence limit that is far too low.",
)

BUDGET, SEQS = "max-num-batched-tokens", "max-num-seqs"
BASELINE: Config = {SEQS: 16}
STEPS: tuple[tuple[Config, StepKind, int | None, str], ...] = (
    (BASELINE, StepKind.BASELINE, None, "the configuration in use"),
    ({SEQS: 64}, StepKind.ONE, 0, "requests queue behind the sequence limit: raise it"),
    ({SEQS: 4096, BUDGET: 2048}, StepKind.ONE, 1, "further up"),
    ({SEQS: 256}, StepKind.ONE, 1, "between the two"),
    ({SEQS: 256, BUDGET: 2048}, StepKind.ONE, 3, "decodes wait behind long prefills: a smaller token budget"),
    ({SEQS: 256, BUDGET: 512}, StepKind.ONE, 4, "further down"),
)
WINNER = 4
REMOVED = (Removal(BUDGET, 2048, {SEQS: 256}), Removal(SEQS, 256, {SEQS: 16, BUDGET: 2048}))


@functools.cache
def shared_study() -> Path:
    """The folder of one such study, built once for all tests of a session, which only read it."""
    root = Path(tempfile.mkdtemp(prefix="simulated-study-")) / "demo"
    atexit.register(shutil.rmtree, root.parent, ignore_errors=True)
    simulated_study(root)
    return root


def simulated_study(root: Path, *, scenario: Scenario = SCENARIO, rounds: int = 3) -> StudyFile:
    """Run the study above and write it to `root`; the verdict is the real one of the finish on these numbers."""
    folder = ResultsFolder(root)
    names = tuple(load.name for load in scenario.loads)
    weights = {name: promise.weight for name, promise in scenario.slo.classes.items()}
    clock = itertools.count()
    trials: list[TrialRecord] = []

    def run(
        number: int,
        replicate: int,
        config: Config,
        kind: StepKind,
        start: int | None,
        reason: str,
        *,
        round: int | None = None,
        seed: int = 1,
    ) -> TrialRecord:
        before = config if start is None else STEPS[start][0]
        changed: dict[str, tuple[KnobValue | None, KnobValue | None]] = {
            name: (before.get(name), config.get(name))
            for name in {**before, **config}
            if before.get(name) != config.get(name)
        }
        step = Step(kind, changed, start, reason)
        started_at = STARTED_AT + 600.0 * next(clock)
        record = _trial(folder, scenario, number, replicate, config, step, started_at, round=round, seed=seed)
        folder.write_trial(record)
        trials.append(record)
        return record

    for number, (config, kind, start, reason) in enumerate(STEPS):
        run(number, 0, config, kind, start, reason)
    run(0, 1, BASELINE, StepKind.BASELINE, None, "noise floor")
    contenders = (Contender(0, BASELINE), Contender(WINNER, STEPS[WINNER][0]))
    plan = FinishPlan(0, contenders, plan_rounds((0, WINNER), rounds, seed=1), 2)
    finish = [
        run(r.number, 2 + r.round, STEPS[r.number][0], StepKind.FINALIST, None, "finish", round=r.round, seed=r.seed)
        for r in plan.runs
    ]
    removed = dict(enumerate(REMOVED, start=len(STEPS)))
    ablation = [
        run(
            number,
            turn,
            removal.config,
            StepKind.ABLATION,
            WINNER,
            f"without {removal.flag}",
            round=turn,
            seed=2 + turn,
        )
        for number, removal in removed.items()
        for turn in range(2)
    ]
    measured = [_measured(record) for record in (*finish, *ablation)]
    conclusion = judge(measured[: len(finish)], 0, weights)
    best = conclusion.winner if conclusion.decision is Decision.IMPROVED else 0
    assert best is not None
    study = StudyFile(
        definition=StudyDefinition(
            name=root.name,
            model="meta/llama-8b",
            vllm="vllm-sim",
            objective="capacity",
            workloads=names,
            fixed={"max-model-len": 16384},
            baseline=BASELINE,
            gpus=(0,),
            budget=Budget(trials=len(STEPS)),
            finish_rounds=rounds,
            speed="quick",
            lossy_allowed=False,
            seed=1,
            slo_digest=scenario.slo.digest,
            workload_digests={name: f"digest-of-{name}" for name in names},
            space_digest="digest-of-space",
            created_at=STARTED_AT,
            tuner_version=__version__,
        ),
        environment=EnvironmentFacts(
            vllm_version="0.32.0",
            python_version="3.12.3",
            platform="Linux-6.8-x86_64",
            cpu="a simulated CPU",
            cpu_count=16,
            memory_bytes=2**37,
            gpus=("a simulated H200, 139.8 GiB",),
            driver="580.0",
            cuda="13.0",
            host="simulated",
            digest="digest-of-environment",
        ),
        status=Status.DONE,
        plan=plan,
        result=StudyResult(
            conclusion=conclusion,
            config=STEPS[best][0],
            rates={
                name: ClassRates(_mean(finish, 0, name), _mean(finish, best, name), conclusion.classes[name].gain)
                for name in names
            },
            effects=effects(measured, WINNER, removed, weights),
            dropped=(),
            search_trials=len(STEPS),
            runs=len(trials),
            wall_s=sum(record.phases.total_s for record in trials),
            gpu_s=sum(record.phases.total_s for record in trials),
            simulated=True,
            finished_at=STARTED_AT + 20_000,
        ),
    )
    write_study(folder, study)
    knobs = [Knob(name, Kind.INT, values, Scale.LOG2, 1) for name, values in scenario.knobs.items()]
    write_atomic(folder.inputs / "inputs.json", dumps(Inputs(scenario.slo, {}, make_space("demo", knobs))))
    return study


def _trial(
    folder: ResultsFolder,
    scenario: Scenario,
    number: int,
    replicate: int,
    config: Config,
    step: Step,
    started_at: float,
    *,
    round: int | None = None,
    seed: int = 1,
) -> TrialRecord:
    server = VirtualServer(scenario, config, start_seed=100 * number + replicate)
    place = folder.new_attempt(number, replicate)
    failure = server.failure
    capacities = {}
    wall: list[float] = []

    def probe(workload: str, rate: float, probe_seed: int, purpose: str, window_s: float) -> Probe:
        load = scenario.load(workload)
        results, telemetry, wall_s = server.probe(workload, rate, probe_seed, window_s, load.ramp_s)
        wall.append(wall_s)
        promise = {workload: scenario.slo.classes[workload]}
        classes = score_all(results, promise, window=(load.ramp_s, load.ramp_s + window_s))
        outcome, margin = overall(classes)
        return Probe(
            workload=workload,
            rate_rps=rate,
            seed=probe_seed,
            purpose=purpose,
            ramp_s=load.ramp_s,
            window_s=window_s,
            wall_s=wall_s,
            started_at=started_at + sum(wall),
            classes=classes,
            outcome=outcome,
            margin=margin,
            validity=Validity(True, (), 0.0, rate, rate),
            client=ClientEvidence(workers=1, cpu_share=0.1, loop_lag_p99_s=0.0, loop_lag_max_s=0.0),
            telemetry=telemetry,
            requests_file=folder.write_requests(place, f"{workload}-{len(wall):02d}", results),
        )

    if failure is None:
        for index, load in enumerate(scenario.loads):
            seeds = itertools.count(1000 * seed + 100 * index)
            capacities[load.name] = find_capacity(
                probe, load.name, start_rps=load.start_rps, settings=SETTINGS, seeds=seeds
            )
    phases = PhaseTimes(launch_s=server.start_s, measure_s=sum(wall), stop_s=1.0, settle_s=2.0)
    return TrialRecord(
        number=number,
        replicate=replicate,
        config=config,
        step=step,
        state=TrialState.COMPLETE if failure is None else TrialState.INFEASIBLE,
        capacities=capacities,
        probes=(),
        failure=failure,
        effective={},
        degraded=(),
        startup={"weights_gib": 15.0},
        phases=phases,
        environment="digest-of-environment",
        command=("vllm", "serve", "meta/llama-8b"),
        started_at=started_at,
        ended_at=started_at + phases.total_s,
        seed=seed,
        simulated=True,
        round=round,
    )


def measured_runs(trials: Sequence[TrialRecord]) -> tuple[list[Measured], list[Measured]]:
    """What the finish and the ablation measured, as the verdict takes it."""
    finish = [record for record in trials if record.step.kind is StepKind.FINALIST]
    ablation = [record for record in trials if record.step.kind is StepKind.ABLATION]
    return [_measured(record) for record in finish], [_measured(record) for record in ablation]


def _measured(record: TrialRecord) -> Measured:
    values = {name: capacity.rate_rps for name, capacity in record.capacities.items()}
    excess = {name: 1.0 if c.bound is Bound.BELOW else -0.1 for name, c in record.capacities.items()}
    return Measured(record.number, record.round or 0, values, excess)


def _mean(records: Sequence[TrialRecord], number: int, workload: str) -> float:
    logs = [math.log(r.capacities[workload].rate_rps) for r in records if r.number == number]
    return math.exp(sum(logs) / len(logs))


def as_real(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The same records without the mark of the simulator, for tests of what is allowed to real ones only."""
    return [replace(record, simulated=False) for record in trials]


def fixed_flags(study: StudyFile, **flags: KnobValue) -> StudyFile:
    """The study with these flags given by the user."""
    fixed: Mapping[str, KnobValue] = {name.replace("_", "-"): value for name, value in flags.items()}
    return replace(study, definition=replace(study.definition, fixed=fixed))
