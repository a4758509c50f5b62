"""A server with one scripted answer for each odd thing that servers do; the request names the one it wants as `user`.

A request may also bring the answer itself: the pieces in `raw` are written as they are, then the connection closes. The
server keeps no exact time: that is the reference server's part.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

HANG_S = 30.0
LATE_S = 0.1
"""What comes before the first token, comes this much before it."""

Write = Callable[[bytes], Awaitable[None]]
Script = Callable[[Write, int], Awaitable[None]]
SCRIPTS: dict[str, Script] = {}


class Close(Exception):
    """The script wants the connection closed."""


def script(name: str) -> Callable[[Script], Script]:
    def register(function: Script) -> Script:
        SCRIPTS[name] = function
        return function

    return register


# --- building blocks ---


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def text_event(text: str, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return event({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": None} | more)


def delta_event(delta: object, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]})


def usage_event(tokens: int, **more: object) -> bytes:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens} | more
    return event({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"


def texts(tokens: int) -> list[bytes]:
    return [text_event(f" w{k}", "length" if k == tokens - 1 else None) for k in range(tokens)]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def stream(write: Write, *events: bytes, end: bool = True) -> None:
    """A chunked answer, one HTTP chunk and one write for each event."""
    await write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for data in events:
        await write(chunk(data))
    if end:
        await write(b"0\r\n\r\n")


async def whole(write: Write, status: str, body: bytes, kind: str = "application/json") -> None:
    await write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


# --- answers that are all right ---


@script("plain")
async def _plain(write: Write, tokens: int) -> None:
    await stream(write, *texts(tokens), usage_event(tokens), DONE)


@script("role-first")
async def _role_first(write: Write, tokens: int) -> None:
    await write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(delta_event({"role": "assistant", "content": ""})))
    await asyncio.sleep(LATE_S)
    for k in range(tokens):
        await write(chunk(delta_event({"content": f" w{k}"}, "length" if k == tokens - 1 else None)))
    await write(chunk(usage_event(tokens)) + chunk(DONE) + b"0\r\n\r\n")


@script("empty-first")
async def _empty_first(write: Write, tokens: int) -> None:
    await write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(text_event("")))
    await asyncio.sleep(LATE_S)
    for data in (*texts(tokens - 1), usage_event(tokens), DONE):
        await write(chunk(data))
    await write(b"0\r\n\r\n")


@script("multi-token")
async def _multi_token(write: Write, tokens: int) -> None:
    """Half as many events as tokens, as with speculative decoding or a stream interval."""
    await stream(write, *texts(tokens // 2), usage_event(tokens), DONE)


def _deltas(field: str, value: Callable[[int], object]) -> None:
    @script(field)
    async def answer(write: Write, tokens: int) -> None:
        deltas = [delta_event({"role": "assistant", "content": ""})]
        deltas += [delta_event({field: value(k)}) for k in range(tokens)]
        await stream(write, *deltas, delta_event({}, "length"), usage_event(tokens), DONE)


_deltas("reasoning", lambda k: f" w{k}")
_deltas("reasoning_content", lambda k: f" w{k}")
_deltas("tool_calls", lambda k: [{"index": 0, "function": {"arguments": f"{k}"}}])


@script("reasoning-then-content")
async def _reasoning_then_content(write: Write, tokens: int) -> None:
    half = tokens // 2
    deltas = [delta_event({"reasoning": f" r{k}"}) for k in range(half)]
    deltas += [delta_event({"content": f" w{k}"}) for k in range(tokens - half)]
    await stream(write, *deltas, delta_event({}, "stop"), usage_event(tokens), DONE)


@script("escaped")
async def _escaped(write: Write, tokens: int) -> None:
    """Texts that JSON must escape, and texts outside ASCII."""
    words = ['"', "\\", "\n", "\t\u0001", "\u4f60\u597d", "\U0001f600", '\\"', "[DONE]", "data: ", "\u2028"]
    events = [text_event(words[k % len(words)]) for k in range(tokens)]
    await stream(write, *events, text_event("", "length"), usage_event(tokens), DONE)


@script("continuous-usage")
async def _continuous_usage(write: Write, tokens: int) -> None:
    def counted(k: int) -> bytes:
        usage = {"prompt_tokens": 7, "completion_tokens": k + 1}
        return text_event(" w", "length" if k == tokens - 1 else None, usage=usage)

    await stream(write, *(counted(k) for k in range(tokens)), DONE)


@script("cached")
async def _cached(write: Write, tokens: int) -> None:
    details = {"cached_tokens": 5}
    await stream(write, *texts(tokens), usage_event(tokens, prompt_tokens_details=details), DONE)


@script("coalesced")
async def _coalesced(write: Write, tokens: int) -> None:
    await stream(write, b"".join([*texts(tokens), usage_event(tokens), DONE]))


@script("split")
async def _split(write: Write, tokens: int) -> None:
    data = b"".join(chunk(part) for part in (*texts(tokens), usage_event(tokens), DONE)) + b"0\r\n\r\n"
    await write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for start in range(0, len(data), 37):
        await write(data[start : start + 37])
        await asyncio.sleep(0.0005)


@script("crlf-and-comments")
async def _crlf(write: Write, tokens: int) -> None:
    events = [b": ping\r\n\r\n", b"event: message\r\nid: 1\r\nretry: 5\r\n" + texts(tokens)[0].replace(b"\n", b"\r\n")]
    events += [data.replace(b"\n", b"\r\n") for data in (*texts(tokens)[1:], usage_event(tokens), DONE)]
    await stream(write, *events, b": bye\r\n\r\n")


@script("content-length")
async def _content_length(write: Write, tokens: int) -> None:
    await whole(write, "200 OK", b"".join([*texts(tokens), usage_event(tokens), DONE]), "text/event-stream")


@script("close-delimited")
async def _close_delimited(write: Write, tokens: int) -> None:
    await write(HEAD + b"connection: close\r\n\r\n" + b"".join([*texts(tokens), usage_event(tokens), DONE]))
    raise Close


@script("connection-close")
async def _connection_close(write: Write, tokens: int) -> None:
    await write(HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n")
    await write(chunk(b"".join([*texts(tokens), usage_event(tokens), DONE])) + b"0\r\n\r\n")
    raise Close


@script("continue-first")
async def _continue_first(write: Write, tokens: int) -> None:
    await write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await _plain(write, tokens)


@script("answers-twice")
async def _answers_twice(write: Write, tokens: int) -> None:
    await _plain(write, tokens)
    await write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


@script("no-usage")
async def _no_usage(write: Write, tokens: int) -> None:
    await stream(write, *texts(tokens), DONE)


# --- answers that are not ---


@script("short-output")
async def _short_output(write: Write, tokens: int) -> None:
    short = tokens - 2
    last = event({"choices": [{"index": 0, "text": " w", "finish_reason": "stop", "stop_reason": 128001}]})
    await stream(write, *(text_event(" w") for _ in range(short - 1)), last, usage_event(short), DONE)


@script("abort")
async def _abort(write: Write, tokens: int) -> None:
    await stream(write, text_event(" w", "abort"), usage_event(1), DONE)


@script("no-token")
async def _no_token(write: Write, tokens: int) -> None:
    await stream(write, text_event("", "length"), usage_event(tokens), DONE)


@script("error-in-stream")
async def _error_in_stream(write: Write, tokens: int) -> None:
    error = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
    await stream(write, text_event(" w"), event(error), DONE)


@script("old-error-in-stream")
async def _old_error_in_stream(write: Write, tokens: int) -> None:
    await stream(write, event({"object": "error", "message": "engine dead", "code": 500}), DONE)


@script("http-500")
async def _http_500(write: Write, tokens: int) -> None:
    await whole(write, "500 Internal Server Error", b'{"error": {"message": "out of order", "code": 500}}')


@script("http-429")
async def _http_429(write: Write, tokens: int) -> None:
    await whole(write, "429 Too Many Requests", b'{"object": "error", "message": "slow down"}')


@script("http-502-page")
async def _http_502_page(write: Write, tokens: int) -> None:
    await whole(write, "502 Bad Gateway", b"<html>" + b"x" * 1_000_000, "text/html")


@script("http-400-stream")
async def _http_400_stream(write: Write, tokens: int) -> None:
    """Tokens under another status than 200 are no answer."""
    await write(b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n")
    await write(chunk(b"".join([*texts(tokens), DONE])) + b"0\r\n\r\n")


@script("early-close")
async def _early_close(write: Write, tokens: int) -> None:
    await stream(write, *texts(tokens)[:-1], end=False)
    raise Close


@script("cut-in-event")
async def _cut_in_event(write: Write, tokens: int) -> None:
    await stream(write, text_event(" w"), text_event(" w")[:40], end=False)
    raise Close


@script("closes-unanswered")
async def _closes_unanswered(write: Write, tokens: int) -> None:
    raise Close


@script("no-done")
async def _no_done(write: Write, tokens: int) -> None:
    await stream(write, *texts(tokens), usage_event(tokens))


@script("no-finish-reason")
async def _no_finish_reason(write: Write, tokens: int) -> None:
    await stream(write, *(text_event(" w") for _ in range(tokens)), usage_event(tokens), DONE)


@script("empty-200")
async def _empty_200(write: Write, tokens: int) -> None:
    await whole(write, "200 OK", b"")


@script("hang")
async def _hang(write: Write, tokens: int) -> None:
    await asyncio.sleep(HANG_S)


@script("hang-in-stream")
async def _hang_in_stream(write: Write, tokens: int) -> None:
    await stream(write, *texts(tokens)[:-1], end=False)
    await asyncio.sleep(HANG_S)


@script("not-http")
async def _not_http(write: Write, tokens: int) -> None:
    await write(b"\x16\x03\x01 this is not HTTP\r\n\r\n" + bytes(range(256)))
    raise Close


@script("switches-protocol")
async def _switches_protocol(write: Write, tokens: int) -> None:
    await write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
    raise Close


@script("bad-chunk-size")
async def _bad_chunk_size(write: Write, tokens: int) -> None:
    await write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(text_event(" w")) + b"zz\r\nnonsense")
    await asyncio.sleep(HANG_S)


@script("bad-json")
async def _bad_json(write: Write, tokens: int) -> None:
    await stream(write, text_event(" w"), b"data: {not json}\n\n", DONE)


@script("html-in-200")
async def _html_in_200(write: Write, tokens: int) -> None:
    await whole(write, "200 OK", b"<!doctype html>\n<title>Welcome</title>\n", "text/html")


@script("json-in-200")
async def _json_in_200(write: Write, tokens: int) -> None:
    await whole(write, "200 OK", json.dumps({"choices": [{"text": " w", "finish_reason": "stop"}]}).encode())


@script("bytes-in-200")
async def _bytes_in_200(write: Write, tokens: int) -> None:
    await stream(write, b"data: " + bytes(range(128, 256)) + b"\n\n", DONE)


# --- the server ---


class FaultServer:
    """Serves the scripts from a thread of its own."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.connections = 0
        self.requests = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            async for body in _requests(reader):
                self.requests += 1
                for piece in body.get("raw", ()):
                    await write(piece.encode("latin-1"))
                    await asyncio.sleep(0)
                if "raw" in body:
                    raise Close
                await SCRIPTS[body["user"]](write, body["max_tokens"])
        except (Close, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            yield json.loads(await reader.readexactly(int(lengths[0].split(b":")[1])))
        except asyncio.IncompleteReadError:
            return
