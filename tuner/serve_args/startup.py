"""What a start-up log (and `/metrics`) says is in effect, whatever was asked for; it judges nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from tuner.records import KnobValue
from tuner.serve_args.flags import plain_value

_ENGINE = re.compile(r"Initializing a V1 LLM engine \(v(?P<version>[^)]+)\) with config: (?P<config>.*)")
_BANNER = re.compile(r"  version (\d+\.\d+\S*)")
_NON_DEFAULT = re.compile(r"non-default args: (\{.*\})")
_PAIR = re.compile(r"'(\w+)': ('[^'\\]*'|-?(?:0|[1-9]\d{0,17})(?:\.\d+)?(?:e-?\d{1,3})?|True|False)(?=[,}])")

_NUMBER = re.compile(r"-?\d+(?:\.\d*)?|-?\.\d+")

_CONFIG_KEYS = {
    "dtype": "dtype",
    "max-model-len": "max_seq_len",
    "tensor-parallel-size": "tensor_parallel_size",
    "pipeline-parallel-size": "pipeline_parallel_size",
    "data-parallel-size": "data_parallel_size",
    "decode-context-parallel-size": "decode_context_parallel_size",
    "quantization": "quantization",
    "enforce-eager": "enforce_eager",
    "kv-cache-dtype": "kv_cache_dtype",
    "load-format": "load_format",
    "enable-prefix-caching": "enable_prefix_caching",
    "enable-chunked-prefill": "enable_chunked_prefill",
}
"""Knob to its name in the engine's `with config:` line. The word before the name must not be part of a longer one."""

_LINES: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], KnobValue]], ...] = (
    ("max-num-batched-tokens", re.compile(r"Setting max_num_batched_tokens to (\d{1,18})"), lambda m: int(m[1])),
    ("max-num-seqs", re.compile(r"Setting max_num_seqs to (\d{1,18})"), lambda m: int(m[1])),
    (
        "max-num-batched-tokens",
        re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,18})"),
        lambda m: int(m[1]),
    ),
    (
        "max-num-batched-tokens",
        re.compile(r"Raising max_num_batched_tokens from \d+ to (\d{1,18})"),
        lambda m: int(m[1]),
    ),
    ("max-model-len", re.compile(r"Using max model len (\d{1,18})"), lambda m: int(m[1])),
    ("async-scheduling", re.compile(r"Asynchronous scheduling is (enabled|disabled)"), lambda m: m[1] == "enabled"),
    (
        "async-scheduling",
        re.compile(r"Async scheduling (?:will be|is) disabled|Disabling asynchronous scheduling"),
        lambda m: False,
    ),
    (
        "enable-prefix-caching",
        re.compile(r"prefix caching .{0,80}will be disabled|Disabling prefix caching"),
        lambda m: False,
    ),
    ("attention-backend", re.compile(r"Using (\w+) attention backend"), lambda m: m[1]),
    ("block-size", re.compile(r"Setting attention block size to (\d{1,18}) tokens"), lambda m: int(m[1])),
    (
        "max-cudagraph-capture-size",
        re.compile(r"Truncating max_cudagraph_capture_size to (\d{1,18})"),
        lambda m: int(m[1]),
    ),
    ("enforce-eager", re.compile(r"Enforce eager set, disabling"), lambda m: True),
)
"""Single lines of the log; a later line of the log overrides an earlier one for the same knob."""

_FACTS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("kv_tokens", re.compile(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens"), "min"),
    ("max_concurrency", re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"), "min"),
    ("kv_gib", re.compile(r"Available KV cache memory: (-?[\d.]+) GiB"), "min"),
    ("kv_gib", re.compile(r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV cache"), "min"),
    ("weights_gib", re.compile(r"(?:Model loading took|Actual usage is) ([\d.]+) GiB"), "max"),
    ("activation_gib", re.compile(r"(-?[\d.]+) GiB for peak activation"), "max"),
    ("non_torch_gib", re.compile(r"(-?[\d.]+) GiB for non-torch memory"), "max"),
    ("graph_gib", re.compile(r"(-?[\d.]+) GiB for CUDAGraph memory"), "max"),
    ("graph_gib", re.compile(r"Graph capturing finished in [\d.]+ secs?, took (-?[\d.]+) GiB"), "max"),
    ("graph_capture_s", re.compile(r"Graph capturing finished in ([\d.]+) secs?"), "max"),
    ("free_gib", re.compile(r"Free memory on device(?: \S+)? \(([\d.]+)/[\d.]+ GiB\)"), "min"),
    ("device_gib", re.compile(r"Free memory on device(?: \S+)? \([\d.]+/([\d.]+) GiB\)"), "min"),
    ("requested_gib", re.compile(r"Desired GPU memory utilization is \([\d.]+, ([\d.]+) GiB\)"), "min"),
    ("load_s", re.compile(r"Model loading took [\d.]+ GiB and ([\d.]+) seconds"), "max"),
    ("compile_s", re.compile(r"torch\.compile took ([\d.]+) s in total"), "max"),
    ("compile_s", re.compile(r"took [\d.]+ s \(compilation: ([\d.]+) s\)"), "max"),
    ("init_engine_s", re.compile(r"init engine \(.*?\) took ([\d.]+) s"), "max"),
)


def effective_values(log_text: str) -> dict[str, KnobValue]:
    """Values in effect by knob, as far as the log says; a knob that it does not mention is absent.

    Order of trust, lowest first: what vLLM parsed from the command line, its engine configuration, and single lines
    that report a decision.
    """
    values: dict[str, KnobValue] = {}
    parsed = _NON_DEFAULT.search(log_text)
    if parsed:
        values |= _parsed_arguments(parsed[1])
    engine = _ENGINE.search(log_text)
    if engine:
        values |= _engine_config(engine["config"])
    for line in log_text.splitlines():
        for knob, pattern, read in _LINES:
            match = pattern.search(line)
            if match:
                values[knob] = read(match)
    return values


def startup_facts(log_text: str) -> dict[str, float]:
    """Sizes (`*_gib`, `kv_tokens`) and times (`*_s`) of the start; with several workers the scarcest or slowest one."""
    facts: dict[str, float] = {}
    for name, pattern, keep in _FACTS:
        found = [
            float(text) for match in pattern.finditer(log_text) if _NUMBER.fullmatch(text := match[1].replace(",", ""))
        ]
        if found:
            chosen = min(found) if keep == "min" else max(found)
            facts[name] = chosen if name not in facts else (min if keep == "min" else max)(facts[name], chosen)
    return facts


def logged_version(log_text: str) -> str | None:
    """vLLM's version as the server prints it."""
    match = _ENGINE.search(log_text) or _BANNER.search(log_text)
    return None if match is None else match["version"] if "version" in match.groupdict() else match[1]


def effective_from_metrics(metrics_text: str) -> dict[str, KnobValue]:
    """Values in effect that only `/metrics` tells (`vllm:cache_config_info`): block size, prefix caching, KV memory."""
    info = re.search(r"^vllm:cache_config_info\{(.*?)\} ", metrics_text, re.MULTILINE)
    if info is None:
        return {}
    labels = {key: plain_value(text) for key, text in re.findall(r'(\w+)="([^"]*)"', info[1])}
    names = {
        "block-size": "block_size",
        "enable-prefix-caching": "enable_prefix_caching",
        "kv-cache-dtype": "cache_dtype",
    }
    found = {knob: labels.get(label) for knob, label in names.items()}
    return {knob: value for knob, value in found.items() if value is not None}


def _parsed_arguments(text: str) -> dict[str, KnobValue]:
    """`{'model': …, 'max_model_len': 1024}` as knobs; where a value is no Python literal, the plain pairs only."""
    try:
        document = ast.literal_eval(text)
        entries = document.items() if isinstance(document, dict) else ()
        pairs = [(str(key), value) for key, value in entries if isinstance(value, bool | int | float | str)]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pairs = [(key, ast.literal_eval(value)) for key, value in _PAIR.findall(text)]
    skipped = ("model", "model_tag", "host", "port")
    return {key.replace("_", "-"): value for key, value in pairs if key not in skipped}


def _engine_config(text: str) -> dict[str, KnobValue]:
    values: dict[str, KnobValue] = {}
    for knob, name in _CONFIG_KEYS.items():
        match = re.search(rf"(?<![\w.]){name}=([\w./:-]+)", text)
        value = plain_value(match[1].removeprefix("torch.")) if match else None
        if value is not None:
            values[knob] = value
    largest = re.search(r"'max_cudagraph_capture_size': (\d{1,18})", text)
    if largest:
        values["max-cudagraph-capture-size"] = int(largest[1])
    mode = re.search(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)", text)
    if mode:
        values["compilation-config.cudagraph_mode"] = mode[1]
    # The end of the compiled range is the token budget; some platforms report it nowhere else.
    budget = re.search(r"'compile_ranges_endpoints': \[(?:\d+, )*(\d{1,18})\]", text)
    if budget:
        values["max-num-batched-tokens"] = int(budget[1])
    return values
