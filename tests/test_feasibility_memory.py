"""The memory estimate against recorded starts: close where it is shown, never wrong where it rejects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_feasibility import llama
from tuner.errors import InputError
from tuner.feasibility import Calibration, ModelShape, memory_estimate, memory_failure, model_shape, read_model_shape
from tuner.records import Config, KnobValue, Verdict
from tuner.serve_args import startup_facts

GIB = 1 << 30
RECORDED = Path(__file__).parent / "recorded"
DEVICE = int(139.8 * GIB)
DEFAULTS: dict[str, KnobValue] = {
    "gpu-memory-utilization": 0.92,
    "max-num-batched-tokens": 8192,
    "max-num-seqs": 1024,
}
EIGHT_B = llama(tie_word_embeddings=False)
ONE_B = llama(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, head_dim=64, tie_word_embeddings=False)

STARTS: dict[str, tuple[ModelShape, Config]] = {
    "serve_ok_default": (EIGHT_B, {"max-model-len": 16384}),
    "serve_ok_2_api_servers": (EIGHT_B, {"max-model-len": 16384}),
    "serve_ok_eager": (EIGHT_B, {"max-model-len": 16384, "enforce-eager": True}),
    "serve_ok_budget512": (EIGHT_B, {"max-model-len": 16384, "max-num-batched-tokens": 512}),
    "fail_engine_killed": (ONE_B, {"max-model-len": 4096, "enforce-eager": True}),
}


def facts(name: str) -> dict[str, float]:
    return startup_facts((RECORDED / "h200-0.26.0" / f"{name}.log").read_text())


@pytest.mark.parametrize("name", STARTS)
def test_estimates_without_any_start_are_close(name: str) -> None:
    shape, config = STARTS[name]
    truth = facts(name)
    estimate = memory_estimate(shape, config, DEVICE, Calibration(), defaults=DEFAULTS, free_bytes=int(139.29 * GIB))
    assert estimate.may_fit, estimate
    assert estimate.weights_bytes / GIB == pytest.approx(truth["weights_gib"], abs=0.06)
    assert estimate.activation_bytes / GIB == pytest.approx(truth["activation_gib"], abs=0.15)
    assert estimate.kv_bytes / GIB == pytest.approx(truth["kv_gib"], rel=0.002)
    assert estimate.kv_tokens == pytest.approx(truth["kv_tokens"], rel=0.002)
    assert not estimate.calibrated


def test_estimates_converge_on_what_was_measured() -> None:
    shape, config = STARTS["serve_ok_default"]
    truth = facts("serve_ok_default")
    calibration = Calibration().learn({**DEFAULTS, **config}, truth)
    estimate = memory_estimate(shape, config, DEVICE, calibration, defaults=DEFAULTS)
    assert estimate.calibrated
    assert estimate.weights_bytes / GIB == pytest.approx(truth["weights_gib"], abs=0.005)
    assert estimate.activation_bytes / GIB == pytest.approx(truth["activation_gib"], abs=0.005)
    assert estimate.kv_bytes / GIB == pytest.approx(truth["kv_gib"], abs=0.03)
    assert estimate.kv_tokens == pytest.approx(truth["kv_tokens"], rel=3e-4)
    other, config = STARTS["serve_ok_budget512"]
    moved = memory_estimate(other, config, DEVICE, calibration, defaults=DEFAULTS)
    assert moved.kv_bytes / GIB == pytest.approx(facts("serve_ok_budget512")["kv_gib"], rel=0.002)


def test_a_recorded_failure_is_foreseen_with_its_size() -> None:
    config: Config = {"gpu-memory-utilization": 0.125, "max-model-len": 131072, "enforce-eager": True}
    estimate = memory_estimate(EIGHT_B, config, DEVICE, Calibration(), defaults=DEFAULTS)
    assert not estimate.may_fit
    assert "needs 16.00 GiB of KV cache" in str(estimate)
    failure = memory_failure(estimate)
    assert failure is not None
    assert (failure.verdict, failure.kind) == (Verdict.STATIC, "will-not-fit")
    assert {"gpu-memory-utilization": "up", "max-model-len": "down"}.items() <= failure.moves.items()
    assert "GiB more" in failure.cause


def test_weights_that_do_not_fit() -> None:
    shape = llama(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672)
    alone = memory_estimate(shape, {"max-model-len": 4096}, 80 * GIB, Calibration(), defaults=DEFAULTS)
    assert not alone.may_fit
    assert alone.moves["tensor-parallel-size"] == "up"
    spread = {"max-model-len": 4096, "tensor-parallel-size": 4}
    assert memory_estimate(shape, spread, 80 * GIB, Calibration(), defaults=DEFAULTS).may_fit
    quantized: Config = {"max-model-len": 4096, "quantization": "bitsandbytes"}
    assert memory_estimate(shape, quantized, 80 * GIB, Calibration(), defaults=DEFAULTS).may_fit
    offloaded: Config = {"max-model-len": 4096, "cpu-offload-gb": 80}
    assert memory_estimate(shape, offloaded, 80 * GIB, Calibration(), defaults=DEFAULTS).may_fit


def test_more_than_an_idle_device_has() -> None:
    config: Config = {"gpu-memory-utilization": 0.998, "max-model-len": 4096}
    estimate = memory_estimate(ONE_B, config, DEVICE, Calibration(), defaults=DEFAULTS, free_bytes=int(139.29 * GIB))
    assert estimate.moves == {"gpu-memory-utilization": "down"}
    assert estimate.violation == pytest.approx(0.998 * 139.8 / 139.29 - 1, rel=0.01)


TINY = llama(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
SMALL = llama(
    hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=2048
)


def test_the_cpu_backend() -> None:
    def cpu(shape: ModelShape, config: Config, **environment: str) -> bool:
        estimate = memory_estimate(
            shape, config, int(18.46 * GIB), Calibration(), device_type="cpu", environment=environment
        )
        return estimate.may_fit

    # recorded: fail_kv_too_small, fail_len_too_big_kv1G, serve_ok_eager
    assert not cpu(TINY, {"max-model-len": 1024, "kv-cache-memory-bytes": 100_000})
    assert not cpu(SMALL, {"max-model-len": 200_000}, VLLM_CPU_KVCACHE_SPACE="1")
    assert cpu(TINY, {"max-model-len": 1024, "kv-cache-memory-bytes": 67_108_864})
    assert cpu(TINY, {"max-model-len": 1024, "kv-cache-memory-bytes": 100_000}, VLLM_CPU_KVCACHE_SPACE="1")
    estimate = memory_estimate(
        TINY, {"max-model-len": 1024, "kv-cache-memory-bytes": 67_108_864}, 18 * GIB, Calibration(), device_type="cpu"
    )
    assert estimate.kv_tokens == 131_072


def test_left_to_vllm_or_overridden_is_not_judged() -> None:
    auto: Config = {"gpu-memory-utilization": 0.125, "max-model-len": -1}
    assert memory_estimate(EIGHT_B, auto, DEVICE, Calibration(), defaults=DEFAULTS).may_fit
    blocks: Config = {"gpu-memory-utilization": 0.01, "num-gpu-blocks-override": 9}
    assert memory_estimate(EIGHT_B, blocks, DEVICE, Calibration(), defaults=DEFAULTS).may_fit


def test_kv_bytes_a_token() -> None:
    def per_token(shape: ModelShape, config: Config) -> float:
        return memory_estimate(shape, config, DEVICE, Calibration(), defaults=DEFAULTS).kv_bytes_per_token

    assert per_token(EIGHT_B, {}) == 128 * 1024
    assert per_token(EIGHT_B, {"kv-cache-dtype": "fp8"}) == 64 * 1024
    assert per_token(EIGHT_B, {"tensor-parallel-size": 4}) == 32 * 1024
    assert per_token(EIGHT_B, {"tensor-parallel-size": 16}) == 16 * 1024  # one head a GPU, repeated
    assert per_token(EIGHT_B, {"pipeline-parallel-size": 2}) == 64 * 1024
    mla = llama(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=61)
    assert per_token(mla, {"tensor-parallel-size": 8}) == 61 * 576 * 2


def test_sliding_layers_need_only_their_window() -> None:
    sliding = {"sliding_window": 1024, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8}
    hybrid = llama(num_hidden_layers=48, **sliding)
    full = llama(num_hidden_layers=48)
    assert (hybrid.full_layers, hybrid.window_layers) == (8, 40)
    config: Config = {"max-model-len": 131072}
    needed = [
        memory_estimate(shape, config, DEVICE, Calibration(), defaults=DEFAULTS).needed_bytes
        for shape in (hybrid, full)
    ]
    assert needed[0] < 0.25 * needed[1]


def test_starts_that_a_neighbour_disturbed_are_not_learnt_from() -> None:
    disturbed = {**facts("serve_ok_default"), "non_torch_gib": -1.98}
    assert Calibration().learn(DEFAULTS, disturbed) == Calibration()
    assert Calibration().learn(DEFAULTS, {}) == Calibration()


# --- shapes --------------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[dict[str, Any], float]] = {
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
        671.0,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "vocab_size": 151936,
        },
        30.5,
    ),
    "Gemma-3-12B": (
        {
            "model_type": "gemma3",
            "tie_word_embeddings": True,
            "vision_config": {},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 3840,
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 256,
                "intermediate_size": 15360,
                "vocab_size": 262208,
            },
        },
        11.8,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "vocab_size": 201088,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        20.9,
    ),
    "Mistral-7B": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
        },
        7.24,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_of_known_models(name: str) -> None:
    document, billions = SHAPES[name]
    shape = model_shape(document)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_quantized_weights_are_smaller() -> None:
    quantized = llama(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    plain = memory_estimate(EIGHT_B, {}, DEVICE, Calibration(), defaults=DEFAULTS).weights_bytes
    small = memory_estimate(quantized, {}, DEVICE, Calibration(), defaults=DEFAULTS).weights_bytes
    assert small / GIB == pytest.approx(5.3, abs=0.2)  # Llama-3.1-8B-AWQ files: 5.7 GB
    assert small < 0.4 * plain


def test_a_folder_with_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Mistral-7B"][0]))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "left-over.safetensors").write_bytes(b"x" * 5000)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shape = read_model_shape(tmp_path)
    assert shape is not None
    assert shape.file_bytes == 1000


def test_rope_scaling_bounds_the_length() -> None:
    yarn = llama(max_position_embeddings=32768, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert (yarn.max_positions, yarn.most_positions) == (32768, 131072)
    linear = llama(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.max_positions == 8192
    long = llama(rope_scaling={"rope_type": "longrope", "original_max_position_embeddings": 4096})
    assert (long.max_positions, long.least_positions) == (4096, 4096)


def test_no_decoder_no_shape(tmp_path: Path) -> None:
    assert read_model_shape(tmp_path) is None
    (tmp_path / "config.json").write_text("[]")
    assert read_model_shape(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert read_model_shape(tmp_path) is None


def test_a_broken_config_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="must be JSON"):
        read_model_shape(tmp_path)


def test_an_absurd_number_of_layers_costs_no_memory() -> None:
    assert model_shape({**SHAPES["Mistral-7B"][0], "num_hidden_layers": 1 << 45}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 45) | st.floats(allow_nan=True) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(
    [
        *sorted({name for document, _ in SHAPES.values() for name in document}),
        *("layer_types", "rope_scaling", "rope_parameters", "sliding_window", "hybrid_override_pattern"),
        "architectures",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, json_values, max_size=8), st.dictionaries(st.sampled_from(sorted(DEFAULTS)), json_values))
def test_no_configuration_upsets_shape_or_estimate(changes: dict[str, Any], config: dict[str, Any]) -> None:
    shape = model_shape({**SHAPES["Mistral-7B"][0], **changes})
    if shape is not None:
        estimate = memory_estimate(shape, config, DEVICE, Calibration(), defaults=DEFAULTS)
        assert str(estimate)
        failure = memory_failure(estimate)
        assert failure is None or 0 < failure.violation <= 10
