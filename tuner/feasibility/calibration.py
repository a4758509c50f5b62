"""What earlier starts on this machine taught about memory; it keeps numbers from logs and predicts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.records import Config, KnobValue

GIB = 1 << 30

_SAME_WEIGHTS = (
    *("quantization", "dtype", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"),
    *("enable-expert-parallel", "cpu-offload-gb", "load-format"),
)
_NEUTRAL = (1, 0, "auto", "dummy", "None", "bfloat16", "float16", "half")
"""Values of the above that make no difference to sizes, or are what vLLM chooses anyway."""

_ROUNDING_GIB = 0.02
"""vLLM prints hundredths of a GiB, and a few buffers move with the batch."""


@dataclass(frozen=True, slots=True)
class Start:
    """Memory facts of one start, GiB a GPU; None where the log did not say. Negative numbers in a log mean that another
    process interfered, and such a start is not kept."""

    weights_key: tuple[KnobValue | None, ...]
    cache_key: KnobValue | None
    budget: float | None
    seqs: float | None
    eager: bool
    weights: float | None
    activation: float | None
    graphs: float | None
    non_torch: float | None
    bytes_per_token: float | None  # of KV cache, from its size and its tokens


@dataclass(frozen=True, slots=True)
class Calibration:
    """The starts so far. Empty is a calibration too: estimates then rest on formulas alone."""

    starts: tuple[Start, ...] = ()

    def learn(self, config: Config, startup: Mapping[str, float]) -> Calibration:
        """With one more start. `config` holds the values in effect (asked for, fixed, defaults), `startup` the facts of
        its log (`serve_args.startup_facts`)."""
        sizes = [startup.get(name) for name in ("weights_gib", "activation_gib", "graph_gib", "non_torch_gib")]
        if not startup or any(size is not None and size < 0 for size in sizes):
            return self
        kv_gib, kv_tokens = startup.get("kv_gib"), startup.get("kv_tokens")
        budget, seqs = _number(config.get("max-num-batched-tokens")), _number(config.get("max-num-seqs"))
        start = Start(
            weights_key=weights_key(config),
            cache_key=cache_key(config),
            budget=budget,
            seqs=seqs if budget is None or seqs is None else min(seqs, budget),  # vLLM clamps a default seqs
            eager=config.get("enforce-eager") is True,
            weights=sizes[0],
            activation=sizes[1],
            graphs=sizes[2],
            non_torch=sizes[3],
            bytes_per_token=kv_gib * GIB / kv_tokens if kv_gib and kv_tokens and kv_gib > 0.5 else None,
        )
        return Calibration((*self.starts, start))

    def weights_gib(self, config: Config) -> float | None:
        """Measured weights of the same precision and partition."""
        key = weights_key(config)
        found = [start.weights for start in self.starts if start.weights is not None and start.weights_key == key]
        return found[-1] if found else None

    def non_torch_gib(self) -> float | None:
        found = [start.non_torch for start in self.starts if start.non_torch is not None]
        return max(found) if found else None

    def least_non_torch_gib(self) -> float:
        found = [start.non_torch for start in self.starts if start.non_torch is not None]
        return max(min(found) - _ROUNDING_GIB, 0.0) if found else 0.0

    def nearest(self, config: Config, budget: float | None, seqs: float | None) -> Start | None:
        """The start with measured activation that is most like this one, the latest among equals."""
        key, eager = weights_key(config), config.get("enforce-eager") is True
        alike = [
            s for s in reversed(self.starts) if s.activation is not None and s.weights_key == key and s.eager == eager
        ]
        return min(alike, key=lambda s: _distance(s.budget, budget) + _distance(s.seqs, seqs)) if alike else None

    def bytes_per_token(self, config: Config) -> float | None:
        """Measured KV bytes a token on one GPU, for the same cache type and partition."""
        key, cache = weights_key(config), cache_key(config)
        found = [
            start.bytes_per_token
            for start in self.starts
            if start.bytes_per_token is not None and start.weights_key == key and start.cache_key == cache
        ]
        return found[-1] if found else None


def weights_key(config: Config) -> tuple[KnobValue | None, ...]:
    """What decides how many bytes of weights one GPU holds; values that change nothing count as absent."""
    values = [config.get(knob) for knob in _SAME_WEIGHTS]
    return tuple(None if value in _NEUTRAL and value is not True else value for value in values)


def cache_key(config: Config) -> KnobValue | None:
    value = config.get("kv-cache-dtype")
    if value in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return "fp8"
    return None if value in _NEUTRAL else value


def _number(value: KnobValue | None) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)


def _distance(one: float | None, other: float | None) -> float:
    """How many times apart; the unknown lies far away."""
    if one is None or other is None or one <= 0 or other <= 0:
        return 0.0 if one == other else 20.0
    ratio = one / other
    return max(ratio, 1 / ratio)
