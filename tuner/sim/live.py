"""Owns one engine process of the HTTP face: the scheduler in real time behind a socket; it knows no HTTP.

Messages in: `(add, key, prompt, output, hashes)`, `(abort, key)`, `(reset,)`. Out: `(ready, facts)`, `(failed,)`,
`(step, time, first tokens, token keys, finished keys, statistics)`, `(state, statistics)`, `(reset, done)`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from tuner.records import KnobValue
from tuner.sim import crashes, startup
from tuner.sim.engine import start_factor
from tuner.sim.faults import Fault
from tuner.sim.flags import Arguments
from tuner.sim.memory import found_by_engine, oom_under_load, plan_memory, starts
from tuner.sim.options import Options
from tuner.sim.profile import Effective
from tuner.sim.scheduler import Scheduler, Sequence, Step
from tuner.sim.steps import StepTimes
from tuner.sim.wire import Log, Message, Unpacker, name_process, send

BEHIND_S = 0.25
"""An engine that is later than this gives up on its schedule: the machine is too slow for the simulated one."""


def engine_main(
    connection: socket.socket, arguments: Arguments, options: Options, effective: Effective, rank: int, start_s: float
) -> int:
    """Run one engine until its API server goes away; returns the exit code."""
    name = "EngineCore" if effective.data == 1 else f"EngineCore_DP{rank}"
    name_process(f"VLLM::{name}")
    log = Log(name)
    values = dict(arguments.given)
    faults = {fault.name: fault for fault in options.faults}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "engine-survives" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        crash = _start(connection, log, arguments, options, effective, faults, values, start_s)
        if crash is not None:
            kind, error = crash
            log.errors("core.py:1330", ["EngineCore failed to start.", *crashes.traceback("engine", error, kind)])
            send(connection, ("failed",))
            return 1
        memory = plan_memory(options.profile, effective)
        send(connection, ("ready", memory.kv_tokens))
        return _Engine(connection, options, effective, faults, log, rank).run()
    except (BrokenPipeError, ConnectionResetError):
        return 0


def _pause(connection: socket.socket, seconds: float | None) -> None:
    """Sleep (None: for ever), unless the API server goes away; BrokenPipeError then."""
    until = None if seconds is None else time.monotonic() + seconds
    while until is None or time.monotonic() < until:
        left = None if until is None else max(0.0, until - time.monotonic())
        readable, _, _ = select.select([connection], [], [], left)
        if readable and not connection.recv(1 << 18):
            raise BrokenPipeError


def _start(
    connection: socket.socket,
    log: Log,
    arguments: Arguments,
    options: Options,
    effective: Effective,
    faults: Mapping[str, Fault],
    values: Mapping[str, KnobValue],
    start_s: float,
) -> tuple[str, str] | None:
    """Print the start, in its time; returns kind and exception of what ends it, if something does."""
    profile = options.profile
    memory = plan_memory(profile, effective)
    log.lines(startup.engine_begins(arguments, profile, effective, options.version))
    _pause(connection, 0.3 * start_s)
    if "hang-at-start" in faults:
        _pause(connection, None)
    failure = starts(profile, values)
    crash = None
    if "start" in faults and crashes.START_CRASHES[faults["start"].argument].process == "engine":
        crash = (faults["start"].argument, crashes.START_CRASHES[faults["start"].argument].error)
    elif failure is not None and found_by_engine(failure):
        crash = (failure.kind, crashes.exception(failure))
    if crash is None or crash[0] not in _BEFORE_LOADING:
        log.lines(startup.engine_loads(profile, effective, memory))
        _pause(connection, 0.5 * start_s)
        extra = faults["slow-start"].number if "slow-start" in faults else 0.0
        until = time.monotonic() + extra
        while time.monotonic() < until:
            log.write("INFO", "backends.py:378", "Cache the graph of compile range (1, 8192) for later use")
            _pause(connection, min(0.5, max(0.0, until - time.monotonic())))
    if crash is not None and crash[0] not in _AFTER_PROFILING:
        return crash
    log.lines(startup.engine_measured(profile, memory))
    if crash is not None and crash[0].startswith("kv-cache"):
        return crash
    log.lines(startup.engine_cached(profile, effective, memory))
    if crash is not None:
        return crash
    log.lines(startup.engine_ready(profile, effective, memory))
    _pause(connection, 0.2 * start_s)
    return None


_BEFORE_LOADING = ("memory-utilization-too-high", "gpu-not-free", "gpus-missing", "nccl", "oom-weights")
_AFTER_PROFILING = (
    "kv-cache-none",
    "kv-cache-below-length",
    "kv-cache-below-length-old",
    "oom-graph-capture",
    "oom-sampler",
)


class _Engine:
    """The busy loop: steps on their own clock, requests as they come."""

    def __init__(
        self,
        connection: socket.socket,
        options: Options,
        effective: Effective,
        faults: Mapping[str, Fault],
        log: Log,
        rank: int,
    ) -> None:
        profile = options.profile
        self._connection = connection
        self._scale = options.time_scale
        self._effective = effective
        self._profile = profile
        self._faults = faults
        self._log = log
        self._memory = plan_memory(profile, effective)
        self._times = StepTimes(profile, effective, start_factor(profile, options.seed))
        self._scheduler = Scheduler(effective, self._memory.kv_tokens)
        self._rng = np.random.default_rng((options.seed, rank))
        self._unpacker = Unpacker()
        self._incoming: deque[tuple[float, Sequence]] = deque()  # arrival on our clock
        self._known: dict[int, Sequence] = {}
        self._arrived: dict[int, float] = {}
        self._scheduled: dict[int, float] = {}
        self._gone: list[Sequence] = []  # aborted while a step runs
        self._received = 0
        self._closed = False

    def run(self) -> int:
        """Returns when the API server has closed its end."""
        scheduler = self._scheduler
        now = before = self._clock()
        while not self._closed:
            self._admit(before if self._effective.asynchronous and scheduler.running else now)
            if not scheduler.busy:
                status = self._listen(self._incoming[0][0] if self._incoming else None)
                if status is not None:
                    return status
                now = before = self._clock()
                continue
            step = scheduler.plan()
            if self._memory.oom_tokens is not None and step.tokens > self._memory.oom_tokens:
                cause = oom_under_load(self._profile, self._effective, step.tokens).cause
                return self._die(cause)
            before = now
            for sequence in scheduler.prefilling:
                self._scheduled.setdefault(sequence.key, now)
            now += self._duration(step)
            if self._clock() - now > BEHIND_S:
                now = self._clock()
            status = self._listen(now)
            if status is not None:
                return status
            self._report(step, now)
        if "engine-survives" in self._faults:
            while True:
                signal.pause()
        return 0

    def _clock(self) -> float:
        return time.monotonic() / self._scale

    def _duration(self, step: Step) -> float:
        if step.tokens == step.decodes:
            seconds = self._times.decode(step.decodes, step.context)
        else:
            seconds = self._times.mixed(step.tokens, step.sequences, step.context, step.pairs)
        profile = self._profile
        seconds *= float(np.exp(profile.step_noise * self._rng.standard_normal()))
        if self._rng.random() < profile.hiccup_share:
            seconds += float(self._rng.exponential(profile.hiccup_s))
        return seconds

    def _admit(self, cut: float) -> None:
        for gone in self._gone:
            self._incoming = deque(item for item in self._incoming if item[1] is not gone)
            self._scheduler.abort(gone)
            self._forget(gone.key)
        if self._gone:
            self._gone.clear()
            send(self._connection, ("state", self._statistics(0)))
        while self._incoming and self._incoming[0][0] <= cut:
            self._scheduler.add(self._incoming.popleft()[1])

    def _listen(self, until: float | None) -> int | None:
        """Take messages until the clock says `until` (None: until one comes); an exit code ends the engine."""
        while not self._closed:
            left = None if until is None else max(0.0, (until - self._clock()) * self._scale)
            readable, _, _ = select.select([self._connection], [], [], left)
            if not readable:
                return None
            data = self._connection.recv(1 << 18)
            if not data:
                self._closed = True
                return None
            for message in self._unpacker.feed(data):
                status = self._handle(message)
                if status is not None:
                    return status
            if until is None:
                return None
        return None

    def _handle(self, message: Message) -> int | None:
        kind = message[0]
        if kind == "add":
            _, key, prompt, output, hashes = message
            sequence = Sequence(key, prompt, output, hashes)
            self._known[key] = sequence
            arrived = self._clock()
            self._arrived[key] = arrived
            self._incoming.append((arrived, sequence))
            self._received += 1
            return self._fault()
        if kind == "abort":
            gone = self._known.pop(message[1], None)
            if gone is not None:
                self._gone.append(gone)
        elif kind == "reset":
            send(self._connection, ("reset", self._scheduler.blocks.forget()))
        return None

    def _fault(self) -> int | None:
        """Faults that a request sets off."""
        faults = self._faults
        for name in ("oom-under-load", "dead-health", "engine-killed", "stuck"):
            if name in faults and self._received == int(faults[name].number):
                if name == "stuck":
                    _pause(self._connection, None)
                if name == "engine-killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "dead-health":
                    return self._die("RuntimeError: CUDA error: an illegal memory access was encountered")
                return self._die(
                    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 960.00 MiB. GPU 0 has a total "
                    f"capacity of {self._memory.total / 2**30:.2f} GiB of which 712.75 MiB is free."
                )
        return None

    def _die(self, error: str) -> int:
        self._log.errors("core.py:1340", ["EngineCore encountered a fatal error.", *crashes.traceback("step", error)])
        return 1

    def _report(self, step: Step, now: float) -> None:
        """Commit the step and tell the API server what came out."""
        scheduler = self._scheduler
        tokens = [sequence.key for sequence in scheduler.running if sequence.decoding]
        firsts = []
        for sequence in step.completing:
            key = sequence.key
            scheduled = self._scheduled.get(key, now)
            firsts.append((key, max(0, sequence.cached), scheduled - self._arrived.get(key, now), now - scheduled))
        finished = [sequence.key for sequence in scheduler.commit(step)]
        send(self._connection, ("step", now, firsts, tokens, finished, self._statistics(step.tokens)))
        for key in finished:
            gone = self._known.pop(key, None)
            if gone is None:
                self._gone = [sequence for sequence in self._gone if sequence.key != key]
            self._forget(key)

    def _statistics(self, tokens: int) -> tuple[float, ...]:
        """Running, waiting, KV usage, tokens of this step, and the totals of preemptions, queried and hit tokens."""
        scheduler = self._scheduler
        counters, blocks = scheduler.counters, scheduler.blocks
        return (
            len(scheduler.running),
            len(scheduler.waiting) + len(self._incoming),
            1.0 - blocks.free / blocks.total,
            tokens,
            counters.preemptions,
            counters.prefix_queries,
            counters.prefix_hits,
        )

    def _forget(self, key: int) -> None:
        self._arrived.pop(key, None)
        self._scheduled.pop(key, None)
