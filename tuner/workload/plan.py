"""Which requests a probe sends and when: a pure function of its arguments; it neither sends nor waits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from tuner.errors import InputError
from tuner.pacing import unit_gaps
from tuner.records import PlannedRequest
from tuner.workload.model import Workload
from tuner.workload.prompts import MAX_INDEX, Forge, random_for, tag_of
from tuner.workload.traces import BLOCK_TOKENS, Trace, TraceRow, estimated_tokens
from tuner.workload.vocabulary import Vocabulary

_PREFIX_INDEX = MAX_INDEX  # no request has it
_CACHE_GRAIN = 16  # tokens of a prefix that vLLM shares or not, by default
_GIVE_UP = 2000  # candidates refused in a row before a class counts as too long for the model

Draw = Callable[[int], PlannedRequest]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a probe sends, in order of time. `rejected` says which requests were left out and why, one line each."""

    requests: tuple[PlannedRequest, ...]
    rejected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    concurrency: int | None = None  # closed loop


def plan(
    workload: Workload,
    *,
    rate_rps: float,
    duration_s: float,
    seed: int,
    vocabulary: Vocabulary,
    max_model_len: int = 0,
    min_requests: int = 0,
    concurrency: int | None = None,
    members: Mapping[str, Workload] | None = None,
) -> Plan:
    """The requests that arrive within `duration_s` at `rate_rps`, and more until there are `min_requests`.

    Same arguments, same plan. The same seed at another rate gives the same requests on a stretched clock; different
    seeds never share the first 16 tokens of a prompt (texts and token ids that a trace brings are sent as they are).
    `rate_rps` 0 replays a timed trace as recorded. `max_model_len` 0: unknown, nothing is refused for its length. A
    closed loop (`concurrency`, or the workload's own) has no times and `max(min_requests, rate × duration)` requests.
    `members` are the classes of a mix. Raises `InputError` when nothing of the workload can be sent.
    """
    if not (math.isfinite(rate_rps) and rate_rps >= 0 and math.isfinite(duration_s) and duration_s >= 0):
        raise ValueError(f"rate {rate_rps!r} and duration {duration_s!r} must be finite and not negative")
    forge = Forge(vocabulary)
    slots = concurrency or workload.arrivals.concurrency
    if workload.trace is not None and workload.arrivals.process == "trace" and not slots:
        rows = _replayed(workload.trace, rate_rps, duration_s, min_requests)
        return _replay(workload, workload.trace, rows, _builder(workload, "", forge, seed), max_model_len)
    if rate_rps == 0 and not slots:
        raise ValueError("only a timed trace has a rate of its own")
    classes = {workload.name: workload} if not workload.mix else members or {}
    draw = _mixed(workload, classes, forge, seed) if workload.mix else _single(workload, "", forge, seed)
    if slots:
        times: Iterable[float | None] = [None] * max(min_requests, math.ceil(rate_rps * duration_s))
    else:
        times = _arrivals(workload, rate_rps, duration_s, seed, min_requests)
    requests: list[PlannedRequest] = []
    rejected: list[str] = []
    candidates = _candidates(draw, workload, max_model_len)
    for at_s in times:
        request, refused = next(candidates)
        requests.append(replace(request, index=len(requests), scheduled_s=at_s))
        rejected.extend(refused)
    notes = _notes(workload, len(requests) + len(rejected))
    return Plan(_with_shared_blocks(requests, classes), tuple(rejected), notes, slots)


def _arrivals(workload: Workload, rate_rps: float, duration_s: float, seed: int, min_requests: int) -> Iterator[float]:
    burstiness = workload.arrivals.burstiness
    gaps = unit_gaps(workload.arrivals.process, seed=tag_of(f"{_salt(workload)} arrivals", seed), burstiness=burstiness)
    for count, units in enumerate(itertools.accumulate(itertools.islice(gaps, MAX_INDEX))):
        if units / rate_rps >= duration_s and count >= min_requests:
            return
        yield units / rate_rps


def _candidates(draw: Draw, workload: Workload, max_model_len: int) -> Iterator[tuple[PlannedRequest, list[str]]]:
    """Requests that can be sent, each with the reasons of those refused before it."""
    refused: list[str] = []
    for index in range(MAX_INDEX):
        request = draw(index)
        reason = _refusal(request, max_model_len)
        if reason is None:
            yield request, refused
            refused = []
            continue
        refused.append(reason)
        if len(refused) > _GIVE_UP:
            raise InputError(
                where=f"workload {workload.name}",
                field="input_tokens",
                value=f"{request.input_tokens} + {request.output_tokens} tokens",
                rule=f"{len(refused)} requests in a row do not fit a model length of {max_model_len}",
                remedy="Shorten the workload, or raise `--max-model-len`.",
            )


def _refusal(request: PlannedRequest, max_model_len: int) -> str | None:
    name = f"{request.class_name} {request.index}"
    length = request.input_tokens or estimated_tokens(str(request.prompt))
    if not request.prompt or request.output_tokens < 1:
        return f"{name}: an input of {len(request.prompt)} or an output of {request.output_tokens} cannot be sent"
    if max_model_len and length + request.output_tokens > max_model_len:
        return f"{name}: {length} + {request.output_tokens} tokens exceed the model length of {max_model_len}"
    return None


def _replayed(trace: Trace, rate_rps: float, duration_s: float, min_requests: int) -> list[tuple[int, TraceRow, float]]:
    """Position, row and time of what is replayed: as recorded (rate 0), or with the clock scaled to a mean rate."""
    scale = 1.0
    span = trace.rows[-1].at_s or 0.0
    if rate_rps:
        if span <= 0.0:
            raise InputError(
                where=trace.path,
                field="trace",
                value=f"{len(trace.rows)} requests at one moment",
                rule="has no rate that could be scaled",
                remedy="Give a longer trace or window, or another arrival process.",
            )
        scale = (len(trace.rows) - 1) / span / rate_rps
    rows: list[tuple[int, TraceRow, float]] = []
    for position, row in enumerate(trace.rows):
        at_s = (row.at_s or 0.0) * scale
        if at_s >= duration_s and position >= min_requests:
            break
        rows.append((position, row, at_s))
    return rows


def _replay(
    workload: Workload,
    trace: Trace,
    rows: list[tuple[int, TraceRow, float]],
    build: Callable[[int, TraceRow], PlannedRequest],
    max_model_len: int,
) -> Plan:
    requests: list[PlannedRequest] = []
    rejected: list[str] = []
    for position, row, at_s in rows:
        request = build(position, row)
        reason = _refusal(request, max_model_len)
        if reason is None:
            requests.append(replace(request, index=len(requests), scheduled_s=at_s))
        else:
            rejected.append(f"{reason} (line {row.line} of the trace)")
    if not requests:
        raise InputError(
            where=trace.path,
            field="trace",
            value=f"{len(rejected)} requests",
            rule=f"none of them can be sent ({rejected[0] if rejected else 'the duration is too short'})",
            remedy="Choose another window or a longer duration, or raise `--max-model-len`.",
        )
    notes = list(trace.notes)
    if len(rows) == len(trace.rows):
        notes.append(f"the whole trace was used: {len(rows)} requests, the last at {rows[-1][2]:.1f} s")
    return Plan(_with_shared_blocks(requests, {workload.name: workload}), tuple(rejected), tuple(notes))


def _with_shared_blocks(requests: list[PlannedRequest], classes: Mapping[str, Workload]) -> tuple[PlannedRequest, ...]:
    """Where a trace brings its prompts: for each request the leading blocks that another one of the plan has too.

    Known are token ids, and the blocks of a trace that names them; texts are, once the server has made ids of them.
    """
    grains = {name: grain for name, workload in classes.items() if (grain := _grain(workload.trace))}
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}  # a block after another one -> its number
    uses: dict[int, int] = {}
    chains: dict[int, list[int]] = {}
    for request in requests:
        grain = grains.get(request.class_name, 0)
        if grain and not isinstance(request.prompt, str):
            chain = chains[request.index] = [-1]
            for start in range(0, len(request.prompt), grain):
                key = chain[-1], request.prompt[start : start + grain]
                number = numbers.setdefault(key, len(numbers))
                uses[number] = uses.get(number, 0) + 1
                chain.append(number)
    return tuple(
        replace(request, shared_prefix_tokens=_shared(request, chains[request.index][1:], uses, grains))
        if request.index in chains
        else request
        for request in requests
    )


def _grain(trace: Trace | None) -> int:
    """Tokens of a block; 0 where the trace brings only lengths."""
    if trace is None or all(row.blocks is None and row.tokens is None for row in trace.rows):
        return 0
    return BLOCK_TOKENS if any(row.blocks for row in trace.rows) else _CACHE_GRAIN


def _shared(request: PlannedRequest, chain: list[int], uses: Mapping[int, int], grains: Mapping[str, int]) -> int:
    shared = sum(1 for _ in itertools.takewhile(lambda number: uses[number] > 1, chain))
    return min(shared * grains[request.class_name], len(request.prompt))


def _salt(workload: Workload, within: str = "") -> str:
    """Keeps the chance of one class (as written, with its own seed) apart from that of every other."""
    return f"{within}/{workload.name}/{workload.seed}"


def _single(workload: Workload, within: str, forge: Forge, seed: int) -> Draw:
    """Draws request `index` of one class: independent of every other index, of the rate and of the clock."""
    build = _builder(workload, within, forge, seed)
    if workload.trace is None:
        return build
    rows = workload.trace.rows
    order = list(range(len(rows)))
    Random(tag_of(f"{_salt(workload, within)} order", seed)).shuffle(order)
    return lambda index: build(index, rows[order[index % len(order)]])


def _mixed(workload: Workload, members: Mapping[str, Workload], forge: Forge, seed: int) -> Draw:
    names = list(workload.mix)
    missing = [name for name in names if name not in members]
    if missing:
        raise ValueError(f"the mix {workload.name} needs the classes {missing}")
    draws = {name: _single(members[name], _salt(workload), forge, seed) for name in names}
    shares = tuple(itertools.accumulate(workload.mix.values()))
    tag = tag_of(f"{_salt(workload)} classes", seed)
    return lambda index: draws[random_for(tag, index).choices(names, cum_weights=shares)[0]](index)


def _builder(workload: Workload, within: str, forge: Forge, seed: int) -> Callable[..., PlannedRequest]:
    """Builds the request of an index, with lengths drawn or those of a row of a trace."""
    tag = tag_of(_salt(workload, within), seed)
    prefix = forge.tokens(tag, _PREFIX_INDEX, workload.shared_prefix_tokens)

    def build(index: int, row: TraceRow | None = None) -> PlannedRequest:
        random = random_for(tag, index)
        if row is None:
            if workload.input_tokens is None or workload.output_tokens is None:
                raise ValueError(f"the class {workload.name} has no lengths")
            row = TraceRow(0, None, workload.input_tokens.draw(random), workload.output_tokens.draw(random))
        elif workload.output_tokens is not None:
            row = replace(row, output_tokens=workload.output_tokens.draw(random))
        prompt: tuple[int, ...] | str
        shared = 0
        if row.text is not None:
            prompt = row.text
        elif row.tokens is not None:
            prompt = row.tokens
        elif row.blocks is not None:
            prompt = forge.blocks(tag, row.blocks, row.input_tokens)
        else:
            prompt = prefix + forge.tokens(tag, index, row.input_tokens, random)
            shared = len(prefix)
        return PlannedRequest(
            index=index,
            class_name=workload.name,
            scheduled_s=None,
            prompt=prompt,
            input_tokens=0 if isinstance(prompt, str) else len(prompt),
            output_tokens=row.output_tokens,
            shared_prefix_tokens=shared,
        )

    return build


def _notes(workload: Workload, drawn: int) -> tuple[str, ...]:
    trace = workload.trace
    if trace is None:
        return ()
    brought = any(row.text is not None or row.tokens is not None or row.blocks is not None for row in trace.rows)
    repeated = drawn > len(trace.rows) and brought
    note = f"the trace has {len(trace.rows)} prompts, so some of the {drawn} requests repeat one"
    return (*trace.notes, note) if repeated else trace.notes
