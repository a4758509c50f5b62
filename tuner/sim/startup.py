"""Owns the log lines of a start, in vLLM 0.32's words and order; it prints nothing."""

from __future__ import annotations

from tuner.sim.flags import Arguments
from tuner.sim.memory import Memory
from tuner.sim.profile import GIB, Effective, Profile

BANNER = (
    "",
    "       █     █     █▄   ▄█",
    " ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
    "  █▄█▀ █     █     █     █  model   {model}",
    "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
    "",
)
ROUTES = (
    ("/health", "GET"),
    ("/version", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
)

Line = tuple[str, str, str]
"""Level, source, message."""


def banner(arguments: Arguments, version: str) -> list[Line]:
    lines = [
        ("INFO", "api_utils.py:347", text.format(version=version.partition("+")[0], model=arguments.model))
        for text in BANNER
    ]
    shown: dict[str, object] = {"model_tag": arguments.model}
    if arguments.host != "0.0.0.0":
        shown["host"] = arguments.host
    if arguments.port != 8000:
        shown["port"] = arguments.port
    shown["model"] = arguments.model
    shown |= {name.replace("-", "_"): value for name, value in arguments.given.items()}
    return [
        *lines,
        ("INFO", "api_utils.py:286", f"non-default args: {shown}"),
        ("WARNING", "http.py:1", "SIMULATED: nothing measured on this server is a result about vLLM."),
    ]


def configured(profile: Profile, effective: Effective) -> list[Line]:
    """What the API server says once the configuration stands."""
    lines = [
        ("INFO", "model.py:733", "Resolved architecture: LlamaForCausalLM"),
        ("INFO", "model.py:2152", f"Using max model len {effective.max_len}"),
    ]
    if effective.chunked:
        text = f"Chunked prefill is enabled with max_num_batched_tokens={effective.budget}."
        lines.append(("INFO", "scheduler.py:252", text))
    if effective.eager:
        lines.append(
            (
                "WARNING",
                "vllm.py:1703",
                "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup. This is equivalent to "
                "setting -cc.mode=none -cc.cudagraph_mode=none and --kernel_config.enable_jit_warmup=False",
            )
        )
    if profile.machine.device == "cuda":
        state = "enabled" if effective.asynchronous else "disabled"
        lines.append(("INFO", "vllm.py:1109", f"Asynchronous scheduling is {state}."))
    return lines


def engine_begins(arguments: Arguments, profile: Profile, effective: Effective, version: str) -> list[Line]:
    model = arguments.model
    mode = "NONE: 0" if effective.eager else "FULL_AND_PIECEWISE: (2, 1)"
    largest = max(effective.captures) if effective.captures else None
    quantization = arguments.flag("quantization", "None")
    config = (
        f"model='{model}', speculative_config=None, tokenizer='{model}', skip_tokenizer_init=False, "
        f"dtype=torch.bfloat16, max_seq_len={effective.max_len}, load_format={arguments.flag('load-format', 'auto')}, "
        f"tensor_parallel_size={effective.tensor}, pipeline_parallel_size=1, data_parallel_size={effective.data}, "
        f"quantization={quantization}, enforce_eager={effective.eager}, "
        f"kv_cache_dtype={arguments.flag('kv-cache-dtype', 'auto')}, device_config={profile.machine.device}, seed=0, "
        f"served_model_name={model}, enable_prefix_caching={effective.prefix}, "
        f"enable_chunked_prefill={effective.chunked}, "
        f"compilation_config={{'compile_ranges_endpoints': [{effective.budget}], "
        f"'cudagraph_mode': <CUDAGraphMode.{mode}>, 'cudagraph_capture_sizes': {list(effective.captures)}, "
        f"'max_cudagraph_capture_size': {largest}}}"
    )
    release = version.partition("+")[0]
    return [("INFO", "core.py:133", f"Initializing a V1 LLM engine (v{release}) with config: {config}")]


def engine_loads(profile: Profile, effective: Effective, memory: Memory) -> list[Line]:
    lines = [
        ("INFO", "model_runner.py:284", "Loading model from scratch..."),
        ("INFO", "cuda.py:482", "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN']."),
        ("INFO", "model_runner.py:305", f"Model loading took {memory.weights / GIB:.1f} GiB and 2.012841 seconds"),
    ]
    if not effective.eager:
        compile_s = profile.machine.compile_s * 0.65
        lines.append(("INFO", "monitor.py:53", f"torch.compile took {compile_s:.2f} s in total"))
    if profile.machine.device == "cpu":
        lines = lines[:1]
    return lines


def engine_measured(profile: Profile, memory: Memory) -> list[Line]:
    """After profiling."""
    if profile.machine.device == "cpu":
        return []
    return [("INFO", "gpu_worker.py:560", f"Available KV cache memory: {memory.kv / GIB:.2f} GiB")]


def engine_cached(profile: Profile, effective: Effective, memory: Memory) -> list[Line]:
    """Once the KV cache is there."""
    kind = "CPU" if profile.machine.device == "cpu" else "GPU"
    concurrency = memory.kv_tokens / effective.max_len
    text = (
        f"{kind} KV cache size: {memory.kv_tokens:,} tokens, Maximum concurrency for {effective.max_len:,} tokens per "
        f"request: {concurrency:.2f}x"
    )
    return [("INFO", "kv_cache_utils.py:2327", text)]


def engine_ready(profile: Profile, effective: Effective, memory: Memory) -> list[Line]:
    machine = profile.machine
    lines: list[Line] = []
    if machine.device == "cuda":
        if effective.captures:
            text = f"Graph capturing finished in 5 secs, took {memory.graphs / GIB:.2f} GiB"
            lines.append(("INFO", "model_runner.py:747", text))
        lines.append(
            (
                "INFO",
                "gpu_worker.py:857",
                f"Free memory on device ({memory.free / GIB:.2f}/{memory.total / GIB:.1f} GiB) on startup. Desired GPU "
                f"memory utilization is ({effective.utilization}, {memory.requested / GIB:.2f} GiB). Actual usage is "
                f"{memory.weights / GIB:.1f} GiB for weight, {memory.activation / GIB:.2f} GiB for peak activation, "
                f"{memory.nontorch / GIB:.2f} GiB for non-torch memory, and {memory.graphs / GIB:.2f} GiB for "
                f"CUDAGraph memory. Current kv cache memory in use is {memory.kv / GIB:.2f} GiB.",
            )
        )
    took = "" if effective.eager else f" (compilation: {machine.compile_s * 0.65:.2f} s)"
    spent = machine.start_s * 0.5 + (0.0 if effective.eager else machine.compile_s)
    lines.append(
        ("INFO", "core.py:340", f"init engine (profile, create kv cache, warmup model) took {spent:.2f} s{took}")
    )
    return lines


def serving(arguments: Arguments) -> list[Line]:
    return [
        ("INFO", "entry.py:136", "Supported tasks: ['generate']"),
        ("INFO", "entry.py:140", f"Starting vLLM server on http://{arguments.host}:{arguments.port}"),
        ("INFO", "launcher.py:186", "Available routes are:"),
        *(("INFO", "launcher.py:195", f"Route: {path}, Methods: {method}") for path, method in ROUTES),
    ]
