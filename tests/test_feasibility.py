"""Static rules: what they reject breaks a rule of vLLM, and what runs is never rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.feasibility import ModelShape, check_static, model_shape
from tuner.records import Config, Failure, KnobValue, Verdict

H200: Mapping[str, KnobValue] = {"max-num-batched-tokens": 8192, "max-num-seqs": 1024}
CPU: Mapping[str, KnobValue] = {"max-num-batched-tokens": 2048, "max-num-seqs": 128}


def llama(**changes: object) -> ModelShape:
    document: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        **changes,
    }
    shape = model_shape(document)
    assert shape is not None
    return shape


def check(
    config: Config,
    *,
    fixed: Config | None = None,
    defaults: Mapping[str, KnobValue] = H200,
    model: ModelShape | None = None,
    devices: int = 1,
    version: str = "0.32.0",
    device_type: str = "cuda",
    **more: Any,
) -> Failure | None:
    return check_static(
        config,
        fixed=fixed or {},
        defaults=defaults,
        model=model,
        devices=devices,
        version=version,
        device_type=device_type,
        **more,
    )


BROKEN: list[tuple[dict[str, KnobValue], dict[str, Any], str, dict[str, str], float | None]] = [
    (
        {"max-num-batched-tokens": 448, "max-num-seqs": 1024},
        {},
        "budget-below-seqs",
        {"max-num-batched-tokens": "up", "max-num-seqs": "down"},
        1024 / 448 - 1,
    ),
    ({"max-num-seqs": 4096}, {"defaults": CPU, "model": llama(), "device_type": "cpu"}, "budget-below-seqs", {}, 1.0),
    (
        {"enable-chunked-prefill": False, "max-num-batched-tokens": 8192},
        {"model": llama()},
        "budget-below-length",
        {"enable-chunked-prefill": "on", "max-num-batched-tokens": "up"},
        10.0,
    ),
    (
        {"enable-chunked-prefill": False, "max-num-batched-tokens": 512, "max-model-len": 1024},
        {},
        "budget-below-length",
        {"max-model-len": "down"},
        1.0,
    ),
    ({"max-num-active-seqs": 300, "max-num-seqs": 256}, {}, "active-seqs", {"max-num-active-seqs": "down"}, None),
    ({"max-num-active-seqs": 300, "max-num-batched-tokens": 128}, {}, "active-seqs", {}, None),
    (
        {"long-prefill-token-threshold": 65536, "max-model-len": 16384},
        {},
        "long-prefill-threshold",
        {"long-prefill-token-threshold": "down"},
        3.0,
    ),
    (
        {"max-num-partial-prefills": 4, "enable-chunked-prefill": False},
        {"version": "0.26.0"},
        "partial-prefills-need-chunking",
        {"enable-chunked-prefill": "on"},
        None,
    ),
    ({"max-long-partial-prefills": 4}, {"version": "0.26.0"}, "long-partial-prefills", {}, 3.0),
    ({"tensor-parallel-size": 3}, {"model": llama(), "devices": 4}, "heads-not-divisible", {}, None),
    (
        {"tensor-parallel-size": 4},
        {"model": llama(num_attention_heads=24, num_key_value_heads=6), "devices": 4},
        "heads-not-divisible",
        {"tensor-parallel-size": "down"},
        None,
    ),
    ({"tensor-parallel-size": 2}, {"devices": 1}, "gpus-missing", {"tensor-parallel-size": "down"}, 1.0),
    ({"pipeline-parallel-size": 2, "data-parallel-size": 2}, {"devices": 2}, "gpus-missing", {}, 1.0),
    ({"enable-expert-parallel": True}, {"model": llama()}, "no-experts", {"enable-expert-parallel": "off"}, None),
    ({"quantization": "awq"}, {"model": llama()}, "quantization-mismatch", {"quantization": "off"}, None),
    (
        {"quantization": "gguf"},
        {"model": llama(quantization_config={"quant_method": "fp8"})},
        "quantization-mismatch",
        {"quantization": "off"},
        None,
    ),
    ({"max-model-len": 200000}, {"model": llama()}, "length-beyond-model", {"max-model-len": "down"}, None),
    ({"block-size": 8}, {"model": llama()}, "block-size-unsupported", {"block-size": "up"}, None),
    ({"dtype": "bfloat16"}, {"capability": (7, 5)}, "dtype-unsupported", {"dtype": "off"}, None),
    ({"gpu-memory-utilization": 1.2}, {}, "value-out-of-range", {"gpu-memory-utilization": "down"}, None),
    ({"max-num-seqs": 0}, {}, "value-out-of-range", {"max-num-seqs": "up"}, None),
]


@pytest.mark.parametrize(("config", "around", "kind", "moves", "violation"), BROKEN)
def test_a_broken_rule_is_static(
    config: Config, around: dict[str, Any], kind: str, moves: dict[str, str], violation: float | None
) -> None:
    failure = check(config, **around)
    assert failure is not None
    assert (failure.verdict, failure.kind, failure.phase) == (Verdict.STATIC, kind, "prepare")
    assert moves.items() <= failure.moves.items()
    assert failure.cause
    assert failure.violation > 0
    if violation is not None:
        assert failure.violation == pytest.approx(violation)


RUNS: list[tuple[dict[str, KnobValue], dict[str, Any]]] = [
    ({}, {}),
    ({"max-num-batched-tokens": 512}, {}),  # the default of 1024 sequences is clamped: recorded on an H200
    ({"max-num-batched-tokens": 512, "max-model-len": 131072}, {}),  # chunked prefill makes it legal
    ({"max-num-seqs": 4096}, {}),  # below the default budget of 8192
    ({"max-num-seqs": 4096, "performance-mode": "throughput"}, {"defaults": CPU, "model": llama()}),
    ({"max-num-seqs": 4096}, {"defaults": {}}),  # nothing known about defaults
    ({"max-num-seqs": 4096, "tensor-parallel-size": 2}, {"defaults": CPU, "device_type": "cpu", "model": llama()}),
    ({"enable-chunked-prefill": False}, {"model": llama()}),  # the default budget is raised to the length
    ({"enable-chunked-prefill": False, "max-num-batched-tokens": 512, "max-model-len": -1}, {"model": llama()}),
    ({"long-prefill-token-threshold": 65536, "max-model-len": 16384}, {"version": "0.26.0"}),
    ({"long-prefill-token-threshold": 4096}, {"model": llama()}),
    ({"tensor-parallel-size": 4}, {"model": llama(), "devices": 4}),
    ({"tensor-parallel-size": 32}, {"model": llama(), "devices": 0}),
    ({"tensor-parallel-size": 4}, {"devices": 1, "fixed": {"distributed-executor-backend": "ray"}}),
    ({"data-parallel-size": 4}, {"devices": 1, "fixed": {"data-parallel-size-local": 1}}),
    ({"tensor-parallel-size": 2}, {"devices": 1, "device_type": "cpu"}),
    ({"quantization": "fp8"}, {"model": llama()}),  # quantizes while loading
    ({"quantization": "awq_marlin"}, {"model": llama(quantization_config={"quant_method": "awq", "bits": 4})}),
    ({"max-model-len": 200000}, {"model": llama(), "environment": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}),
    ({"max-model-len": 200000, "hf-overrides": "{}"}, {"model": llama()}),
    (
        {"max-model-len": 131072},
        {"model": llama(max_position_embeddings=32768, rope_scaling={"type": "yarn", "factor": 4.0})},
    ),
    (
        {"enable-chunked-prefill": False, "max-num-batched-tokens": 8192},
        {"model": llama(rope_scaling={"rope_type": "longrope", "original_max_position_embeddings": 4096})},
    ),
    ({"block-size": 8}, {"model": llama(), "device_type": "cpu"}),
    ({"block-size": 1}, {"model": llama(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)}),
    ({"dtype": "bfloat16"}, {"capability": (9, 0)}),
    ({"kv-cache-dtype": "anything"}, {"model": llama()}),
]


@pytest.mark.parametrize(("config", "around"), RUNS)
def test_what_runs_is_not_rejected(config: Config, around: dict[str, Any]) -> None:
    assert check(config, **around) is None


def test_fixed_flags_count_and_the_configuration_overrides_them() -> None:
    assert check({"max-num-batched-tokens": 64}, fixed={"max-num-seqs": 256}) is not None
    assert check({"max-num-batched-tokens": 64, "max-num-seqs": 32}, fixed={"max-num-seqs": 256}) is None


values = st.one_of(
    st.integers(-2, 1 << 40), st.floats(), st.booleans(), st.text(max_size=5), st.sampled_from(["auto", "awq", "fp8"])
)
knobs = st.sampled_from(sorted({knob for config, *_ in BROKEN for knob in config}))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(knobs, values, max_size=6), st.dictionaries(knobs, values, max_size=3), st.integers(-1, 9))
def test_no_value_upsets_the_rules(config: dict[str, KnobValue], defaults: dict[str, KnobValue], devices: int) -> None:
    for model in (None, llama()):
        failure = check(config, defaults=defaults, model=model, devices=devices)
        assert failure is None or 0 < failure.violation <= 10
