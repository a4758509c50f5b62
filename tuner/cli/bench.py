"""`tune bench`: one measurement without a search, of a running server (`--url`) or of a configuration."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tuner.cli.options import existing_file, positive, refuse, whole
from tuner.records import SPEED_NAMES, ClassSlo

_LOOPS = (
    "An open loop takes --rate and --duration, a closed loop --concurrency and --requests; both take --input-tokens and"
    " --output-tokens."
)

_OWN_ONLY = {
    "baseline": "--config",
    **{name: f"--{name}" for name in ("workloads", "vllm", "gpus", "speed", "mixed")},
}
_URL_ONLY = {
    **{name: f"--{name}" for name in ("api", "duration", "concurrency", "requests", "ramp", "timeout", "workers")},
    "input_tokens": "--input-tokens",
    "output_tokens": "--output-tokens",
}

_MOST_REQUESTS = 10_000_000
_MOST_TOKENS = 500_000_000
"""In all prompts: they are made before anything is sent and take some 15 bytes of memory each."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line, checked."""

    url: str
    model: str | None
    api: str
    rate_rps: float  # 0: closed loop
    duration_s: float
    ramp_s: float
    concurrency: int | None
    requests: int
    input_tokens: int
    output_tokens: int
    timeout_s: float
    workers: int
    seed: int
    slo: Path | None
    out: Path | None


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure one server",
        description="Measure a server that is already running (--url): one probe, by the load generator of the trials. "
        "Or, without --url, start `vllm serve` with one configuration and measure every class as a trial does; flags "
        "for vLLM go after `--`.",
        epilog="exit codes: 0 measured, 2 bad input, 3 no server or no answer, 6 the measurement is not valid",
    )
    parser.add_argument("--url", metavar="URL", help="the server, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--model", metavar="NAME", help="with --url: its name there (default: the only one); else the model"
    )
    parser.add_argument("--api", choices=("completions", "chat"), default="completions", help="which endpoint")
    parser.add_argument("--slo", metavar="FILE", help="judge the result by the `slo:` part of this file")
    parser.add_argument(
        "--seed",
        metavar="N",
        help="the same seed sends the same requests, which a prefix cache then answers (default: new)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/client.md lists its keys)")
    parser.add_argument("--out", metavar="FILE|DIR", help="with --url: raw requests, gzipped JSON lines; else a folder")
    load = parser.add_argument_group("load")
    load.add_argument("--rate", metavar="R", help="open loop: requests/s, Poisson arrivals")
    load.add_argument("--duration", metavar="S", help="open loop: seconds in which requests arrive and are scored")
    load.add_argument("--concurrency", metavar="N", help="closed loop instead: requests under way at any time")
    load.add_argument("--requests", metavar="K", help="closed loop: how many requests in all")
    load.add_argument("--ramp", metavar="S", default="0", help="open loop: unscored seconds before (default: 0)")
    load.add_argument("--input-tokens", metavar="N", help="prompt length, tokens")
    load.add_argument("--output-tokens", metavar="M", help="answer length, tokens")
    load.add_argument("--timeout", metavar="S", default="300", help="give a request up after this (default: 300)")
    load.add_argument("--workers", metavar="N", default="0", help="client processes (default: as the load needs)")
    own = parser.add_argument_group("without --url")
    own.add_argument(
        "--config", dest="baseline", metavar="KNOB=VALUE|FILE", action="append", default=[], help="the flags"
    )
    own.add_argument("--workloads", metavar="DIR|FILE", help="workload classes (default: the four of the tuner)")
    own.add_argument("--vllm", metavar="PATH", default="vllm", help="the vLLM executable (default: vllm)")
    own.add_argument("--gpus", metavar="LIST", help="GPUs, e.g. 0 or 0,1 (default: the first visible)")
    own.add_argument("--speed", choices=SPEED_NAMES, default="normal", help="how long it measures")
    own.add_argument("--mixed", action="store_true", help="also all classes at once")
    parser.set_defaults(
        handler=run,
        default_of=parser.get_default,
        takes_fixed=True,
        space=None,
        allow_lossy=True,
        finish_rounds="3",
        trials=None,
        wall=None,
        gpu_hours=None,
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.url is None:
        _refuse(arguments, _URL_ONLY, "needs --url", "Leave it out, or name a running server by --url.")
        from tuner.cli.bench_own import bench_own

        return bench_own(arguments)
    if arguments.fixed:
        raise refuse("--", " ".join(arguments.fixed), "has no meaning with --url", "The running server has its flags.")
    _refuse(arguments, _OWN_ONLY, "has no meaning with --url", "Leave it out: the server is running already.")
    asked = read_arguments(arguments)
    slo = read_slo(asked.slo)
    from tuner.client import Crew

    # A worker takes as long to start as the modules that follow; so the first request leaves sooner.
    with Crew() as crew:
        crew.grow(1)
        from tuner.cli.bench_url import bench_url

        return bench_url(asked, slo, crew, as_json=arguments.json)


def _refuse(arguments: argparse.Namespace, flags: Mapping[str, str], rule: str, remedy: str) -> None:
    for name, flag in flags.items():
        if (value := getattr(arguments, name)) != arguments.default_of(name):
            raise refuse(flag, value, rule, remedy)


def read_arguments(arguments: argparse.Namespace) -> Asked:
    """InputError for whatever cannot be measured."""
    from tuner.client.load import MAX_TIMEOUT_S

    open_loop = arguments.concurrency is None
    loops = (("rate", "duration"), ("requests",))
    needed, unwanted = loops if open_loop else loops[::-1]
    for name in (*needed, "input_tokens", "output_tokens"):
        if getattr(arguments, name) is None:
            raise refuse("--" + name.replace("_", "-"), None, "is needed", _LOOPS)
    for name in unwanted:
        if (value := getattr(arguments, name)) is not None:
            raise refuse(f"--{name}", value, f"does not go with {'an open' if open_loop else 'a closed'} loop", _LOOPS)
    ramp_s = positive("--ramp", arguments.ramp, or_zero=True)
    if ramp_s and not open_loop:
        raise refuse("--ramp", arguments.ramp, "is for an open loop", "Leave it out.")
    asked = Asked(
        url=_url(arguments.url),
        model=arguments.model,
        api=arguments.api,
        rate_rps=positive("--rate", arguments.rate) if open_loop else 0.0,
        duration_s=positive("--duration", arguments.duration) if open_loop else 0.0,
        ramp_s=ramp_s,
        concurrency=None if open_loop else whole("--concurrency", arguments.concurrency, at_least=1, at_most=100_000),
        requests=0 if open_loop else whole("--requests", arguments.requests, at_least=1, at_most=_MOST_REQUESTS),
        input_tokens=whole("--input-tokens", arguments.input_tokens, at_least=1, at_most=10_000_000),
        output_tokens=whole("--output-tokens", arguments.output_tokens, at_least=1, at_most=10_000_000),
        timeout_s=positive("--timeout", arguments.timeout),
        workers=whole("--workers", arguments.workers, at_least=0, at_most=1024),
        seed=time.time_ns()
        if arguments.seed is None
        else whole("--seed", arguments.seed, at_least=0, at_most=2**63 - 1),
        slo=existing_file("--slo", arguments.slo) if arguments.slo is not None else None,
        out=Path(arguments.out) if arguments.out is not None else None,
    )
    if asked.timeout_s > MAX_TIMEOUT_S:
        raise refuse("--timeout", arguments.timeout, f"must not exceed {MAX_TIMEOUT_S:g}", "Choose less.")
    requests = asked.rate_rps * (asked.ramp_s + asked.duration_s) if open_loop else asked.requests
    if requests > _MOST_REQUESTS:
        longer = ("--ramp", arguments.ramp) if asked.ramp_s > asked.duration_s else ("--duration", arguments.duration)
        raise refuse(*longer, f"gives more than {_MOST_REQUESTS:,} requests", "Choose less.")
    if max(requests, 1) * asked.input_tokens > _MOST_TOKENS:
        rule = f"gives more than {_MOST_TOKENS:,} prompt tokens with {max(requests, 1):,.0f} requests"
        raise refuse("--input-tokens", arguments.input_tokens, rule, "Choose shorter prompts or fewer requests.")
    if open_loop and asked.rate_rps * asked.duration_s < 1:
        rule = f"gives no request to expect at --rate {arguments.rate}"
        remedy = f"Give at least {1 / asked.rate_rps:g} s, or a higher rate."
        raise refuse("--duration", arguments.duration, rule, remedy)
    if asked.out is not None and not asked.out.parent.is_dir():
        raise refuse("--out", arguments.out, "lies in a folder that does not exist", "Create the folder first.")
    if asked.out is not None and asked.out.exists() and not asked.out.is_file():
        raise refuse("--out", arguments.out, "is no regular file", "Name a file for the raw requests.")
    return asked


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        known = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and not parts.query
        if parts.username or parts.password:
            raise refuse("--url", "http://***@…", "holds a name or password", "Leave them out.")
        # What neither a request line nor a header takes, and labels that no resolver does (UnicodeError: ValueError).
        known = known and text.isascii() and text.isprintable() and " " not in text
        (parts.hostname or "").encode("idna")
    except ValueError:
        known = False
    if not known:
        raise refuse("--url", text, "is no http:// address", "Write for example http://127.0.0.1:8000.")
    return text.rstrip("/")


def read_slo(path: Path | None) -> ClassSlo:
    """The part that holds for every class; without a file nothing is promised."""
    if path is None:
        return ClassSlo((), 0.0, 1.0)
    from tuner.documents import read_yaml
    from tuner.slo import parse_slo

    document = read_yaml(path).value
    common = (
        {key: value for key, value in document.items() if key != "classes"} if isinstance(document, dict) else document
    )
    return parse_slo(common, str(path), ["bench"]).classes["bench"]
