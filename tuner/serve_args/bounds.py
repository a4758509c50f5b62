"""Least and largest values of single flags, as vLLM's configuration declares them; it knows no combination of flags."""

from __future__ import annotations

from tuner.records import KnobValue

LEAST = {
    "max-num-batched-tokens": 1,
    "max-num-seqs": 1,
    "max-num-active-seqs": 1,
    "max-model-len": 1,
    "long-prefill-token-threshold": 0,
    "max-num-partial-prefills": 1,
    "max-long-partial-prefills": 1,
    "tensor-parallel-size": 1,
    "pipeline-parallel-size": 1,
    "data-parallel-size": 1,
    "block-size": 1,
    "stream-interval": 1,
    "kv-cache-memory-bytes": 1,
}
"""`Field(ge=…)` in vllm/config, 0.26–0.33."""

_MOST = {"kv-cache-memory-bytes": 2**63 - 1}
_MOST_OF_OTHERS = 2**31 - 1  # vLLM keeps these in tensors of 32-bit integers
_AUTOMATIC = ("max-model-len",)  # −1 leaves it to vLLM
_SHARES = ("gpu-memory-utilization",)


def out_of_range(knob: str, value: KnobValue) -> str | None:
    """The bound that this value breaks, in words, e.g. `must be at least 1`; None where it breaks none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if knob in LEAST and value < LEAST[knob] and not (value == -1 and knob in _AUTOMATIC):
        return f"must be at least {LEAST[knob]}"
    if knob in LEAST and value > (most := _MOST.get(knob, _MOST_OF_OTHERS)):
        return f"must be at most {most}"
    if knob in _SHARES and not 0 < value <= 1:
        return "is a share of the device memory: above 0, at most 1"
    return None
