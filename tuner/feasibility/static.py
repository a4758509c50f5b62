"""Rules that reject a configuration before any launch; it rejects only what is certain, and estimates nothing.

Every rule restates one check that vLLM 0.26–0.33 makes itself (named in its docstring), on the values that would be in
effect: the configuration over the user's fixed flags over the installed version's defaults for this device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.feasibility.shape import ModelShape
from tuner.records import Config, Failure, KnobValue, Verdict
from tuner.serve_args import out_of_range

_NEEDS_FILES = frozenset({"awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq"})
"""Methods that exist only as prepared checkpoints; others quantize while loading."""

_FAMILIES: Sequence[frozenset[str]] = (
    frozenset({"awq", "awq_marlin", "auto_awq"}),
    frozenset({"gptq", "gptq_marlin", "auto_gptq"}),
    frozenset({"gguf"}),
    frozenset({"bitsandbytes"}),
    frozenset({"fp8", "deepseek_v4_fp8"}),
)
"""Methods whose files no method of another family reads. What is not listed here is not judged."""

_DENSE_ATTENTION = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite"}
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rule may look at. `explicit` was asked for; `get` falls back to the default in effect."""

    explicit: Config
    defaults: Mapping[str, KnobValue]
    model: ModelShape | None
    devices: int
    version: tuple[int, int]
    device_type: str
    capability: tuple[int, int] | None
    environment: Mapping[str, str]

    def number(self, knob: str) -> float | None:
        """An explicit number; None where absent, left to vLLM (−1, `auto`) or no number."""
        value = self.explicit.get(knob)
        return None if isinstance(value, bool) or not isinstance(value, (int, float)) or value == -1 else float(value)

    def default(self, knob: str) -> float | None:
        value = self.defaults.get(knob)
        return None if isinstance(value, bool) or not isinstance(value, (int, float)) or value == -1 else float(value)

    def size(self, knob: str) -> int:
        value = self.number(knob)
        return int(value) if value is not None else 1

    @property
    def world_size(self) -> int:
        return self.size("tensor-parallel-size") * self.size("pipeline-parallel-size")

    @property
    def chunked(self) -> bool:
        """Chunked prefill is on unless it was switched off."""
        return self.explicit.get("enable-chunked-prefill") is not False

    @property
    def model_is_as_described(self) -> bool:
        return "hf-overrides" not in self.explicit and not any(k.startswith("hf-overrides.") for k in self.explicit)

    @property
    def budget(self) -> float | None:
        """Token budget in effect; None where it cannot be known for certain.

        Not given, it is the device's default, at most seqs × length, doubled in throughput mode, and raised to the
        length without chunked prefill (`_set_default_max_num_seqs_and_batched_tokens_args`); models that take whole
        images raise it further, which is why it is unknown for them.
        """
        given = self.number("max-num-batched-tokens")
        if given is not None:
            return given
        default = self.default("max-num-batched-tokens")
        if default is None or self.model is None or self.model.multimodal:
            return None
        budget = default * (2 if self.explicit.get("performance-mode") == "throughput" else 1)
        budget *= self.world_size if self.device_type != "cuda" else 1
        return budget if self.chunked else max(budget, self.length(at_most=True) or math.inf)

    @property
    def seqs_at_most(self) -> float | None:
        """Upper bound of the sequences in a step; a default is clamped to the budget."""
        given, default = self.number("max-num-seqs"), self.default("max-num-seqs")
        if given is not None or default is None:
            return given
        default *= 2 if self.explicit.get("performance-mode") == "throughput" else 1
        default *= self.world_size if self.device_type != "cuda" else 1
        return min(default, self.number("max-num-batched-tokens") or default)

    def length(self, *, at_most: bool) -> float | None:
        """Longest request in effect, as an upper or lower bound; None where vLLM fits it to memory or nobody says."""
        if self.explicit.get("max-model-len") is not None:
            return self.number("max-model-len")
        if self.model is None or not self.model_is_as_described or "disable-sliding-window" in self.explicit:
            return None
        bound = self.model.most_positions if at_most else self.model.least_positions
        return None if bound is None else float(bound)


@dataclass(frozen=True, slots=True)
class _Broken:
    kind: str
    rule: str
    remedy: str
    moves: Mapping[str, str] = field(default_factory=dict)
    violation: float = 1.0


def check_static(
    config: Config,
    *,
    fixed: Config,
    defaults: Mapping[str, KnobValue],
    model: ModelShape | None,
    devices: int,
    version: str,
    device_type: str = "",
    capability: tuple[int, int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Failure | None:
    """The first broken rule as a STATIC failure, or None.

    `defaults` are the installed vLLM's for this device (`serve_args.defaults`, or read back from the log of a start
    without overrides). `devices` is the number of GPUs that one server may use, 0 where unknown; `device_type` is
    `cuda`, `cpu` or empty, `capability` the GPUs' compute capability. `environment` holds the VLLM_* variables of the
    servers. What is unknown rejects nothing.
    """
    asked = {**fixed, **config}
    setting = Setting(asked, defaults, model, devices, _version(version), device_type, capability, environment or {})
    for rule in RULES:
        broken = rule(setting)
        if broken is not None:
            return Failure(
                verdict=Verdict.STATIC,
                kind=broken.kind,
                phase="prepare",
                cause=broken.rule,
                explanation=f"vLLM {version} refuses that, so it was not started.",
                remedy=broken.remedy,
                moves=dict(broken.moves),
                violation=min(max(broken.violation, 1e-3), 10.0),
            )
    return None


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (9999, 0)


def _ranges(setting: Setting) -> _Broken | None:
    """Bounds of single values; −1 leaves many of them to vLLM."""
    for knob, value in setting.explicit.items():
        bound = None if value == -1 else out_of_range(knob, value)
        if bound is not None:
            too_low = isinstance(value, int | float) and value <= 0
            move = {knob: "up" if too_low else "down"}
            return _Broken("value-out-of-range", f"--{knob} is {value}, but {bound}.", "", move)
    return None


def _budget_below_seqs(setting: Setting) -> _Broken | None:
    """`SchedulerConfig.verify_max_model_len`; sequences that were not given are clamped to the budget."""
    seqs, budget = setting.number("max-num-seqs"), setting.budget
    if seqs is None or budget is None or budget >= seqs:
        return None
    return _Broken(
        "budget-below-seqs",
        f"The token budget of a step ({budget:g}) is smaller than the number of sequences in it ({seqs:g}).",
        "Raise --max-num-batched-tokens or lower --max-num-seqs.",
        {"max-num-batched-tokens": "up", "max-num-seqs": "down"},
        seqs / budget - 1,
    )


def _budget_below_length(setting: Setting) -> _Broken | None:
    """`SchedulerConfig.verify_max_model_len`: only without chunked prefill."""
    budget, length = setting.number("max-num-batched-tokens"), setting.length(at_most=False)
    if setting.chunked or budget is None or length is None or budget >= length:
        return None
    return _Broken(
        "budget-below-length",
        f"Without chunked prefill the token budget ({budget:g}) must hold the longest request ({length:g}).",
        "Raise --max-num-batched-tokens, shorten --max-model-len, or leave chunked prefill on.",
        {"max-num-batched-tokens": "up", "max-model-len": "down", "enable-chunked-prefill": "on"},
        length / budget - 1,
    )


def _active_seqs(setting: Setting) -> _Broken | None:
    """`SchedulerConfig.verify_max_model_len`, 0.31 and later."""
    active, seqs = setting.number("max-num-active-seqs"), setting.seqs_at_most
    if active is None or seqs is None or active <= seqs:
        return None
    return _Broken(
        "active-seqs",
        f"--max-num-active-seqs ({active:g}) exceeds the number of sequences in a step ({seqs:g}).",
        "Lower the one or raise the other.",
        {"max-num-active-seqs": "down", "max-num-seqs": "up"},
        active / seqs - 1,
    )


def _long_prefill(setting: Setting) -> _Broken | None:
    """`SchedulerConfig.verify_max_model_len`; up to 0.30 only with several partial prefills."""
    threshold, length = setting.number("long-prefill-token-threshold"), setting.length(at_most=True)
    if threshold is None or length is None or threshold <= length:
        return None
    if setting.version < (0, 31) and setting.size("max-num-partial-prefills") <= 1:
        return None
    return _Broken(
        "long-prefill-threshold",
        f"--long-prefill-token-threshold ({threshold:g}) exceeds the longest request ({length:g}).",
        "Lower it, or set 0 to switch it off.",
        {"long-prefill-token-threshold": "down"},
        threshold / length - 1,
    )


def _partial_prefills(setting: Setting) -> _Broken | None:
    """`SchedulerConfig.verify_max_model_len`, up to 0.30."""
    partial, long = setting.size("max-num-partial-prefills"), setting.number("max-long-partial-prefills")
    if partial > 1 and not setting.chunked:
        return _Broken(
            "partial-prefills-need-chunking",
            f"--max-num-partial-prefills {partial} needs chunked prefill, which is switched off.",
            "Leave chunked prefill on, or --max-num-partial-prefills at 1.",
            {"enable-chunked-prefill": "on", "max-num-partial-prefills": "down"},
        )
    if long is not None and long > partial:
        return _Broken(
            "long-partial-prefills",
            f"--max-long-partial-prefills ({long:g}) exceeds --max-num-partial-prefills ({partial}).",
            "Lower the one or raise the other.",
            {"max-long-partial-prefills": "down", "max-num-partial-prefills": "up"},
            long / partial - 1,
        )
    return None


def _gpus(setting: Setting) -> _Broken | None:
    """`ParallelConfig`: every rank of a server on one machine needs a GPU of its own."""
    elsewhere = setting.explicit.get("distributed-executor-backend") in ("ray", "external_launcher")
    if setting.devices <= 0 or setting.device_type == "cpu" or elsewhere or setting.size("nnodes") > 1:
        return None
    spread = any(knob.startswith("data-parallel-") and knob != "data-parallel-size" for knob in setting.explicit)
    world = setting.world_size * (1 if spread else setting.size("data-parallel-size"))
    if world <= setting.devices:
        return None
    return _Broken(
        "gpus-missing",
        f"The configuration needs {world} GPUs; one server may use {setting.devices} here.",
        "Lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size.",
        {"tensor-parallel-size": "down", "pipeline-parallel-size": "down", "data-parallel-size": "down"},
        world / setting.devices - 1,
    )


def _heads(setting: Setting) -> _Broken | None:
    """`ModelConfig.verify_with_parallel_config`; key-value heads as `QKVParallelLinear` divides or repeats them."""
    model, size = setting.model, setting.size("tensor-parallel-size")
    if model is None or size <= 1 or not setting.model_is_as_described:
        return None
    plain = model.model_type in _DENSE_ATTENTION and model.latent_dim is None
    if model.heads % size:
        what = f"{model.heads} attention heads"
    elif plain and model.kv_heads % size and size % model.kv_heads:
        what = f"{model.kv_heads} key-value heads"
    else:
        return None
    return _Broken(
        "heads-not-divisible",
        f"{what} cannot be shared evenly by {size} GPUs.",
        f"Choose a --tensor-parallel-size that divides {model.heads}.",
        {"tensor-parallel-size": "down"},
    )


def _experts(setting: Setting) -> _Broken | None:
    """`ModelConfig._verify_with_expert_parallelism`."""
    model = setting.model
    if model is None or model.experts or setting.explicit.get("enable-expert-parallel") is not True:
        return None
    if model.model_type not in _DENSE_ATTENTION or not setting.model_is_as_described:
        return None
    return _Broken(
        "no-experts",
        "Expert parallelism is asked for, but this model has no experts.",
        "Leave out --enable-expert-parallel.",
        {"enable-expert-parallel": "off"},
    )


def _quantization(setting: Setting) -> _Broken | None:
    """`ModelConfig._verify_quantization` and `get_quant_config`."""
    model, asked = setting.model, setting.explicit.get("quantization")
    if model is None or not isinstance(asked, str) or not setting.model_is_as_described:
        return None
    moves = {"quantization": "off"}
    if model.quantization is None and asked in _NEEDS_FILES and not model.has_quantization_file:
        rule = f"--quantization {asked} reads prepared weights, but this model's config.json describes none."
        return _Broken("quantization-mismatch", rule, "Leave out --quantization.", moves)
    families = [family for family in _FAMILIES if asked in family or model.quantization in family]
    if len(families) == 2:
        rule = f"The model is quantized as {model.quantization}, and --quantization asks for {asked}."
        return _Broken("quantization-mismatch", rule, "Leave out --quantization; the model says it itself.", moves)
    return None


def _length_beyond_model(setting: Setting) -> _Broken | None:
    """`_get_and_verify_max_len`."""
    model, asked = setting.model, setting.number("max-model-len")
    allowed = setting.environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")
    if model is None or asked is None or allowed or not setting.model_is_as_described:
        return None
    longest = model.most_positions
    if longest is None or asked <= longest:
        return None
    return _Broken(
        "length-beyond-model",
        f"The model was made for at most {longest} tokens; --max-model-len asks for {asked:g}.",
        f"Lower --max-model-len to {model.max_positions}.",
        {"max-model-len": "down"},
        asked / longest - 1,
    )


def _block_size(setting: Setting) -> _Broken | None:
    """Attention kernels on CUDA work on blocks of a multiple of 16 tokens; latent attention has sizes of its own."""
    size, model = setting.number("block-size"), setting.model
    if size is None or setting.device_type != "cuda" or model is None or model.latent_dim is not None:
        return None
    if model.model_type not in _DENSE_ATTENTION or size >= 16:
        return None
    return _Broken(
        "block-size-unsupported",
        f"No attention kernel on CUDA serves this model with KV blocks of {size:g} tokens.",
        "Use 16 or more, or leave out --block-size.",
        {"block-size": "up"},
    )


def _dtype(setting: Setting) -> _Broken | None:
    """`CudaPlatform.check_if_supports_dtype`."""
    if setting.capability is None or setting.device_type != "cuda" or setting.capability >= (8, 0):
        return None
    if setting.explicit.get("dtype") != "bfloat16":
        return None
    major, minor = setting.capability
    return _Broken(
        "dtype-unsupported",
        f"--dtype bfloat16 needs compute capability 8.0; this GPU has {major}.{minor}.",
        "Use --dtype half.",
        {"dtype": "off"},
    )


RULES: tuple[Callable[[Setting], _Broken | None], ...] = (
    _ranges,
    _budget_below_seqs,
    _budget_below_length,
    _active_seqs,
    _long_prefill,
    _partial_prefills,
    _gpus,
    _heads,
    _experts,
    _quantization,
    _length_beyond_model,
    _block_size,
    _dtype,
)
