"""One TCP connection and the exchange on it, with httptools as the HTTP parser; it never connects a second time."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import cast

import httptools

from tuner.client.answer import Answer
from tuner.client.wire import Item


class Exchange:
    """One request from its sending to the end of its answer; times on CLOCK_MONOTONIC."""

    __slots__ = ("answer", "connection", "end_ns", "item", "scheduled_ns", "sent_ns")

    def __init__(self, item: Item, scheduled_ns: int, connection: Connection) -> None:
        self.item = item
        self.scheduled_ns = scheduled_ns
        self.sent_ns = 0
        self.end_ns = 0
        self.connection = connection
        self.answer = Answer(item.planned_output_tokens, item.ignore_eos)


class Connection(asyncio.Protocol):
    """Carries one exchange at a time; calls `ended(exchange)` once for each, and may then be used again if `idle`."""

    __slots__ = (
        "_answer",
        "_attaching",
        "_connecting",
        "_ended",
        "_exchange",
        "_feed",
        "_loop",
        "_parser",
        "_transport",
        "_unsent",
        "idle",
        "idle_since_ns",
        "on_body",
        "over",
        "reusable",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[Exchange], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._exchange: Exchange | None = None
        self._answer: Answer | None = None
        self._connecting: socket.socket | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # not yet handed to the kernel
        self._parser: httptools.HttpResponseParser | None = None
        self._feed: Callable[[bytes], None] = _ignore
        self.on_body: Callable[[bytes], None] = _ignore
        self.over = False  # HTTP says that the answer has ended
        self.reusable = False
        self.idle = False
        self.idle_since_ns = 0

    # --- sending ---

    def connect_and_send(self, exchange: Exchange, family: int, address: tuple[object, ...], data: list[bytes]) -> None:
        """Open the connection and send. OSError where this machine, not the server, is the obstacle."""
        self._begin(exchange)
        self._unsent = data
        exchange.sent_ns = monotonic_ns()
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = sock.connect_ex(address)
        if code == errno.EADDRNOTAVAIL:
            raise OSError(code, "no local port is free (net.ipv4.ip_local_port_range)")
        if code in (0, errno.EINPROGRESS):
            self._push(sock)
        else:
            self._refused(sock, code)

    def send(self, exchange: Exchange, data: Sequence[bytes]) -> None:
        """Send on this idle connection."""
        assert self._transport is not None
        self._begin(exchange)
        self._expect(exchange.answer)
        exchange.sent_ns = monotonic_ns()
        self._transport.writelines(data)

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._answer = exchange.answer
        self.over = self.idle = False
        self.reusable = True

    def _expect(self, answer: Answer) -> None:
        self.on_body = answer.feed  # httptools looks it up when the parser is made
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    def _push(self, sock: socket.socket) -> None:
        """The request leaves at once, before the event loop takes the socket over.

        Within a machine the connection is there by now, although connect(2) says that it is in progress.
        """
        try:
            self._unsent = _after(self._unsent, sock.sendmsg(self._unsent))
        except BlockingIOError:
            self._connecting = sock
            self._loop.add_writer(sock.fileno(), self._writable, sock)
        except OSError as error:
            self._refused(sock, error.errno or errno.EIO)
        else:
            self._attaching = self._loop.create_task(self._attach(sock))

    def _writable(self, sock: socket.socket) -> None:
        self._loop.remove_writer(sock.fileno())
        self._connecting = None
        self._push(sock)

    def _refused(self, sock: socket.socket, code: int) -> None:
        assert self._answer is not None
        sock.close()
        self._answer.fail("connect-error", os.strerror(code))
        # Not from here: the caller is still sending, and the next request of a closed loop may fail just so.
        self._loop.call_soon(self._end)

    async def _attach(self, sock: socket.socket) -> None:
        await self._loop.create_connection(lambda: self, sock=sock)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop have the methods of asyncio.Transport without being its subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._attaching = None
        if self._exchange is None:
            self._transport.abort()
            return
        self._expect(self._exchange.answer)
        if self._unsent:
            self._transport.writelines(self._unsent)
            self._unsent = []

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.drop()  # nothing was asked
            return
        answer.now_ns = monotonic_ns()
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            if self.over:
                self.reusable = False  # the answer was complete; what follows it is none of its business
            else:
                answer.fail("protocol-error", f"not HTTP: {error}")
        except httptools.HttpParserUpgrade:
            if self.over:
                self.reusable = False
            else:
                answer.fail("http-error", "HTTP 101: the server switches to another protocol")
        if answer.status:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle = self.reusable = False
        self._transport = None
        answer = self._answer
        if answer is not None:
            if exc is not None and not answer.done and answer.http_status in (0, 200):
                answer.fail("early-close", f"connection lost: {exc}")
            self._end()

    # --- httptools ---

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._answer is not None
        if self.over:
            self.reusable = False  # a second answer to one request
        elif (status := self._parser.get_status_code()) >= 200:
            self._answer.http_status = status

    def on_message_complete(self) -> None:
        assert self._parser is not None
        assert self._answer is not None
        if self._answer.http_status:
            self.over = True
            self._answer.close(complete=True)
            self.reusable = self.reusable and self._parser.should_keep_alive()

    # --- ending ---

    def cancel(self, status: str, reason: str) -> None:
        """Give the exchange up."""
        if self._answer is not None:
            self._answer.fail(status, reason)
            self._end()

    def drop(self) -> None:
        """Close, with whatever is on it."""
        self.idle = False
        if self._transport is not None:
            self._transport.abort()
        elif self._connecting is not None:
            self._loop.remove_writer(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None

    def _end(self) -> None:
        exchange, answer = self._exchange, self._answer
        if exchange is None or answer is None:
            return
        exchange.end_ns = monotonic_ns()
        if not self.over:
            answer.close(complete=False)
        self._exchange = self._answer = self._parser = None
        self._feed = self.on_body = _ignore
        if self.over and self.reusable and self._transport is not None:
            self.idle, self.idle_since_ns = True, exchange.end_ns
        else:
            self.drop()
        self._ended(exchange)


def _ignore(data: bytes) -> None:
    """Stands where no answer is expected; the objects of the last one are free then."""


def _after(parts: list[bytes], sent: int) -> list[bytes]:
    """What is left of `parts` after `sent` bytes."""
    for position, part in enumerate(parts):
        if sent < len(part):
            return [part[sent:], *parts[position + 1 :]]
        sent -= len(part)
    return []
