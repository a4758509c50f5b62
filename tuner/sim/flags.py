"""Owns the command line of the simulated `vllm serve`: flags, help and complaints; it starts nothing.

The spellings, groups and defaults are vLLM 0.32's; it knows those flags that a search space or a tuner needs. Flags
that the simulator takes and ignores say so in their help.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tuner.records import KnobValue

IGNORED = "Accepted and ignored by the simulator."
READABLE = "Parse human-readable integers like '1k', '2M', etc."
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    kind: str  # `switch`, `boolean`, `int`, `float`, `str`, `list`, `json`
    default: object
    help: str
    choices: tuple[str, ...] = ()
    short: str = ""


_GROUPS: Mapping[str, tuple[_Flag, ...]] = {
    "options": (
        _Flag("api-server-count", "int", None, "How many API server processes to run.", short="-asc"),
        _Flag("disable-log-stats", "switch", False, "Do not print statistics every ten seconds."),
        _Flag("enable-log-requests", "boolean", False, f"Log every request. {IGNORED}"),
    ),
    "Frontend": (
        _Flag("host", "str", None, "Host name."),
        _Flag("port", "int", 8000, "Port number."),
        _Flag("uvicorn-log-level", "str", "info", "Log level of the HTTP server.", ("critical", "error", "info")),
        _Flag("disable-uvicorn-access-log", "boolean", False, "Do not log HTTP requests."),
        _Flag("api-key", "list", None, "Keys of which a request must present one."),
        _Flag("enable-prompt-tokens-details", "boolean", False, "Report cached tokens in usage."),
        _Flag("enable-force-include-usage", "boolean", False, "Include usage in every stream."),
        _Flag("chat-template", "str", None, IGNORED),
    ),
    "ModelConfig": (
        _Flag("model", "str", "Qwen/Qwen3-0.6B", "Name or path of the model."),
        _Flag("tokenizer", "str", None, IGNORED),
        _Flag("trust-remote-code", "boolean", False, IGNORED),
        _Flag("dtype", "str", "auto", IGNORED, ("auto", "bfloat16", "float", "float16", "float32", "half")),
        _Flag("seed", "int", 0, IGNORED),
        _Flag("revision", "str", None, IGNORED),
        _Flag("max-model-len", "int", None, f"Model context length (prompt and output). {READABLE}"),
        _Flag("quantization", "str", None, "Must agree with the model.", short="-q"),
        _Flag("enforce-eager", "boolean", False, "Never capture CUDA graphs."),
        _Flag("served-model-name", "list", None, "Names that requests may use."),
        _Flag("generation-config", "str", "auto", IGNORED),
    ),
    "LoadConfig": (
        _Flag("load-format", "str", "auto", IGNORED),
        _Flag("download-dir", "str", None, IGNORED),
    ),
    "ParallelConfig": (
        _Flag("data-parallel-size", "int", 1, "Number of replicas.", short="-dp"),
        _Flag("distributed-executor-backend", "str", None, IGNORED, ("external_launcher", "mp", "ray", "uni")),
        _Flag("pipeline-parallel-size", "int", 1, "Number of pipeline stages; only 1 is simulated.", short="-pp"),
        _Flag("tensor-parallel-size", "int", 1, "Number of devices that share every layer.", short="-tp"),
    ),
    "CacheConfig": (
        _Flag("block-size", "int", None, "Tokens in one KV block."),
        _Flag("enable-prefix-caching", "boolean", None, "Whether to reuse the KV blocks of equal prefixes."),
        _Flag("gpu-memory-utilization", "float", 0.92, "Share of device memory that this instance may take."),
        _Flag(
            "kv-cache-dtype",
            "str",
            "auto",
            "Data type of the KV cache.",
            ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        ),
        _Flag("kv-cache-memory-bytes", "int", None, f"Size of the KV cache; overrides the share of memory. {READABLE}"),
    ),
    "OffloadConfig": (_Flag("cpu-offload-gb", "float", 0, IGNORED),),
    "SchedulerConfig": (
        _Flag("async-scheduling", "boolean", None, "Schedule the next step while the device works on this one."),
        _Flag("enable-chunked-prefill", "boolean", None, "Whether a prompt may be cut to fit the token budget."),
        _Flag("long-prefill-token-threshold", "int", 0, "Longest piece of one prompt in a step; 0 is no limit."),
        _Flag("max-num-active-seqs", "int", None, "Most requests that run at once, at most max-num-seqs."),
        _Flag("max-num-batched-tokens", "int", None, f"Most tokens in one step. {READABLE}"),
        _Flag("max-num-seqs", "int", None, "Most sequences in one step."),
        _Flag("scheduler-reserve-full-isl", "boolean", True, "Admit a request only when its whole prompt fits."),
        _Flag("scheduling-policy", "str", "fcfs", IGNORED, ("fcfs", "priority")),
        _Flag("stream-interval", "int", 1, "Tokens in one streamed chunk."),
        _Flag("watermark", "float", 0.0, "Share of KV blocks that admission leaves free."),
    ),
    "CompilationConfig": (
        _Flag("cudagraph-capture-sizes", "list", None, "Batch sizes to capture."),
        _Flag("max-cudagraph-capture-size", "int", None, "Largest batch size to capture."),
    ),
    "VllmConfig": (
        _Flag("compilation-config", "json", "{}", IGNORED, short="-cc"),
        _Flag("speculative-config", "json", None, IGNORED, short="-sc"),
        _Flag("optimization-level", "int", 2, IGNORED),
        _Flag(
            "performance-mode",
            "str",
            "balanced",
            "Preset for graphs, batching and kernels.",
            ("balanced", "interactivity", "throughput"),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line. `given` holds what differs from the defaults, by flag name without dashes."""

    model: str
    host: str
    port: int
    given: Mapping[str, KnobValue]

    def flag(self, name: str, default: KnobValue) -> KnobValue:
        return self.given.get(name, default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        prog = "vllm" if message.startswith("unrecognized arguments") else self.prog
        print(f"usage: vllm serve [model_tag] [options]\n{prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> _Parser:
    parser = _Parser(
        prog="vllm serve",
        usage="vllm serve [model_tag] [options]",
        description="Launch a SIMULATED OpenAI-compatible API server: nothing measured on it is a result about vLLM.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", default=None, help="The model tag to serve (default: None)")
    for title, flags in _GROUPS.items():
        group = parser if title == "options" else parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def _add(group: argparse.ArgumentParser | argparse._ArgumentGroup, flag: _Flag) -> None:
    words = [f"--{flag.name}", *([flag.short] if flag.short else [])]
    text = f"{flag.help} (default: {flag.default})"
    if flag.kind == "switch":
        group.add_argument(*words, action="store_true", default=None, help=text)
    elif flag.kind == "boolean":
        group.add_argument(*words, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif flag.kind == "list":
        group.add_argument(*words, nargs="+", default=None, help=text)
    else:
        converters: dict[str, Callable[[str], KnobValue]]
        converters = {"int": _integer, "float": float, "str": str, "json": _json}
        suffix = (
            " Should either be a valid JSON string or JSON keys passed individually." if flag.kind == "json" else ""
        )
        group.add_argument(
            *words,
            type=converters[flag.kind],
            choices=flag.choices or None,
            default=None,
            help=f"{flag.help}{suffix} (default: {flag.default})",
        )


def _integer(text: str) -> int:
    """`16384`, `16k` (1000) or `16K` (1024)."""
    unit = _UNITS.get(text[-1:])
    return int(text) if unit is None else int(float(text[:-1]) * unit)


_integer.__name__ = "int"  # what argparse names in its complaint


def _json(text: str) -> str:
    try:
        json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted: {error}") from error
    return text


def help_text() -> str:
    """What `vllm serve --help=all` prints."""
    return _parser().format_help()


def parse(words: Sequence[str]) -> Arguments:
    """Read the words after `serve`; prints a complaint and exits with 2 when it cannot."""
    jsons = {flag.name for flags in _GROUPS.values() for flag in flags if flag.kind == "json"}
    plain: list[str] = []
    skip = False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if skip:
            skip = False
        elif name.startswith("--") and name[2:].partition(".")[0] in jsons and "." in name:
            skip = not equals and not following.startswith("--")  # one key of a JSON flag
        elif name.startswith("-O") and name[2:].isdigit():
            plain += ["--optimization-level", name[2:]]
        else:
            plain.append(name + equals + value)
    parsed = vars(_parser().parse_args(plain))
    given: dict[str, KnobValue] = {}
    for flags in _GROUPS.values():
        for flag in flags:
            value = parsed[flag.name.replace("-", "_")]
            if value is not None:
                given[flag.name] = " ".join(value) if isinstance(value, list) else value
    model = parsed["model_tag"] or str(given.get("model", "Qwen/Qwen3-0.6B"))
    return Arguments(model, str(given.pop("host", "0.0.0.0")), int(given.pop("port", 8000)), given)
