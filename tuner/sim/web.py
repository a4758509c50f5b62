"""Owns HTTP/1.1 of the simulated API server: requests in, responses and event streams out; it knows no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, cast
from urllib.parse import parse_qs, unquote

import httptools


class Handler(Protocol):
    """What answers requests."""

    def handle(self, request: Request) -> None: ...


class Request:
    """One request with the means to answer it: `respond` once, or `begin`, `event`…, `end`."""

    __slots__ = ("body", "connection", "gone", "headers", "method", "path", "query", "streaming")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.method = ""
        self.path = ""
        self.query: dict[str, list[str]] = {}
        self.headers: dict[str, str] = {}
        self.body = b""
        self.streaming = False
        self.gone: Callable[[], None] | None = None  # called when the client leaves before the answer is complete

    def respond(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        reason = HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.connection.write(head.encode() + body)
        self.connection.done(self, status)

    def begin(self) -> None:
        self.streaming = True
        self.connection.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def event(self, data: bytes) -> None:
        """One server-sent event in one chunk."""
        self.connection.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def end(self) -> None:
        self.connection.write(b"0\r\n\r\n")
        self.connection.done(self, 200)

    def cut(self) -> None:
        """Close the connection in the middle of the answer."""
        self.gone = None
        self.connection.close()


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after the other."""

    def __init__(self, handler: Handler, opened: set[Connection], log: Callable[[str], None] | None) -> None:
        self._handler = handler
        self._opened = opened
        self._log = log
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._current: Request | None = None
        self._peer = ""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses
        self._opened.add(self)
        host, port = self._transport.get_extra_info("peername")[:2]
        self._peer = f"{host}:{port}"

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.discard(self)
        request, self._current = self._current, None
        if request is not None and request.gone is not None:
            request.gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.close()

    def on_message_begin(self) -> None:
        self._current = Request(self)
        self._body = []

    def on_url(self, url: bytes) -> None:
        parsed = httptools.parse_url(url)
        if self._current is not None:
            self._current.path = unquote((parsed.path or b"/").decode("latin-1"))
            self._current.query = parse_qs((parsed.query or b"").decode("latin-1"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._current is not None:
            self._current.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._current
        if request is not None:
            request.method = self._parser.get_method().decode()
            request.body = b"".join(self._body)
            self._handler.handle(request)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def done(self, request: Request, status: int) -> None:
        """The answer is complete."""
        if self._log is not None:
            phrase = HTTPStatus(status).phrase
            self._log(f'INFO:     {self._peer} - "{request.method} {request.path} HTTP/1.1" {status} {phrase}')
        self._current = None
        if not self._parser.should_keep_alive():
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
