"""One probe against a server that somebody else runs: asks it what it serves, sends, scores and prints.

Until the first request leaves, only light modules are imported: a user who asks for one number should not wait for
the libraries of a search.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tuner.cli.bench import Asked
from tuner.cli.options import refuse
from tuner.client import Crew, LoadRequest, run_load
from tuner.errors import EnvironmentFault, ExitCode, InputError
from tuner.records import ClassSlo, LoadResult, Outcome, Probe, RequestStatus
from tuner.workload import (
    PATHS,
    PROBE_TEXT,
    Arrivals,
    Plan,
    Vocabulary,
    Workload,
    constant,
    plan,
    request_body,
    vocabulary_from_tokens,
)

if TYPE_CHECKING:
    from tuner.validity import ServerEvidence

NAME = "bench"
_ASK_S = 10.0  # of silence
_ANSWER_S = 30.0  # in all
_MOST_BYTES = 64 * 2**20
_MOST_ID = 2**20
"""Above the ids of every tokenizer; a larger one would cost memory and mean nothing."""
_METRICS_BYTES = 16_000_000
_SAFE_IDS = Vocabulary(1300, frozenset(range(300)))
"""Where the server does not tokenize: above the special and byte tokens of the usual tokenizers, below their ends."""


def bench_url(asked: Asked, slo: ClassSlo, crew: Crew, *, as_json: bool) -> int:
    """Measure and print; the exit code. `crew`: workers that are starting meanwhile."""
    began = time.monotonic()
    server = Endpoint(asked.url)
    model, max_model_len = _served_model(server, asked.model)
    notes: list[str] = []
    vocabulary = _vocabulary(server, model, notes)
    planned = _plan(asked, vocabulary, max_model_len)
    requests = _load_requests(planned, asked, model, server)
    headers = server.headers
    before = server.metrics()
    probe, result = _measure(asked, slo, requests, headers, asked.workers, began, notes, (server, before), crew)
    if (
        probe.outcome is Outcome.INVALID
        and not asked.workers
        and probe.client.workers < len(os.sched_getaffinity(0)) - 1
    ):
        print(f"not valid ({probe.validity.reasons[0]}); once more with more workers", file=sys.stderr)
        asked = replace(asked, seed=asked.seed + 1)  # other prompts: the server has seen these
        requests = _load_requests(_plan(asked, vocabulary, max_model_len), asked, model, server)
        before = server.metrics()
        workers = 2 * probe.client.workers
        probe, result = _measure(asked, slo, requests, headers, workers, began, notes, (server, before))
    from tuner.cli.bench_output import as_document, as_table

    if as_json:
        print(json.dumps(as_document(probe, url=asked.url, model=model, api=asked.api, slo=slo, asked=_load(asked))))
    else:
        print(as_table(probe, url=asked.url, model=_printable(model), slo=slo, asked=_load(asked)))
    if asked.out is not None:
        from tuner.store import write_requests

        sys.stdout.flush()  # what was measured is told, even if it cannot be kept
        write_requests(asked.out, result.requests)
    if not any(request.status is RequestStatus.OK for request in result.requests):
        print("tune: no request was answered: nothing is measured. Check the server or --timeout.", file=sys.stderr)
        return int(ExitCode.ENVIRONMENT)
    return int(ExitCode.OK if probe.validity.valid else ExitCode.HARNESS)


def _load(asked: Asked) -> dict[str, object]:
    return {
        "rate_rps": asked.rate_rps or None,
        "duration_s": asked.duration_s or None,
        "concurrency": asked.concurrency,
        "input_tokens": asked.input_tokens,
        "output_tokens": asked.output_tokens,
        "seed": asked.seed,
    }


# --- the server ---


class Endpoint:
    """The few questions to the server before the load; the standard library, because it is loaded fastest."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._prefix = parts.path
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_ASK_S)
        self._url = url
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise InputError(
                where="environment",
                field="OPENAI_API_KEY",
                value="…",
                rule="holds characters that no HTTP header may hold",
                remedy="Set it to the key alone, on one line.",
            )
        self.headers: Mapping[str, str] = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, path: str, body: object = None) -> tuple[int, object]:
        """Status and JSON (None where it is none); EnvironmentFault where no answer ends in time or size."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, "Content-Type": "application/json"}
        late = threading.Event()
        try:
            with self._at_most(_ANSWER_S, late):
                self._connection.request("GET" if data is None else "POST", self._prefix + path, data, headers)
                response = self._connection.getresponse()
                answer = response.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            if late.is_set():
                raise self._hopeless(path, f"within {_ANSWER_S:g} s") from error
            raise EnvironmentFault(
                f"no server answers at {self._url}: {error or type(error).__name__}. Start it, or correct --url."
            ) from error
        if late.is_set():
            raise self._hopeless(path, f"within {_ANSWER_S:g} s")
        if len(answer) > _MOST_BYTES:
            raise self._hopeless(path, f"within {_MOST_BYTES >> 20} MiB")
        try:
            return response.status, json.loads(answer)
        except (ValueError, RecursionError):
            return response.status, None

    def metrics(self) -> str:
        """The text of `/metrics`; empty where the server has none."""
        self._connection.close()  # servers close what was idle, and a request into that would fail
        try:
            with self._at_most(_ANSWER_S, threading.Event()):
                self._connection.request("GET", self._prefix + "/metrics", headers=dict(self.headers))
                response = self._connection.getresponse()
                text = response.read(_METRICS_BYTES).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return ""
        if not response.isclosed():
            self._connection.close()  # longer than that: what is left unread would be taken for the next answer
        return text if response.status == 200 else ""

    def _hopeless(self, path: str, bound: str) -> EnvironmentFault:
        return EnvironmentFault(f"the server at {self._url} did not answer {path} {bound}. Check --url and the server.")

    @contextlib.contextmanager
    def _at_most(self, seconds: float, late: threading.Event) -> Iterator[None]:
        """Cut the connection after this time (its own limit counts from the last byte); `late` says that it did."""
        if self._connection.sock is None:
            self._connection.connect()
        connection = self._connection.sock

        def cut() -> None:
            late.set()
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _printable(name: str) -> str:
    """A name as the server wrote it, without what a terminal would obey or could not show."""
    return repr(name)[1:-1]


def _served_model(server: Endpoint, asked: str | None) -> tuple[str, int]:
    """The name to ask for, and the model length (0: unknown)."""
    status, answer = server.ask("/v1/models")
    entries = answer.get("data") if isinstance(answer, dict) else None
    if status == 401:
        raise InputError(
            where="environment",
            field="OPENAI_API_KEY",
            value="…" if server.headers else None,
            rule="the server does not accept it",
            remedy="Set the server's API key.",
        )
    if status != 200 or not isinstance(entries, list):
        if asked is None:
            raise refuse("--model", None, "is needed: the server does not list its models", "Give the model's name.")
        return asked, 0
    models = {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
    if asked is None and len(models) == 1:
        asked = next(iter(models))
    if asked is None or asked not in models:
        served = ", ".join(map(_printable, list(models)[:20])) or "nothing"
        raise refuse("--model", asked, "is not what the server serves", f"It serves {served}.")
    length = models[asked].get("max_model_len")
    return asked, length if isinstance(length, int) and length > 0 else 0


def _vocabulary(server: Endpoint, model: str, notes: list[str]) -> Vocabulary:
    question = {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}
    status, answer = server.ask("/tokenize", question)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if status == 200 and isinstance(tokens, list) and all(map(_is_token_id, tokens)):
        return vocabulary_from_tokens(tokens)
    notes.append("the server does not tokenize: prompts are token ids from 300 to 1299")
    return _SAFE_IDS


def _is_token_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < _MOST_ID


def _detokenize(server: Endpoint, model: str, tokens: Sequence[int]) -> str:
    status, answer = server.ask("/detokenize", {"model": model, "tokens": list(tokens)})
    text = answer.get("prompt") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(text, str):
        raise refuse("--api", "chat", "needs text, and the server does not detokenize", "Use --api completions.")
    return text


# --- the probe ---


def _plan(asked: Asked, vocabulary: Vocabulary, max_model_len: int) -> Plan:
    if max_model_len and asked.input_tokens + asked.output_tokens > max_model_len:
        rule = f"and {asked.output_tokens} more for the answer exceed the model length of {max_model_len}"
        raise refuse("--input-tokens", asked.input_tokens, rule, "Choose less.")
    arrivals = Arrivals("closed", concurrency=asked.concurrency) if asked.concurrency else Arrivals()
    workload = Workload(NAME, constant(asked.input_tokens), constant(asked.output_tokens), arrivals, api=asked.api)
    planned = plan(
        workload,
        rate_rps=asked.rate_rps,
        duration_s=asked.ramp_s + asked.duration_s,
        seed=asked.seed,
        vocabulary=vocabulary,
        max_model_len=max_model_len,
        min_requests=asked.requests,
    )
    if not any(asked.concurrency or (request.scheduled_s or 0.0) >= asked.ramp_s for request in planned.requests):
        rule = f"is too short: with the seed {asked.seed} no request arrives in it"
        raise refuse("--duration", asked.duration_s, rule, "Give a longer one, a higher --rate or another --seed.")
    return planned


def _load_requests(planned: Plan, asked: Asked, model: str, server: Endpoint) -> list[LoadRequest]:
    sampling = Workload(NAME, None, None).sampling
    requests = []
    for request in planned.requests:
        if asked.api == "chat" and not isinstance(request.prompt, str):
            # The chat template adds tokens of its own: only the server knows how many there are.
            request = replace(request, prompt=_detokenize(server, model, request.prompt), input_tokens=0)
        requests.append(
            LoadRequest(
                index=request.index,
                class_name=NAME,
                scheduled_s=request.scheduled_s or 0.0,
                body=request_body(request, model=model, sampling=sampling, api=asked.api),
                path=PATHS[asked.api],
                planned_input_tokens=request.input_tokens,
                planned_output_tokens=request.output_tokens,
                ignore_eos=sampling.ignore_eos,
            )
        )
    return requests


def _measure(
    asked: Asked,
    slo: ClassSlo,
    requests: Sequence[LoadRequest],
    headers: Mapping[str, str],
    workers: int,
    began: float,
    notes: Sequence[str],
    watched: tuple[Endpoint, str],
    crew: Crew | None = None,
) -> tuple[Probe, LoadResult]:
    """The load, scored and judged; `watched`: the server, and its metrics before."""
    result = run_load(
        asked.url,
        requests,
        workers=workers,
        concurrency=asked.concurrency,
        timeout_s=asked.timeout_s,
        drain_s=asked.timeout_s,
        headers=headers,
        progress=_progress(),
        crew=crew,
    )
    from tuner.metrics import score
    from tuner.validity import judge_validity

    ends_s = asked.ramp_s + asked.duration_s
    if asked.concurrency:
        # Up to the last end, so that throughput counts every answer.
        ends_s = math.nextafter(max(request.end_s for request in result.requests), math.inf)
    window = (asked.ramp_s, ends_s)
    metrics = score(result.requests, slo, class_name=NAME, window=window)
    server, before = watched
    evidence = _evidence(before, server.metrics())
    if evidence is None:
        notes = (*notes, "the server's metrics were not read: other traffic and prefix hits were not looked for")
    validity = judge_validity(result, offered_rps=asked.rate_rps, window=window, limits=slo.limits, server=evidence)
    probe = Probe(
        workload=NAME,
        rate_rps=asked.rate_rps,
        seed=asked.seed,
        purpose="bench",
        ramp_s=asked.ramp_s,
        window_s=window[1] - window[0],
        wall_s=time.monotonic() - began,
        started_at=result.started_at,
        classes={NAME: metrics},
        outcome=metrics.outcome if validity.valid else Outcome.INVALID,
        margin=metrics.margin,
        validity=validity,
        client=result.client,
        telemetry=None,
        requests_file=str(asked.out or ""),
        notes=tuple(notes),
    )
    return probe, result


def _evidence(before: str, after: str) -> ServerEvidence | None:
    """What the server's counters say of the time between two readings; None where it has none."""
    from tuner.telemetry.prometheus import parse
    from tuner.validity import ServerEvidence

    old, new = parse(before), parse(after)
    if old.empty or new.empty:
        return None

    def gained(name: str) -> float | None:
        return new.counters[name] - old.counters[name] if name in new.counters and name in old.counters else None

    then, now = old.histograms.get("ttft_s"), new.histograms.get("ttft_s")
    ttft = now.minus(then) if now is not None and then is not None else now
    return ServerEvidence(
        ttft_median_bucket_s=ttft.bracket(0.5) if ttft is not None and ttft.count else None,
        requests=None if ttft is None else ttft.count,
        prefix_queries=gained("prefix_queries"),
        prefix_hits=gained("prefix_hits"),
    )


def _progress() -> Callable[[int, int], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        print(f"\r{done} of {total} requests", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show
