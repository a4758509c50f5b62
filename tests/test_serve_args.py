"""vLLM's flags: read from the help of four versions, written in their spelling, read back from recorded logs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tuner.errors import InputError
from tuner.records import KnobValue
from tuner.serve_args import (
    RESERVED,
    ServeFlags,
    Takes,
    canonical,
    defaults,
    degraded,
    effective_from_metrics,
    effective_values,
    logged_version,
    merged,
    parse_argv,
    parse_help,
    startup_facts,
    to_argv,
    to_vllm_yaml,
    version_tuple,
)
from tuner.sim.flags import help_text

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = {"0.26.0": 275, "0.31.0": 312, "0.32.0": 317, "0.33.0": 321}
USED = (
    "max-num-seqs max-num-batched-tokens gpu-memory-utilization max-model-len kv-cache-memory-bytes kv-cache-dtype"
    " enable-prefix-caching enable-chunked-prefill async-scheduling long-prefill-token-threshold block-size dtype"
    " performance-mode max-cudagraph-capture-size cudagraph-capture-sizes api-server-count compilation-config"
    " tensor-parallel-size pipeline-parallel-size data-parallel-size enforce-eager load-format served-model-name"
)


def help_of(version: str) -> ServeFlags:
    return parse_help((RECORDED / "help" / f"serve_help_{version}.txt").read_text(), version)


FLAGS = {version: help_of(version) for version in VERSIONS}
NEW = FLAGS["0.33.0"]
OLD = FLAGS["0.26.0"]


def log(name: str) -> str:
    return (RECORDED / name).read_text()


# --- help --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_of_the_help_is_read(version: str) -> None:
    flags = FLAGS[version]
    assert len(flags.flags) == VERSIONS[version]
    assert all(name in flags for name in USED.split())
    assert all(flag.group for flag in flags.flags.values())
    assert flags.flags["max-num-seqs"].group == "SchedulerConfig"
    assert flags.flags["max-num-seqs"].help.startswith(
        "Maximum number of sequences to be processed in a single iteration."
    )
    assert flags.flags["gpu-memory-utilization"].default == 0.92
    assert flags.flags["performance-mode"].choices == ("balanced", "interactivity", "throughput")
    assert flags.flags["enforce-eager"].default is False
    assert flags.flags["kv-cache-dtype"].default == "auto"
    assert flags.flags["compilation-config"].json
    assert not flags.flags["max-num-seqs"].json
    assert flags.flags["cudagraph-capture-sizes"].takes is Takes.LIST
    assert flags.flags["hf-token"].takes is Takes.OPTIONAL
    assert flags.flags["disable-log-stats"].takes is Takes.NOTHING


def test_negations_are_read_as_each_version_spells_them() -> None:
    for name, old, new in [
        ("enable-prefix-caching", "--no-enable-prefix-caching", "--disable-prefix-caching"),
        ("enforce-eager", "--no-enforce-eager", "--no-enforce-eager"),
        ("disable-custom-all-reduce", "--no-disable-custom-all-reduce", "--enable-custom-all-reduce"),
        ("enable-expert-parallel", "--no-enable-expert-parallel", "--disable-expert-parallel"),
        ("data-parallel-external-lb", "--no-data-parallel-external-lb", "--no-data-parallel-external-lb"),
        ("max-num-seqs", None, None),
    ]:
        assert (OLD.flags[name].negation, NEW.flags[name].negation) == (old, new)
    assert "-ep" in NEW.flags["enable-expert-parallel"].spellings


def test_every_switch_has_the_opposite_that_the_help_prints() -> None:
    for version, flags in FLAGS.items():
        text = (RECORDED / "help" / f"serve_help_{version}.txt").read_text()
        for flag in flags.flags.values():
            assert all(f"{word}," in text or f"{word} " in text or f"{word}\n" in text for word in flag.spellings)
            if flag.takes is Takes.NOTHING:
                assert f"--no-{flag.name}" not in text


def test_aliases_lead_to_the_same_flag() -> None:
    assert NEW.spellings["--device-memory-utilization"] == "gpu-memory-utilization"
    assert NEW.spellings["-tp"] == "tensor-parallel-size"
    assert NEW.spellings["-cc"] == "compilation-config"


def test_python_3_13_prints_the_placeholder_once() -> None:
    text = "options:\n  --api-server-count, -asc API_SERVER_COUNT\n                        How many. (default: None)\n"
    flag = parse_help(text, "0.40.0").flags["api-server-count"]
    assert (flag.takes, flag.spellings) == (Takes.VALUE, ("--api-server-count", "-asc"))


def test_wrapping_at_another_width_changes_nothing() -> None:
    text = (
        "SchedulerConfig:\n  --max-num-seqs MAX_NUM_SEQS  Most sequences in a step. (default: None)\n"
        "  --async-scheduling, --no-async-scheduling  On or off. (default: True)\n"
    )
    flags = parse_help(text, "0.40.0")
    assert flags.flags["max-num-seqs"].help == "Most sequences in a step."
    assert flags.flags["async-scheduling"].default is True


def test_other_text_has_no_flags() -> None:
    assert not parse_help("usage: something\n\nerror: no\n", "1.0").flags


def test_versions_compare_as_numbers() -> None:
    assert version_tuple("0.9.2") < version_tuple("0.26.0") < version_tuple("0.32.0rc1+cpu") < version_tuple("1.0")
    assert version_tuple("dev") > version_tuple("99.0")


# --- words -------------------------------------------------------------------------------------------------------


def test_booleans_are_spelled_as_the_version_does() -> None:
    config: dict[str, KnobValue] = {"enable-prefix-caching": False, "async-scheduling": True, "disable-log-stats": True}
    assert to_argv(config, OLD) == ("--no-enable-prefix-caching", "--async-scheduling", "--disable-log-stats")
    assert to_argv(config, NEW) == ("--disable-prefix-caching", "--async-scheduling", "--disable-log-stats")
    assert to_argv({"disable-log-stats": False}, NEW) == ()


def test_json_that_is_nested_too_deep_stays_text() -> None:
    deep = "[" * 100_000
    assert json.loads(str(parse_argv(["--compilation-config.x", deep], NEW)["compilation-config"])) == {"x": deep}


def test_values_lists_and_json() -> None:
    config: dict[str, KnobValue] = {
        "max-num-seqs": 64,
        "gpu-memory-utilization": 0.9,
        "cudagraph-capture-sizes": "[1, 2, 4]",
        "compilation-config.cudagraph_mode": "FULL",
        "compilation-config": '{"mode": 3}',
        "chat-template": "{% if x %}",
    }
    assert to_argv(config, NEW) == (
        *("--max-num-seqs", "64", "--gpu-memory-utilization", "0.9", "--cudagraph-capture-sizes", "1", "2", "4"),
        *("--compilation-config", '{"cudagraph_mode": "FULL", "mode": 3}', "--chat-template", "{% if x %}"),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-num-seqs 64", {"max-num-seqs": 64}),
        ("--max-num-seqs=64", {"max-num-seqs": 64}),
        ("--max_num_seqs=64", {"max-num-seqs": 64}),
        ("-tp 2", {"tensor-parallel-size": 2}),
        ("-tp=2", {"tensor-parallel-size": 2}),
        ("--max-model-len 8K --max-num-batched-tokens 2k", {"max-model-len": 8192, "max-num-batched-tokens": 2000}),
        ("--max-model-len auto", {"max-model-len": -1}),
        ("--kv-cache-memory-bytes 64M", {"kv-cache-memory-bytes": 64 << 20}),
        ("--gpu-memory-utilization 0.90", {"gpu-memory-utilization": 0.9}),
        ("--device-memory-utilization 0.5", {"gpu-memory-utilization": 0.5}),
        ("--enforce-eager --disable-prefix-caching", {"enforce-eager": True, "enable-prefix-caching": False}),
        ("--no-enforce-eager", {"enforce-eager": False}),
        ("--seed -1", {"seed": -1}),
        ("-O3", {"optimization-level": 3}),
        ("-O 1", {"optimization-level": 1}),
        ("--cudagraph-capture-sizes 1 2 --no-numa-bind", {"cudagraph-capture-sizes": "[1, 2]", "numa-bind": False}),
        ("--served-model-name a b", {"served-model-name": '["a", "b"]'}),
        ("--max-lora-rank 32", {"max-lora-rank": 32}),
        ("--revision 007", {"revision": "007"}),
        ("--hf-token", {"hf-token": ""}),
        ('--compilation-config {"mode":3}', {"compilation-config": '{"mode": 3}'}),
        ("-cc.mode=3 --compilation-config.a.b true", {"compilation-config": '{"a": {"b": true}, "mode": 3}'}),
        ("-cc.sizes+ 1,2 -cc.sizes+=4", {"compilation-config": '{"sizes": [1, 2, 4]}'}),
        ("--hf-overrides.a 1k", {"hf-overrides": '{"a": 1000}'}),
    ],
)  # fmt: skip
def test_the_users_words(words: str, expected: dict[str, KnobValue]) -> None:
    assert parse_argv(words.split(), NEW) == expected


@pytest.mark.parametrize(
    ("words", "field", "message"),
    [
        ("model", "model", "is no flag"),
        ("-5", "-5", "is no flag"),
        ("--", "--", "no such flag"),
        ("--max-num-seq 4", "--max-num-seq", "Did you mean `--max-num-seqs`"),
        ("--tensor-parallel 2", "--tensor-parallel", "`--tensor-parallel-size`"),
        ("--no-enable-prefix-caching", "--no-enable-prefix-caching", "spells it .* or --disable-prefix-caching"),
        ("--max-num-seqs", "--max-num-seqs", "needs a value"),
        ("--max-num-seqs --enforce-eager", "--max-num-seqs", "needs a value"),
        ("--max-num-seqs many", "--max-num-seqs", "whole number"),
        ("--max-num-seqs 1.5", "--max-num-seqs", "whole number"),
        ("--gpu-memory-utilization high", "--gpu-memory-utilization", "must be a number"),
        ("--gpu-memory-utilization nan", "--gpu-memory-utilization", "must be a number"),
        ("--performance-mode fast", "--performance-mode", "balanced, interactivity, throughput"),
        ("--enforce-eager=true", "--enforce-eager", "takes no value"),
        ("--max-num-seqs 1 --max_num_seqs 2", "--max-num-seqs", "given twice"),
        ("--max-num-seqs.x 1", "--max-num-seqs.x", "takes no keys"),
        ("--compilation-config {mode:3}", "--compilation-config", "not valid JSON"),
        ("--compilation-config [3]", "--compilation-config", "JSON object"),
        ("--api-key=secret", "--api-key", "cannot be set here"),
        ("-h", "-h", "cannot be set here"),
    ],
)
def test_what_the_user_cannot_give(words: str, field: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_argv(words.split(), NEW)
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--disable-log-requests", "--no-enable-log-requests"),
        ("--swap-space=4", "leave it out"),
        ("--num-scheduler-steps=8", "--async-scheduling"),
        ("--enable-reasoning", "--reasoning-parser"),
        ("--preemption-mode=swap", "always recomputed"),
        ("--task=generate", "--runner"),
    ],
)
def test_removed_flags_are_named_with_what_to_do_instead(word: str, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        parse_argv([word], FLAGS["0.32.0"])


def test_a_removed_flag_that_is_still_there_is_accepted() -> None:
    assert parse_argv(["--max-num-partial-prefills=2"], OLD) == {"max-num-partial-prefills": 2}
    with pytest.raises(InputError, match=r"removed after vLLM 0\.30"):
        parse_argv(["--max-num-partial-prefills=2"], NEW)
    assert parse_argv(["--disable-log-requests"], NEW) == {"enable-log-requests": False}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_flags(name: str) -> None:
    with pytest.raises(InputError, match="cannot be set here"):
        parse_argv([f"--{name}"], NEW)


def test_reserved_flags_exist_in_some_version() -> None:
    spelled = {name for flags in FLAGS.values() for name in (*flags.flags, "help")}
    assert set(RESERVED) - spelled == set()


def test_the_simulator_reads_lengths_as_vllm_does() -> None:
    assert parse_argv(["--max-model-len", "8K"], parse_help(help_text(), "0.32.0")) == {"max-model-len": 8192}


def test_keys_of_one_object_may_be_given_one_by_one() -> None:
    words = ["--compilation-config", '{"mode": 3}', "--compilation-config.cudagraph_mode", "NONE"]
    words += ["--compilation-config.custom_ops+", "all", "--compilation-config.custom_ops+", "none"]
    document = {"mode": 3, "cudagraph_mode": "NONE", "custom_ops": ["all", "none"]}
    config = parse_argv(words, NEW)
    assert {name: json.loads(str(value)) for name, value in config.items()} == {"compilation-config": document}


@pytest.mark.parametrize("version", VERSIONS)
def test_words_survive_the_way_there_and_back(version: str) -> None:
    config: dict[str, KnobValue] = {
        "max-num-seqs": 64,
        "gpu-memory-utilization": 0.85,
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "cudagraph-capture-sizes": "[1, 2]",
        "compilation-config": '{"mode": 3}',
        "dtype": "bfloat16",
    }
    assert parse_argv(to_argv(config, FLAGS[version]), FLAGS[version]) == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"no-such": 1}, "no such flag"),
        ({"max-num-seqs": True}, "takes a value"),
        ({"enforce-eager": 1}, "is a switch"),
        ({"max-num-seqs.x": 1}, "takes no keys"),
        ({"compilation-config": "x", "compilation-config.mode": 3}, "not valid JSON"),
    ],
)
def test_configurations_that_cannot_be_written(config: dict[str, KnobValue], message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_argv(config, NEW)


# --- YAML --------------------------------------------------------------------------------------------------------


def as_vllm_reads_it(text: str, flags: ServeFlags) -> list[str]:
    """The rules of vLLM's `load_config_file`, 0.26 to 0.33: what each entry becomes on the command line."""
    words: list[str] = []
    for key, value in yaml.safe_load(text).items():
        if isinstance(value, bool):
            words += [f"--{key}"] if value else []  # a false switch is dropped where `--no-KEY` does not exist
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            words += [f"--{key}", str(value)]
    return words


@pytest.mark.parametrize("version", VERSIONS)
def test_the_yaml_means_the_same_to_every_version(version: str) -> None:
    flags = FLAGS[version]
    config: dict[str, KnobValue] = {
        "max-num-seqs": 64,
        "gpu-memory-utilization": 0.85,
        "enable-prefix-caching": False,
        "async-scheduling": False,
        "enforce-eager": True,
        "kv-cache-memory-bytes": 64 << 20,
        "cudagraph-capture-sizes": "[1, 2, 4]",
        "compilation-config.cudagraph_mode": "FULL",
        "served-model-name": '["a: b", "é#"]',
        "revision": "1e5",
    }
    text = to_vllm_yaml("/models/a b", config, flags, {"": "made by\ntune", "max-num-seqs": "+12 %"})
    words = as_vllm_reads_it(text, flags)
    assert words[:2] == ["--model", "/models/a b"]
    assert parse_argv(words[2:], flags) == merged(config)
    assert text.startswith("# made by\n# tune\nmodel:")
    assert "# +12 %\nmax-num-seqs: 64\n" in text


def test_yaml_refuses_unknown_flags() -> None:
    with pytest.raises(InputError, match="no such flag"):
        to_vllm_yaml("m", {"nope": 1}, NEW)


# --- logs --------------------------------------------------------------------------------------------------------


def test_effective_values_on_a_gpu() -> None:
    assert effective_values(log("h200-0.26.0/serve_ok_default.log")) == {
        "dtype": "bfloat16",
        "max-model-len": 16384,
        "load-format": "dummy",
        "tensor-parallel-size": 1,
        "pipeline-parallel-size": 1,
        "data-parallel-size": 1,
        "decode-context-parallel-size": 1,
        "enforce-eager": False,
        "kv-cache-dtype": "auto",
        "enable-prefix-caching": True,
        "enable-chunked-prefill": True,
        "max-num-batched-tokens": 8192,
        "max-cudagraph-capture-size": 512,
        "compilation-config.cudagraph_mode": "FULL_AND_PIECEWISE",
        "async-scheduling": True,
        "attention-backend": "FLASH_ATTN",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h200-0.26.0/serve_ok_budget512.log", {"max-num-batched-tokens": 512}),
        ("h200-0.26.0/serve_ok_2_api_servers.log", {"api-server-count": 2, "async-scheduling": True}),
        ("h200-0.26.0/serve_ok_eager.log", {"enforce-eager": True, "compilation-config.cudagraph_mode": "NONE"}),
        ("cpu-0.32.0/serve_ok.log", {"max-num-batched-tokens": 2048, "max-model-len": 1024, "enforce-eager": False}),
        ("cpu-0.32.0/serve_ok_eager.log", {"max-num-seqs": 16, "kv-cache-memory-bytes": 67108864}),
    ],
)
def test_effective_values_of_other_starts(name: str, expected: dict[str, KnobValue]) -> None:
    found = effective_values(log(name))
    assert {knob: found.get(knob) for knob in expected} == expected
    assert not {"model", "port", "host", "model-tag"} & set(found)


def test_startup_facts_on_a_gpu() -> None:
    assert startup_facts(log("h200-0.26.0/serve_ok_default.log")) == {
        "kv_tokens": 919_824,
        "max_concurrency": 56.14,
        "kv_gib": 112.28,
        "weights_gib": 15.0,
        "activation_gib": 1.1,
        "non_torch_gib": 0.22,
        "graph_gib": 0.98,
        "graph_capture_s": 5,
        "free_gib": 139.29,
        "device_gib": 139.8,
        "requested_gib": 128.62,
        "load_s": 2.012841,
        "compile_s": 18.94,
        "init_engine_s": 41.91,
    }


def test_startup_facts_on_a_cpu() -> None:
    assert startup_facts(log("cpu-0.32.0/serve_ok.log")) == {
        "kv_tokens": 2_097_152,
        "max_concurrency": 2048,
        "kv_gib": 1.0,
        "init_engine_s": 20.79,
    }


def test_of_several_workers_the_scarcest_counts() -> None:
    text = (
        "GPU KV cache size: 1,000 tokens\nGPU KV cache size: 900 tokens\n"
        "Model loading took 7.5 GiB and 2.0 seconds\nModel loading took 7.6 GiB and 1.0 seconds"
    )
    assert startup_facts(text) == {"kv_tokens": 900, "weights_gib": 7.6, "load_s": 2.0}


@pytest.mark.parametrize("name", ["fail_kv_len.log", "fail_cotenant.log", "fail_batched_lt_seqs.log"])
def test_what_a_failed_start_said_is_kept(name: str) -> None:
    assert effective_values(log(f"h200-0.26.0/{name}"))["load-format"] == "dummy"


def test_versions_in_logs() -> None:
    assert logged_version(log("cpu-0.32.0/serve_ok.log")) == "0.32.0"
    assert logged_version(log("h200-0.26.0/serve_ok_default.log")) == "0.26.0"
    assert logged_version(log("cpu-0.32.0/fail_bad_value.log")) == "0.32.0"
    assert logged_version("nothing") is None
    assert effective_values("nothing") == {}


def test_metrics_tell_the_block_size() -> None:
    assert effective_from_metrics(log("cpu-0.32.0/metrics.txt"))["block-size"] == 128
    assert effective_from_metrics(log("h200-0.26.0/metrics.txt"))["block-size"] == 16
    assert effective_from_metrics("") == {}


@pytest.mark.parametrize(
    ("line", "knob", "value"),
    [
        (
            "Async scheduling will be disabled because it is not supported with the `ray` backend",
            "async-scheduling",
            False,
        ),
        ("Async scheduling is disabled because the V1 model runner …", "async-scheduling", False),
        ("Asynchronous scheduling is disabled.", "async-scheduling", False),
        ("Disabling asynchronous scheduling by default for pooling model.", "async-scheduling", False),
        ("Truncating max_cudagraph_capture_size to 4", "max-cudagraph-capture-size", 4),
        ("Setting attention block size to 528 tokens to ensure …", "block-size", 528),
        ("Setting max_num_seqs to 1024 for OPENAI_API_SERVER usage context.", "max-num-seqs", 1024),
        ("Setting max_num_batched_tokens to 8192 for OPENAI_API_SERVER usage context.", "max-num-batched-tokens", 8192),
        ("prefix caching for Mamba models and will be disabled", "enable-prefix-caching", False),
        ("Using max model len 131072", "max-model-len", 131072),
    ],
)
def test_lines_that_report_a_decision(line: str, knob: str, value: KnobValue) -> None:
    assert effective_values(f"(APIServer pid=1) WARNING 11-30 12:00:00 [x.py:1] {line}")[knob] == value


def test_arguments_that_are_no_literals_do_not_hide_the_others() -> None:
    text = "non-default args: {'model': 'x', 'max_num_seqs': 4, 'load': <Enum.A: 1>, 'dtype': 'half', 'x': 0.5}"
    assert effective_values(text) == {"max-num-seqs": 4, "dtype": "half", "x": 0.5}


# --- identity ----------------------------------------------------------------------------------------------------


def test_degraded_names_what_was_asked_and_what_is() -> None:
    asked: dict[str, KnobValue] = {
        "async-scheduling": True,
        "max-num-batched-tokens": 2048,
        "kv-cache-dtype": "fp8",
        "max-model-len": -1,
        "performance-mode": "throughput",
        "gpu-memory-utilization": 1.0,
    }
    effective: dict[str, KnobValue] = {
        "async-scheduling": False,
        "max-num-batched-tokens": 2048,
        "kv-cache-dtype": "fp8_e4m3",
        "max-model-len": 4096,
        "gpu-memory-utilization": 1,
    }
    assert degraded(asked, effective) == ("async-scheduling: asked for true, in effect false",)


def test_a_configuration_is_what_differs_from_the_defaults_in_effect() -> None:
    effective: dict[str, KnobValue] = {"max-num-seqs": 256, "async-scheduling": True, "gpu-memory-utilization": 0.92}
    assert canonical({}, {}, effective) == "{}"
    assert (
        canonical({"max-num-seqs": 256, "gpu-memory-utilization": 0.92}, {"async-scheduling": True}, effective) == "{}"
    )
    one = canonical({"max-num-seqs": 64, "block-size": 16}, {"dtype": "half"}, effective)
    two = canonical({"block-size": 16.0}, {"max-num-seqs": 64, "dtype": "half"}, effective)
    assert one == two == '{"block-size": 16, "dtype": "half", "max-num-seqs": 64}'
    dotted = canonical({"compilation-config.mode": 3}, {}, effective)
    assert dotted == canonical({"compilation-config": '{"mode":3}'}, {}, effective)
    assert canonical({"async-scheduling": False}, {}, effective) != canonical({"x": 0}, {}, effective)
    effective["compilation-config.cudagraph_mode"] = "FULL"
    assert canonical({"compilation-config": '{"cudagraph_mode": "FULL"}'}, {}, effective) == "{}"


def test_defaults_before_any_log() -> None:
    gib = 1 << 30
    cpu = defaults(FLAGS["0.32.0"], device_type="cpu")
    assert (cpu["max-num-batched-tokens"], cpu["max-num-seqs"], cpu["async-scheduling"]) == (2048, 128, False)
    cases = [("H200", 141, 8192, 1024), ("NVIDIA A100-SXM4-80GB", 80, 2048, 256), ("L4", 24, 2048, 256)]
    for name, size, budget, seqs in cases:
        found = defaults(NEW, device_type="cuda", device_bytes=size * gib, device_name=name)
        assert (found["max-num-batched-tokens"], found["max-num-seqs"]) == (budget, seqs)
        assert found["gpu-memory-utilization"] == 0.92
    assert defaults(NEW, device_type="cuda", device_bytes=180 * gib)["max-num-batched-tokens"] == 16384
    assert "max-num-batched-tokens" not in defaults(OLD, device_type="cuda", device_bytes=180 * gib)
    assert "max-num-seqs" not in defaults(NEW, device_type="cuda")


# --- the real thing ----------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_the_installed_vllm_understands_what_is_written(vllm_executable: Path, tmp_path: Path) -> None:
    """`vllm serve --config` prints the arguments it parsed before it looks for the model, which is not there."""
    output = subprocess.run(
        [vllm_executable, "serve", "--help=all"], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    flags = parse_help(output, "installed")
    assert all(name in flags for name in USED.split())
    config: dict[str, KnobValue] = {
        "max-num-seqs": 7,
        "max-num-batched-tokens": 96,
        "gpu-memory-utilization": 0.5,
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "kv-cache-memory-bytes": 64 << 20,
        "long-prefill-token-threshold": 48,
        "disable-log-stats": True,
        "compilation-config.cudagraph_mode": "NONE",
        "served-model-name": '["a b"]',
    }
    path = tmp_path / "best.yaml"
    path.write_text(to_vllm_yaml(str(tmp_path / "no-such-model"), config, flags, {"max-num-seqs": "why"}))
    result = subprocess.run(
        [vllm_executable, "serve", "--config", path], capture_output=True, text=True, timeout=200, check=False
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 1, printed[-2000:]  # 2 would be a refused argument
    found = effective_values(printed)
    plain = {knob: value for knob, value in config.items() if "." not in knob and knob != "served-model-name"}
    assert {knob: found.get(knob) for knob in plain} == plain
    assert "'served_model_name': ['a b']" in printed
    assert "CUDAGraphMode.NONE" in printed
