"""`tune verify`: what has drifted since an export, and whether it still carries what its lock records."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from tests.comparing import FormulaPlace, flags, install
from tests.formula import FACTS
from tests.simulated_study import shared_study
from tests.synthetic import slo as class_slo
from tuner.cli import main
from tuner.comparison import (
    Asked,
    Held,
    Lock,
    Now,
    SideRate,
    Verification,
    Weight,
    drift_between,
    hold,
    lock_of,
    prepare_verification,
    resume_verification,
    verify,
)
from tuner.environment import model_revision
from tuner.errors import EnvironmentFault, ExitCode, InputError
from tuner.export import deployment, write
from tuner.records import Config, Slo
from tuner.slo import load_slo
from tuner.store import ResultsFolder
from tuner.study import Silent, StopSignals, read_study
from tuner.study.inputs import kept

CLASSES = ("long_in_short_out", "long_in_long_out")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """`best.yaml` and its lock, away from the study that they came from."""
    folder = ResultsFolder(shared_study())
    study, slo = read_study(folder), kept(folder).slo
    out = tmp_path / "deploy"
    write(deployment(study, slo, folder.trials(), flags(), forced=True), ("vllm",), flags(), out)
    return out / "best.yaml"


@pytest.fixture
def workloads(tmp_path: Path) -> Path:
    folder = tmp_path / "workloads"
    folder.mkdir()
    for name in (*CLASSES, "another"):
        (folder / f"{name}.yaml").write_text("input_tokens: 64\noutput_tokens: 16\n")
    return folder


@pytest.fixture
def lock(exported: Path) -> Lock:
    found = lock_of(exported)
    assert found is not None
    return found


def asked(exported: Path, workloads: Path, **changes: object) -> Asked:
    made = Asked(words=(str(exported),), vllms=("vllm",), workloads=workloads, rounds=3, name="verify")
    return replace(made, **changes)  # type: ignore[arg-type]


def recorded(lock: Lock) -> dict[str, float]:
    best = {name: rates.best for name, rates in lock.capacity_rps.items()}
    return {name: rate.value for name, rate in best.items() if rate is not None}


def as_if_recorded_here(exported: Path, workloads: Path) -> None:
    """The lock with the digests of these workloads and of the machine that the tests measure on."""
    definition, _, lock = prepare_verification(asked(exported, workloads), install())
    path = exported.with_name("best.lock.json")
    document = json.loads(path.read_text())
    document["digests"] |= {f"workload {name}": definition.workload_digests[name] for name in lock.workloads}
    document["environment"] |= {name: getattr(FACTS, name) for name in ("gpus", "cpu", "cpu_count", "driver", "cuda")}
    path.write_text(json.dumps(document))


def measured(exported: Path, workloads: Path, factor: float, **changes: object) -> Verification:
    """Verified where everything carries `factor` of what the lock records."""
    definition, traffic, lock = prepare_verification(asked(exported, workloads, **changes), install())
    rates = {name: value * factor for name, value in recorded(lock).items()}

    def truth(version: str, config: Config) -> Mapping[str, float] | None:
        assert config == lock.config
        return rates if factor > 0 else None

    folder = ResultsFolder(exported.parent / "verify")
    place = FormulaPlace(truth, noise=0.01)
    return verify(definition, traffic, lock, install(), folder, place, {}, StopSignals(), Silent(), pause_s=0.0)


# --- the lock ----------------------------------------------------------------------------------------------------


def test_the_lock_brings_everything_that_verifying_needs(exported: Path, workloads: Path, lock: Lock) -> None:
    definition, traffic, _ = prepare_verification(asked(exported, workloads), install())
    assert definition.model == "meta/llama-8b"
    assert definition.fixed == {"max-model-len": 16384}
    assert definition.sides[0].config == {"max-num-seqs": 256, "max-num-batched-tokens": 2048}
    assert set(definition.workloads) == set(CLASSES)  # and not `another`, which it knows nothing of
    assert traffic.slo.classes == kept(ResultsFolder(shared_study())).slo.classes
    assert len(lock.runs_rps) == 3
    assert lock.baseline == {"max-num-seqs": 16}


def test_without_a_lock_nothing_is_known(exported: Path, workloads: Path) -> None:
    exported.with_name("best.lock.json").unlink()
    with pytest.raises(InputError, match=r"best\.lock\.json"):
        prepare_verification(asked(exported, workloads), install())


def test_a_broken_lock_is_named(exported: Path, workloads: Path) -> None:
    exported.with_name("best.lock.json").write_text("{}")
    with pytest.raises(InputError, match=r"best\.lock\.json: study"):
        prepare_verification(asked(exported, workloads), install())


def test_workloads_that_are_not_here_are_asked_for(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "short.yaml").write_text("input_tokens: 64\noutput_tokens: 16\n")
    with pytest.raises(InputError, match="--workloads DIR"):
        prepare_verification(asked(exported, tmp_path / "few"), install())


# --- drift -------------------------------------------------------------------------------------------------------


def now_of(lock: Lock, promise: Slo, **changes: object) -> Now:
    digests = {name: lock.digests[f"workload {name}"] for name in lock.workloads}
    now = Now(lock.environment, lock.model, "", lock.config, promise, digests, dict(lock.variables))
    return replace(now, **changes)  # type: ignore[arg-type]


def test_nothing_has_changed(lock: Lock) -> None:
    promise = lock.promise(CLASSES, "lock")
    assert drift_between(lock, promise, now_of(lock, promise)) == ()


@pytest.mark.parametrize(
    ("fact", "value", "says", "weight"),
    [
        ("vllm_version", "0.33.0", "vLLM: 0.32.0 → 0.33.0", Weight.EXPLAINS),
        ("driver", "590.1", "driver: 580.0 → 590.1", Weight.EXPLAINS),
        ("gpus", ("another GPU",), "GPU: a simulated H200, 139.8 GiB → another GPU", Weight.FORBIDS),
        ("cuda", "13.1", "CUDA: 13.0 → 13.1", Weight.EXPLAINS),
        ("cpu", "another CPU", "CPU: a simulated CPU → another CPU", Weight.EXPLAINS),
        ("memory_bytes", 2**35, "memory: 128.0 GiB → 32.0 GiB", Weight.NOTHING),
    ],
)
def test_each_fact_of_the_machine_is_named(lock: Lock, fact: str, value: object, says: str, weight: Weight) -> None:
    promise = lock.promise(CLASSES, "lock")
    changed = replace(lock.environment, **{fact: value})  # type: ignore[arg-type]
    (drift,) = drift_between(lock, promise, now_of(lock, promise, environment=changed))
    assert (str(drift), drift.weight) == (says, weight)


def test_model_flags_workloads_variables_and_slo_are_named(lock: Lock, tmp_path: Path) -> None:
    promise = lock.promise(CLASSES, "lock")
    (tmp_path / "slo.yaml").write_text("slo: {ttft: {p99: 1500}, tpot: {p99: 30}}\n")
    known = replace(lock, digests={**lock.digests, "model": "commit a"})
    now = now_of(
        lock,
        load_slo(tmp_path / "slo.yaml", CLASSES),
        model_revision="commit b",
        config={**lock.config, "max-num-seqs": 512, "enforce-eager": True},
        workload_digests={CLASSES[0]: lock.digests[f"workload {CLASSES[0]}"], CLASSES[1]: "other"},
        variables={"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
    )
    said = [str(drift) for drift in drift_between(known, promise, now)]
    assert "model revision: commit a → commit b" in said
    assert "flag --max-num-seqs: 256 → 512" in said
    assert "flag --enforce-eager: unset → true" in said
    assert "variable VLLM_ATTENTION_BACKEND: unset → FLASHINFER" in said
    assert f"workload {CLASSES[1]}: digest-of-{CLASSES[1]} → other" in said
    assert "SLO long_in_short_out, tpot p99 in ms: 45 → 30" in said


def test_the_revision_of_a_model_folder_follows_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 3_000_000)
    before = model_revision(str(tmp_path))
    (tmp_path / "README.md").write_text("words")
    assert model_revision(str(tmp_path)) == before
    weights.write_bytes(b"\0" * 2_999_999 + b"\1")
    assert model_revision(str(tmp_path)) != before
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_revision("org/name") == ""
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0123abc\n")
    assert model_revision("org/name") == "commit 0123abc"


# --- holding -----------------------------------------------------------------------------------------------------


def test_what_still_carries_its_capacity_holds(exported: Path, workloads: Path) -> None:
    as_if_recorded_here(exported, workloads)
    verification = measured(exported, workloads, 1.0)
    assert verification.verified.held is Held.HOLDS
    ratio = verification.verified.ratio
    assert ratio is not None
    assert ratio.low < 1.0 < ratio.high
    assert json.loads((exported.parent / "verify" / "verify.json").read_text())["verified"]["held"] == "holds"


def test_a_loss_beyond_the_tolerance_holds_not(exported: Path, workloads: Path) -> None:
    as_if_recorded_here(exported, workloads)
    verified = measured(exported, workloads, 0.75).verified
    assert verified.held is Held.HOLDS_NOT
    assert {one.held for one in verified.classes.values()} == {Held.HOLDS_NOT}


def test_what_does_not_start_holds_not(exported: Path, workloads: Path) -> None:
    as_if_recorded_here(exported, workloads)
    verified = measured(exported, workloads, 0.0).verified
    assert verified.held is Held.HOLDS_NOT
    assert verified.reason == "did not run in 3 of 3 rounds"


def test_other_workloads_are_shown_and_not_judged(exported: Path, workloads: Path) -> None:
    verified = measured(exported, workloads, 0.5).verified
    assert verified.held is Held.UNRESOLVED
    assert "workload long_in_long_out" in verified.reason
    assert verified.classes["long_in_long_out"].measured is not None


def runs(*values: float) -> list[dict[str, float]]:
    return [dict.fromkeys(CLASSES, value) for value in values]


def holding(lock: Lock, now: list[dict[str, float]]) -> Held:
    before = replace(lock, runs_rps=tuple(runs(1.0, 1.02, 0.98)))
    rates = {name: SideRate(run[name], run[name], run[name], len(now), False) for run in now for name in CLASSES}
    return hold(before, now, rates, "", dict.fromkeys(CLASSES, 0.5), ()).held


def test_the_three_verdicts(lock: Lock) -> None:
    assert holding(lock, runs(1.0, 0.98, 1.01)) is Held.HOLDS
    assert holding(lock, runs(0.80, 0.82, 0.81)) is Held.HOLDS_NOT
    assert holding(lock, runs(1.1, 0.8, 0.9)) is Held.UNRESOLVED
    assert holding(lock, runs(1.3, 1.31, 1.29)) is Held.HOLDS


def test_a_loss_in_one_class_is_not_hidden_by_the_others(lock: Lock) -> None:
    now = [{CLASSES[0]: value * 1.3, CLASSES[1]: value * 0.75} for value in (1.0, 1.02, 0.99)]
    assert holding(lock, now) is Held.HOLDS_NOT


def test_an_older_lock_without_its_runs_is_held_against_its_mean(lock: Lock) -> None:
    old = replace(lock, runs_rps=())
    value = recorded(lock)
    now = [{name: rate * factor for name, rate in value.items()} for factor in (0.70, 0.71, 0.69)]
    rates = {name: SideRate(rate, rate, rate, 3, False) for name, rate in now[0].items()}
    verified = hold(old, now, rates, "", dict.fromkeys(CLASSES, 0.5), ())
    assert verified.held is Held.HOLDS_NOT
    assert verified.ratio is not None
    assert verified.ratio.value == pytest.approx(0.70, rel=0.01)
    assert math.isfinite(verified.ratio.high)


def test_a_promise_survives_the_lock(tmp_path: Path) -> None:
    from tuner.export.text import slo_document
    from tuner.slo import parse_slo

    promise = Slo({"short": class_slo(ttft=(100, 0.4), tpot=(99.9, 0.029))}, "")
    again = parse_slo(slo_document(promise), "lock", ["short"]).classes["short"]
    assert [(one.metric, one.percentile) for one in again.limits] == [("ttft", 100.0), ("tpot", 99.9)]
    assert [one.limit_s for one in again.limits] == pytest.approx([0.4, 0.029])


# --- files that somebody has edited, and going on ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speed": "bogus"}, "none of quick, fast"),
        *[({"runs_rps": [{"long_in_long_out": value}]}, "runs_rps") for value in (0, -1, math.nan, math.inf)],
        ({"capacity_rps": {}}, "no workload that could be measured"),
        ({"slo": {"classes": {"long_in_long_out": {"ttft": "soon"}, "long_in_short_out": {}}}}, "ttft"),
    ],
)
def test_an_edited_lock_is_refused_before_anything_starts(
    exported: Path, workloads: Path, change: dict[str, object], says: str
) -> None:
    path = exported.with_name("best.lock.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=says):
        prepare_verification(asked(exported, workloads), install())


def test_a_lock_brings_no_variables_but_those_of_tuning(exported: Path) -> None:
    tuning = {"VLLM_ATTENTION_BACKEND": "FLASHINFER", "OMP_NUM_THREADS": "8"}
    foreign = (
        "LD_PRELOAD",
        "TMPDIR",
        "PATH",
        "VLLM_TUNE_SERVER",
        "VLLM_CACHE_ROOT",
        "VLLM_PORT",
        "CUDA_VISIBLE_DEVICES",
    )
    path = exported.with_name("best.lock.json")
    variables = {**tuning, **dict.fromkeys(foreign, "/tmp/x"), "VLLM_KEY": "***", "VLLM_X": "a\0b"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"variables": variables}))
    lock = lock_of(exported)
    assert lock is not None
    assert dict(lock.variables) == tuning


def test_a_verification_goes_on_only_with_the_file_that_it_measured(exported: Path, workloads: Path) -> None:
    measured(exported, workloads, 1.0)
    folder = ResultsFolder(exported.parent / "verify")
    definition, _, _ = resume_verification(asked(exported, workloads, rounds=9), install(), folder)
    assert definition.rounds == 3
    text = exported.read_text()
    edits = {
        "flags": text + "long-prefill-token-threshold: 512\n",
        "model": re.sub(r"(?m)^model: .*$", "model: another/model", text),
    }
    for field, edited in edits.items():
        exported.write_text(edited)
        with pytest.raises(InputError, match="is not what was measured") as error:
            resume_verification(asked(exported, workloads), install(), folder)
        assert error.value.field == field
    exported.write_text(text)
    with pytest.raises(InputError) as error:
        resume_verification(asked(exported, workloads, given=("--max-logprobs", "5")), install(), folder)
    assert "is not what was measured" in str(error.value)


def test_a_verification_is_resumed_on_its_own_vllm_and_with_nothing_else(
    exported: Path, workloads: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(exported, workloads, 1.0)
    sought: list[str] = []

    def find(path: str) -> NoReturn:
        sought.append(path)
        raise EnvironmentFault("found")

    monkeypatch.setattr("tuner.server.find_vllm", find)
    words = ["verify", str(exported), "--resume", str(exported.parent / "verify")]
    assert main(words) == ExitCode.ENVIRONMENT
    assert sought == [install().path]
    for flag in ("--vllm", "--rounds", "--slo", "--seed", "--out"):
        assert main([*words, flag, "3"]) == ExitCode.INPUT
        assert f"{flag} = '3': is kept by the verification" in capsys.readouterr().err
    assert main(["compare", "--resume", words[-1]]) == ExitCode.INPUT
    assert "measurements of 1 side" in capsys.readouterr().err
