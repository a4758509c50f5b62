"""Owns the last words of a simulated server that does not start or dies: real texts, in real shape; it ends nothing.

Texts are those of recorded logs and public reports of vLLM. The cause stands in the traceback of the process that met
it; an engine's death ends in the API server's generic line, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.records import Failure


@dataclass(frozen=True, slots=True)
class Crash:
    """`process` is `argparse`, `api` or `engine`; `error` the exception line."""

    process: str
    error: str
    exit_code: int = 1


_PYDANTIC = (
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for {config}\n"
    "  Value error, {text} [type=value_error, input_value=ArgsKwargs((), {{'runner_t..., 'stream_interval': 1}}), "
    "input_type=ArgsKwargs]\n"
    "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
)


def validation(text: str, config: str = "SchedulerConfig") -> str:
    """A rule of vLLM's configuration as pydantic words it."""
    return _PYDANTIC.format(config=config, text=text)


START_CRASHES: Mapping[str, Crash] = {
    "unknown-flag": Crash("argparse", "unrecognized arguments: --no-such-flag 3", 2),
    "bad-flag-value": Crash("argparse", "argument --max-num-seqs: invalid int value: 'many'", 2),
    "budget-below-seqs": Crash(
        "api", validation("max_num_batched_tokens (448) must be greater than or equal to max_num_seqs (1024).")
    ),
    "budget-below-length": Crash(
        "api",
        validation(
            "max_num_batched_tokens (8192) is smaller than max_model_len (131072). This effectively limits the maximum "
            "sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase "
            "max_num_batched_tokens or decrease max_model_len."
        ),
    ),
    "quantization-mismatch": Crash(
        "api",
        validation(
            "Quantization method specified in the model config (fp8) does not match the quantization method specified "
            "in the `quantization` argument (gguf).",
            "ModelConfig",
        ),
    ),
    "heads-not-divisible": Crash(
        "api",
        validation("Total number of attention heads (64) must be divisible by tensor parallel size (3).", "VllmConfig"),
    ),
    "gpus-missing": Crash(
        "engine",
        "AssertionError: please ensure that world_size (2) is less than than max local gpu count (1)",
    ),
    "model-not-found": Crash(
        "api",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
        "'/models/nope'. Use `repo_type` argument if needed.",
    ),
    "port-in-use": Crash("api", "OSError: [Errno 98] Address already in use"),
    "kv-cache-none": Crash(
        "engine",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
    ),
    "kv-cache-below-length-old": Crash(
        "engine",
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (7344). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the "
        "engine.",
    ),
    "kv-cache-below-length": Crash(
        "engine",
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (5.60 GiB). Based on the available memory, the "
        "estimated maximum model length is 45872. Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len` when initializing the engine.",
    ),
    "oom-sampler": Crash(
        "engine",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
    ),
    "oom-graph-capture": Crash(
        "engine",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 980.00 MiB. GPU 0 has a total capacity of "
        "139.80 GiB of which 412.06 MiB is free.",
    ),
    "memory-utilization-too-high": Crash(
        "engine",
        "ValueError: Free memory on device cuda:0 (139.29/139.8 GiB) on startup is less than desired GPU memory "
        "utilization (0.999, 139.66 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
        "processes.",
    ),
    "gpu-not-free": Crash(
        "engine",
        "ValueError: Free memory on device cuda:0 (78.77/139.8 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 128.62 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    "memory-profiling-disturbed": Crash(
        "engine",
        "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB. This "
        "happens when other processes sharing the same container release GPU memory while vLLM is profiling during "
        "initialization. To fix this, ensure consistent GPU memory allocation or isolate vLLM in its own container.",
    ),
    "block-size-unsupported": Crash("engine", "ValueError: No common block size for 1. "),
    "kv-cache-dtype-unsupported": Crash(
        "engine",
        "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=128, "
        "dtype=torch.bfloat16, kv_cache_dtype=fp8_e5m2, block_size=16). Reasons: {FLASH_ATTN: [kv_cache_dtype not "
        "supported], TRITON_ATTN: [kv_cache_dtype not supported]}.",
    ),
    "nccl": Crash(
        "engine",
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    ),
    "gpu-hardware": Crash("engine", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
}
"""Ways of not starting that VLLM_SIM_FAULT=start:KIND can ask for."""

_API_FRAMES = (
    ("vllm/entrypoints/cli/main.py", 120, "main", "args.dispatch_function(args)"),
    ("vllm/entrypoints/cli/serve.py", 156, "cmd", "uvloop.run(run_server(args))"),
    (
        "vllm/entrypoints/launchers/api_server/entry.py",
        195,
        "run_server_worker",
        "async with build_async_engine_client(",
    ),
)
_ENGINE_FRAMES = (
    ("vllm/v1/engine/core.py", 1299, "run_engine_core", "engine_core = EngineCoreProc(*args, **kwargs)"),
    ("vllm/v1/engine/core.py", 125, "__init__", "self.model_executor = executor_class(vllm_config)"),
)
_STEP_FRAMES = (
    ("vllm/v1/engine/core.py", 1310, "run_engine_core", "engine_core.run_busy_loop()"),
    ("vllm/v1/worker/gpu_model_runner.py", 3391, "execute_model", "model_output = self._model_forward("),
)
ENGINE_START_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
_EXCEPTIONS = {"oom-sampler": "RuntimeError: ", "gpus-missing": "AssertionError: "}


def exception(failure: Failure) -> str:
    """The exception line of a failure that the memory model found; its cause is the message."""
    prefix = "" if failure.cause.startswith("torch.") else _EXCEPTIONS.get(failure.kind, "ValueError: ")
    return prefix + failure.cause


ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


_STAGES = {
    "memory-utilization-too-high": ("vllm/v1/worker/utils.py", 435, "request_memory", "raise ValueError("),
    "gpu-not-free": ("vllm/v1/worker/utils.py", 435, "request_memory", "raise ValueError("),
    "oom-weights": ("vllm/model_executor/model_loader/base_loader.py", 63, "load_model", "self.load_weights(model)"),
    "kv-cache-none": ("vllm/v1/core/kv_cache_utils.py", 660, "_check_enough_kv_cache_memory", "raise ValueError("),
    "kv-cache-below-length": (
        "vllm/v1/core/kv_cache_utils.py",
        690,
        "_check_enough_kv_cache_memory",
        "raise ValueError(",
    ),
    "oom-graph-capture": ("vllm/v1/worker/gpu_model_runner.py", 4410, "capture_model", "self._capture_cudagraphs("),
    "oom-sampler": ("vllm/v1/worker/gpu_model_runner.py", 4120, "_dummy_sampler_run", "raise RuntimeError("),
}
"""The innermost frame, where it tells at which stage of a start the engine was."""


def traceback(where: str, error: str, kind: str = "") -> list[str]:
    """Lines of a Python traceback as the process `where` (`api`, `engine` or `step`) would print it."""
    frames = {"api": _API_FRAMES, "engine": _ENGINE_FRAMES, "step": _STEP_FRAMES}[where]
    if kind in _STAGES:
        frames = (*frames, _STAGES[kind])
    lines = ["Traceback (most recent call last):"]
    for path, line, function, code in frames:
        lines += [f'  File "/venv/lib/python3.11/site-packages/{path}", line {line}, in {function}', f"    {code}"]
    return lines + error.splitlines()
