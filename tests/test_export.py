"""Every export starts the measured configuration: checked by the tools that read the formats, and by a real vLLM."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.simulated_study import BUDGET, SCENARIO, SEQS, WINNER, as_real, fixed_flags, shared_study
from tuner.cli import main
from tuner.cli.export import FORMAT_NAMES
from tuner.errors import InputError
from tuner.export import ALONE, FORMATS, LOCK_FILE, POINT_ESTIMATES, Deployment, deployment, write, write_best
from tuner.export.containers import compose, dns_label, helm, image, kubernetes
from tuner.export.text import as_json, document, shell, systemd, vllm_yaml
from tuner.finish import Decision, FlagEffect
from tuner.records import Bound, Estimate, Slo, TrialRecord, TrialState
from tuner.serve_args import ServeFlags, parse_argv, parse_help
from tuner.slo import parse_slo
from tuner.store import ResultsFolder, dumps
from tuner.study import refuse_secrets
from tuner.study.result import StudyFile, read_study

HOSTILE = "org/mo'del $(touch /tmp/x) %h\"#"
VARIABLES = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CACHE_ROOT": "/somewhere",
    "VLLM_API_KEY": "secret-word",
    "HF_TOKEN": "secret-word",
    "NCCL_DEBUG": "$HOME 100%",
    "VLLM_TUNE_LOCKS": "/locks",
    "VLLM_SIM_TIME_SCALE": "0.05",
    "VLLM_HTTP_HEADERS": "Authorization: Bearer secret-word",
}


@pytest.fixture(scope="module")
def flags() -> ServeFlags:
    text = (Path(__file__).parent / "recorded" / "help" / "serve_help_0.32.0.txt").read_text()
    return parse_help(text, "0.32.0")


@pytest.fixture(scope="module")
def study() -> StudyFile:
    return read_study(ResultsFolder(shared_study()))


@pytest.fixture(scope="module")
def trials() -> list[TrialRecord]:
    return as_real(ResultsFolder(shared_study()).trials())


@pytest.fixture(scope="module")
def slo() -> Slo:
    return SCENARIO.slo


@pytest.fixture(scope="module")
def exported(study: StudyFile, slo: Slo, trials: list[TrialRecord], flags: ServeFlags) -> Deployment:
    return deployment(study, slo, trials, flags, variables=VARIABLES, vllm_path=shutil.which("env") or "/usr/bin/env")


def hostile(exported: Deployment) -> Deployment:
    return replace(exported, model=HOSTILE)


# --- what is exported ---------------------------------------------------------------------------------------------


def test_the_winner_is_exported_with_the_measured_effect_of_each_flag(exported: Deployment, study: StudyFile) -> None:
    assert study.result is not None
    effects = {effect.flag: effect.effect for effect in study.result.effects}
    assert exported.trial == WINNER
    assert exported.config == {"max-model-len": 16384, SEQS: 256, BUDGET: 2048}
    notes = {flag.name: flag.note for flag in exported.flags}
    assert notes["max-model-len"].startswith("given by the user")
    for name in (SEQS, BUDGET):
        effect = effects[name]
        assert effect is not None
        assert f"{effect.value:.2f} times (95 %: {effect.low:.2f} to {effect.high:.2f}" in notes[name]
    assert "of the capacity without it: not shown to matter; kept because leaving it out was not" in notes[BUDGET]
    assert "of the capacity with the baseline's value" in notes[SEQS]
    assert "not shown to matter" not in notes[SEQS]


def test_no_secret_and_nothing_of_the_measuring_is_exported(
    exported: Deployment, flags: ServeFlags, tmp_path: Path
) -> None:
    assert exported.variables == {"VLLM_USE_FLASHINFER_SAMPLER": "0", "NCCL_DEBUG": "$HOME 100%"}
    write(exported, list(FORMATS), flags, tmp_path)
    for path in tmp_path.iterdir():
        text = path.read_text()
        assert "secret-word" not in text
        assert "DEV_MODE" not in text


def test_a_flag_whose_value_is_a_secret_is_withheld_and_named(
    study: StudyFile, slo: Slo, trials: list[TrialRecord], flags: ServeFlags
) -> None:
    secretive = fixed_flags(study, max_model_len=16384, hf_token="secret-word")
    result = deployment(secretive, slo, trials, flags)
    assert result.withheld == ("hf-token",)
    assert "--hf-token is not written here" in vllm_yaml(result, flags)
    assert "secret-word" not in json.dumps(document(result))


@pytest.mark.parametrize(
    "words",
    [
        ("--model-loader-extra-config", '{"s3_secret_access_key": "secret-word"}'),
        ("--model-loader-extra-config.s3_secret_access_key", "secret-word"),
        ("--kv-transfer-config", '{"kv_connector_extra_config": {"auth_token": "secret-word"}}'),
        ("--kv-transfer-config.kv_connector_extra_config.auth_token", "secret-word"),
        ("--download-dir", "https://me:secret-word@host/x"),
    ],
)
def test_a_secret_inside_a_flag_is_refused_and_withheld(
    words: tuple[str, ...],
    exported: Deployment,
    study: StudyFile,
    slo: Slo,
    trials: list[TrialRecord],
    flags: ServeFlags,
    tmp_path: Path,
) -> None:
    config = parse_argv(words, flags)
    with pytest.raises(InputError, match="secret") as caught:
        refuse_secrets(config, flags)
    assert "secret-word" not in str(caught.value)
    fixed = {**study.definition.fixed, **config}
    result = deployment(replace(study, definition=replace(study.definition, fixed=fixed)), slo, trials, flags)
    assert result.withheld == (words[0].removeprefix("--").partition(".")[0],)
    write(result, list(FORMATS), flags, tmp_path)
    assert all("secret-word" not in path.read_text() for path in tmp_path.iterdir())


def test_simulated_results_are_refused_unless_forced(study: StudyFile, slo: Slo, flags: ServeFlags) -> None:
    trials = ResultsFolder(shared_study()).trials()
    with pytest.raises(InputError, match=r"simulator.*--force"):
        deployment(study, slo, trials, flags)
    forced = deployment(study, slo, trials, flags, forced=True)
    assert forced.simulated
    assert "# NOT VERIFIED: it was measured on the simulator" in vllm_yaml(forced, flags)


def test_an_unfinished_study_is_refused_unless_forced(
    study: StudyFile, slo: Slo, trials: list[TrialRecord], flags: ServeFlags
) -> None:
    unfinished = replace(study, result=None)
    with pytest.raises(InputError, match="has no winner"):
        deployment(unfinished, slo, trials, flags)
    with pytest.raises(InputError, match="nothing is verified"):
        deployment(unfinished, slo, trials, flags, trial=3)
    forced = deployment(unfinished, slo, trials, flags, trial=3, forced=True)
    assert forced.config[SEQS] == 256
    assert not forced.verified


def test_another_trial_than_the_winner_is_refused_unless_forced(
    study: StudyFile, slo: Slo, trials: list[TrialRecord], flags: ServeFlags
) -> None:
    with pytest.raises(InputError, match=f"verified winner, which is trial {WINNER}"):
        deployment(study, slo, trials, flags, trial=1)
    with pytest.raises(InputError, match="never ran to the end"):
        deployment(study, slo, trials, flags, trial=2)
    with pytest.raises(InputError, match=r"no such trial.*0, 1, 2"):
        deployment(study, slo, trials, flags, trial=99)


def test_the_lock_reads_back(exported: Deployment, flags: ServeFlags, slo: Slo, tmp_path: Path) -> None:
    write(exported, ["vllm"], flags, tmp_path)
    lock = json.loads((tmp_path / LOCK_FILE).read_text())
    assert parse_slo(lock["slo"], "lock", list(slo.classes)).classes == slo.classes
    assert lock["environment"]["vllm_version"] == "0.32.0"
    assert lock["digests"]["workload long_in_short_out"] == "digest-of-long_in_short_out"
    assert lock["command"][:3] == ["vllm", "serve", "meta/llama-8b"]
    assert lock["capacity_rps"]["long_in_long_out"]["best"]["n"] == 3


# --- capacities and what they are -----------------------------------------------------------------------------------


def test_capacities_are_those_of_the_verdict(exported: Deployment, study: StudyFile, flags: ServeFlags) -> None:
    assert study.result is not None
    text = vllm_yaml(exported, flags)
    for name, rates in study.result.rates.items():
        pair = exported.classes[name]
        assert pair.baseline is not None
        assert pair.best is not None
        assert (pair.baseline.value, pair.best.value, pair.gain) == (rates.baseline_rps, rates.best_rps, rates.gain)
        assert f"{rates.best_rps:.3g} (" in text
    for sentence in (POINT_ESTIMATES, ALONE):
        assert sentence in text


def test_only_whole_rounds_of_this_finish_on_one_machine_count(
    study: StudyFile, slo: Slo, trials: list[TrialRecord], flags: ServeFlags
) -> None:
    plain = deployment(study, slo, trials, flags)
    one = next(record for record in trials if record.number == WINNER and record.round == 0)
    tenth = {n: replace(c, rate_rps=c.rate_rps / 10, bound=Bound.ABOVE) for n, c in one.capacities.items()}
    stray = replace(one, capacities=tenth, replicate=50)
    strays = [
        replace(stray, machine="another", started_at=0.0),  # half a round
        replace(stray, state=TrialState.INTERRUPTED, started_at=0.0),
        replace(stray, state=TrialState.FAULT, started_at=0.0),
        replace(stray, round=None),  # of the search
    ]
    assert deployment(study, slo, [*trials, *strays], flags).classes == plain.classes
    assert study.plan is not None
    later = replace(study, plan=replace(study.plan, runs=tuple(r for r in study.plan.runs if r.round > 0)))
    earlier = deployment(later, slo, trials, flags).classes["long_in_long_out"].best
    assert earlier is not None
    assert earlier.n == 2  # round 0 is of an earlier finish


@pytest.mark.parametrize(
    ("bounds", "mark"),
    [((Bound.ABOVE,), "≥ "), ((Bound.BELOW,), "≤ "), ((Bound.ABOVE, Bound.BELOW), "≈ "), ((Bound.BRACKETED,), "")],
)
def test_bounds_are_marked(
    bounds: tuple[Bound, ...],
    mark: str,
    study: StudyFile,
    slo: Slo,
    trials: list[TrialRecord],
    flags: ServeFlags,
) -> None:
    left = list(bounds)
    changed = []
    for record in trials:
        if record.number == WINNER and record.round is not None and left:
            bound = left.pop()
            capacities = {name: replace(c, bound=bound) for name, c in record.capacities.items()}
            changed.append(replace(record, capacities=capacities))
        else:
            changed.append(record)
    result = deployment(study, slo, changed, flags)
    rate = result.classes["long_in_long_out"].best
    assert rate is not None
    assert rate.mark == mark
    assert f"SLO capacity long_in_long_out: {mark}{rate.value:.3g}" in vllm_yaml(result, flags)
    assert json.loads(json.dumps(document(result)))["capacity_rps"]["long_in_long_out"]["best"]["bound"] == rate.bound


def returning(study: StudyFile) -> StudyFile:
    """The study, won by vLLM's defaults."""
    assert study.result is not None
    effect = FlagEffect(SEQS, None, Estimate(1.42, 1.31, 1.54, 3), True)
    conclusion = replace(study.result.conclusion, gains={WINNER: Estimate(1.42, 1.31, 1.54, 3)})
    return replace(study, result=replace(study.result, conclusion=conclusion, config={}, effects=(effect,)))


def test_a_flag_of_the_baseline_that_returns_to_the_default_is_named(
    study: StudyFile, slo: Slo, trials: list[TrialRecord], flags: ServeFlags
) -> None:
    result = deployment(returning(study), slo, trials, flags)
    line = (
        f"# --{SEQS} 16 → vLLM's default: 1.42 times (95 %: 1.31 to 1.54, n = 3) of the baseline's capacity; the only"
    )
    for text in (vllm_yaml(result, flags), shell(result), systemd(result)):
        assert line in text
    assert SEQS not in yaml.safe_load(vllm_yaml(result, flags))
    (returned,) = json.loads(json.dumps(document(result)))["returned"]
    assert (returned["name"], returned["baseline"]) == (SEQS, 16)


def test_a_flag_is_the_only_difference_only_if_no_other_returns_to_the_default(
    study: StudyFile, slo: Slo, trials: list[TrialRecord], flags: ServeFlags
) -> None:
    alone = returning(study)
    assert alone.result is not None
    two = replace(alone, result=replace(alone.result, config={BUDGET: 2048}))
    result = deployment(two, slo, trials, flags)
    assert {flag.name: flag.note for flag in result.flags}[BUDGET] == "effect of this flag alone was not measured"
    assert result.returned[0].note == "1.42 times (95 %: 1.31 to 1.54, n = 3) of the capacity with the baseline's value"


def test_an_unbounded_gain_is_valid_json(exported: Deployment) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    unbounded = replace(exported, gain=Estimate(1.4, 0.0, math.inf, 2))
    assert json.loads(as_json(unbounded), parse_constant=refuse)["gain"] == {
        "value": 1.4,
        "low": 0,
        "high": None,
        "n": 2,
    }


# --- formats ------------------------------------------------------------------------------------------------------


def test_yaml_holds_the_configuration_and_the_reasons(exported: Deployment, flags: ServeFlags) -> None:
    text = vllm_yaml(exported, flags)
    assert yaml.safe_load(text) == {"model": "meta/llama-8b", "max-model-len": 16384, SEQS: 256, BUDGET: 2048}
    lines = text.splitlines()
    assert "of the capacity with the baseline's value" in lines[lines.index(f"{SEQS}: 256") - 1]


def test_the_script_starts_exactly_the_measured_command(exported: Deployment, tmp_path: Path) -> None:
    script, stand_in = tmp_path / "best.sh", tmp_path / "vllm"
    script.write_text(shell(hostile(exported)))
    stand_in.write_text('#!/bin/bash\nprintf "%s\\0" "$NCCL_DEBUG" "$@"\n')
    stand_in.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "VLLM": str(stand_in)}
    output = subprocess.run(
        ["bash", str(script), "--port", "8001"], env=environment, capture_output=True, check=True, text=True
    ).stdout
    assert output.split("\0")[:-1] == ["$HOME 100%", "serve", HOSTILE, *exported.words, "--port", "8001"]


def test_systemd_accepts_the_unit(exported: Deployment, tmp_path: Path) -> None:
    unit = tmp_path / "vllm.service"
    unit.write_text(systemd(hostile(exported)))
    assert "Restart=always" in unit.read_text()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "vllm.service" not in checked.stderr


def test_compose_is_valid_and_keeps_every_word(exported: Deployment) -> None:
    text = compose(hostile(exported))
    service = yaml.safe_load(text)["services"]["vllm"]
    command = [word.replace("$$", "$") for word in service["command"]]
    assert command == [HOSTILE, *exported.words, "--host", "0.0.0.0", "--port", "8000"]
    assert service["image"] == "vllm/vllm-openai:v0.32.0"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1
    compose_spec = pytest.importorskip("compose_spec")
    assert compose_spec.PyCompose.from_yaml(text).service_names() == ["vllm"]


def test_kubernetes_manifests_are_valid_and_belong_together(exported: Deployment) -> None:
    claim, workload, service = yaml.safe_load_all(kubernetes(exported))
    pod = workload["spec"]["template"]
    assert service["spec"]["selector"] == workload["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    container = pod["spec"]["containers"][0]
    assert container["args"] == ["meta/llama-8b", *exported.words, "--host", "0.0.0.0", "--port", "8000"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 300
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert pod["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert "&id" not in kubernetes(exported)
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in (claim, workload, service):
        kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_a_model_on_disk_is_mounted_under_its_own_name(exported: Deployment) -> None:
    local = replace(exported, model="/data/llama 8b", model_folder="/data/llama 8b", gpus=0)
    service = yaml.safe_load(compose(local))["services"]["vllm"]
    assert service["command"][:3] == ["/models/model", "--served-model-name", "/data/llama 8b"]
    assert service["volumes"][1]["source"] == "/data/llama 8b"
    assert "deploy" not in service
    workload = list(yaml.safe_load_all(kubernetes(local)))[1]
    assert {"name": "model", "hostPath": {"path": "/data/llama 8b", "type": "Directory"}} in workload["spec"][
        "template"
    ]["spec"]["volumes"]
    assert image(local) == "vllm/vllm-openai-cpu:v0.32.0"


@pytest.mark.parametrize("folder", ["/data/a:b", "/data/$HOME and $$", "/data/${x:-y}", "/data/'\"#"])
def test_any_folder_can_be_mounted(exported: Deployment, folder: str) -> None:
    local = replace(exported, model=folder, model_folder=folder)
    text = compose(local)
    service = yaml.safe_load(text)["services"]["vllm"]
    assert service["volumes"][1] == {
        "type": "bind",
        "source": folder.replace("$", "$$"),
        "target": "/models/model",
        "read_only": True,
    }
    compose_spec = pytest.importorskip("compose_spec")
    assert compose_spec.PyCompose.from_yaml(text).service_names() == ["vllm"]


def test_kubernetes_substitutes_nothing(exported: Deployment) -> None:
    container = list(yaml.safe_load_all(kubernetes(replace(exported, model="a/$(HF_TOKEN)"))))[1]["spec"]["template"][
        "spec"
    ]["containers"][0]
    assert container["args"][0] == "a/$$(HF_TOKEN)"
    assert {"name": "NCCL_DEBUG", "value": "$$HOME 100%"} in container["env"]
    values = yaml.safe_load(helm(exported))["servingEngineSpec"]["modelSpec"][0]
    assert {"name": "NCCL_DEBUG", "value": "$$HOME 100%"} in values["env"]


@pytest.mark.parametrize("model", ["models/llama", "./models/llama", "models"])
def test_a_folder_named_from_here_is_no_hub_name(
    model: str,
    study: StudyFile,
    slo: Slo,
    trials: list[TrialRecord],
    flags: ServeFlags,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    here = replace(study, definition=replace(study.definition, model=model))
    result = deployment(here, slo, trials, flags)
    folder = str((tmp_path / model).resolve())
    service = yaml.safe_load(compose(result))["services"]["vllm"]
    assert service["command"][:3] == ["/models/model", "--served-model-name", model]
    assert service["volumes"][1]["source"] == folder
    assert yaml.safe_load(vllm_yaml(result, flags))["model"] == folder
    assert f"serve {folder} " in shell(result)
    assert f"serve {folder} " in systemd(result)
    monkeypatch.chdir(Path(__file__).parent)
    assert deployment(here, slo, trials, flags).source == model


def test_helm_values_say_prefix_caching_outright(exported: Deployment) -> None:
    # The chart passes --no-enable-prefix-caching when vllmConfig does not say otherwise.
    model = yaml.safe_load(helm(exported))["servingEngineSpec"]["modelSpec"][0]
    words = ["--enable-prefix-caching", *exported.words]
    assert model["vllmConfig"] == {"enablePrefixCaching": True, "extraArgs": words}
    # What the chart's values.schema.json requires of every entry, with its types.
    required = {
        "name": str,
        "repository": str,
        "tag": str,
        "modelURL": str,
        "replicaCount": int,
        "requestCPU": int,
        "requestMemory": str,
        "requestGPU": int,
        "pvcStorage": str,
    }
    for key, kind in required.items():
        assert isinstance(model[key], kind)


@pytest.mark.parametrize("name", ["meta/Llama-3.1_8B", "--", "/a/b/", "x" * 99])
def test_names_suit_kubernetes(name: str) -> None:
    label = dns_label(name)
    assert 0 < len(label) <= 63
    assert label.strip("-") == label
    assert label.replace("-", "").isalnum()


@pytest.mark.parametrize("version", ["0.26.0", "0.31.0", "0.32.0", "0.33.0"])
def test_the_yaml_means_the_same_to_every_version(
    version: str, study: StudyFile, slo: Slo, trials: list[TrialRecord]
) -> None:
    text = (Path(__file__).parent / "recorded" / "help" / f"serve_help_{version}.txt").read_text()
    known = parse_help(text, version)
    switched = fixed_flags(study, enable_prefix_caching=False, enforce_eager=True)
    result = deployment(switched, slo, trials, known)
    assert parse_argv(result.words, known) == dict(result.config)
    off = "disable-prefix-caching" if version == "0.33.0" else "no-enable-prefix-caching"
    loaded = yaml.safe_load(vllm_yaml(result, known))
    assert loaded[off] is True
    assert loaded["enforce-eager"] is True
    model = yaml.safe_load(helm(result))["servingEngineSpec"]["modelSpec"][0]
    assert model["vllmConfig"]["extraArgs"].count(f"--{off}") == 1


@pytest.mark.vllm
def test_a_real_vllm_starts_from_the_yaml(
    vllm_executable: Path, tiny_model: Path, exported: Deployment, flags: ServeFlags, tmp_path: Path
) -> None:
    shown = {
        "max-model-len": 512,
        SEQS: 7,
        "enforce-eager": True,
        "load-format": "dummy",
        "kv-cache-memory-bytes": "64M",
    }
    keep = {flag.name: flag for flag in exported.flags}[SEQS]
    small = tuple(replace(keep, name=name, value=value) for name, value in shown.items())
    real = replace(exported, model=str(tiny_model), flags=small)
    write(real, ["vllm"], flags, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(vllm_executable), "serve", "--config", "best.yaml", "--host", "127.0.0.1", "--port", str(port)],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        )
    try:
        deadline = time.monotonic() + 180
        while not _healthy(port):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        text = log.read_text()
        assert "'max_num_seqs': 7" in text
        assert "'enforce_eager': True" in text
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


# --- from a results folder ----------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> ResultsFolder:
    """A copy of the study, to write into."""
    folder = ResultsFolder(tmp_path / "demo")
    shutil.copytree(shared_study(), folder.root)
    return folder


def test_a_study_ends_with_its_files(
    finished: ResultsFolder, study: StudyFile, flags: ServeFlags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    written = write_best(study, finished, flags)
    assert [path.name for path in written] == ["best.yaml", "best.sh", "best.json", LOCK_FILE]
    assert "NOT VERIFIED: it was measured on the simulator" in written[0].read_text()
    assert "export VLLM_USE_FLASHINFER_SAMPLER=0" in written[1].read_text()
    assert os.access(written[1], os.X_OK)


def test_nothing_is_written_where_nothing_keeps_the_slo(
    finished: ResultsFolder, study: StudyFile, flags: ServeFlags
) -> None:
    assert study.result is not None
    conclusion = replace(study.result.conclusion, decision=Decision.NO_FEASIBLE, winner=None)
    assert write_best(replace(study, result=replace(study.result, conclusion=conclusion)), finished, flags) == ()


def test_export_from_the_command_line(
    finished: ResultsFolder, study: StudyFile, flags: ServeFlags, capsys: pytest.CaptureFixture[str]
) -> None:
    write_best(study, finished, flags)  # keeps the flags, so that no vLLM is needed from here on
    out = finished.root / "deploy"
    command = ["export", str(finished.root), "--out", str(out), *(["--format", "helm", "--format", "systemd"])]
    assert main(command) == 2
    assert "simulator" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--force"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [LOCK_FILE, "values.yaml", "vllm.service"]
    assert main([*command, "--force", "--trial", "77"]) == 2
    assert "no such trial" in capsys.readouterr().err


def test_no_vllm_is_needed_to_say_that_there_is_no_verdict(
    finished: ResultsFolder, study: StudyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = replace(study.definition, vllm="/gone/bin/vllm")
    finished.study_file.write_text(dumps(replace(study, definition=gone, result=None)))
    assert main(["export", str(finished.root)]) == 2
    assert "the study has no verdict yet" in capsys.readouterr().err
    assert main(["export", str(finished.root), "--trial", "0", "--force"]) == 3
    err = capsys.readouterr().err
    assert "/gone/bin/vllm is not on this machine" in err
    assert f"--resume {finished.root}" in err


def test_the_command_knows_every_format() -> None:
    assert set(FORMAT_NAMES) == set(FORMATS)
