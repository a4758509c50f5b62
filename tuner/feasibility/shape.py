"""What a model's config.json says about its size, layers and limits; opens that folder and nothing else.

Field names as in Hugging Face's configurations and vLLM's `model_arch_config_convertor.py` (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import InputError

_MAX_BYTES = 16 * 2**20
_MAX_LAYERS = 10_000  # each is looked at; a larger number is no model, and must not cost memory
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config")
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_UNSCALED_ROPE = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Rope types whose `factor` does not lengthen max_position_embeddings (vLLM, `_get_and_verify_max_len`)."""
_UNGATED = frozenset(
    (
        *("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi"),
        *("starcoder2", "stablelm_alpha"),
    )
)
"""Model types whose MLP has two matrices instead of three."""
_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "float8_e4m3fn": 1, "fp8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's dimensions; `*_layers` add up to `layers` unless layers share or keep only a constant state."""

    architecture: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool
    dtype: str
    full_layers: int  # attention layers that keep every token
    window_layers: int  # attention layers that keep the last `window` tokens
    window: int | None
    latent_dim: int | None  # MLA: elements kept per token and layer, the same on every GPU of a replica
    experts: int
    parameters: int  # of the language model
    expert_parameters: int  # of those, in routed experts
    embedding_parameters: int  # of those, in embeddings and output head, which quantization leaves alone
    quantization: str | None  # `quant_method` of the model itself
    weight_bits: float  # per quantized parameter, scales included; 8 × bytes of dtype where nothing is quantized
    kv_bytes: float | None  # bytes per element where the checkpoint brings a quantized KV cache
    file_bytes: int | None  # of the weight files in the folder; None where there are none
    multimodal: bool
    max_positions: int | None  # longest request, prompt and answer, that vLLM derives by itself
    least_positions: int | None  # bounds of it over the versions' rules for rope scaling, which differ
    most_positions: int | None
    has_quantization_file: bool = False

    @property
    def dtype_bytes(self) -> int:
        return _DTYPE_BYTES.get(self.dtype, 2)


def read_model_shape(model_dir: Path) -> ModelShape | None:
    """The shape of a model folder; None without a config.json or for one that describes no decoder.

    Raises `InputError` for a config.json that is not valid JSON: vLLM could not read it either.
    """
    document = _read_json(model_dir / "config.json")
    if document is None:
        return None
    extra = {
        name: _read_json(model_dir / name)
        for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
    }
    has_file = any(value is not None for value in extra.values())
    return model_shape(document, file_bytes=_weight_files(model_dir), has_quantization_file=has_file)


def model_shape(
    document: Mapping[str, Any], *, file_bytes: int | None = None, has_quantization_file: bool = False
) -> ModelShape | None:
    """The shape that a parsed config.json describes; None where it describes no decoder with attention."""
    text = _text_config(document)
    layers = _integer(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = _integer(text, "hidden_size", "n_embd", "d_model", "dim")
    heads = _integer(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    vocabulary = _integer(text, "vocab_size") or _integer(document, "vocab_size")
    if not (layers and hidden and heads and vocabulary) or layers > _MAX_LAYERS:
        return None
    model_type = str(text.get("model_type") or document.get("model_type") or "")
    kv_heads = _kv_heads(text, model_type, heads)
    head_dim = _integer(text, "head_dim", "hidden_size_per_head") or hidden // heads
    intermediate = _integer(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * hidden
    rank = _integer(text, "kv_lora_rank")
    rope = _integer(text, "qk_rope_head_dim") or 0
    kinds = _layer_kinds(text, layers)
    experts = _integer(text, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts") or 0
    tied = bool(document.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    quantization, bits, kv_bytes = _quantization(document, text)
    dtype = str(
        text.get("dtype")
        or text.get("torch_dtype")
        or document.get("dtype")
        or document.get("torch_dtype")
        or "bfloat16"
    )
    dtype = dtype.removeprefix("torch.")
    embedding = vocabulary * hidden * (1 if tied else 2)
    attention = _attention_parameters(text, hidden, heads, kv_heads, head_dim)
    dense, routed = _mlp_parameters(text, model_type, layers, hidden, intermediate, experts)
    parameters = embedding + layers * (attention + 2 * hidden) + hidden + dense + routed
    architectures = document.get("architectures")
    positions, least, most = _positions(text, model_type)
    return ModelShape(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else model_type,
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied_embeddings=tied,
        dtype=dtype,
        full_layers=kinds.count("full"),
        window_layers=kinds.count("window"),
        window=_window(text),
        latent_dim=rank + rope if rank else None,
        experts=experts,
        parameters=parameters,
        expert_parameters=routed,
        embedding_parameters=embedding,
        quantization=quantization,
        weight_bits=bits or 8.0 * _DTYPE_BYTES.get(dtype, 2),
        kv_bytes=kv_bytes,
        file_bytes=file_bytes,
        multimodal=text is not document
        or any(key in document for key in ("vision_config", "audio_config", "vit_config")),
        max_positions=positions,
        least_positions=least,
        most_positions=most,
        has_quantization_file=has_quantization_file,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        document = json.loads(path.read_bytes())
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        raise InputError(
            where=str(path),
            field="document",
            value=path.name,
            rule=f"must be JSON ({error})",
            remedy="Download the model again, or mend the file.",
        ) from None
    return document if isinstance(document, dict) else None


def _weight_files(model_dir: Path) -> int | None:
    """Bytes of the weights as stored. The index names the files that vLLM loads; without one all of a kind count."""
    index = _read_json(model_dir / "model.safetensors.index.json")
    names: Iterable[Path]
    if index is not None and isinstance(index.get("weight_map"), dict):
        names = {model_dir / Path(str(name)).name for name in index["weight_map"].values()}
    else:
        names = list(model_dir.glob("*.safetensors")) or list(model_dir.glob("*.bin"))
    sizes = [path.stat().st_size for path in names if path.is_file()]
    return sum(sizes) or None


def _text_config(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model inside a multimodal configuration, however deep, or the document itself."""
    for name in _TEXT_CONFIGS:
        nested = document.get(name)
        if isinstance(nested, dict) and nested:
            return _text_config(nested)
    return document


def _integer(source: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = source.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _kv_heads(text: Mapping[str, Any], model_type: str, heads: int) -> int:
    if model_type == "falcon" and not text.get("new_decoder_architecture") and text.get("multi_query"):
        return 1
    if model_type == "gpt_bigcode" and text.get("multi_query", True):
        return 1
    names = (
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
        "kv_n_heads",
    )
    nested = text.get("attn_config")
    found = _integer(nested, *names) if isinstance(nested, dict) else None
    return _integer(text, *names) or found or heads


def _window(text: Mapping[str, Any]) -> int | None:
    if text.get("use_sliding_window") is False:
        return None
    return _integer(text, "sliding_window", "attention_chunk_size", "sliding_window_size")


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """`full`, `window` or `state` (constant memory) for every layer that keeps a cache of its own.

    Sources, in order: an explicit list, a pattern, an interval. Layers that reuse another layer's cache are left out.
    """
    windowed = _window(text) is not None
    listed = text.get("layer_types") or text.get("layers_block_type") or text.get("attn_type_list")
    pattern = text.get("hybrid_override_pattern")
    interval = _integer(text, "full_attention_interval", "attn_layer_period")
    every = _integer(text, "sliding_window_pattern")
    if isinstance(listed, list) and listed:
        kinds = [_kind(entry, windowed) for entry in listed[:layers]]
    elif isinstance(pattern, str) and pattern:
        kinds = ["full" if mark == "*" else "state" for mark in pattern[:layers]]
    elif interval is not None:
        kinds = ["full" if (index + 1) % interval == 0 else "state" for index in range(layers)]
    elif windowed and every is not None:
        kinds = ["full" if (index + 1) % every == 0 else "window" for index in range(layers)]
    else:
        kinds = ["window" if windowed else "full"] * layers
    shared = _integer(text, "num_kv_shared_layers")
    return kinds[: max(len(kinds) - shared, 1)] if shared else kinds


def _kind(entry: object, windowed: bool) -> str:
    if isinstance(entry, int):
        return "full" if entry == 1 else "state"
    word = str(entry).lower()
    if "sliding" in word or "chunked" in word or "local" in word:
        return "window" if windowed else "full"
    return "full" if "full" in word or "global" in word or word in ("attention", "hybrid", "*") else "state"


def _attention_parameters(text: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Parameters of one attention layer: plain and grouped heads, or DeepSeek's latent form."""
    rank = _integer(text, "kv_lora_rank")
    if rank is None:
        return hidden * head_dim * (2 * heads + 2 * kv_heads)
    rope, nope = _integer(text, "qk_rope_head_dim") or 0, _integer(text, "qk_nope_head_dim") or head_dim
    value, query_rank = _integer(text, "v_head_dim") or head_dim, _integer(text, "q_lora_rank")
    query = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _mlp_parameters(
    text: Mapping[str, Any], model_type: str, layers: int, hidden: int, intermediate: int, experts: int
) -> tuple[int, int]:
    """Parameters of all MLPs: (dense and shared, routed experts)."""
    matrices = 2 if model_type in _UNGATED else 3
    dense_layer = matrices * hidden * intermediate
    if not experts:
        return layers * dense_layer, 0
    width = _integer(text, "moe_intermediate_size", "expert_ffn_hidden_size") or intermediate
    first_dense = text.get("first_k_dense_replace")
    dense_layers = first_dense if isinstance(first_dense, int) and 0 <= first_dense <= layers else 0
    step = _integer(text, "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step") or 1
    sparse_layers = (layers - dense_layers) // step
    shared = (_integer(text, "n_shared_experts") or 0) * width
    shared = _integer(text, "shared_expert_intermediate_size") or shared
    routed = sparse_layers * experts * 3 * hidden * width
    dense = (layers - sparse_layers) * dense_layer + sparse_layers * (hidden * experts + 3 * hidden * shared)
    return dense, routed


def _quantization(
    document: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[str | None, float | None, float | None]:
    """(method, bits per quantized parameter, bytes per KV element), each None where the model does not say.

    Bits include scales: a 16-bit scale (and a zero point of the weight's own width) per group of 32 or 128.
    """
    config = (
        document.get("quantization_config") or text.get("quantization_config") or document.get("compression_config")
    )
    if not isinstance(config, dict) or not config:
        return None, None, None
    method = str(config.get("quant_method") or "").lower()
    kv = None
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        kv = 1.0 if scheme.get("num_bits") == 8 else None
    elif isinstance(scheme, str):
        kv = 1.0 if "FP8" in scheme.upper() else None
    algorithm = str(config.get("quant_algo") or config.get("quantization", "")).upper()
    bits: float | None
    if method == "modelopt" or algorithm:
        bits = 4.5 if "FP4" in algorithm else 8.0
    elif method == "mxfp4":
        bits = 4.25
    elif method in ("fp8", "fbgemm_fp8", "experts_int8"):
        bits = 8.0
    elif method == "bitsandbytes":
        bits = 4.5 if config.get("load_in_4bit") else 8.0
    elif method == "compressed-tensors":
        bits = _compressed_bits(config)
    else:
        width = _integer(config, "bits", "w_bit", "weight_bits")
        bits = width + (width + 16) / (_integer(config, "group_size", "q_group_size") or 128) if width else None
    return method or None, bits, kv


def _compressed_bits(config: Mapping[str, Any]) -> float | None:
    """The smallest width among the groups of a compressed-tensors configuration."""
    groups = config.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and (bits := _integer(weights, "num_bits")):
            found.append(float(bits))
    return min(found) if found else None


def _positions(text: Mapping[str, Any], model_type: str) -> tuple[int | None, int | None, int | None]:
    """(what vLLM derives by itself, least, most): versions differ in how rope scaling lengthens a model."""
    found = [value for name in _LENGTHS if (value := _integer(text, name))]
    if not found:
        return None, None, None
    plain = _integer(text, "model_max_length") or min(found)
    derived, factors, originals = float(plain), [1.0], [plain]
    for rope in _ropes(text):
        kind, factor = str(rope.get("rope_type") or rope.get("type") or ""), rope.get("factor")
        original = _integer(rope, "original_max_position_embeddings")
        original = original or _integer(text, "original_max_position_embeddings")
        if original:
            originals.append(original)
        if kind == "longrope" and original:
            derived = float(original)  # the longer form costs quality, so vLLM uses it only when asked
        if (
            isinstance(factor, (int, float))
            and not isinstance(factor, bool)
            and factor > 0
            and "gemma3" not in model_type
        ):
            factors.append(float(factor))
            if kind not in _UNSCALED_ROPE:
                derived = plain * float(factor)
    return int(derived), min(*originals, int(derived)), int(max(max(originals) * max(factors), *found))


def _ropes(text: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Rope settings in either spelling, alone or one per kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        value = text.get(name)
        if isinstance(value, dict):
            nested = [entry for entry in value.values() if isinstance(entry, dict)]
            yield from nested or [value]
