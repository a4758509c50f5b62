"""The life cycle on a real vLLM: whatever is killed, and whenever, no process, port, segment or file stays behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuner.environment import facts
from tuner.ownership.processes import SHARED_MEMORY, ProcessInfo, running, table
from tuner.ownership.runs import marked
from tuner.server import Liveness, ReadyLimits, Server, VllmInstall, find_vllm
from tuner.server import command as commands

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--load-format", "dummy", "--max-model-len", "1024", "--enforce-eager", "--kv-cache-memory-bytes", "64M")
LIMITS = ReadyLimits(silent_s=120, cap_s=240)


@pytest.fixture(scope="module")
def install(vllm_executable: Path) -> VllmInstall:
    return find_vllm(str(vllm_executable))


@pytest.fixture
def server(install: VllmInstall, tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    made = Server(install, model=str(tiny_model), flags=FLAGS, log_path=tmp_path / "server.log")
    made.launch()
    yield made
    made.stop()
    assert_nothing_left(made)


def assert_nothing_left(server: Server) -> None:
    watch = server._state.watch
    assert watch is not None
    assert marked([server._marker]) == set()
    assert [process for process in watch.processes if running(process)] == []
    # Reaped, too: zombies of this server. Those that servers of other tests have left to us are not its business.
    assert [info.id for info in table().values() if info.parent == os.getpid() and info.id in watch.processes] == []
    assert commands.port_free(server.port)
    assert [one.name for one in watch.segments if (SHARED_MEMORY / one.name).exists()] == []
    assert server._temporary is not None
    assert not server._temporary.exists()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_start_identify_stop(server: Server, install: VllmInstall, tiny_model: Path) -> None:
    """And the engine, killed behind a healthy server at the end, is missed."""
    assert (install.device, install.simulated) == ("cpu", False)
    assert facts(install, ()).vllm_version == install.version
    server.wait_ready(LIMITS)
    identity = server.identify()
    assert (identity.model, identity.max_model_len) == (str(tiny_model), 1024)
    assert identity.effective["max-num-batched-tokens"] == 2048
    assert identity.startup["kv_tokens"] > 0
    server.control.reset_prefix_cache()
    tokens = server.control.tokenize(identity.model, "hello world")
    assert server.control.detokenize(identity.model, tokens) == "hello world"
    assert "vllm:num_requests_running" in server.control.metrics_text()
    assert len(rings(server)) == 2
    engines = server._state.engines
    assert len(engines) == 2, "the engine core and its worker"
    assert server.alive()
    os.kill(min(engines).pid, signal.SIGSTOP)
    wait_until(lambda: server.liveness() is Liveness.SUSPENDED, 10)
    os.kill(min(engines).pid, signal.SIGKILL)
    wait_until(lambda: server.liveness() in (Liveness.ENGINE_DEAD, Liveness.MAIN_DEAD), 10)
    assert server.stop().clean


def test_main_killed_leaves_an_engine_that_is_removed(server: Server) -> None:
    server.wait_ready(LIMITS)
    engines = server._state.engines
    os.kill(server.pids[0], signal.SIGKILL)
    wait_until(lambda: server.liveness() is Liveness.MAIN_DEAD, 10)
    time.sleep(1)
    assert all(running(engine) for engine in engines), "vllm#55510: they outlive it and hold the memory"
    report = server.stop()
    assert report.clean
    assert not report.requested
    assert {engine.pid for engine in engines} <= set(report.killed)
    assert len(report.segments) == 2


@pytest.mark.parametrize("moment", ["first line", "engine", "segments"])
def test_stop_during_start(server: Server, moment: str) -> None:
    """vLLM's own SIGTERM handling is unreliable here: it may die, hang or swallow it."""
    reached: dict[str, Callable[[], bool]] = {
        "first line": lambda: "non-default args" in server.log_path.read_text(errors="replace"),
        "engine": lambda: any(info.name.startswith("VLLM::Engine") for info in alive(server)),
        "segments": lambda: len(rings(server)) == 2,
    }
    wait_until(reached[moment], 120)
    report = server.stop(grace_s=6)
    assert report.requested
    assert report.clean


def rings(server: Server) -> list[str]:
    """Segments between engine and workers (semaphores come and go while it starts)."""
    watch = server._state.watch
    assert watch is not None
    return [segment.name for segment in watch.segments if segment.name.startswith("psm_")]


def alive(server: Server) -> list[ProcessInfo]:
    watch = server._state.watch
    assert watch is not None
    return [info for process in watch.processes if (info := running(process))]
