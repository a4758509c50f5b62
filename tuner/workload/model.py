"""What a workload is and how its YAML is read; it draws nothing and knows no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from tuner.documents import Node, digest, parse_yaml, read_text, suggestion
from tuner.errors import InputError
from tuner.workload.lengths import MAX_LENGTH, Lengths, parse_lengths
from tuner.workload.traces import FORMATS, Trace, cut, estimated_tokens, load_trace

MIXED = "mixed"
APIS = ("completions", "chat")
PROCESSES = ("poisson", "gamma", "constant", "closed", "trace")

_KEYS = (
    "input_tokens",
    "output_tokens",
    "arrivals",
    "shared_prefix_tokens",
    "sampling",
    "seed",
    "api",
    "trace",
    "mix",
    "description",
)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive. `burstiness` is the gamma shape; `concurrency` is for the closed loop only."""

    process: str = "poisson"
    burstiness: float = 1.0
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as sent; `ignore_eos` keeps output lengths exact."""

    temperature: float = 0.0
    ignore_eos: bool = True
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One class of traffic. Lengths come from distributions, from a trace, or (a mix) from other classes.

    `input_tokens` counts what is unique to a request; `shared_prefix_tokens` come before it. `mix` maps class names to
    proportions that sum to 1; `mix_by_weight` says that they follow the weights of the SLO (`settle_mix`).
    """

    name: str
    input_tokens: Lengths | None
    output_tokens: Lengths | None
    arrivals: Arrivals = Arrivals()
    shared_prefix_tokens: int = 0
    sampling: Sampling = Sampling()
    seed: int = 1
    api: str = "completions"
    trace: Trace | None = None
    mix: Mapping[str, float] = field(default_factory=dict)
    mix_by_weight: bool = False
    digest: str = ""


def load_workloads(folder_or_file: Path) -> dict[str, Workload]:
    """The classes of a folder of YAML files (in the order of their names, mixes last), or of one file.

    The class name is the file name. The classes that a mix names must lie beside it and come with it.
    Raises `InputError`.
    """
    if not folder_or_file.is_dir():
        return _load_one(folder_or_file)
    try:
        paths = sorted(path for path in folder_or_file.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
    except OSError as error:
        _refuse(folder_or_file, f"the folder cannot be read ({error.strerror})", "Check its permissions.")
    if not paths:
        _refuse(folder_or_file, "the folder holds no workload (`*.yaml`)", "Name a folder such as `workloads/`.")
    found: dict[str, Workload] = {}
    for path in paths:
        if path.stem in found:
            _refuse(path, f"the class `{path.stem}` has two files", "Rename or remove one of them.")
        found[path.stem] = _parse_file(path)
    for workload in found.values():
        _check_mix(workload, found, folder_or_file / workload.name)
    return dict(sorted(found.items(), key=lambda item: bool(item[1].mix or item[1].mix_by_weight)))


def parse_workload(root: Node, name: str, folder: Path) -> Workload:
    """One workload document; a relative trace path counts from `folder`."""
    top = root.mapping(_KEYS)
    seed = top["seed"].integer(at_least=0, at_most=2**63 - 1) if "seed" in top else 1
    prefix = top["shared_prefix_tokens"].integer(at_least=0, at_most=MAX_LENGTH) if "shared_prefix_tokens" in top else 0
    arrivals = _arrivals(top["arrivals"]) if "arrivals" in top else Arrivals()
    if "mix" in top:
        for key in ("input_tokens", "output_tokens", "trace", "shared_prefix_tokens", "api", "sampling"):
            if key in top:
                top[key].fail("has no meaning in a mix", "Set it in the classes that the mix is made of.")
        if arrivals.process == "trace":
            top["arrivals"].fail("a mix has no trace of its own", "Use poisson, gamma, constant or closed.")
        mix, by_weight = _mix(top["mix"])
        workload = Workload(name, None, None, arrivals, seed=seed, mix=mix, mix_by_weight=by_weight)
        return _with_digest(workload)
    trace = _trace(top["trace"], folder) if "trace" in top else None
    lengths: dict[str, Lengths] = {
        key: parse_lengths(top[key]) for key in ("input_tokens", "output_tokens") if key in top
    }
    _check_lengths(root, top, lengths, trace)
    if arrivals.process == "trace" and (trace is None or not trace.timed):
        place = top["arrivals"]
        if trace is None:
            place.fail("needs a trace", "Add `trace: {file: …}`, or use another process.")
        place.fail("needs a trace with timestamps, which this one has not", "Use poisson, gamma, constant or closed.")
    return _with_digest(
        Workload(
            name=name,
            input_tokens=lengths.get("input_tokens"),
            output_tokens=lengths.get("output_tokens"),
            arrivals=arrivals,
            shared_prefix_tokens=prefix,
            sampling=_sampling(top["sampling"]) if "sampling" in top else Sampling(),
            seed=seed,
            api=top["api"].text(APIS) if "api" in top else "completions",
            trace=trace,
        )
    )


def settle_mix(workloads: Mapping[str, Workload], weights: Mapping[str, float]) -> dict[str, Workload]:
    """`mix: weights` gets its proportions from the SLO's weights, of the classes that are in the study."""
    names = [name for name, workload in workloads.items() if not (workload.mix or workload.mix_by_weight)]
    total = sum(weights.get(name, 0.0) for name in names)
    shares = {name: weights.get(name, 0.0) / total for name in names} if total > 0 else {}
    return {
        name: _with_digest(replace(workload, mix=shares)) if workload.mix_by_weight else workload
        for name, workload in workloads.items()
    }


def longest(workloads: Iterable[Workload]) -> tuple[int, int]:
    """Longest input (with its shared prefix) and longest output that any of the classes can ask for, tokens."""
    inputs, outputs = [0], [0]
    for workload in workloads:
        if workload.input_tokens is not None:
            inputs.append(workload.shared_prefix_tokens + workload.input_tokens.maximum)
        if workload.output_tokens is not None:
            outputs.append(workload.output_tokens.maximum)
        elif workload.trace is not None:
            outputs.extend(row.output_tokens for row in workload.trace.rows)
        if workload.trace is not None and workload.input_tokens is None:
            inputs.extend(
                workload.shared_prefix_tokens + (row.input_tokens or estimated_tokens(row.text or ""))
                for row in workload.trace.rows
            )
    return max(inputs), max(outputs)


def _load_one(path: Path) -> dict[str, Workload]:
    workload = _parse_file(path)
    members: dict[str, Workload] = {}
    for name in workload.mix:
        beside = [path.with_name(name + suffix) for suffix in (".yaml", ".yml")]
        for file in beside:
            if file.is_file():
                members[name] = _parse_file(file)
    if workload.mix_by_weight:
        others = [file for file in sorted(path.parent.glob("*.y*ml")) if file != path]
        loaded = {file.stem: _parse_file(file) for file in others if file.suffix in (".yaml", ".yml")}
        members = {name: member for name, member in loaded.items() if not (member.mix or member.mix_by_weight)}
    found = {**members, workload.name: workload}
    _check_mix(workload, found, path)
    return found


def _parse_file(path: Path) -> Workload:
    return parse_workload(parse_yaml(read_text(path, what="workload"), str(path)), path.stem, path.parent)


def _with_digest(workload: Workload) -> Workload:
    plain = asdict(replace(workload, digest="", trace=None))
    plain["trace"] = None if workload.trace is None else workload.trace.digest
    return replace(workload, digest=digest(plain))


def _check_lengths(root: Node, top: Mapping[str, Node], lengths: Mapping[str, Lengths], trace: Trace | None) -> None:
    for key in ("input_tokens", "output_tokens"):
        if trace is None and key not in lengths:
            root.child(key, None).fail("this key is required", "Give a number or a distribution, or a `trace`.")
    if trace is not None and "input_tokens" in lengths:
        top["input_tokens"].fail("the trace already says the input lengths", "Remove one of the two.")
    if trace is not None and "output_tokens" in lengths and all(row.response is None for row in trace.rows):
        top["output_tokens"].fail("the trace already says the output lengths", "Remove one of the two.")


def _arrivals(node: Node) -> Arrivals:
    entries = node.mapping(("process", "burstiness", "concurrency"), required=("process",))
    process = entries["process"].text(PROCESSES)
    if "burstiness" in entries and process != "gamma":
        entries["burstiness"].fail("belongs to `process: gamma`", "Remove it or use gamma.")
    if "concurrency" in entries and process != "closed":
        entries["concurrency"].fail("belongs to `process: closed`", "Remove it or use closed.")
    if process == "closed" and "concurrency" not in entries:
        node.fail("a closed loop needs its concurrency", "Add `concurrency: 16`.")
    return Arrivals(
        process,
        entries["burstiness"].number(above=0.0, at_most=1000.0) if "burstiness" in entries else 1.0,
        entries["concurrency"].integer(at_least=1, at_most=100_000) if "concurrency" in entries else None,
    )


def _sampling(node: Node) -> Sampling:
    entries = node.mapping(("temperature", "ignore_eos", "top_p", "top_k", "seed"))
    default = Sampling()
    return Sampling(
        temperature=entries["temperature"].number(at_least=0.0, at_most=10.0) if "temperature" in entries else 0.0,
        ignore_eos=entries["ignore_eos"].boolean() if "ignore_eos" in entries else default.ignore_eos,
        top_p=entries["top_p"].number(above=0.0, at_most=1.0) if "top_p" in entries else None,
        top_k=entries["top_k"].integer(at_least=-1, at_most=MAX_LENGTH) if "top_k" in entries else None,
        seed=entries["seed"].integer(at_least=0, at_most=2**63 - 1) if "seed" in entries else None,
    )


def _mix(node: Node) -> tuple[dict[str, float], bool]:
    if node.value == "weights":
        return {}, True
    shares = {name: entry.number(above=0.0) for name, entry in node.mapping().items()}
    if not shares:
        node.fail("must not be empty", "Give proportions by class, or `mix: weights` for those of the SLO.")
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}, False


def _check_mix(workload: Workload, found: Mapping[str, Workload], where: Path) -> None:
    plain = [name for name, other in found.items() if not (other.mix or other.mix_by_weight)]
    for name in workload.mix:
        if name not in plain:
            rule = "a mix cannot contain a mix" if name in found else "there is no such class beside the mix"
            raise InputError(where=str(where), field="mix", value=name, rule=rule, remedy=suggestion(name, plain))


def _trace(node: Node, folder: Path) -> Trace:
    entries = node.mapping(("file", "format", "start_s", "end_s"), required=("file",))
    path = folder / entries["file"].text()
    kind = entries["format"].text(FORMATS) if "format" in entries else "auto"
    trace = load_trace(path, kind)
    if "start_s" not in entries and "end_s" not in entries:
        return trace
    start = entries["start_s"].number(at_least=0.0) if "start_s" in entries else 0.0
    end = entries["end_s"].number(above=start) if "end_s" in entries else None
    if not trace.timed:
        node.fail("has no timestamps to cut a window from", "Remove `start_s` and `end_s`.")
    window = cut(trace, start, end)
    if not window.rows:
        node.fail("the window holds no request", f"The trace spans {trace.rows[-1].at_s or 0.0:g} s.")
    return window


def _refuse(path: Path, rule: str, remedy: str) -> NoReturn:
    raise InputError(where=str(path), field="workloads", value=path.name, rule=rule, remedy=remedy)


def class_names(workloads: Sequence[Workload] | Iterable[Workload]) -> tuple[str, ...]:
    """The classes that are judged by limits of their own: all but the mixes."""
    return tuple(workload.name for workload in workloads if not (workload.mix or workload.mix_by_weight))
