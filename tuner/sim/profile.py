"""Owns what a simulated machine and model are and what a configuration means on them; it refuses to advance time.

All constants are effective ones, fitted to measurements where there are any (docs/simulator.md), not data sheet values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tuner.records import Config, KnobValue

GIB = float(1 << 30)
DEFAULT_UTILIZATION = 0.92


@dataclass(frozen=True, slots=True)
class Machine:
    """One device and its host. Times in seconds, sizes in bytes, rates per second."""

    name: str
    device: str  # `cuda` or `cpu`
    memory_bytes: float
    free_bytes: float  # before the server starts
    bandwidth: float  # bytes/s that weights and KV are read at
    flops: float  # FLOP/s of large matrix products
    attention_flops: float  # FLOP/s of prefill attention
    knee: float  # how sharply the step turns from memory- to compute-bound; higher is sharper
    step_s: float  # device time of a step beside the products: norms, sampling, synchronisation
    step_seq_s: float  # the same for one sequence
    cpu_step_s: float  # host time of one scheduling pass; hidden under the device by async scheduling
    cpu_seq_s: float  # the same for one scheduled sequence
    eager_s: float  # shortest step that is launched kernel by kernel
    piecewise_s: float  # shortest mixed step on piecewise graphs
    mixed_s: float  # what a step with prefill costs beyond its products: metadata, two kinds of attention
    request_s: float  # API server: one request
    prompt_token_s: float  # API server: one prompt token (JSON, tokenizer)
    token_s: float  # API server: one output token (detokenizer)
    chunk_s: float  # API server: one streamed chunk (JSON, SSE, socket)
    turns: float  # turns of the API server's event loop that a request needs before the engine has it
    latency_s: float  # on the way of every request, occupies nobody
    cores: int
    link_bandwidth: float  # bytes/s between devices
    link_latency_s: float  # one collective
    start_s: float  # launch to healthy without compilation
    compile_s: float
    default_budget: int
    default_seqs: int
    devices: int = 1
    nontorch_bytes: float = 0.22 * GIB
    activation_bytes: float = 0.48 * GIB  # peak activation at the smallest step
    graph_bytes: float = 0.0192 * GIB  # one captured size
    spike_bytes: float = 0.25 * GIB  # what a loaded server takes beyond what profiling saw
    spike_token_bytes: float = 18e3  # the same for one token of the step


@dataclass(frozen=True, slots=True)
class Model:
    """A dense transformer."""

    name: str
    parameters: float  # that every token is multiplied with
    weight_bytes: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_model_len: int

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of keys and values of one token at 16 bits."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def pair_flops(self) -> float:
        """FLOPs of attention between one query and one key, all layers: QK and PV, multiply and add."""
        return 4.0 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Profile:
    """Machine × model, with the noise that a measurement on it shows."""

    machine: Machine
    model: Model
    start_noise: float = 0.03  # standard deviation of the log of a server's speed, drawn once a start
    step_noise: float = 0.03  # the same for a step
    hiccup_share: float = 0.0005  # steps that the host delays
    hiccup_s: float = 0.012
    defaults: tuple[tuple[str, KnobValue], ...] = ()  # the user's fixed flags in this profile

    @property
    def name(self) -> str:
        return f"{self.machine.name}/{self.model.name}"

    def quiet(self) -> Profile:
        """The same without noise, for exact optima."""
        return replace(self, start_noise=0.0, step_noise=0.0, hiccup_share=0.0)


@dataclass(frozen=True, slots=True)
class Effective:
    """What a configuration comes to once defaults are filled in, as vLLM 0.32 does it."""

    budget: int
    seqs: int
    active_seqs: int
    max_len: int
    block: int
    utilization: float
    kv_bytes: float | None  # --kv-cache-memory-bytes
    kv_factor: float  # bytes of the cache dtype ÷ bytes at 16 bits
    chunked: bool
    prefix: bool
    asynchronous: bool
    eager: bool
    captures: tuple[int, ...]
    threshold: int
    reserve_full: bool
    watermark: float
    stream_interval: int
    api_servers: int
    tensor: int
    data: int
    mode: str


def resolve(profile: Profile, config: Config) -> Effective:
    """Fill in defaults. Values are taken as valid; `starts` is what rejects them."""
    machine, model = profile.machine, profile.model
    given = dict(profile.defaults) | dict(config)
    mode = str(given.get("performance-mode", "balanced"))
    growth = 2 if mode == "throughput" else 1
    seqs = int(given.get("max-num-seqs", machine.default_seqs * growth))
    max_len = int(given.get("max-model-len", model.max_model_len))
    chunked = bool(given.get("enable-chunked-prefill", True))
    budget = int(given.get("max-num-batched-tokens", machine.default_budget * growth))
    if "max-num-batched-tokens" not in given and not chunked:
        budget = max(budget, max_len)
    data = int(given.get("data-parallel-size", 1))
    eager = bool(given.get("enforce-eager", machine.device == "cpu"))
    kv_bytes = given.get("kv-cache-memory-bytes")
    return Effective(
        budget=budget,
        seqs=seqs,
        active_seqs=min(seqs, int(given.get("max-num-active-seqs", seqs))),
        max_len=max_len,
        block=int(given.get("block-size", 128 if machine.device == "cpu" else 16)),
        utilization=float(given.get("gpu-memory-utilization", DEFAULT_UTILIZATION)),
        kv_bytes=None if kv_bytes is None else float(kv_bytes),
        kv_factor=0.5 if str(given.get("kv-cache-dtype", "auto")).startswith("fp8") else 1.0,
        chunked=chunked,
        prefix=bool(given.get("enable-prefix-caching", True)),
        asynchronous=bool(given.get("async-scheduling", machine.device != "cpu")),
        eager=eager,
        captures=() if eager else capture_sizes(given, seqs, budget, mode),
        threshold=int(given.get("long-prefill-token-threshold", 0)),
        reserve_full=bool(given.get("scheduler-reserve-full-isl", True)),
        watermark=float(given.get("watermark", 0.0)),
        stream_interval=max(1, int(given.get("stream-interval", 1))),
        api_servers=max(1, int(given.get("api-server-count", data))),
        tensor=int(given.get("tensor-parallel-size", 1)),
        data=data,
        mode=mode,
    )


def capture_sizes(given: Config, seqs: int, budget: int, mode: str) -> tuple[int, ...]:
    """Batch sizes with a CUDA graph: the pattern that `--help` of `--max-cudagraph-capture-size` states."""
    listed = given.get("cudagraph-capture-sizes")
    if listed is not None:
        return tuple(sorted({int(word) for word in str(listed).replace(",", " ").split()}))
    largest = min(int(given.get("max-cudagraph-capture-size", min(2 * seqs, 512))), budget)
    small = list(range(1, 33)) if mode == "interactivity" else [1, 2, 4]
    sizes = small + list(range(8, 256, 8)) + list(range(256, largest + 1, 16))
    return tuple(sorted({size for size in sizes if size <= largest}))


def knob_values(effective: Effective) -> dict[str, KnobValue]:
    """What is in effect, by flag name."""
    return {
        "max-num-batched-tokens": effective.budget,
        "max-num-seqs": effective.seqs,
        "max-num-active-seqs": effective.active_seqs,
        "max-model-len": effective.max_len,
        "gpu-memory-utilization": effective.utilization,
        "block-size": effective.block,
        "enable-chunked-prefill": effective.chunked,
        "enable-prefix-caching": effective.prefix,
        "async-scheduling": effective.asynchronous,
        "enforce-eager": effective.eager,
        "max-cudagraph-capture-size": max(effective.captures, default=0),
        "long-prefill-token-threshold": effective.threshold,
        "scheduler-reserve-full-isl": effective.reserve_full,
        "watermark": effective.watermark,
        "stream-interval": effective.stream_interval,
        "api-server-count": effective.api_servers,
        "tensor-parallel-size": effective.tensor,
        "data-parallel-size": effective.data,
        "performance-mode": effective.mode,
        "kv-cache-dtype": "auto" if effective.kv_factor == 1.0 else "fp8",
    }
