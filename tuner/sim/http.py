"""Owns the command `vllm-sim` and the life of its processes: API server, engines, signals; it answers no request."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import uvloop

from tuner.errors import InputError
from tuner.sim import crashes, startup
from tuner.sim.api import ApiServer
from tuner.sim.faults import Fault
from tuner.sim.flags import Arguments, help_text, parse
from tuner.sim.live import engine_main
from tuner.sim.memory import found_by_engine, starts
from tuner.sim.options import Options, read_options
from tuner.sim.profile import Effective, knob_values, resolve
from tuner.sim.web import Connection
from tuner.sim.wire import Log, Unpacker

USAGE = "usage: vllm [-h] [-v] {serve} ..."
STATISTICS_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """`vllm-sim --version`, `vllm-sim serve --help=all`, `vllm-sim serve MODEL [flags]`; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = read_options(os.environ)
    except InputError as error:
        print(f"vllm-sim: {error}", file=sys.stderr)
        return int(error.exit_code)
    if words[:1] in (["--version"], ["-v"]):
        print(options.version)
        return 0
    if words[:1] != ["serve"]:
        print(f"{USAGE}\nvllm: error: argument subcommand: invalid choice: {words[:1]}", file=sys.stderr)
        return 2
    if any(word.startswith("--help") or word == "-h" for word in words):
        print(help_text())
        return 0
    return _serve(parse(words[1:]), options)


def _serve(arguments: Arguments, options: Options) -> int:
    effective = resolve(options.profile, arguments.given)
    values = knob_values(effective)
    live = tuple(fault for fault in options.faults if fault.applies(values))
    options = replace(options, faults=live)
    crash = next((crashes.START_CRASHES[fault.argument] for fault in live if fault.name == "start"), None)
    if crash is not None and crash.process == "argparse":
        print(f"{USAGE}\nvllm: error: {crash.error}", file=sys.stderr)
        return crash.exit_code
    _signals(live)
    log = Log("APIServer")
    log.lines(startup.banner(arguments, options.version))
    time.sleep(0.1 * options.start_s)
    log.lines(startup.configured(options.profile, effective))
    failure = starts(options.profile, arguments.given)
    if crash is not None and crash.process == "api":
        return _refuse(log, crash.error)
    if failure is not None and not found_by_engine(failure):
        return _refuse(log, crashes.validation(failure.cause))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((arguments.host, arguments.port))
    except OSError as error:
        return _refuse(log, f"OSError: [Errno {error.errno}] {os.strerror(error.errno or 0)}")
    if any(fault.name == "orphan" for fault in live):
        _leave_orphan()
    engines = [_fork(arguments, options, effective, rank, listener) for rank in range(effective.data)]
    if not all(_ready(connection) for _, connection in engines):
        for pid, _ in engines:
            _end(pid)
        return _refuse(log, crashes.ENGINE_START_FAILED)
    return uvloop.run(_run(arguments, options, effective, engines, listener, log))


def _refuse(log: Log, error: str) -> int:
    for line in crashes.traceback("api", error):
        log.raw(line)
    return 1


def _signals(faults: Sequence[Fault]) -> None:
    """What SIGTERM does until the server runs."""
    names = {fault.name for fault in faults}
    if "ignore-sigterm" in names:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif "swallow-sigterm" in names:
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _fork(
    arguments: Arguments, options: Options, effective: Effective, rank: int, listener: socket.socket
) -> tuple[int, socket.socket]:
    """One engine in a process of its own; forked before there is an event loop."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    listener.close()
    status = 1
    try:
        status = engine_main(theirs, arguments, options, effective, rank, 0.85 * options.start_s)
    finally:
        os._exit(status)


def _ready(connection: socket.socket) -> bool:
    """Wait for the engine's first message."""
    unpacker = Unpacker()
    while True:
        data = connection.recv(1 << 16)
        if not data:
            return False
        for message in unpacker.feed(data):
            return bool(message[0] == "ready")


def _end(pid: int) -> None:
    """SIGTERM, a moment, SIGKILL; and no zombie."""
    for wait_s, sign in ((2.0, signal.SIGTERM), (None, signal.SIGKILL)):
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            return
        until = None if wait_s is None else time.monotonic() + wait_s
        while until is None or time.monotonic() < until:
            try:
                done, _ = os.waitpid(pid, 0 if until is None else os.WNOHANG)
            except ChildProcessError:
                return
            if done:
                return
            time.sleep(0.01)


def _leave_orphan() -> None:
    """A process that outlives the server: own session, a shared-memory segment, a listening port."""
    code = (
        "import multiprocessing.shared_memory as m, multiprocessing.resource_tracker as t, socket, time\n"
        "s = m.SharedMemory(create=True, size=1 << 20)\n"
        "t.unregister(s._name, 'shared_memory')\n"
        "p = socket.create_server(('127.0.0.1', 0))\n"
        "time.sleep(600)\n"
    )
    subprocess.Popen(
        [sys.executable, "-c", code],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


async def _run(
    arguments: Arguments,
    options: Options,
    effective: Effective,
    engines: Sequence[tuple[int, socket.socket]],
    listener: socket.socket,
    log: Log,
) -> int:
    """Serve until SIGTERM, SIGINT or the death of an engine; exit code 0 in every case, as vLLM's."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    names = {fault.name for fault in options.faults}
    server = ApiServer(arguments, options, effective, [connection for _, connection in engines], log)
    await server.connect()
    _stop_on_signals(loop, stop, names)
    opened: set[Connection] = set()
    access = None if _quiet(arguments) else log.raw
    http = await loop.create_server(partial(Connection, server, opened, access), sock=listener, backlog=2048)
    log.lines(startup.serving(arguments))
    log.raw(f"INFO:     Started server process [{os.getpid()}]")
    log.raw("INFO:     Waiting for application startup.")
    log.raw("INFO:     Application startup complete.")
    tasks: list[asyncio.Task[bool] | asyncio.Task[None]] = [asyncio.create_task(stop.wait())]
    if "dead-health" not in names:
        tasks.append(asyncio.create_task(server.died.wait()))
    if not arguments.given.get("disable-log-stats", False):
        tasks.append(asyncio.create_task(_statistics(server, log)))
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if stop.is_set():
        log.write("INFO", "launcher.py:254", "[shutdown] API server: shutdown triggered")
    else:
        await asyncio.sleep(0.05)  # the errors reach their clients
    http.close()
    for connection in list(opened):
        connection.close()
    await asyncio.sleep(0.01)
    server.stopping = True
    if "engine-survives" not in names:
        for pid, _ in engines:
            _end(pid)
    log.write("INFO", "core_client.py:777", "[shutdown] MPClient: complete")
    log.raw("INFO:     Shutting down")
    log.raw("INFO:     Application shutdown complete.")
    return 0


def _stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, faults: set[str]) -> None:
    def again() -> None:
        loop.add_signal_handler(signal.SIGTERM, stop.set)

    loop.add_signal_handler(signal.SIGINT, stop.set)
    if "ignore-sigterm" in faults:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
    elif "swallow-sigterm" in faults:
        loop.add_signal_handler(signal.SIGTERM, again)
    else:
        again()


def _quiet(arguments: Arguments) -> bool:
    given = arguments.given
    return bool(given.get("disable-uvicorn-access-log", False)) or given.get("uvicorn-log-level", "info") != "info"


async def _statistics(server: ApiServer, log: Log) -> None:
    """vLLM's line every ten seconds."""
    before = server.totals()
    while True:
        await asyncio.sleep(STATISTICS_S)
        now = server.totals()
        prompt, generated = ((a - b) / STATISTICS_S for a, b in zip(now, before, strict=True))
        if prompt or generated:
            running, waiting, usage = server.state()
            log.write(
                "INFO",
                "loggers.py:310",
                f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generated:.1f} "
                f"tokens/s, Running: {running:.0f} reqs, Waiting: {waiting:.0f} reqs, GPU KV cache usage: "
                f"{100 * usage:.1f}%, Prefix cache hit rate: 0.0%",
            )
        before = now


if __name__ == "__main__":
    sys.exit(main())
