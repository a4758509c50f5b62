"""Rules about memory that was not there; the numbers decide whose fault it was, not the sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tuner.failures.rule import EXACT, FAMILY, Case, Judgement, Rule, by_ratio, excess, number, rule
from tuner.records import Verdict

_I, _R, _T, _E = Verdict.INFEASIBLE, Verdict.RUNTIME, Verdict.TRANSIENT, Verdict.ENV

MORE_KV = {
    "gpu-memory-utilization": "up",
    "max-model-len": "down",
    "max-num-seqs": "down",
    "max-num-batched-tokens": "down",
}
LESS_MEMORY = {"gpu-memory-utilization": "down", "max-num-seqs": "down", "max-num-batched-tokens": "down"}

_WEIGHTS = re.compile(r"Model loading took ([\d.]+) GiB")
_AVAILABLE = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")
_TRIED = re.compile(r"Tried to allocate ([\d.]+) ([KMGT]i?B)")
_FREE = re.compile(r"of which ([\d.]+) ([KMGT]i?B) is free")
_OWN = re.compile(r"this process has ([\d.]+) ([KMGT]i?B) memory in use")
_TOTAL = re.compile(r"total capacity of ([\d.]+) ([KMGT]i?B)")
_OTHER = re.compile(r"Process \d+ has ([\d.]+) ([KMGT]i?B) memory in use")
_ALLOCATED = re.compile(r"Of the allocated memory ([\d.]+) ([KMGT]i?B|bytes) is allocated by PyTorch")
_RESERVED = re.compile(r"([\d.]+) ([KMGT]i?B|bytes) is reserved by PyTorch but unallocated")
_UNITS = {"b": 2.0**-30, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}

_GIB_TOLERANCE = 1.0
"""GiB by which free memory may differ from the idle baseline without anybody else being there: contexts of monitoring
tools and display servers come and go. Real neighbours hold a CUDA context (≥ 0.4 GiB) and a model."""

_BESIDE_PYTORCH_GIB = 8.0
"""What a server may hold beyond what PyTorch counts: its context, NCCL's buffers, captured graphs."""


def _gib(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    value = number(match[1]) if match else None
    return None if match is None or value is None else value * _UNITS[match[2][0]]


def _neighbour(case: Case, free_gib: float | None) -> str | None:
    """Why the memory is not ours to complain about; None where nobody else seems to hold any.

    Free memory against the idle baseline decides where both are known: what a display server holds, it held when the
    GPU was idle. A process that may have come after the launch is given the benefit of the doubt once.
    """
    facts = case.facts
    measured = free_gib if free_gib is not None else facts.launch_free_gib
    if facts.idle_free_gib is not None and measured is not None:
        missing = facts.idle_free_gib - measured
        if missing > _GIB_TOLERANCE:
            return f"{measured:.2f} GiB were free, {missing:.2f} GiB less than when the GPU was idle"
        if free_gib is not None or facts.retries:
            return None
    if facts.other_processes:
        return f"process {facts.other_processes[0]}, which is not ours, holds memory on this GPU"
    return None


def _blame_neighbour(case: Case, judgement: Judgement, why: str) -> Judgement:
    """The memory is held by somebody else: wait for it, and give up only when it stays."""
    return judgement.but(
        kind="gpu-not-free",
        verdict=_E if (case.facts.retries or 0) >= 2 else _T,
        explanation=f"The GPU was not free: {why}. That is an earlier server that is still releasing memory, an orphan "
        "of one that was killed, or another user; the configuration is not to blame.",
        remedy="Wait until the free memory is back at its idle level, end leftovers (`nvidia-smi`; an engine shows as "
        "`VLLM::EngineCore`), then try again.",
        moves={},
    )


def _free_at_start(case: Case, judgement: Judgement) -> Judgement:
    """ "Free memory … is less than desired": a neighbour, or a share that even an idle device does not have."""
    free, total, need = case.number("free"), case.number("total"), case.number("need")
    why = _neighbour(case, free)
    if why is None and case.facts.idle_free_gib is None and free is not None and total is not None:
        # Without a baseline: drivers, ECC and displays take up to a tenth of small cards; a neighbour takes more.
        held = total - free
        if held > max(0.15 * total, 4.0):
            why = f"{held:.1f} of {total:.1f} GiB were in use before vLLM allocated anything"
    if why is not None:
        return _blame_neighbour(case, judgement, why)
    return judgement.but(violation=excess(need, free))


def _no_kv(case: Case, judgement: Judgement) -> Judgement:
    """Nothing left for the KV cache: size of the gap, and whether the accounting can be believed."""
    why = _neighbour(case, None)
    if why is not None:
        return _blame_neighbour(case, judgement, why)
    judgement = _explicit_kv(case, judgement)
    available = number(m[1]) if (m := _last(_AVAILABLE, case)) else None
    weights = number(m[1]) if (m := _last(_WEIGHTS, case)) else None
    utilization, device = case.argument("gpu_memory_utilization"), case.facts.device_gib
    budget = utilization * device if utilization and device else weights
    explanation = judgement.explanation
    if available is not None:
        explanation += f" It was short by {max(-available, 0.0):.2f} GiB before the first block."
    if available is not None and budget and weights and utilization and device:
        beyond = budget - weights - available
        if beyond > max(0.5 * weights, 8.0):
            explanation += (
                f" {beyond:.1f} GiB beyond the weights are more than a profiling run uses; the number is distorted if "
                "another process allocated on this GPU meanwhile."
            )
    violation = -available / budget if available is not None and available < 0 and budget else None
    return judgement.but(explanation=explanation, violation=violation)


def _last(pattern: re.Pattern[str], case: Case) -> re.Match[str] | None:
    matches = list(pattern.finditer(case.log.text))
    return matches[-1] if matches else None


def _explicit_kv(case: Case, judgement: Judgement) -> Judgement:
    """A size that was set outright overrides the utilization, although vLLM's message still names the latter."""
    if case.argument("kv_cache_memory_bytes") is None and "Explicitly set (" not in case.log.text:
        return judgement
    return judgement.but(
        explanation=judgement.explanation + " The size was set outright (--kv-cache-memory-bytes, or "
        "VLLM_CPU_KVCACHE_SPACE on the CPU backend), which overrides the utilization that the message names.",
        moves={"kv-cache-memory-bytes": "up", "max-model-len": "down"},
        remedy="Raise or drop that size, or shorten --max-model-len.",
    )


def _length(case: Case, judgement: Judgement) -> Judgement:
    """The longest request does not fit: how far off, and what would fit."""
    why = _neighbour(case, None)
    if why is not None:
        return _blame_neighbour(case, judgement, why)
    judgement = _explicit_kv(case, judgement)
    need, have, fits = case.number("need"), case.number("have"), case.number("fits")
    violation = excess(need, have) if need else None  # both are printed as 0.0 when they are tiny
    remedy = judgement.remedy
    if fits:
        remedy += f" With the memory as it is, --max-model-len {int(fits)} fits."
    return judgement.but(violation=violation, remedy=remedy)


def _out_of_memory(case: Case, judgement: Judgement) -> Judgement:
    """An allocation failed: by whom, and in which part of a server's life."""
    text = case.match.string
    free, own, total, tried = _gib(_FREE, text), _gib(_OWN, text), _gib(_TOTAL, text), _gib(_TRIED, text)
    named = [float(value) * _UNITS[unit[0]] for value, unit in _OTHER.findall(text)]
    if total is not None:  # what the driver does not tell is printed as 17179869184.00 GiB
        named = [held for held in named if held <= total]
        own = None if own is not None and own > total else own
    if own is None and (own := _own_among(named, text)) is not None:
        named.remove(own)
    others = sum(named)
    idle, device = case.facts.idle_free_gib, case.facts.device_gib or total
    always = max(device - idle, 0.0) if idle is not None and device is not None else 0.0
    if own is not None and free is not None and total is not None and idle is not None:
        others = max(others, total - own - free)  # inside a container the other processes are not named
    if others - always > 2 * _GIB_TOLERANCE:
        return _blame_neighbour(case, judgement, f"other processes held {others:.1f} GiB of it")
    if (why := _neighbour(case, None)) is not None:
        return _blame_neighbour(case, judgement, why)
    violation = (tried - free) / (own + free) if tried and own and free is not None and tried > free else None
    return _by_stage(case, judgement).but(violation=violation)


def _own_among(named: Sequence[float], text: str) -> float | None:
    """Which of the processes is the failed one itself; None where it is none of them.

    PyTorch says "this process" only where it finds its own pid on the GPU. In a container the driver lists the host's
    pids, so that a server's own memory is printed as somebody else's (vllm#8903, vllm#19445).
    """
    allocated = _gib(_ALLOCATED, text)
    if allocated is None:
        return named[0] if len(named) == 1 else None
    counted = allocated + (_gib(_RESERVED, text) or 0.0)
    ours = [held for held in named if allocated <= held <= counted + _BESIDE_PYTORCH_GIB]
    return min(ours, default=None, key=lambda held: abs(held - counted))


def _by_stage(case: Case, judgement: Judgement) -> Judgement:
    """Which part of a start (or the load) ran out, because the way out differs."""
    if case.serving:
        moves = dict(LESS_MEMORY)
        if case.argument("kv_cache_memory_bytes") is not None:
            moves["kv-cache-memory-bytes"] = "down"
        return judgement.but(
            kind="oom-under-load",
            verdict=_R,
            explanation="The server started and then ran out of GPU memory under load: the memory share leaves too "
            "little margin for what this load needs at its peak. That it started proved nothing.",
            remedy="Lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens.",
            moves=moves,
        )
    frames = case.log.frames(case.line)
    seen = "\n".join(line.text for line in case.log.lines[: case.line.index])
    if any(word in frames for word in ("cudagraph", "capture_model", "cuda_graph")) or (
        "Capturing CUDA graphs" in seen and "Graph capturing finished" not in seen
    ):
        return judgement.but(
            kind="oom-graph-capture",
            explanation="Memory ran out while CUDA graphs were captured: the KV cache had already taken the rest.",
            remedy="Lower --gpu-memory-utilization, or capture fewer graphs (smaller --max-num-seqs).",
            moves={"gpu-memory-utilization": "down", "max-num-seqs": "down"},
        )
    if any(word in frames for word in ("_allocate_kv_cache", "initialize_kv_cache", "initialize_from_config")):
        return judgement.but(
            kind="oom-kv-allocation",
            explanation="Memory ran out while the KV cache was allocated.",
            remedy="Lower --gpu-memory-utilization (or --kv-cache-memory-bytes where it is set).",
            moves={"gpu-memory-utilization": "down", "kv-cache-memory-bytes": "down"},
        )
    if any(word in frames for word in ("profile_run", "determine_available_memory", "_dummy_run")):
        return judgement.but(
            kind="oom-profiling",
            explanation="One engine step with the largest allowed batch did not fit beside the weights.",
            remedy="Lower --max-num-batched-tokens or --max-num-seqs, or spread the weights over more GPUs.",
            moves={"max-num-batched-tokens": "down", "max-num-seqs": "down", "tensor-parallel-size": "up"},
        )
    if any(word in frames for word in ("model_loader", "load_model", "weight_utils")) or (
        "Starting to load model" in seen and not _WEIGHTS.search(seen)
    ):
        return judgement.but(
            kind="oom-weights",
            explanation="The weights alone do not fit on the device.",
            remedy="Spread them over more GPUs (--tensor-parallel-size), use a smaller precision, or a smaller model.",
            moves={"tensor-parallel-size": "up", "quantization": "on", "cpu-offload-gb": "up"},
        )
    return judgement


def _host_memory(case: Case, judgement: Judgement) -> Judgement:
    """Main memory is the KV cache on the CPU backend, a spill area where one was asked for, else the machine's own."""
    asked = [name for name in ("cpu_offload_gb", "kv_offloading_size", "swap_space") if case.argument(name)]
    cpu = "cpu_worker" in case.log.text or "backend=gloo" in case.log.text
    if asked:
        return judgement.but(verdict=_R if case.serving else _I, moves={asked[0].replace("_", "-"): "down"})
    if cpu:
        moves = {"kv-cache-memory-bytes": "down", "gpu-memory-utilization": "down", "max-num-seqs": "down"}
        return judgement.but(verdict=_R if case.serving else _I, moves=moves)
    return judgement


RULES: tuple[Rule, ...] = (
    rule(
        "kv-cache-none",
        _I,
        r"No available memory for the cache blocks",
        r"Cannot auto-fit max_model_len: not enough",
        explanation="After weights and one profiling step, the memory that vLLM was allowed to take held no room for "
        "the "
        "KV cache.",
        remedy="Raise --gpu-memory-utilization, or lower --max-num-batched-tokens, --max-num-seqs or --max-model-len.",
        moves=MORE_KV,
        judge=_no_kv,
    ),
    rule(
        "kv-cache-below-length",
        _I,
        r"max seq len \((?P<len>[\d,]+)\).{0,60}?\(?(?P<need>[\d.]+) "
        r"GiB KV cache is needed.{0,120}?\((?P<have>-?[\d.]+) GiB\)"
        r"(?:.{0,80}?estimated maximum model length is (?P<fits>[\d,]+))?",
        r"max seq len \((?P<need>[\d,]+)\) is larger than the maximum "
        r"number of tokens that can be stored in (?:the )?KV cache "
        r"\((?P<have>[\d,]+)\)",
        explanation="One request of the longest allowed length does not fit into the KV cache that is left after "
        "weights "
        "and profiling.",
        remedy="Shorten --max-model-len or raise --gpu-memory-utilization.",
        moves={"gpu-memory-utilization": "up", "max-model-len": "down", "max-num-batched-tokens": "down"},
        judge=_length,
    ),
    rule(
        "oom-sampler",
        _I,
        r"out of memory occurred when warming up (?:sampler|pooler).{0,80}?with (?P<requests>\d+) dummy requests",
        explanation="The sampler's warm-up with {requests} sequences ran out of memory: KV cache and graphs had taken "
        "the "
        "rest.",
        remedy="Lower --gpu-memory-utilization (not raise it: the KV cache leaves too little margin) or "
        "--max-num-seqs.",
        moves={"gpu-memory-utilization": "down", "max-num-seqs": "down"},
        weight=EXACT,
    ),
    rule(
        "memory-utilization-too-high",
        _I,
        r"(?:Free|Available) memory on (?:device|node)(?: \S+)? \((?P<free>[\d.]+)/(?P<total>[\d.]+) "
        r"GiB\) on startup is less "
        r"than .{0,120}?\((?:[\d.]+, )?(?P<need>[\d.]+) GiB\)",
        explanation="The memory share asks for {need} GiB, but even this idle device has only {free} of {total} GiB "
        "free.",
        remedy="Lower --gpu-memory-utilization.",
        moves={"gpu-memory-utilization": "down"},
        judge=_free_at_start,
    ),
    rule(
        "kv-cache-over-free",
        _I,
        r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) "
        r"GiB\) on kv cache allocation is less than requested "
        r"memory for kv \((?P<need>[\d.]+)",
        explanation="The KV cache was to take {need} GiB of main memory; {free} of {total} GiB were free.",
        remedy="Lower --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE, or free main memory.",
        moves={"kv-cache-memory-bytes": "down", "gpu-memory-utilization": "down"},
        judge=_free_at_start,
    ),
    rule(
        "memory-profiling-disturbed",
        _T,
        r"Error in memory profiling\.(?: Initial free memory (?P<before>[\d.]+) "
        r"GiB, current free memory (?P<now>[\d.]+))?",
        explanation="Memory became free while vLLM was measuring its own use, so its numbers made no sense: another "
        "process "
        "(often the previous server) was still releasing memory.",
        remedy="Wait until the GPU's free memory is stable, then try again.",
    ),
    rule(
        "kernel-resources",
        _I,
        r"[Oo]ut of resources?: (?P<what>[\w ]+?)[,.] Required: (?P<need>\d+), Hardware limit: (?P<have>\d+)",
        explanation="A compiled kernel needs more {what} than this GPU has.",
        remedy="This kernel does not suit this GPU: choose another backend, block size or precision.",
        moves={"block-size": "down"},
        judge=by_ratio("need", "have"),
    ),
    rule(
        "mamba-blocks",
        _I,
        r"max_num_seqs \((?P<need>\d+)\) exceeds available Mamba cache blocks \((?P<have>\d+)\)",
        explanation="Every sequence of this hybrid model needs a state block; {have} fit, {need} are asked for.",
        remedy="Lower --max-num-seqs to at most {have}, or raise --gpu-memory-utilization.",
        moves={"max-num-seqs": "down", "gpu-memory-utilization": "up"},
        judge=by_ratio("need", "have"),
    ),
    rule(
        "host-memory",
        _E,
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
        r"^MemoryError\b|std::bad_alloc|\[Errno 12\]|Cannot allocate memory",
        r"oom[-_]kill|Out of memory: Killed process|OOMKilled|node running low on memory",
        explanation="Main memory ran out.",
        remedy="Free main memory, or give the KV cache and offloading less of it.",
        judge=_host_memory,
    ),
    rule(
        "oom-start",
        _I,
        r"(?:CUDA|HIP|XPU|Triton)(?: driver)?(?: Error| error)?:? ?\[?out of memory",
        r"OutOfMemoryError",
        r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|ncclInternalError.{0,40}memory",
        r"Cuda failure.{0,20}out of memory",
        explanation="The GPU ran out of memory while the server started.",
        remedy="Lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens.",
        moves=LESS_MEMORY,
        judge=_out_of_memory,
    ),
    rule(
        "oom-start",
        _I,
        r"(?i)out of (?:device |gpu |video )?memory|failed to allocate .{0,40}memory",
        explanation="The GPU ran out of memory while the server started.",
        remedy="Lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens.",
        moves=LESS_MEMORY,
        weight=FAMILY,
        judge=_out_of_memory,
    ),
)
