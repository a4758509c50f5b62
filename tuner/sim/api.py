"""Owns the API server of the HTTP face: routes, streams, what happens when an engine dies; it starts nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from tuner.sim import crashes
from tuner.sim.answer import Answer, Refused, error_body, read
from tuner.sim.blocks import chain
from tuner.sim.engine import start_factor
from tuner.sim.exposition import Metrics
from tuner.sim.faults import Fault
from tuner.sim.flags import Arguments
from tuner.sim.frontend import Frontend
from tuner.sim.memory import plan_memory
from tuner.sim.options import Options
from tuner.sim.profile import Effective
from tuner.sim.tokens import decode, encode
from tuner.sim.web import Request
from tuner.sim.wire import Log, Message, Unpacker, pack

DEAD = error_body(crashes.ENGINE_DEAD, "InternalServerError", 500)


class ApiServer:
    """Answers requests with what the engines make."""

    def __init__(
        self,
        arguments: Arguments,
        options: Options,
        effective: Effective,
        engines: Sequence[socket.socket],
        log: Log,
    ) -> None:
        self._options, self._effective, self._log = options, effective, log
        self._scale = options.time_scale
        self._faults: dict[str, Fault] = {fault.name: fault for fault in options.faults}
        self._engines = [_Link(self, rank, connection) for rank, connection in enumerate(engines)]
        self._frontend = Frontend(options.profile, effective, start_factor(options.profile, options.seed))
        names = str(arguments.given.get("served-model-name", arguments.model)).split()
        self._models = tuple(names)
        self._root = arguments.model
        self._keys = str(arguments.given.get("api-key", "")).split()
        self._details = bool(arguments.given.get("enable-prompt-tokens-details", False))
        self._usage = bool(arguments.given.get("enable-force-include-usage", False))
        self._vocabulary = options.profile.model.vocabulary
        memory = plan_memory(options.profile, effective)
        self.metrics = Metrics(names[0], effective, memory, len(engines))
        self._answers: dict[int, Answer] = {}
        self._next = 0
        self._prompt_tokens = self._generated_tokens = 0.0
        self._outbox: deque[tuple[float, Callable[[], None]]] = deque()  # when its step is visible, what delivers it
        self._waiting_reset: list[Request] = []
        self.died = asyncio.Event()
        self.stopping = False
        self._loop = asyncio.get_running_loop()

    def totals(self) -> tuple[float, float]:
        """Prompt and generated tokens so far."""
        return self._prompt_tokens, self._generated_tokens

    def state(self) -> tuple[float, float, float]:
        """Running, waiting, KV usage of the fullest engine."""
        running, waiting, usage = zip(*(link.state for link in self._engines), strict=True)
        return sum(running), sum(waiting), max(usage)

    async def connect(self) -> None:
        for link in self._engines:
            link.connection.setblocking(False)
            await self._loop.create_connection(partial(_itself, link), sock=link.connection)

    def clock(self) -> float:
        """Simulated seconds, the engines' clock."""
        return time.monotonic() / self._scale

    def handle(self, request: Request) -> None:
        route = f"{request.method} {request.path}"
        if self._keys and request.path.startswith("/v1"):
            sent = request.headers.get("authorization", "")
            if sent.removeprefix("Bearer ") not in self._keys:
                request.respond(401, b'{"error":"Unauthorized"}')
                return
        if route in ("POST /v1/completions", "POST /v1/chat/completions"):
            self._complete(request, chat="chat" in request.path)
        elif route == "GET /health":
            dead = self.died.is_set() and "dead-health" not in self._faults
            request.respond(503 if dead else 200)
        elif route in ("GET /ping", "POST /ping"):
            request.respond(200)
        elif route in ("GET /metrics", "GET /metrics/"):
            request.respond(200, self.metrics.text(request.query.get("name[]", [])), "text/plain; version=1.0.0")
        elif route == "GET /version":
            request.respond(200, json.dumps({"version": self._options.version}).encode())
        elif route == "GET /v1/models":
            request.respond(200, self._list_models())
        elif route == "POST /tokenize":
            self._tokenize(request)
        elif route == "POST /detokenize":
            self._detokenize(request)
        elif route == "POST /reset_prefix_cache" and os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            self._waiting_reset.append(request)
            for link in self._engines:
                link.send(("reset",))
        else:
            request.respond(404, b'{"detail":"Not Found"}')

    def _list_models(self) -> bytes:
        created = int(time.time())
        data = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": self._root,
                "parent": None,
                "max_model_len": self._effective.max_len,
            }
            for name in self._models
        ]
        return json.dumps({"object": "list", "data": data}).encode()

    def _tokenize(self, request: Request) -> None:
        try:
            document = json.loads(request.body)
            if "messages" in document:
                text = " ".join(f"{message['role']} {message['content']}" for message in document["messages"])
            else:
                text = str(document["prompt"])
        except (ValueError, KeyError, TypeError):
            request.respond(400, error_body("Invalid body.", "BadRequestError", 400))
            return
        tokens = encode(text, self._vocabulary)
        strings = [f"w{token}" for token in tokens] if document.get("return_token_strs") else None
        answer = {
            "count": len(tokens),
            "max_model_len": self._effective.max_len,
            "tokens": tokens,
            "token_strs": strings,
        }
        request.respond(200, json.dumps(answer).encode())

    def _detokenize(self, request: Request) -> None:
        try:
            tokens = [int(token) for token in json.loads(request.body)["tokens"]]
        except (ValueError, KeyError, TypeError):
            request.respond(400, error_body("Invalid body.", "BadRequestError", 400))
            return
        request.respond(200, json.dumps({"prompt": decode(tokens)}).encode())

    def _complete(self, request: Request, *, chat: bool) -> None:
        if self.died.is_set() and "dead-health" not in self._faults:
            request.respond(500, DEAD)
            return
        try:
            asked = read(
                request.body,
                chat=chat,
                models=self._models,
                max_len=self._effective.max_len,
                vocabulary=self._vocabulary,
            )
        except Refused as refused:
            request.respond(refused.status, refused.body())
            return
        key = self._next = self._next + 1
        if self._every("http-500", key):
            request.respond(500, error_body("Internal Server Error", "InternalServerError", 500))
            return
        now = self.clock()
        answer = Answer(key, asked, request, key % len(self._engines), now, int(time.time()))
        answer.details = self._details
        self._answers[key] = answer
        request.gone = partial(self._gone, key)
        if asked.stream:
            request.begin()
        ready = self._frontend.receive(now, len(asked.prompt))
        self._loop.call_later(max(0.0, ready - self.clock()) * self._scale, self._submit, key)

    def _submit(self, key: int) -> None:
        answer = self._answers.get(key)
        if answer is not None:
            asked = answer.asked
            hashes = chain(asked.prompt, self._effective.block) if self._effective.prefix else ()
            self._engines[answer.rank].send(("add", key, len(asked.prompt), asked.output, hashes))

    def _gone(self, key: int) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._engines[answer.rank].send(("abort", key))
            self.metrics.finished[answer.rank]["abort"].inc()

    def _every(self, name: str, key: int) -> bool:
        return name in self._faults and key % max(1, int(self._faults[name].number)) == 0

    def message(self, rank: int, message: Message) -> None:
        """From an engine."""
        if message[0] == "step":
            _, at, firsts, tokens, finished, statistics = message
            self._statistics(rank, statistics)
            visible = self._frontend.send(at, len(firsts) + len(tokens))
            self._outbox.append((visible, partial(self._deliver, rank, firsts, tokens, set(finished), visible)))
            if len(self._outbox) == 1:
                self._flush()
        elif message[0] == "state":
            self._statistics(rank, message[1])
        elif message[0] == "reset" and self._waiting_reset:
            if not message[1]:
                self._log.write(
                    "WARNING", "block_pool.py:435", "Failed to reset prefix cache: blocks are not freed yet"
                )
            if rank == len(self._engines) - 1:
                self._waiting_reset.pop(0).respond(200)

    def _flush(self) -> None:
        """Deliver what is due, strictly in order, and come back for the rest."""
        while self._outbox:
            left = (self._outbox[0][0] - self.clock()) * self._scale
            if left > 0.0005:  # timers are not finer
                self._loop.call_later(left, self._flush)
                return
            # Delivered before it is taken out: `message` starts another flush only on an empty outbox.
            self._outbox[0][1]()
            self._outbox.popleft()

    def _statistics(self, rank: int, values: tuple[float, ...]) -> None:
        running, waiting, usage, tokens, preemptions, queries, hits = values
        metrics = self.metrics
        metrics.running[rank].set(running)
        metrics.waiting[rank].set(waiting)
        metrics.usage[rank].set(usage)
        if tokens:
            metrics.iteration[rank].observe(tokens)
        link = self._engines[rank]
        link.state = (running, waiting, usage)
        for counter, total, name in (
            (metrics.preemptions, preemptions, "preemptions"),
            (metrics.queries, queries, "queries"),
            (metrics.hits, hits, "hits"),
        ):
            counter[rank].inc(total - link.totals.get(name, 0.0))
            link.totals[name] = total

    def _deliver(
        self,
        rank: int,
        firsts: list[tuple[int, int, float, float]],
        tokens: list[int],
        finished: set[int],
        at: float,
    ) -> None:
        """The tokens of one step reach their clients."""
        metrics, answers = self.metrics, self._answers
        metrics.generation[rank].inc(len(tokens) + len(firsts))
        self._generated_tokens += len(tokens) + len(firsts)
        for key, cached, queued, prefilled in firsts:
            answer = answers.get(key)
            if answer is None:
                continue
            if not answer.made:
                answer.cached = cached
                metrics.ttft[rank].observe(at - answer.arrived)
                metrics.queue[rank].observe(queued)
                metrics.prefill[rank].observe(prefilled)
                metrics.prompt[rank].inc(len(answer.asked.prompt))
                self._prompt_tokens += len(answer.asked.prompt)
                answer.first = at
                if answer.asked.chat and answer.asked.stream:
                    answer.request.event(answer.role())
            self._token(answer, at, key in finished)
        for key in tokens:
            answer = answers.get(key)
            if answer is not None:
                metrics.itl[rank].observe(at - answer.last)
                self._token(answer, at, key in finished)

    def _token(self, answer: Answer, at: float, last: bool) -> None:
        answer.last = at
        answer.unsent.append(answer.word())
        key = answer.key
        if self._every("short-output", key) and answer.made == answer.asked.output - 1:
            self._engines[answer.rank].send(("abort", key))
            last = True
        if answer.asked.stream:
            interval = self._effective.stream_interval
            if last or answer.made == 1 or len(answer.unsent) >= interval:
                answer.request.event(answer.chunk("".join(answer.unsent), answer.asked.reason if last else None))
                answer.unsent.clear()
            if answer.made == 2 and self._every("stream-error", key):
                self._fail(answer)
                return
            if answer.made == 2 and self._every("early-close", key):
                del self._answers[key]
                self._engines[answer.rank].send(("abort", key))
                answer.request.cut()
                return
        if last:
            self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        request, asked, metrics, rank = answer.request, answer.asked, self.metrics, answer.rank
        del self._answers[answer.key]
        request.gone = None
        metrics.finished[rank][asked.reason].inc()
        metrics.e2e[rank].observe(answer.last - answer.arrived)
        metrics.decode[rank].observe(answer.last - answer.first)
        if answer.made > 1:
            metrics.tpot[rank].observe((answer.last - answer.first) / (answer.made - 1))
        if not asked.stream:
            request.respond(200, answer.whole("".join(answer.unsent).strip(), asked.reason))
            return
        if asked.include_usage or self._usage:
            request.event(answer.usage_chunk())
        request.event(b"[DONE]")
        request.end()

    def _fail(self, answer: Answer) -> None:
        """The engine is gone, or the answer was chosen to fail: an error inside the 200, as vLLM sends it."""
        del self._answers[answer.key]
        answer.request.gone = None
        self._engines[answer.rank].send(("abort", answer.key))
        self.metrics.finished[answer.rank]["error"].inc()
        if answer.asked.stream:
            answer.request.event(DEAD)
            answer.request.event(b"[DONE]")
            answer.request.end()
        else:
            answer.request.respond(500, DEAD)

    def lost(self, rank: int) -> None:
        """An engine has closed its end."""
        if self.stopping:
            return
        self.died.set()
        if "dead-health" in self._faults:
            return
        self._log.write(
            "WARNING", "core_client.py:702", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
        )
        self._log.errors(
            "async_llm.py:906", ["AsyncLLM output_handler failed.", *crashes.traceback("api", _DEAD_ERROR)]
        )
        for answer in list(self._answers.values()):
            self._fail(answer)


_DEAD_ERROR = f"vllm.v1.engine.exceptions.EngineDeadError: {crashes.ENGINE_DEAD}"


class _Link(asyncio.Protocol):
    """The API server's end of the socket to one engine."""

    def __init__(self, server: ApiServer, rank: int, connection: socket.socket) -> None:
        self._server, self._rank, self.connection = server, rank, connection
        self._transport: asyncio.WriteTransport | None = None
        self._unpacker = Unpacker()
        self.totals: dict[str, float] = {}
        self.state = (0.0, 0.0, 0.0)  # running, waiting, share of the KV cache

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports are no subclasses

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._server.message(self._rank, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.lost(self._rank)

    def send(self, message: Message) -> None:
        if self._transport is not None:
            self._transport.write(pack(message))


def _itself(link: _Link) -> _Link:
    return link
