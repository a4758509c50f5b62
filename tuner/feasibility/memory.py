"""Whether a configuration fits into device memory, from the model's shape and earlier starts; it measures nothing.

vLLM's own account (`gpu_worker.determine_available_memory`, 0.26–0.33), for one GPU:

    KV cache = utilization × device − weights − activations of one full step − graphs (since 0.19) − non-torch memory

and a start fails when nothing is left or when one request of the longest length does not fit into what is left. Two
readings are kept apart: the *likely* one is shown, the *optimistic* one decides. Only what fails even when every
unknown is taken at its smallest is called impossible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.feasibility.calibration import Calibration
from tuner.feasibility.shape import ModelShape
from tuner.records import Config, Failure, KnobValue, Verdict

GIB = 1 << 30
DEFAULT_UTILIZATION = 0.92

_ELEMENT_BYTES = {"auto": 0.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0, "float32": 4.0, "nvfp4": 0.5625}
_LEAST_ELEMENT_BYTES = 0.25
"""For KV cache types that are not known here: smaller than any that exists, so that they reject nothing."""

_LOGIT_BYTES = 4
"""Logits of the sampler's warm-up, in 32 bits for every sequence and word."""
_COMPILED_GIB = 0.67
"""What graphs and compiled code added to the activations of an 8B model on an H200 (docs/feasibility.md)."""
_OPTIMISTIC_ACTIVATION = 0.3
"""Share of the formula that a step takes at least. Measured: 0.6 and more of it (docs/feasibility.md)."""
_OPTIMISTIC_WEIGHTS = 0.97


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the fullest GPU. `short_bytes` > 0: impossible even in the optimistic reading, by that much."""

    requested_bytes: int  # what vLLM may take
    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    non_torch_bytes: int
    kv_bytes: int  # likely KV cache; negative when nothing is left
    kv_bytes_per_token: float
    kv_tokens: int
    needed_bytes: int  # KV cache of one request of the longest length
    short_bytes: int
    violation: float  # need ÷ have − 1 of what does not fit; 0 where it may fit
    reason: str  # what does not fit, in words; empty where it may fit
    moves: Mapping[str, str]
    calibrated: bool  # weights measured in an earlier start

    @property
    def may_fit(self) -> bool:
        return self.short_bytes <= 0

    def __str__(self) -> str:
        if not self.may_fit:
            return f"will not fit, needs {_gib(self.short_bytes)} more: {self.reason}"
        return (
            f"weights {_gib(self.weights_bytes)}, activations {_gib(self.activation_bytes)}, "
            f"KV cache {_gib(self.kv_bytes)} = {self.kv_tokens:,} tokens"
        )


def memory_estimate(
    shape: ModelShape,
    config: Config,
    device_bytes: int,
    calibration: Calibration,
    *,
    defaults: Mapping[str, KnobValue] | None = None,
    free_bytes: int | None = None,
    device_type: str = "cuda",
    environment: Mapping[str, str] | None = None,
) -> MemoryEstimate:
    """Estimate one GPU's memory (or one CPU's) under `config`, which includes the user's fixed flags.

    `defaults` are the installed vLLM's values for what `config` leaves open; `free_bytes` is what an idle device has
    free; `environment` holds the servers' VLLM_* variables. Values that it cannot read count as left open.
    """
    need = _Need(shape, {**(defaults or {}), **config}, config, calibration, device_type)
    utilization = need.number("gpu-memory-utilization") or DEFAULT_UTILIZATION
    requested = int(device_bytes * utilization)
    explicit_kv = need.number("kv-cache-memory-bytes")
    if device_type == "cpu" and (space := (environment or {}).get("VLLM_CPU_KVCACHE_SPACE", "")).strip().isdigit():
        explicit_kv = int(space) * GIB or explicit_kv  # overrides the flag
    likely, least = need.likely(), need.least()
    if explicit_kv is not None:
        kv = optimistic_kv = int(explicit_kv)
    elif device_type == "cpu":
        kv = requested - likely.weights - likely.activation
        optimistic_kv = requested
    else:
        kv = requested - likely.total
        optimistic_kv = requested - least.total
    per_token = need.bytes_per_token()
    needed = need.longest_request_bytes()
    gap = _gap(need, requested, explicit_kv, optimistic_kv, least, needed, device_bytes, free_bytes) or _Gap()
    return MemoryEstimate(
        requested_bytes=requested,
        weights_bytes=likely.weights,
        activation_bytes=likely.activation,
        graph_bytes=likely.graphs,
        non_torch_bytes=likely.non_torch,
        kv_bytes=kv,
        kv_bytes_per_token=per_token,
        kv_tokens=max(int(kv / per_token), 0) if per_token else 0,
        needed_bytes=needed,
        short_bytes=gap.need - gap.have,
        violation=(gap.need / gap.have - 1 if gap.have > 0 else 10.0) if gap.need else 0.0,
        reason=gap.reason,
        moves=gap.moves,
        calibrated=calibration.weights_gib(need.effective) is not None,
    )


def memory_failure(estimate: MemoryEstimate) -> Failure | None:
    """The estimate as a STATIC failure where it is certain, else None."""
    if estimate.may_fit:
        return None
    return Failure(
        verdict=Verdict.STATIC,
        kind="will-not-fit",
        phase="prepare",
        cause=str(estimate),
        explanation="That holds even if every unknown is taken at its smallest.",
        remedy=", ".join(f"--{knob} {direction}" for knob, direction in estimate.moves.items()) + ".",
        moves=dict(estimate.moves),
        violation=min(max(estimate.violation, 1e-3), 10.0),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    weights: int
    activation: int
    graphs: int
    non_torch: int

    @property
    def total(self) -> int:
        return self.weights + self.activation + self.graphs + self.non_torch


@dataclass(frozen=True, slots=True)
class _Need:
    """The parts of the account for one shape and configuration."""

    shape: ModelShape
    effective: Config  # with defaults
    asked: Config
    calibration: Calibration
    device_type: str

    def number(self, knob: str) -> float | None:
        value = self.effective.get(knob)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
        return float(value) if usable and isinstance(value, (int, float)) else None

    def size(self, knob: str) -> int:
        return int(self.number(knob) or 1)

    @property
    def budget(self) -> float:
        return self.number("max-num-batched-tokens") or 2048.0

    @property
    def seqs(self) -> float:
        return min(self.number("max-num-seqs") or 256.0, self.budget)

    @property
    def length(self) -> int | None:
        """Longest request, tokens; None where vLLM fits it to the memory (`auto`, −1)."""
        if "max-model-len" in self.asked:
            value = self.number("max-model-len")
            return None if value is None else int(value)
        return self.shape.least_positions

    # --- weights ---------------------------------------------------------------------------------------------

    def weights(self) -> int:
        """Likely bytes: measured, else the files, else the formula."""
        measured = self.calibration.weights_gib(self.effective)
        if measured is not None:
            return int(measured * GIB)
        formula = self._formula_weights()
        converted = self._asked_bits() is not None or self.effective.get("load-format") == "dummy"
        if self.shape.file_bytes is None or converted:
            return self._offloaded(formula)
        return self._offloaded(self.shape.file_bytes / self._ways())

    def least_weights(self) -> int:
        """Certain bytes: the smaller of files and formula, since either may count what is not loaded."""
        measured = self.calibration.weights_gib(self.effective)
        if measured is not None:
            return int(max(measured - 0.02, 0.0) * GIB)
        least = self._formula_weights()
        if self.shape.file_bytes is not None and self._asked_bits() is None:
            least = min(least, self.shape.file_bytes / self._ways())
        return self._offloaded(least * _OPTIMISTIC_WEIGHTS)

    def _formula_weights(self) -> float:
        shape = self.shape
        plain = 8.0 * self._dtype_bytes()
        bits = self._asked_bits() or (shape.weight_bits if shape.quantization else plain)
        routed = shape.expert_parameters
        dense = shape.parameters - shape.embedding_parameters - routed
        expert_ways = self._ways()
        if self.effective.get("enable-expert-parallel") is True:
            expert_ways *= self.size("data-parallel-size")
        # Bits decide about matrices only; a smaller precision of the experts alone (mxfp4) leaves the rest as it is.
        dense_bits = plain if shape.quantization == "mxfp4" and self._asked_bits() is None else min(bits, plain)
        whole = shape.embedding_parameters * plain + dense * dense_bits
        return (whole / self._ways() + routed * min(bits, plain) / expert_ways) / 8

    def _asked_bits(self) -> float | None:
        """Bits of a quantization that is asked for and happens while loading."""
        asked = self.asked.get("quantization")
        if not isinstance(asked, str) or asked in ("None", "none", self.shape.quantization):
            return None
        if "fp4" in asked or "4" in asked or asked == "bitsandbytes":
            return 4.5
        return 8.0

    def _dtype_bytes(self) -> int:
        asked = self.asked.get("dtype")
        if asked in ("float32", "float"):
            return 4
        if asked in ("half", "float16", "bfloat16", "auto") or asked is None:
            return 2 if self.shape.dtype_bytes == 4 else self.shape.dtype_bytes  # `auto` loads float32 models in 16 bit
        return self.shape.dtype_bytes

    def _ways(self) -> int:
        """Over how many GPUs one replica's weights are spread."""
        return self.size("tensor-parallel-size") * self.size("pipeline-parallel-size")

    def _offloaded(self, weights: float) -> int:
        return int(max(weights - (self.number("cpu-offload-gb") or 0.0) * GIB, 0.0))

    # --- activations and the rest ------------------------------------------------------------------------------

    @property
    def eager(self) -> bool:
        return self.effective.get("enforce-eager") is True

    def formula_activation(self) -> float:
        """Bytes of one profiling step: the widest layer on a full budget, or the logits of all sequences.

        Eagerly, gate, up and their product live beside four hidden states; compiled code keeps gate and up and one.
        """
        shape, width = self.shape, self._dtype_bytes()
        wide = shape.intermediate / self.size("tensor-parallel-size")
        per_token = (3 * wide + 4 * shape.hidden if self.eager else 2 * wide + shape.hidden) * width
        logits = self.seqs * shape.vocabulary * _LOGIT_BYTES / self.size("tensor-parallel-size")
        return max(self.budget * per_token, logits)

    def likely(self) -> _Parts:
        formula = self.formula_activation() + (0.0 if self.eager or self.device_type == "cpu" else _COMPILED_GIB * GIB)
        like = self.calibration.nearest(self.effective, self.budget, self.seqs)
        if like is not None and like.activation is not None:
            # What a formula gets wrong it gets wrong alike for neighbours: move from the measured start by its slope.
            there = _Need(self.shape, self._at(like.budget, like.seqs), self.asked, self.calibration, self.device_type)
            formula = like.activation * GIB + self.formula_activation() - there.formula_activation()
            formula = max(formula, 0.1 * like.activation * GIB)
        non_torch = self.calibration.non_torch_gib()
        default_non_torch = 0.25 + (0.75 if self.size("tensor-parallel-size") > 1 else 0.0)
        return _Parts(
            weights=self.weights(),
            activation=int(formula),
            graphs=0,  # since vLLM estimates graphs itself, they are part of what it reports as activation
            non_torch=int((default_non_torch if non_torch is None else non_torch) * GIB),
        )

    def least(self) -> _Parts:
        # A measured activation is no lower bound: the same configuration takes less when its kernels come from a cache.
        return _Parts(
            weights=self.least_weights(),
            activation=int(_OPTIMISTIC_ACTIVATION * self.formula_activation()),
            graphs=0,
            non_torch=int(self.calibration.least_non_torch_gib() * GIB),
        )

    def _at(self, budget: float | None, seqs: float | None) -> dict[str, KnobValue]:
        changed: dict[str, KnobValue] = dict(self.effective)
        changed["max-num-batched-tokens"] = budget or self.budget
        changed["max-num-seqs"] = seqs or self.seqs
        return changed

    # --- KV cache ------------------------------------------------------------------------------------------------

    def element_bytes(self) -> float:
        kind = str(self.effective.get("kv-cache-dtype", "auto"))
        if kind == "auto":
            return self.shape.kv_bytes or float(self._dtype_bytes())
        if kind in _ELEMENT_BYTES:
            return _ELEMENT_BYTES[kind]
        return 1.0 if kind.startswith(("fp8", "int8")) else _LEAST_ELEMENT_BYTES

    def layer_bytes(self) -> float:
        """One token in one layer on one GPU: keys and values of its heads, or the shared latent vector."""
        shape, element = self.shape, self.element_bytes()
        split = self.size("decode-context-parallel-size")
        if shape.latent_dim is not None:
            return shape.latent_dim * element / split
        heads = max(shape.kv_heads / self.size("tensor-parallel-size"), 1.0)
        return 2 * heads * shape.head_dim * element / split

    def bytes_per_token(self) -> float:
        """Of a long request: layers that keep every token; where all slide, those."""
        measured = self.calibration.bytes_per_token(self.effective)
        if measured is not None:
            return measured
        layers = self.shape.full_layers or self.shape.window_layers
        return layers * self.layer_bytes() / self.size("pipeline-parallel-size")

    def longest_request_bytes(self) -> int:
        """Least KV memory of one request of the longest length: full layers whole, sliding ones window and one step."""
        length = self.length
        if length is None:
            return 0
        block = self.number("block-size") or 16.0
        shape, per_layer = self.shape, self.layer_bytes() / self.size("pipeline-parallel-size")
        full = math.ceil(length / block) * block
        window = min(length, (shape.window or length) + self.budget)
        return int(per_layer * (shape.full_layers * full + shape.window_layers * window))


@dataclass(frozen=True, slots=True)
class _Gap:
    """What does not fit: bytes needed, bytes there."""

    need: int = 0
    have: int = 0
    reason: str = ""
    moves: Mapping[str, str] = field(default_factory=dict)


def _gap(
    need: _Need,
    requested: int,
    explicit_kv: float | None,
    optimistic_kv: int,
    least: _Parts,
    needed: int,
    device_bytes: int,
    free_bytes: int | None,
) -> _Gap | None:
    """The first thing that cannot fit, or None."""
    cuda = need.device_type != "cpu"
    if "num-gpu-blocks-override" in need.asked:
        return None
    if cuda and free_bytes is not None and requested > free_bytes:
        reason = f"the memory share asks for {_gib(requested)}, an idle device has {_gib(free_bytes)} free"
        return _Gap(requested, free_bytes, reason, {"gpu-memory-utilization": "down"})
    if cuda and explicit_kv is not None and least.weights + explicit_kv > device_bytes:
        reason = f"weights and a KV cache of {_gib(explicit_kv)} exceed the device"
        return _Gap(int(least.weights + explicit_kv), device_bytes, reason, {"kv-cache-memory-bytes": "down"})
    if explicit_kv is None and optimistic_kv <= 0:
        reason = f"weights and one step need {_gib(least.total)} of {_gib(requested)}, which leaves no KV cache"
        moves = {"gpu-memory-utilization": "up", "max-num-batched-tokens": "down", "tensor-parallel-size": "up"}
        return _Gap(least.total + max(needed, 1), requested, reason, moves)
    if needed > optimistic_kv:
        reason = f"one request of {need.length:,} tokens needs {_gib(needed)} of KV cache, and at most "
        reason += f"{_gib(optimistic_kv)} are left"
        more = {"gpu-memory-utilization": "up", "max-model-len": "down", "max-num-batched-tokens": "down"}
        if explicit_kv is not None:
            more = {"kv-cache-memory-bytes": "up", "max-model-len": "down"}
        return _Gap(needed, optimistic_kv, reason, more)
    return None


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 100 else f"{size / 1024:.0f} KiB"
