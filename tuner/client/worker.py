"""A worker process: sends its share of a probe at the planned times and reports every request; it decides nothing.

Its standard input is a socket to `run_load`; when that closes, the worker ends, so no worker outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import resource
import select
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns, process_time_ns
from typing import cast

import uvloop

from tuner.client.connection import Connection, Exchange
from tuner.client.timer import Timer
from tuner.client.wire import Done, Item, Message, Ready, Row, Setup, Start, Stop, Unpacker, pack, pack_rows

_MS = 1_000_000
_NICENESS = -10
_TICK_NS = 10 * _MS
_REPORT_NS = 500 * _MS
_CPU_BLOCK_NS = 1000 * _MS
_SENDS_AT_ONCE = 32
"""Then the loop reads what has arrived in between: about 2 ms."""
_SENDS_INTO_SILENCE = 512
"""The same where nothing is under way whose tokens could be read late."""
_IDLE_NS = 2000 * _MS
"""An idle connection is used again within this time only: uvicorn closes its side after 5 s, and a request that meets
the closing would fail without the server being at fault."""


class Worker:
    """One share of one probe. `slots` of the setup decides between open loop (0) and closed loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, setup: Setup, report: Callable[[Message], None]) -> None:
        self._loop = loop
        self._setup = setup
        self._report = report
        self._head = "".join(
            f"{name}: {value}\r\n"
            for name, value in (
                ("Host", setup.host),
                ("Content-Type", "application/json"),
                ("Accept", "text/event-stream"),
                *setup.headers,
            )
        )
        self._next = 0  # open loop: position in `items`
        self._free_since: deque[int] = deque()  # closed loop: when each free slot became free
        self._queue_open = setup.slots > 0
        self._body: tuple[int, bytes] = (-1, b"")  # of the next request, read ahead
        self._active: dict[int, Exchange] = {}  # in the order of sending
        self._idle: deque[Connection] = deque()  # the longest idle first: every connection gets its turn
        self._rows: list[Row] = []
        self._lags_ns: list[int] = []
        self._zero_ns = self._last_sent_ns = self._tick_due_ns = self._reported_ns = 0
        self._block_start_ns = self._block_cpu_ns = 0
        self._cpu_shares: list[float] = []  # of every second
        self._stopped = self._done = False
        self._send_timer, self._tick_timer = Timer(), Timer()
        loop.add_reader(self._send_timer.fd, self._on_send_timer)
        loop.add_reader(self._tick_timer.fd, self._on_tick)

    def start(self, zero_ns: int) -> None:
        self._zero_ns = self._reported_ns = self._block_start_ns = zero_ns
        self._block_cpu_ns = process_time_ns()
        self._tick_due_ns = zero_ns + _TICK_NS
        self._tick_timer.set(self._tick_due_ns, _TICK_NS)
        self._free_since.extend([zero_ns] * self._setup.slots)
        if self._setup.slots or self._setup.items:
            self._send_timer.set(zero_ns + (0 if self._setup.slots else self._setup.items[0].scheduled_ns))
            self._read_ahead()

    def stop(self) -> None:
        """Send nothing more and cancel what is under way."""
        self._stopped = True
        self._cancel_all("the probe was stopped")
        self._finish_if_done()

    # --- sending ---

    def _on_send_timer(self) -> None:
        self._send_timer.clear()
        self._send_due()

    def _send_due(self) -> None:
        for _ in range(_SENDS_AT_ONCE if self._active else _SENDS_INTO_SILENCE):
            if self._stopped or not (self._send_slot() if self._setup.slots else self._send_scheduled()):
                return
        self._loop.call_soon(self._send_due)

    def _send_scheduled(self) -> bool:
        """Send the next request if it is due; else set the timer for it."""
        items = self._setup.items
        if self._next == len(items):
            return False
        item = items[self._next]
        due_ns = self._zero_ns + item.scheduled_ns
        if due_ns > monotonic_ns():
            self._send_timer.set(due_ns)
            self._read_ahead()
            return False
        self._next += 1
        self._send(item, due_ns)
        return True

    def _send_slot(self) -> bool:
        """Send the next request of the common queue if a slot is free."""
        if not self._free_since or not self._queue_open:
            return False
        try:
            position = os.read(self._setup.queue_fd, 4)
        except BlockingIOError:
            return False  # the parent has not refilled the queue yet; the next tick asks again
        if not position:
            self._queue_open = False
            return False
        self._send(self._setup.items[int.from_bytes(position, "little")], self._free_since.popleft())
        return True

    def _queue_exhausted(self) -> bool:
        """Whether the parent has closed the queue and nothing is left in it; asked while every slot is busy."""
        poll = select.poll()
        poll.register(self._setup.queue_fd, select.POLLIN)
        return any(events == select.POLLHUP for _, events in poll.poll(0))

    def _send(self, item: Item, scheduled_ns: int) -> None:
        number, body = self._body
        if number != item.number:
            body = self._read_body(item)
        head = f"POST {item.path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        data = [head.encode("latin-1"), body]
        connection = self._idle_connection()
        exchange = Exchange(item, scheduled_ns, connection or Connection(self._loop, self._ended))
        self._active[item.number] = exchange
        if connection:
            connection.send(exchange, data)
        else:
            exchange.connection.connect_and_send(exchange, self._setup.family, self._setup.address, data)
        self._last_sent_ns = exchange.sent_ns

    def _read_ahead(self) -> None:
        if not self._setup.slots:
            item = self._setup.items[self._next]
            if self._body[0] != item.number:
                self._body = (item.number, self._read_body(item))

    def _read_body(self, item: Item) -> bytes:
        return os.pread(self._setup.bodies_fd, item.body_bytes, item.body_offset)

    def _idle_connection(self) -> Connection | None:
        self._close_stale(monotonic_ns())
        return self._idle.popleft() if self._idle else None

    def _close_stale(self, now_ns: int) -> None:
        while self._idle and not (self._idle[0].idle and now_ns - self._idle[0].idle_since_ns < _IDLE_NS):
            self._idle.popleft().drop()

    # --- ending ---

    def _ended(self, exchange: Exchange) -> None:
        item, answer = exchange.item, exchange.answer
        del self._active[item.number]
        if exchange.connection.idle:
            self._idle.append(exchange.connection)
        self._rows.append(
            Row(
                number=item.number,
                status=answer.status,
                scheduled_ns=exchange.scheduled_ns,
                sent_ns=exchange.sent_ns,
                first_ns=answer.first_ns,
                last_ns=answer.last_ns,
                end_ns=exchange.end_ns,
                input_tokens=answer.usage.prompt_tokens,
                output_tokens=answer.usage.completion_tokens,
                cached_tokens=answer.usage.cached_tokens,
                gaps_us=answer.gaps_us.tobytes(),
                error="" if answer.status == "ok" else answer.error,
            )
        )
        if self._setup.slots and not self._stopped:
            self._free_since.append(exchange.end_ns)
            self._send_due()

    def _cancel_all(self, reason: str) -> None:
        for exchange in list(self._active.values()):
            exchange.connection.cancel("cancelled", reason)

    def _all_sent(self) -> bool:
        return self._stopped or (not self._queue_open if self._setup.slots else self._next == len(self._setup.items))

    def _finish_if_done(self) -> None:
        if self._done or self._active or not self._all_sent():
            return
        self._done = True
        self._tick_timer.disarm()
        self._report(pack_rows(self._rows))
        if not self._cpu_shares:
            self._close_cpu_block(monotonic_ns())
        self._report(
            Done(
                # The load of a probe comes and goes: a mean over its quiet beginning and end would hide a full core.
                cpu_share=_rank(self._cpu_shares, 0.9),
                loop_lag_p99_ns=round(_rank(self._lags_ns, 0.99)),
                loop_lag_max_ns=max(self._lags_ns, default=0),
                peak_rss_bytes=_peak_rss_bytes(),
            )
        )

    # --- the tick ---

    def _on_tick(self) -> None:
        now_ns = monotonic_ns()
        if not self._tick_timer.clear() or self._done:
            return
        while self._tick_due_ns <= now_ns:
            # Every tick that passed while the loop was busy: one long stall counts for as long as it lasted.
            self._lags_ns.append(now_ns - self._tick_due_ns)
            self._tick_due_ns += _TICK_NS
        expired_ns = now_ns - self._setup.timeout_ns
        expired = []
        for exchange in self._active.values():
            if exchange.sent_ns > expired_ns:
                break
            expired.append(exchange)
        for exchange in expired:
            exchange.connection.cancel("timeout", f"no complete answer within {self._setup.timeout_ns / 1e9:g} s")
        self._close_stale(now_ns)
        if self._queue_open:
            self._send_due()
            self._queue_open = not self._queue_exhausted()
        if self._all_sent():
            last_ns = max(self._last_sent_ns, self._zero_ns + self._setup.last_ns)
            if now_ns > last_ns + self._setup.drain_ns:
                self._cancel_all(f"not finished {self._setup.drain_ns / 1e9:g} s after the last request was due")
        if now_ns - self._block_start_ns >= _CPU_BLOCK_NS:
            self._close_cpu_block(now_ns)
        if now_ns - self._reported_ns >= _REPORT_NS:
            # Empty reports too: they say that this worker is alive.
            self._reported_ns = now_ns
            self._report(pack_rows(self._rows))
            self._rows = []
        self._finish_if_done()

    def _close_cpu_block(self, now_ns: int) -> None:
        cpu_ns, wall_ns = process_time_ns(), now_ns - self._block_start_ns
        self._cpu_shares.append((cpu_ns - self._block_cpu_ns) / wall_ns if wall_ns > 0 else 0.0)
        self._block_start_ns, self._block_cpu_ns = now_ns, cpu_ns


def _rank(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; 0 without values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0


class _Control(asyncio.Protocol):
    """The worker's end of the socket to `run_load`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unpacker = Unpacker()
        self._worker: Worker | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            match message:
                case Setup():
                    self._worker = Worker(self._loop, message, self._send)
                    # What exists now stays; nothing that a request leaves behind is cyclic.
                    gc.collect()
                    gc.freeze()
                    gc.disable()
                    self._send(Ready())
                case Start():
                    assert self._worker is not None
                    self._worker.start(message.zero_ns)
                case Stop():
                    assert self._worker is not None
                    self._worker.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._loop.stop()

    def _send(self, message: Message) -> None:
        assert self._transport is not None
        self._transport.write(pack(message))


def _peak_rss_bytes() -> int:
    # Not ru_maxrss: that one inherits the parent's peak across fork and exec.
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _die(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """An error inside a callback is ours: end, loudly, so that no request is lost in silence."""
    error = context.get("exception")
    if isinstance(error, BaseException):
        traceback.print_exception(error, file=sys.stderr)
    else:
        print(context.get("message"), file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def ask_for_priority() -> None:
    """On a host whose server keeps every core busy, the stamps would else wait for the server."""
    with contextlib.suppress(PermissionError):
        os.nice(_NICENESS)
    # Where Linux shares the cores by sessions (sched(7), "The autogroup feature"), only the session's niceness counts.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
        group.write(str(_NICENESS))


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ask_for_priority()
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(_die)
    control = socket.socket(fileno=0)
    loop.run_until_complete(loop.create_connection(lambda: _Control(loop), sock=control))
    loop.run_forever()
    # No more than the memory of this process is left to tidy up, and the parent waits.
    os._exit(0)
