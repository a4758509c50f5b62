"""Whatever a user writes wrongly: one error with file, field, rule and remedy, exit code 2, and nothing is started."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tuner.cli import main
from tuner.cli.compare import new_folder
from tuner.errors import ExitCode, InputError

RECORDED = Path(__file__).parent / "recorded"

SLO = "slo: {ttft: {p99: 500}, tpot: {p99: 40}}\n"
WORKLOAD = "input_tokens: 32\noutput_tokens: 8\n"
SPACE = "knobs:\n  max-num-seqs: {stage: sequences, values: [1, 4, 16]}\n"


@dataclass(frozen=True)
class Case:
    """What is wrong, and two fragments that the message must hold: the field, and the rule or remedy."""

    name: str
    field: str
    says: str
    slo: str = SLO
    workload: str = WORKLOAD
    space: str = SPACE
    words: tuple[str, ...] = ()  # further words of the command line
    fixed: tuple[str, ...] = ()  # after `--`


def slo(name: str, text: str, field: str, says: str) -> Case:
    return Case(f"slo-{name}", field, says, slo=text)


def workload(name: str, text: str, field: str, says: str) -> Case:
    return Case(f"workload-{name}", field, says, workload=text)


def inputs(name: str, spec: str, field: str, says: str) -> Case:
    return workload(name, f"input_tokens: {spec}\noutput_tokens: 8\n", f"input_tokens{field}", says)


def space(name: str, text: str, field: str, says: str) -> Case:
    return Case(f"space-{name}", field, says, space=text)


def knob(text: str, name: str = "max-num-seqs") -> str:
    return f"knobs:\n  {name}: {text}\n"


CASES = [
    # slo.yaml
    slo("empty", "", "document", "must be a mapping"),
    slo("list", "- a\n", "document", "must be a mapping"),
    slo("no-yaml", "slo: {ttft: {p99: 500}", "document", "is not valid YAML"),
    slo("tab", "slo:\n\tttft: 1\n", "document", "is not valid YAML"),
    slo("two-documents", SLO + "---\n" + SLO, "document", "another document"),
    slo("duplicate-key", "slo: {ttft: {p99: 1}, ttft: {p99: 2}}", "slo.ttft", "appears twice"),
    slo("alias", "slo: &a {ttft: {p99: 1}}\nclasses: {short: *a}", "classes.short", "alias"),
    slo("anchor", "slo: &a {ttft: {p99: 1}}", "document", "anchor"),
    slo("alias-key", "slo: {ttft: {&k p99: 1, *k : 2}}", "slo.ttft", "not a word"),
    slo("python-tag", "slo: !!python/name:os.system {}", "slo", "tag"),
    slo("unknown-section", "slos: {}\n", "slos", "Did you mean `slo`?"),
    slo("unknown-metric", "slo: {ttfft: {p99: 1}}", "slo.ttfft", "Did you mean `ttft`?"),
    slo("mean", "slo: {ttft: {mean: 1}}", "slo.ttft.mean", "is not a percentile"),
    slo("p100", "slo: {ttft: {p100: 1}}", "slo.ttft.p100", "is not a percentile"),
    slo("p10", "slo: {ttft: {p10: 1}}", "slo.ttft.p10", "p50 to p99.9"),
    slo("p99.99", "slo: {ttft: {p99.99: 1}}", "slo.ttft.p99.99", "p50 to p99.9"),
    slo("no-percentile", "slo: {ttft: 500}", "slo.ttft", "needs a percentile"),
    slo("no-limit", "slo: {success: 0.9}", "slo", "no latency limit"),
    slo("empty-metric", "slo: {ttft: {}}", "slo.ttft", "has no limit"),
    slo("negative", "slo: {ttft: {p99: -1}}", "slo.ttft.p99", "greater than 0"),
    slo("zero", "slo: {ttft: {p99: 0}}", "slo.ttft.p99", "greater than 0"),
    slo("nan", "slo: {ttft: {p99: .nan}}", "slo.ttft.p99", "finite"),
    slo("infinite", "slo: {ttft: {p99: .inf}}", "slo.ttft.p99", "finite"),
    slo("boolean", "slo: {ttft: {p99: yes}}", "slo.ttft.p99", "must be a number"),
    slo("quoted", "slo: {ttft: {p99: '500'}}", "slo.ttft.p99", "without quotes"),
    slo("unit", "slo: {ttft: {p99: 500ms}}", "slo.ttft.p99", "without a unit"),
    slo("success-percent", "slo: {ttft: {p99: 1}, success: 99.9}", "slo.success", "Write 0.999 for 99.9 %"),
    slo("success-zero", "slo: {ttft: {p99: 1}, success: 0}", "slo.success", "greater than 0"),
    slo("unknown-class", SLO + "classes: {shrot: {weight: 1}}", "classes.shrot", "Did you mean `short`?"),
    slo("weight-zero", SLO + "classes: {short: {weight: 0}}", "classes.short.weight", "greater than 0"),
    slo("weight-in-slo", "slo: {ttft: {p99: 1}, weight: 1}", "slo.weight", "unknown"),
    slo("weights-sum", SLO + "classes: {short: {weight: 1}}", "classes.short.weight", "leaves no traffic for other"),
    slo("class-list", SLO + "classes: [short]", "classes", "must be a mapping"),
    # workloads/*.yaml
    workload("empty", "", "document", "must be a mapping"),
    workload("missing", "input_tokens: 5\n", "output_tokens", "required"),
    workload("unknown-key", WORKLOAD + "outputs: 3\n", "outputs", "unknown"),
    inputs("zero-length", "0", "", "at least 1"),
    inputs("half-token", "1.5", "", "whole number"),
    inputs("distribution", "{distribution: pareto}", ".distribution", "none of the choices"),
    inputs("no-distribution", "{median: 5}", ".distribution", "required"),
    inputs("parameter", "{distribution: constant, median: 5}", ".median", "unknown"),
    inputs("no-p95", "{distribution: lognormal, median: 5}", ".p95", "required"),
    inputs("p95-below-median", "{distribution: lognormal, median: 5, p95: 4}", ".p95", "below the median"),
    inputs("max-below-median", "{distribution: lognormal, median: 50, p95: 60, max: 40}", ".max", "outside"),
    inputs("min-above-max", "{distribution: uniform, min: 9, max: 4}", ".max", "below the minimum"),
    inputs("empirical-empty", "{distribution: empirical, values: []}", ".values", "must not be empty"),
    inputs("empirical-weights", "{distribution: empirical, values: [1], weights: [1, 2]}", ".weights", "one weight"),
    workload("process", WORKLOAD + "arrivals: {process: uniform}", "arrivals.process", "none of the choices"),
    workload("burstiness", WORKLOAD + "arrivals: {process: poisson, burstiness: 2}", "arrivals.burstiness", "gamma"),
    workload("closed", WORKLOAD + "arrivals: {process: closed}", "arrivals", "concurrency"),
    workload("trace-missing", WORKLOAD + "arrivals: {process: trace}", "arrivals", "needs a trace"),
    workload("trace-file", "trace: {file: none.jsonl}", "file", "does not exist"),
    workload("temperature", WORKLOAD + "sampling: {temperature: -1}", "sampling.temperature", "at least 0"),
    workload("ignore-eos", WORKLOAD + "sampling: {ignore_eos: 'true'}", "sampling.ignore_eos", "true or false"),
    workload("api", WORKLOAD + "api: responses", "api", "none of the choices"),
    workload("seed", WORKLOAD + "seed: -1", "seed", "at least 0"),
    workload("prefix", WORKLOAD + "shared_prefix_tokens: many", "shared_prefix_tokens", "must be a number"),
    workload("mix-member", "mix: {shrot: 1}", "mix", "no such class"),
    workload("mix-negative", "mix: {other: -1}", "mix.other", "greater than 0"),
    workload("mix-empty", "mix: {}", "mix", "must not be empty"),
    workload("mix-lengths", "mix: weights\ninput_tokens: 5", "input_tokens", "no meaning in a mix"),
    # search_spaces/*.yaml and --space
    space("empty", "", "document", "must be a mapping"),
    space("no-knob", "description: x\n", "document", "holds no knob"),
    space("unknown-key", knob("{stage: budget, vals: [1]}"), "max-num-seqs.vals", "Did you mean `values`?"),
    space("no-stage", knob("{values: [1, 2]}"), "max-num-seqs.stage", "required"),
    space("stage", knob("{stage: sequence, values: [1, 2]}"), "max-num-seqs.stage", "Did you mean `sequences`?"),
    space("no-values", knob("{stage: budget}"), "knobs.max-num-seqs", "either `range` or `values`"),
    space("both", knob("{stage: fit, values: [1], range: [1, 2]}"), "knobs.max-num-seqs", "either `range` or `values`"),
    space("range-order", knob("{stage: budget, range: [8, 2]}"), "max-num-seqs.range", "ascending"),
    space("range-zero", knob("{stage: budget, range: [0, 2]}"), "max-num-seqs.range", "above 0"),
    space("no-step", knob("{stage: budget, scale: linear, range: [1, 2]}"), "max-num-seqs.range", "needs a `step`"),
    space("tiny-step", knob("{stage: fit, scale: linear, range: [1, 2], step: 0.001}"), ".range", "more than 64"),
    space("mixed", knob("{stage: budget, values: [1, a]}"), "max-num-seqs.values", "different kinds"),
    space("twice", knob("{stage: budget, values: [1, 1]}"), "max-num-seqs.values[1]", "listed twice"),
    space("nested", knob("{stage: budget, values: [[1]]}"), "max-num-seqs.values[0]", "is not a value"),
    space("kind", knob("{stage: budget, values: [1, 2], kind: bool}"), "max-num-seqs.kind", "kind int"),
    space("version", knob("{stage: budget, values: [1, 2], vllm: new}"), "max-num-seqs.vllm", "version range"),
    space("device", knob("{stage: fit, values: [1], devices: [tpu]}"), ".devices[0]", "none of the choices"),
    space("dashes", knob("{stage: budget, values: [1]}", "--max-num-seqs"), "--max-num-seqs", "without leading dashes"),
    space("extends", "extends: defualt", "extends", "Did you mean `default`?"),
    space("extends-itself", "extends: space.yaml", "extends", "extends itself"),
    space("removes", "extends: default\nknobs: {stream-interval: null}", "knobs.stream-interval", "does not have"),
    space("flag", knob("{stage: fit, values: [1, 2]}", "max-num-sequences"), "max-num-sequences", "`--max-num-seqs`"),
    space("choice", knob("{stage: fit, values: [fast]}", "performance-mode"), "performance-mode", "takes one of"),
    space("switch", knob("{stage: fit, values: [0, 1]}", "enforce-eager"), "enforce-eager", "is a switch"),
    Case("space-name", "--space", "Did you mean `latency`?", words=("--space", "latenzy")),
    Case("space-inline-flag", "max-num-sqes", "`--max-num-seqs`", words=("--space", "max-num-sqes=1,2")),
    Case("space-inline-empty", "--space", "names no value", words=("--space", "max-num-seqs=")),
    Case("space-inline-mixed", "--space max-num-seqs", "different kinds", words=("--space", "max-num-seqs=1,a")),
    space("zero", knob("{stage: sequences, values: [0, 4]}"), "max-num-seqs", "must be at least 1"),
    Case("space-inline-word", "max-num-seqs", "must be a whole number", words=("--space", "max-num-seqs=a,b")),
    Case("space-inline-float", "max-num-seqs", "must be a whole number", words=("--space", "max-num-seqs=1e3,2")),
    Case("space-inline-huge", "max-num-seqs", "must be at most", words=("--space", f"max-num-seqs={10**20},1")),
    Case("baseline-huge", "max-num-seqs", "must be at most", words=("--baseline", f"max-num-seqs={10**20}")),
    Case("space-inline-negative", "max-num-seqs", "must be at least 1", words=("--space", "max-num-seqs=-5,4")),
    Case("space-inline-share", "memory-util", "at most 1", words=("--space", "gpu-memory-utilization=0.5,1.5")),
    # vLLM's flags
    Case("baseline-zero", "--max-num-seqs", "must be at least 1", words=("--baseline", "max-num-seqs=0")),
    Case("baseline-negative", "--max-num-seqs", "must be at least 1", words=("--baseline", "max-num-seqs=-5")),
    Case("baseline-length", "--max-model-len", "must be at least 1", words=("--baseline", "max-model-len=-7")),
    Case("fixed-zero", "--max-num-batched-tokens", "must be at least 1", fixed=("--max-num-batched-tokens", "0")),
    Case("fixed-share", "--gpu-memory-utilization", "at most 1", fixed=("--gpu-memory-utilization", "1.5")),
    Case(
        "fixed-dotted-twice",
        "--compilation-config.mode",
        "given twice",
        fixed=("--compilation-config.mode", "3", "--compilation-config.mode", "2"),
    ),
    Case(
        "fixed-json-then-dotted",
        "--compilation-config.mode",
        "given twice",
        fixed=("--compilation-config", '{"mode": 3}', "--compilation-config.mode=2"),
    ),
    Case("fixed-unknown", "--max-num-seq", "Did you mean `--max-num-seqs`?", fixed=("--max-num-seq", "4")),
    Case("fixed-removed", "--swap-space", "leave it out", fixed=("--swap-space", "4")),
    Case("fixed-log-requests", "--disable-log-requests", "--no-enable-log-requests", fixed=("--disable-log-requests",)),
    Case("fixed-value", "--max-num-seqs", "whole number", fixed=("--max-num-seqs", "many")),
    Case("fixed-no-value", "--max-num-seqs", "needs a value", fixed=("--max-num-seqs",)),
    Case("fixed-choice", "--performance-mode", "Write one of", fixed=("--performance-mode", "fast")),
    Case("fixed-switch", "--enforce-eager", "takes no value", fixed=("--enforce-eager=1",)),
    Case("fixed-twice", "--seed", "given twice", fixed=("--seed", "1", "--seed", "2")),
    Case("fixed-json", "--compilation-config", "not valid JSON", fixed=("--compilation-config", "{mode: 3}")),
    Case("fixed-port", "--port", "cannot be set here", fixed=("--port", "8000")),
    Case("fixed-model", "org/model", "is no flag", fixed=("org/model",)),
    # the command line
    Case("model", "--model", "neither a folder", words=("--model", "/no/such/model")),
    Case("no-slo-file", "--slo", "is no file", words=("--slo", "/no/such/slo.yaml")),
    Case("no-workloads", "--workloads", "neither a folder nor a file", words=("--workloads", "/no/such")),
    Case("vllm", "--vllm", "no executable", words=("--vllm", "/no/such/vllm")),
    *[
        Case(f"long{flag}", flag, "too long for the name of a file", words=(flag, "x" * 5000))
        for flag in ("--model", "--slo", "--workloads", "--space", "--vllm")
    ],
    Case("out-empty", "--out", "names nothing", words=("--out", "")),
    Case("out-mixes-in", "--out", "holds files that are no study's", words=("--out", "workloads")),
    Case("trials-text", "--trials", "whole number", words=("--trials", "ten")),
    Case("trials-zero", "--trials", "from 1", words=("--trials", "0")),
    Case("wall", "--wall", "is not a duration", words=("--wall", "tomorrow")),
    Case("gpu-hours", "--gpu-hours", "above 0", words=("--gpu-hours", "nan")),
    Case("seed", "--seed", "must lie from 0", words=("--seed", "-1")),
    Case("speed", "--speed", "invalid choice", words=("--speed", "ludicrous")),
    Case("unknown-word", "--trails", "unrecognized", words=("--trails", "3")),
]  # fmt: skip

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """Answers `--version` and `serve --help=all` like vLLM 0.32; anything else would be a start, and leaves a mark."""
    path = tmp_path / "bin" / "vllm"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo 0.32.0+cpu\n'
        f"elif [ \"$2\" = --help=all ]; then cat '{RECORDED / 'help' / 'serve_help_0.32.0.txt'}'\n"
        f"else touch '{tmp_path / 'started'}'; exit 1\n"
        "fi\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def words_of(case: Case, folder: Path, vllm: Path) -> list[str]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "workloads").mkdir()
    (folder / "workloads" / "short.yaml").write_text(case.workload)
    (folder / "workloads" / "other.yaml").write_text(WORKLOAD)
    (folder / "slo.yaml").write_text(case.slo)
    (folder / "space.yaml").write_text(case.space)
    usual = {
        "--model": str(folder / "model"),
        "--slo": str(folder / "slo.yaml"),
        "--workloads": str(folder / "workloads"),
        "--space": str(folder / "space.yaml"),
        "--vllm": str(vllm),
        "--out": str(folder / "out"),
    }
    words = [
        "run",
        "--yes",
        *(word for flag, value in usual.items() if flag not in case.words for word in (flag, value)),
    ]
    return [*words, *case.words, *(["--", *case.fixed] if case.fixed else [])]


def test_there_are_enough_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_clear_error_and_nothing_started(
    case: Case, tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words_of(case, tmp_path, vllm))
    except SystemExit as stop:  # argparse's own complaints
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert code == ExitCode.INPUT, err
    assert out == ""
    assert err.count("tune") >= 1
    assert len([line for line in err.splitlines() if line.startswith("tune")]) == 1
    assert case.field in err
    assert case.says in err
    assert "Traceback" not in err
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "out" / "trials").exists()


@pytest.mark.parametrize("command", ["report", "watch", "export"])
def test_a_study_whose_name_is_too_long(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "x" * 5000]) == ExitCode.INPUT
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("tune: ")


@pytest.mark.parametrize("command", ["report", "watch", "dashboard", "export"])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_study_that_may_not_be_read_is_one_line(
    command: str, error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stat_of(path: Path, **_: object) -> NoReturn:
        raise type(error)(*error.args, str(path))

    monkeypatch.setattr(Path, "stat", stat_of)
    assert main([command, str(tmp_path)]) == ExitCode.ENVIRONMENT
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(tmp_path) in err
    assert str(error.strerror) in err


def test_a_link_that_leads_nowhere_is_no_folder(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    assert main(words_of(Case("link", "", ""), tmp_path, vllm)) == ExitCode.INPUT
    assert "--out" in (err := capsys.readouterr().err)
    assert "leads nowhere" in err
    with pytest.raises(InputError, match="leads nowhere"):
        new_folder(str(tmp_path / "out"), "compare")


def test_ctrl_c_while_modules_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert main(["plan"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "tune: interrupted\n"


@pytest.mark.parametrize(
    ("words", "field", "says"),
    [
        (["--help-file", "none.txt"], "file", "does not exist"),
        (["--help-file", "other.txt"], "--help-file", "is no help"),
        (["--version", "0.32.0"], "--version", "belongs to --help-file"),
        (["--help-file", "help.txt", "--space", "nope"], "--space", "neither a shipped search space"),
        (["--help-file", "help.txt", "--space", "swap-space=1,2"], "swap-space", "leave it out"),
        (["--help-file", "help.txt", "--", "--max-num-seqs", "3"], "--", "takes no vLLM flags"),
    ],
)
def test_tune_knobs_refuses(
    words: list[str],
    field: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other.txt").write_text("hello\n")
    (tmp_path / "help.txt").write_text((RECORDED / "help" / "serve_help_0.33.0.txt").read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["knobs", *words]) == ExitCode.INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert field in err
    assert says in err
    assert "Traceback" not in err
