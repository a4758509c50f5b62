"""One `vllm serve`, from launch to settled: ready only when it is ours, stopped only when nothing is left."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from tuner.environment import IdleBaseline, wait_idle
from tuner.errors import EnvironmentFault
from tuner.ownership import ProcessId, Run, ServerEntry
from tuner.ownership.processes import look_up, present_segments, remove_segments, running, send
from tuner.ownership.runs import kill_all, new_temporary, remove_temporary
from tuner.records import KnobValue
from tuner.serve_args import effective_values, startup_facts
from tuner.server import command as commands
from tuner.server.control import Control
from tuner.server.failure import FailureReason, ServerFailure
from tuner.server.install import VllmInstall
from tuner.server.ready import READY_LIMITS, Progress, ReadyLimits
from tuner.server.watch import Watch

_POLL_S = 0.1  # of /health while starting
_STOP_POLL_S = 0.02
_SETTLE_S = 60.0
_IDLE_SLICE_S = 0.5  # of waiting for GPU memory, between which hurry is seen
_FIRST_GRACE_SHARE = 0.4
_KILL_S = 10.0  # a killed process may have tens of GiB to give back
_LINGER_S = 3.0  # helpers that end by themselves shortly after the main process


class Liveness(StrEnum):
    """What the process table says about a server; token progress is for `telemetry` to see."""

    ALIVE = "alive"
    MAIN_DEAD = "main-dead"
    ENGINE_DEAD = "engine-dead"  # /health may go on saying 200
    SUSPENDED = "suspended"  # SIGSTOP: the server or an engine of it is not running
    STOPPED = "stopped"  # by us, or not started


@dataclass(frozen=True, slots=True)
class Identity:
    """Proof of what is being measured."""

    model: str  # the id that requests must name
    max_model_len: int | None
    effective: Mapping[str, KnobValue]
    startup: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a server went."""

    requested: bool  # it still ran when it was asked to stop; False: it had ended by itself, which is a failure
    exit_code: int | None  # negative: the signal that ended it
    signals: tuple[str, ...]  # what had to be sent
    stop_s: float  # until every process was gone
    settle_s: float  # until port and GPU memory were free as well
    killed: tuple[int, ...] = ()  # pids that only SIGKILL removed
    segments: tuple[str, ...] = ()  # shared-memory segments that it left and we removed
    leftovers: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Nothing is left on the machine."""
        return not self.leftovers


@dataclass
class _State:
    watch: Watch | None = None
    engines: frozenset[ProcessId] = frozenset()
    report: StopReport | None = None
    stopping: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Ending:
    requested: bool = False
    signals: list[str] = field(default_factory=list)
    killed: set[ProcessId] = field(default_factory=set)
    segments: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()


class Server:
    """One server. A context manager: leaving it stops the server, whatever happened inside.

    `flags` come from `serve_args.to_argv`. `gpus` are NVML indices (None: whatever CUDA finds; right for a CPU build).
    `run` is told of everything that is started, `baseline` says when GPU memory is free again; once `hurry` is set, a
    stop under way waits for nothing any more. Methods may be called from several threads; `stop` may be called at any
    moment, any number of times.
    """

    def __init__(
        self,
        install: VllmInstall,
        *,
        model: str,
        flags: Sequence[str] = (),
        log_path: Path,
        gpus: Sequence[int] | None = None,
        cache_root: Path | None = None,
        extra_environment: Mapping[str, str] = {},
        served_name: str | None = None,
        run: Run | None = None,
        baseline: IdleBaseline | None = None,
        hurry: threading.Event | None = None,
    ) -> None:
        self._install, self._model, self._flags = install, model, tuple(flags)
        self._gpus = None if gpus is None else tuple(gpus)
        self._cache_root = cache_root or commands.cache_root(install, model, str(self._gpus))
        self._extra, self._served_name = dict(extra_environment), served_name
        self._run, self._baseline, self._hurry = run, baseline, hurry or threading.Event()
        self._marker = uuid.uuid4().hex
        self._state = _State()
        self._stop_lock = threading.RLock()
        self._control: Control | None = None
        self._temporary: Path | None = None
        self._owner = os.getpid()
        self.log_path = log_path
        self.port = 0
        self.command: tuple[str, ...] = ()

    # --- launch ------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process; returns at once. EnvironmentFault when it cannot even be started."""
        with self._stop_lock:
            if self._state.watch is not None:
                raise ValueError("a Server is launched once; make another one for a fresh process")
            if self._state.stopping.is_set():
                raise ServerFailure(FailureReason.STOPPED, "stopped before it was launched")
            self._launch()

    def _launch(self) -> None:
        self.port = commands.free_port()
        try:
            os.getcwd()  # the server inherits it, and a Python without one does not start
        except OSError as error:
            raise EnvironmentFault(
                "the folder in which `tune` was started is gone. Start it again, with --resume, in one that stays."
            ) from error
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._cache_root.mkdir(parents=True, exist_ok=True)
            self._temporary = new_temporary()
        except OSError as error:
            raise EnvironmentFault(
                f"{error.filename}: cannot be made ({error.strerror}). Free space, or choose another --out."
            ) from error
        words = commands.command(self._install, self._model, self._flags, self.port)
        self.command = commands.redacted(words)
        environment = commands.environment(
            os.environ,
            marker=self._marker,
            gpus=self._gpus,
            cache_root=self._cache_root,
            temporary=self._temporary,
            extra=self._extra,
        )
        entry = ServerEntry(self._marker, self.port, self._gpus or (), str(self._temporary))
        if self._run is not None:
            self._run.put(entry)  # before anything runs: the marker alone is enough to find it
        self._state.watch = Watch(entry, self._run)
        self._control = Control(self.base_url)
        _live.add(self)
        try:
            self._state.watch.start(words, environment, self.log_path)
        except OSError as error:
            self.stop()
            raise EnvironmentFault(f"{words[0]}: cannot be started ({error.strerror}). Check --vllm.") from error

    @property
    def base_url(self) -> str:
        return f"http://{commands.HOST}:{self.port}"

    @property
    def control(self) -> Control:
        """Calls that steer the server."""
        assert self._control is not None, "control follows launch"
        return self._control

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that change how this server runs, for the record; without secrets."""
        return commands.telling_environment({**commands.users_environment(os.environ), **self._extra})

    @property
    def pids(self) -> tuple[int, ...]:
        """The main process first, then whatever else of it runs now."""
        main = self._main
        if main is None:
            return ()
        assert self._state.watch is not None
        others = sorted(process.pid for process in self._state.watch.processes if running(process))
        return (main.pid, *(pid for pid in others if pid != main.pid))

    @property
    def exit_code(self) -> int | None:
        """None while the main process runs. Any code, 0 too, is a failure unless `stop` was called before."""
        return None if self._main is None else self._main.poll()

    # --- ready -------------------------------------------------------------------------------------------------

    def wait_ready(self, limits: ReadyLimits = READY_LIMITS) -> float:
        """Block until the server answers and is ours; seconds since the call.

        ServerFailure: it exited, fell silent, took too long, somebody else answers on the port, or stop was called.
        """
        started = time.monotonic()
        progress = Progress(self.log_path, started)
        while True:
            exit_code, now = self.exit_code, time.monotonic()
            if self._state.stopping.is_set():
                raise ServerFailure(FailureReason.STOPPED, "stopped before it was ready", exit_code)
            if exit_code is not None:
                message = f"ended with exit code {exit_code} after {now - started:.1f} s, before it was ready"
                raise ServerFailure(FailureReason.EXITED, message, exit_code)
            if self.control.healthy():
                self._check_port()
                self._arrive()
                return time.monotonic() - started
            failure = limits.judge(now - started, progress.silent_s(now))
            if failure is not None:
                raise failure
            self._state.stopping.wait(_POLL_S)

    def identify(self) -> Identity:
        """What the server says it is; ServerFailure when that is not what was launched."""
        wanted = self._served_name or self._model
        models = {model.id: model for model in self.control.models()}
        if wanted not in models:
            found = ", ".join(models) or "nothing"
            raise ServerFailure(FailureReason.WRONG_MODEL, f"serves {found} where {wanted} was asked for")
        log = self.log_path.read_text(errors="replace")
        return Identity(wanted, models[wanted].max_model_len, effective_values(log), startup_facts(log))

    def liveness(self) -> Liveness:
        """From the process table alone."""
        watch, main = self._state.watch, self._main
        if watch is None or main is None or self._state.stopping.is_set():
            return Liveness.STOPPED
        if main.poll() is not None:
            return Liveness.MAIN_DEAD
        engines = [running(process) for process in self._state.engines]
        if None in engines:
            return Liveness.ENGINE_DEAD
        if any(info is not None and info.state in "Tt" for info in (look_up(main.pid), *engines)):
            return Liveness.SUSPENDED
        return Liveness.ALIVE

    def alive(self) -> bool:
        return self.liveness() is Liveness.ALIVE

    def _check_port(self) -> None:
        """ServerFailure unless every listener that could answer on our address is ours."""
        assert self._state.watch is not None
        self._state.watch.scan()
        ours = {process.pid for process in self._state.watch.processes}
        listening = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == self.port
            and connection.laddr.ip in (commands.HOST, "0.0.0.0", "::", f"::ffff:{commands.HOST}")
        ]
        foreign = [connection.pid for connection in listening if connection.pid not in ours]
        if foreign or not listening:
            who = ", ".join(f"pid {pid}" if pid else "another user's process" for pid in foreign) or "nobody we can see"
            raise ServerFailure(FailureReason.FOREIGN, f"port {self.port} is answered by {who}, not by our server")

    def _arrive(self) -> None:
        assert self._state.watch is not None
        self._state.engines = self._state.watch.engines()
        self._state.watch.serving()

    # --- stop --------------------------------------------------------------------------------------------------

    def stop(self, *, grace_s: float = 25.0, settle_s: float = _SETTLE_S) -> StopReport:
        """End the server and everything that came from it; idempotent.

        SIGTERM, again after 40 % of `grace_s` (one during start-up can be swallowed), SIGKILL after all of it.
        `grace_s=0` kills at once. An exception from a signal handler meanwhile turns it into a kill and goes on.
        """
        with self._stop_lock:
            self._state.stopping.set()
            if self._state.report is None:
                self._state.report = self._stop(grace_s, settle_s)
                _live.discard(self)
            return self._state.report

    def _stop(self, grace_s: float, settle_s: float) -> StopReport:
        started = time.monotonic()
        ending = _Ending()
        try:
            self._ask_to_end(ending, grace_s)
        finally:
            self._sweep(ending)  # also on the way out of an interrupted wait: nothing may stay behind
        stopped = time.monotonic()
        leftovers = (*ending.leftovers, *self._settle(settle_s))
        if self._run is not None and not leftovers:
            self._run.forget(self._marker)
        return StopReport(
            requested=ending.requested,
            exit_code=self.exit_code,
            signals=tuple(ending.signals),
            stop_s=stopped - started,
            settle_s=time.monotonic() - stopped,
            killed=tuple(sorted(process.pid for process in ending.killed)),
            segments=ending.segments,
            leftovers=leftovers,
        )

    def _ask_to_end(self, ending: _Ending, grace_s: float) -> None:
        """SIGTERM, twice if need be, within `grace_s`; then a moment for helpers that follow the main process."""
        watch, main = self._state.watch, self._main
        if watch is None or main is None or main.poll() is not None:
            return
        ending.requested = True
        watch.scan()  # while its processes can still be asked what is theirs
        for share in (_FIRST_GRACE_SHARE, 1 - _FIRST_GRACE_SHARE) if grace_s > 0 else ():
            main.send_signal(signal.SIGTERM)
            ending.signals.append("SIGTERM")
            for process in watch.processes:
                send(process, signal.SIGCONT)  # a suspended process sleeps through a SIGTERM
            if self._wait(lambda: main.poll() is not None, grace_s * share):
                self._wait(lambda: not any(map(running, watch.processes)), _LINGER_S)
                return

    def _sweep(self, ending: _Ending) -> None:
        """SIGKILL to whatever still runs, and away with what it made."""
        watch, main = self._state.watch, self._main
        if watch is not None and main is not None:
            watch.scan()
            if main.poll() is None:
                ending.signals.append("SIGKILL")
                main.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(_KILL_S)  # first: only then are its ended children ours to collect
            others = {process for process in watch.processes if process.pid != main.pid}
            ending.killed, stuck = kill_all(others, [self._marker], reap_except=main.pid)
            watch.stop()
            ending.segments = remove_segments(watch.segments)
            left = [f"process {process.pid}" for process in stuck]
            left += [f"process {main.pid}"] if main.poll() is None else []
            left += [f"/dev/shm/{segment.name}" for segment in watch.segments & present_segments()]
            ending.leftovers = tuple(sorted(left))
        if self._temporary is not None:
            remove_temporary(str(self._temporary))
        if self._control is not None:
            self._control.close()

    def _settle(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until the port is free and GPU memory is back at the baseline; what is not."""
        deadline = time.monotonic() + timeout_s
        free = not self.port or self._wait(lambda: commands.port_free(self.port), timeout_s)
        taken = () if free else (f"port {self.port}",)
        if self._baseline is None:
            return taken
        while True:
            left_s = 0.0 if self._hurry.is_set() else deadline - time.monotonic()
            held = wait_idle(self._baseline, timeout_s=max(0.0, min(left_s, _IDLE_SLICE_S)))
            if not held or left_s <= 0:
                return taken + held

    def _wait(self, ended: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it came true within the time, which hurry cuts short."""
        deadline = time.monotonic() + timeout_s
        while not ended():
            if time.monotonic() >= deadline or self._hurry.wait(_STOP_POLL_S):
                return ended()
        return True

    @property
    def _main(self) -> subprocess.Popen[bytes] | None:
        watch = self._state.watch
        return watch.process if watch is not None and watch.launched() else None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner:  # not in a forked child
            self.stop(grace_s=2.0, settle_s=0.0)


_live: set[Server] = set()  # holds them: a server that nobody refers to any more still runs


@atexit.register
def _stop_all() -> None:
    for server in list(_live):
        server._stop_at_exit()
