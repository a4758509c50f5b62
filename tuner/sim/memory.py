"""Owns device memory on a simulated machine: KV capacity, and which configurations do not start or die under load."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.records import Config, Failure, Verdict
from tuner.sim.profile import GIB, Effective, Profile, resolve


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device after a start."""

    total: float
    free: float
    requested: float  # utilisation × total
    weights: float
    activation: float
    nontorch: float
    graphs: float
    kv: float
    kv_tokens: int  # of one replica, all its devices together
    oom_tokens: int | None  # a step of more tokens than this runs out of memory; None: no step does


def plan_memory(profile: Profile, effective: Effective) -> Memory:
    """vLLM's own accounting (start-up log, `Actual usage is …`): graphs come on top of the requested share."""
    machine, model = profile.machine, profile.model
    requested = effective.utilization * machine.memory_bytes
    weights = model.weight_bytes / effective.tensor
    logits = effective.seqs * model.vocabulary * 4.0  # profiled in float32
    activation = machine.activation_bytes + logits + effective.budget * model.hidden * 3.75
    graphs = machine.graph_bytes * len(effective.captures)
    fixed = weights + activation + machine.nontorch_bytes
    kv = effective.kv_bytes if effective.kv_bytes is not None else requested - fixed
    token_bytes = model.kv_token_bytes * effective.kv_factor / effective.tensor
    tokens = max(0, int(kv // (token_bytes * effective.block))) * effective.block
    used = fixed + kv + graphs + machine.spike_bytes
    spare = machine.free_bytes - used
    most = int(spare // machine.spike_token_bytes)
    oom_tokens = None if machine.device == "cpu" or most >= effective.budget else max(0, most)
    return Memory(
        machine.memory_bytes,
        machine.free_bytes,
        requested,
        weights,
        activation,
        machine.nontorch_bytes,
        graphs,
        kv,
        tokens,
        oom_tokens,
    )


def starts(profile: Profile, config: Config) -> Failure | None:
    """Why this configuration would not come up, in the words of the real log; None when it does."""
    effective = resolve(profile, config)
    return _rules(profile, effective) or _memory(profile, effective)


def found_by_engine(failure: Failure) -> bool:
    """Whether the engine meets this failure; what breaks a rule of the configuration ends the API server before it."""
    return failure.verdict is not Verdict.STATIC or failure.kind == "gpus-missing"


def _rules(profile: Profile, effective: Effective) -> Failure | None:
    longest = profile.model.max_model_len
    if effective.max_len > longest:
        return _failure(
            Verdict.STATIC,
            "length-beyond-model",
            f"User-specified max_model_len ({effective.max_len}) is greater than the derived max_model_len "
            f"(max_position_embeddings={longest} or model_max_length=None in model's config.json).",
            {"max-model-len": "down"},
            effective.max_len / longest - 1.0,
        )
    budget, seqs, max_len = effective.budget, effective.seqs, effective.max_len
    if budget < seqs:
        return _failure(
            Verdict.STATIC,
            "budget-below-seqs",
            f"max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs ({seqs}).",
            {"max-num-batched-tokens": "up", "max-num-seqs": "down"},
            seqs / budget - 1.0,
        )
    if not effective.chunked and budget < max_len:
        return _failure(
            Verdict.STATIC,
            "budget-below-length",
            f"max_num_batched_tokens ({budget}) is smaller than max_model_len ({max_len}). This effectively limits the "
            "maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase "
            "max_num_batched_tokens or decrease max_model_len.",
            {"max-num-batched-tokens": "up", "enable-chunked-prefill": "on"},
            max_len / budget - 1.0,
        )
    if effective.threshold > max_len:
        return _failure(
            Verdict.STATIC,
            "long-prefill-threshold",
            f"long_prefill_token_threshold ({effective.threshold}) cannot be greater than the max_model_len "
            f"({max_len}).",
            {"long-prefill-token-threshold": "down"},
            effective.threshold / max_len - 1.0,
        )
    if profile.machine.device == "cuda" and effective.block % 16:
        return _failure(
            Verdict.INFEASIBLE,
            "block-size-unsupported",
            f"No common block size for {effective.block}.",
            {"block-size": "up"},
            1.0,
        )
    if profile.model.heads % effective.tensor:
        return _failure(
            Verdict.STATIC,
            "heads-not-divisible",
            f"Total number of attention heads ({profile.model.heads}) must be divisible by tensor parallel size "
            f"({effective.tensor}).",
            {"tensor-parallel-size": "down"},
            1.0,
        )
    world = effective.tensor * effective.data
    if world > profile.machine.devices:
        return _failure(
            Verdict.STATIC,
            "gpus-missing",
            f"please ensure that world_size ({world}) is less than than max local gpu count "
            f"({profile.machine.devices})",
            {"tensor-parallel-size": "down", "data-parallel-size": "down"},
            world / profile.machine.devices - 1.0,
        )
    return None


def _memory(profile: Profile, effective: Effective) -> Failure | None:
    machine, model = profile.machine, profile.model
    memory = plan_memory(profile, effective)
    if effective.kv_bytes is None and memory.requested > memory.free:
        return _failure(
            Verdict.INFEASIBLE,
            "memory-utilization-too-high",
            f"Free memory on device cuda:0 ({memory.free / GIB:.2f}/{memory.total / GIB:.2f} GiB) on startup is less "
            f"than desired GPU memory utilization ({effective.utilization}, {memory.requested / GIB:.2f} GiB). "
            "Decrease GPU memory utilization or reduce GPU memory used by other processes.",
            {"gpu-memory-utilization": "down"},
            memory.requested / memory.free - 1.0,
        )
    if memory.weights + memory.nontorch > memory.free:
        need = model.weight_bytes / model.layers / effective.tensor
        return _failure(
            Verdict.INFEASIBLE,
            "oom-weights",
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {need / 2**20:.2f} MiB. GPU 0 has a total "
            f"capacity of {memory.total / GIB:.2f} GiB of which {0.01 * memory.total / 2**20:.2f} MiB is free.",
            {"tensor-parallel-size": "up"},
            (memory.weights + memory.nontorch) / memory.free - 1.0,
        )
    if memory.kv <= 0:
        short = -memory.kv / memory.requested
        return _failure(
            Verdict.INFEASIBLE,
            "kv-cache-none",
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine.",
            {"gpu-memory-utilization": "up", "max-num-seqs": "down", "max-num-batched-tokens": "down"},
            max(short, 0.01),
        )
    if memory.kv_tokens < effective.max_len:
        token_bytes = model.kv_token_bytes * effective.kv_factor / effective.tensor
        need = effective.max_len * token_bytes
        return _failure(
            Verdict.INFEASIBLE,
            "kv-cache-below-length",
            f"To serve at least one request with the models's max seq len ({effective.max_len}), ({need / GIB:.2f} GiB "
            f"KV cache is needed, which is larger than the available KV cache memory ({memory.kv / GIB:.2f} GiB). "
            f"Based on the available memory, the estimated maximum model length is {memory.kv_tokens}. Try increasing "
            "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
            {"gpu-memory-utilization": "up", "max-model-len": "down"},
            need / memory.kv - 1.0,
        )
    spare = memory.free - memory.weights - memory.activation - memory.nontorch - memory.kv
    if machine.device == "cuda" and memory.graphs > spare:
        return _failure(
            Verdict.INFEASIBLE,
            "oom-graph-capture",
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {memory.graphs / 2**20:.2f} MiB. GPU 0 has "
            f"a total capacity of {memory.total / GIB:.2f} GiB of which {max(spare, 0.0) / 2**20:.2f} MiB is free.",
            {"gpu-memory-utilization": "down", "max-num-seqs": "down"},
            memory.graphs / max(spare, 0.01 * memory.graphs) - 1.0,
        )
    sampler = effective.seqs * model.vocabulary * 10.0  # sorted copies and probabilities of the dummy batch
    if machine.device == "cuda" and memory.graphs + sampler - effective.seqs * model.vocabulary * 4.0 > spare:
        return _failure(
            Verdict.INFEASIBLE,
            "oom-sampler",
            f"CUDA out of memory occurred when warming up sampler with {effective.seqs} dummy requests. Please try "
            "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
            {"max-num-seqs": "down", "gpu-memory-utilization": "down"},
            (memory.graphs + sampler) / spare - 1.0,
        )
    return None


def oom_under_load(profile: Profile, effective: Effective, tokens: int) -> Failure:
    """A step of `tokens` tokens needed more than was left: the start proved nothing."""
    memory = plan_memory(profile, effective)
    need = tokens * profile.machine.spike_token_bytes
    left = (memory.oom_tokens or 0) * profile.machine.spike_token_bytes
    return Failure(
        Verdict.RUNTIME,
        "oom-under-load",
        "measure",
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {need / 2**20:.2f} MiB. GPU 0 has a total "
        f"capacity of {memory.total / GIB:.2f} GiB of which {left / 2**20:.2f} MiB is free.",
        "The simulated device ran out of memory under load.",
        "Lower gpu-memory-utilization or max-num-batched-tokens.",
        {"gpu-memory-utilization": "down", "max-num-batched-tokens": "down"},
        need / max(left, 0.01 * need) - 1.0,
        1,
    )


def _failure(verdict: Verdict, kind: str, cause: str, moves: dict[str, str], violation: float) -> Failure:
    return Failure(
        verdict,
        kind,
        "launch",
        cause,
        "The simulated server does not start with this configuration.",
        " or ".join(f"{name} {way}" for name, way in moves.items()),
        moves,
        max(violation, 1e-6),
        1,
    )
