"""`run_load`: starts the workers, hands them their requests, collects what happened; it judges no result."""

from __future__ import annotations

import math
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import urlsplit

from tuner.client.wire import Done, Item, Message, Ready, Row, Rows, Setup, Start, Stop, Unpacker, pack, unpack_rows
from tuner.errors import EnvironmentFault, HarnessError
from tuner.records import ClientEvidence, LoadResult, RequestResult, RequestStatus

MAX_TIMEOUT_S = 3600.0
"""Gaps are kept as 32-bit microseconds."""

# CPU time of one worker, from `make bench-client`, rounded up; a worker is given half a core of work.
_CPU_S_PER_CHUNK = 10e-6
_CPU_S_PER_REQUEST = 250e-6
_CPU_S_PER_BYTE_SENT = 1e-9
_CLOSED_LOOP_STREAM_TPS = 50.0
_SHARE_PER_WORKER = 0.5

_READY_S = 60.0
_ANSWER_S = 30.0
"""A worker reports twice a second; after this silence it is taken for dead."""
_START_MARGIN_S = 0.01
_POLL_S = 0.05
_CONNECT_S = 2.0
_WORKER_CODE = "import sys; sys.path.append(sys.argv[1]); from tuner.client.worker import main; main()"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request, ready to be sent. `scheduled_s` counts from the start; a closed loop ignores it."""

    index: int
    class_name: str
    scheduled_s: float
    body: bytes  # JSON
    path: str  # `/v1/completions` or `/v1/chat/completions`
    planned_input_tokens: int
    planned_output_tokens: int
    ignore_eos: bool


def run_load(
    base_url: str,
    requests: Sequence[LoadRequest],
    *,
    workers: int = 0,
    concurrency: int | None = None,
    timeout_s: float,
    drain_s: float,
    headers: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[int, int], None] | None = None,
    crew: Crew | None = None,
) -> LoadResult:
    """Send every request at its time and return what happened to each, in the order of `index`.

    Open loop, or with `concurrency` a closed loop of that many slots in the order given. A request is given up after
    `timeout_s`; what is not finished `drain_s` after the last request was due is cancelled, and so is everything when
    `stop` is set. Nothing is retried. `workers` = 0 sizes their number from the offered load. `progress` is called
    with the numbers of finished and of all requests. `crew`: workers that the caller started beforehand; used up here.

    HarnessError: a worker died or fell silent. EnvironmentFault: the host name has no address.
    """
    if not requests:
        raise ValueError("no requests")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s = {timeout_s}: must lie in (0, {MAX_TIMEOUT_S:g}]")
    asked_ns = time.monotonic_ns()
    count = workers or workers_needed(requests, concurrency=concurrency, cores=len(os.sched_getaffinity(0)))
    count = min(count, len(requests), concurrency or len(requests))
    with crew or Crew() as crew:
        crew.grow(count)
        count = len(crew.workers)
        url = urlsplit(base_url)
        family, address = _resolve(url.hostname or "", url.port or 80)
        items = _spool(requests, url.path.rstrip("/"), crew.bodies)
        if not concurrency:
            items.sort(key=lambda item: item.scheduled_ns)
        for position, worker in enumerate(crew.workers):
            slots = len(range(position, concurrency or 0, count))
            share = items[position::count]
            if concurrency:
                share = items if slots else []
            setup = Setup(
                family=family,
                address=address,
                host=url.netloc.rpartition("@")[2],
                headers=tuple((headers or {}).items()),
                items=tuple(share),
                bodies_fd=crew.bodies.fileno(),
                queue_fd=crew.queue_out.fileno(),
                slots=slots,
                timeout_ns=round(timeout_s * 1e9),
                drain_ns=round(drain_s * 1e9),
                last_ns=0 if concurrency else items[-1].scheduled_ns,
            )
            worker.send(setup)
        crew.wait_ready()
        zero_ns, started_at = crew.start(len(items) if concurrency else 0)
        done = crew.collect(len(items), stop, progress)
        rows = [row for worker in crew.workers for packed in worker.rows for row in unpack_rows(packed)]
    evidence = ClientEvidence(
        workers=count,
        cpu_share=max(message.cpu_share for message in done),
        loop_lag_p99_s=max(message.loop_lag_p99_ns for message in done) / 1e9,
        loop_lag_max_s=max(message.loop_lag_max_ns for message in done) / 1e9,
        start_s=(zero_ns - asked_ns) / 1e9,
        peak_rss_bytes=max(message.peak_rss_bytes for message in done),
    )
    stopped = stop is not None and stop.is_set()
    results = _results(requests, rows, zero_ns, closed_loop=bool(concurrency), stopped=stopped)
    duration_s = max(result.end_s for result in results) - min(result.scheduled_s for result in results)
    return LoadResult(results, evidence, duration_s, started_at)


def workers_needed(requests: Sequence[LoadRequest], *, concurrency: int | None, cores: int) -> int:
    """How many worker processes keep each at half a core or less; never more than `cores` − 1.

    A closed loop offers no rate; its streams are taken to bring 50 tokens a second each.
    """
    tokens = sum(request.planned_output_tokens for request in requests)
    sent_bytes = sum(len(request.body) for request in requests)
    if concurrency:
        span_s = max(tokens / (concurrency * _CLOSED_LOOP_STREAM_TPS), 1.0)
    else:
        span_s = max(max(request.scheduled_s for request in requests), 1.0)
    cpu_s = tokens * _CPU_S_PER_CHUNK + len(requests) * _CPU_S_PER_REQUEST + sent_bytes * _CPU_S_PER_BYTE_SENT
    return max(1, min(math.ceil(cpu_s / span_s / _SHARE_PER_WORKER), cores - 1))


def _resolve(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """Family and address; where the name has several, the first that accepts a connection."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EnvironmentFault(f"{host}: {error.strerror or error}; check the host name of the server.") from error
    except UnicodeError as error:  # the name cannot even be asked for
        raise EnvironmentFault(f"{host}: is no host name ({error}); check the address of the server.") from error
    for family, kind, protocol, _, address in found if len(found) > 1 else []:
        with socket.socket(family, kind, protocol) as trial:
            trial.settimeout(_CONNECT_S)
            if trial.connect_ex(address) == 0:
                return family, address
    family, _, _, _, address = found[0]
    return family, address


def _spool(requests: Sequence[LoadRequest], prefix: str, bodies: IO[bytes]) -> list[Item]:
    """Write the bodies one after the other; the items say where each lies."""
    items, offset = [], 0
    for request in requests:
        items.append(
            Item(
                number=request.index,
                scheduled_ns=round(request.scheduled_s * 1e9),
                path=prefix + request.path,
                body_offset=offset,
                body_bytes=len(request.body),
                planned_output_tokens=request.planned_output_tokens,
                ignore_eos=request.ignore_eos,
            )
        )
        bodies.write(request.body)
        offset += len(request.body)
    bodies.flush()
    return items


def _results(
    requests: Sequence[LoadRequest], rows: Sequence[Row], zero_ns: int, *, closed_loop: bool, stopped: bool
) -> tuple[RequestResult, ...]:
    by_index = {row.number: row for row in rows}
    end_ns = max((row.end_ns for row in rows), default=zero_ns)
    results = []
    for request in sorted(requests, key=lambda request: request.index):
        row = by_index.get(request.index)
        if row is None:
            if not stopped:
                raise HarnessError(f"the load generator lost request {request.index}; please report this defect.")
            unsent_ns = max(end_ns, zero_ns + round(request.scheduled_s * 1e9))
            row = Row(request.index, "cancelled", unsent_ns, unsent_ns, 0, 0, unsent_ns, None, None, None, b"", "")
            row = row._replace(error="not sent: the probe was stopped")
        results.append(_result(request, row, zero_ns, closed_loop=closed_loop))
    return tuple(results)


def _result(request: LoadRequest, row: Row, zero_ns: int, *, closed_loop: bool) -> RequestResult:
    def seconds(at_ns: int) -> float:
        return (at_ns - zero_ns) / 1e9

    gaps_us = array("I")
    gaps_us.frombytes(row.gaps_us)
    chunks = len(gaps_us) + 1 if row.first_ns else 0
    return RequestResult(
        index=request.index,
        class_name=request.class_name,
        status=RequestStatus(row.status),
        scheduled_s=seconds(row.scheduled_ns) if closed_loop else request.scheduled_s,
        sent_s=seconds(row.sent_ns),
        first_s=seconds(row.first_ns) if row.first_ns else None,
        last_s=seconds(row.last_ns) if row.first_ns else None,
        end_s=seconds(row.end_ns),
        input_tokens=request.planned_input_tokens if row.input_tokens is None else row.input_tokens,
        output_tokens=chunks if row.output_tokens is None else row.output_tokens,
        planned_input_tokens=request.planned_input_tokens,
        planned_output_tokens=request.planned_output_tokens,
        usage_reported=row.output_tokens is not None,
        chunks=chunks,
        gaps_us=tuple(gaps_us),
        cached_tokens=row.cached_tokens,
        error=row.error,
    )


class _WorkerProcess:
    """One worker as its parent sees it."""

    def __init__(self, shared_fds: tuple[int, ...]) -> None:
        self.rows: list[Rows] = []
        self.done: Done | None = None
        self.ready = False
        self.heard_s = time.monotonic()
        self._unpacker = Unpacker()
        self._stderr = os.memfd_create("stderr")
        self.socket, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER_CODE, root],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=shared_fds,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
            )

    def send(self, message: Message) -> None:
        try:
            self.socket.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError):
            raise self.death() from None

    def receive(self) -> list[Message]:
        """The next messages, waiting for bytes where there are none."""
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self.death()
        self.heard_s = time.monotonic()
        return self._unpacker.feed(data)

    def death(self) -> HarnessError:
        code = self.process.wait()
        lines = os.pread(self._stderr, 1 << 20, 0).decode(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "it left no message")
        return HarnessError(f"a worker of the load generator ended with code {code}: {last[:500]}")

    def close(self) -> None:
        """The process is gone when this returns."""
        self.socket.close()
        if self.done is None:
            self.process.kill()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._stderr)


class Crew:
    """The workers of one probe; leaving the block ends them all."""

    def __init__(self) -> None:
        self.workers: list[_WorkerProcess] = []
        # Memory without a name: nothing to remove, whatever happens to us.
        self.bodies = os.fdopen(os.memfd_create("bodies"), "w+b")
        queue_out, queue_in = os.pipe()
        os.set_blocking(queue_out, False)
        os.set_blocking(queue_in, False)
        self.queue_out = os.fdopen(queue_out, "rb", buffering=0)
        self._queue_in = os.fdopen(queue_in, "wb", buffering=0)
        self._queue_left: memoryview = memoryview(b"")

    def grow(self, count: int) -> None:
        """Start workers until there are `count`; they make themselves ready in the background."""
        while len(self.workers) < count:
            self.workers.append(_WorkerProcess((self.bodies.fileno(), self.queue_out.fileno())))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.workers:
            self.workers.pop().close()
        self._queue_left = memoryview(b"")
        self._fill_queue()
        self.queue_out.close()
        self.bodies.close()

    def wait_ready(self) -> None:
        for worker in self.workers:
            worker.socket.settimeout(_READY_S)
            try:
                while not worker.ready:
                    worker.ready = any(isinstance(message, Ready) for message in worker.receive())
            except TimeoutError:
                raise HarnessError(f"a worker of the load generator was not ready within {_READY_S:g} s.") from None

    def start(self, queued: int) -> tuple[int, float]:
        """Fill the queue of a closed loop and give the common start; that moment on the monotonic and wall clocks."""
        self._queue_left = memoryview(array("I", range(queued)).tobytes())
        self._fill_queue()
        zero_ns = time.monotonic_ns() + round(_START_MARGIN_S * 1e9)
        started_at = time.time() + _START_MARGIN_S
        for worker in self.workers:
            worker.send(Start(zero_ns))
        return zero_ns, started_at

    def collect(
        self, total: int, stop: threading.Event | None, progress: Callable[[int, int], None] | None
    ) -> list[Done]:
        """Receive until every worker is done."""
        finished, stopping = 0, False
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select(_POLL_S):
                    worker = key.data
                    for message in worker.receive():
                        if isinstance(message, Rows):
                            worker.rows.append(message)
                            finished += message.size
                        elif isinstance(message, Done):
                            worker.done = message
                            selector.unregister(worker.socket)
                    if progress:
                        progress(finished, total)
                self._fill_queue()
                if stop is not None and stop.is_set() and not stopping:
                    stopping = True
                    for worker in self.workers:
                        if worker.done is None:
                            worker.send(Stop())
                for worker in self.workers:
                    silent_s = time.monotonic() - worker.heard_s
                    if worker.done is None and silent_s > _ANSWER_S:
                        raise HarnessError(f"a worker of the load generator has been silent for {silent_s:.0f} s.")
        return [worker.done for worker in self.workers if worker.done is not None]

    def _fill_queue(self) -> None:
        """Hand on what the pipe has room for; closing our end tells the workers that there is no more."""
        while self._queue_left:
            written = self._queue_in.write(self._queue_left)
            if not written:
                return
            self._queue_left = self._queue_left[written:]
        self._queue_in.close()
