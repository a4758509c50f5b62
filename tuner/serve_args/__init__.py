"""vLLM's flags: what the installed version has, how they are written, what the log says became of them."""

from tuner.serve_args.bounds import out_of_range
from tuner.serve_args.flags import Flag, ServeFlags, Takes, parse_help, unknown_flag, version_tuple
from tuner.serve_args.identity import canonical, defaults, degraded, flattened, same
from tuner.serve_args.startup import effective_from_metrics, effective_values, logged_version, startup_facts
from tuner.serve_args.vllm_yaml import to_vllm_yaml
from tuner.serve_args.words import RESERVED, merged, mistyped, number_of, parse_argv, to_argv

__all__ = [
    "RESERVED",
    "Flag",
    "ServeFlags",
    "Takes",
    "canonical",
    "defaults",
    "degraded",
    "effective_from_metrics",
    "effective_values",
    "flattened",
    "logged_version",
    "merged",
    "mistyped",
    "number_of",
    "out_of_range",
    "parse_argv",
    "parse_help",
    "same",
    "startup_facts",
    "to_argv",
    "to_vllm_yaml",
    "unknown_flag",
    "version_tuple",
]
