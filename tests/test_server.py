"""The server's life cycle on real processes: what is not ours is never taken for ready, and nothing is left behind."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuner.environment import IdleBaseline
from tuner.errors import EnvironmentFault, InputError
from tuner.ownership import Run, ServerEntry, remove_dead_runs
from tuner.ownership.processes import SHARED_MEMORY, look_up
from tuner.ownership.runs import marked
from tuner.server import FailureReason, Liveness, ReadyLimits, Server, ServerFailure, VllmInstall, find_vllm
from tuner.server import command as commands

FAKE = Path(__file__).parent / "fakes" / "fake_vllm.py"
LIMITS = ReadyLimits(silent_s=20, cap_s=40)

Make = Callable[..., Server]


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> VllmInstall:
    """The fake as an executable; on PATH it would be called `vllm`."""
    folder = tmp_path_factory.mktemp("fake")
    script = folder / "vllm"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return find_vllm(str(script), cache=folder / "cache")


@pytest.fixture
def make(install: VllmInstall, tmp_path: Path) -> Iterator[Make]:
    """Servers with oddities; whatever a test does, all are stopped and nothing of them may be left."""
    made: list[Server] = []

    def build(run: Run | None = None, **script: object) -> Server:
        server = Server(
            install,
            model="some/model",
            flags=("--max-num-seqs", "8"),
            log_path=tmp_path / f"server-{len(made)}.log",
            cache_root=tmp_path / "cache",
            extra_environment={"FAKE_VLLM": json.dumps(script)},
            run=run,
        )
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop(grace_s=1.0)
        assert marked([server._marker]) == set()
        assert segments([server._marker]) == []
        assert uncollected(server) == []
        assert not server.port or commands.port_free(server.port)


def segments(markers: list[str]) -> list[Path]:
    return [path for marker in markers for path in SHARED_MEMORY.glob(f"psm_{marker[:12]}*")]


def uncollected(server: Server) -> list[int]:
    """Zombies of this server that have become our children."""
    processes = server._state.watch.processes if server._state.watch else ()
    return [i.id.pid for p in processes if (i := look_up(p.pid)) and i.id == p and i.parent == os.getpid()]


def ready(server: Server) -> Server:
    server.launch()
    server.wait_ready(LIMITS)
    return server


# --- a good server -------------------------------------------------------------------------------------------------


def test_no_server_is_started_from_a_folder_that_is_gone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    server = make()
    with pytest.raises(EnvironmentFault, match="the folder in which `tune` was started is gone"):
        server.launch()
    assert server.pids == ()


def test_start_identify_control_stop(make: Make) -> None:
    server = ready(make())
    identity = server.identify()
    assert (identity.model, identity.max_model_len) == ("some/model", 1024)
    assert server.alive()
    assert len(server.pids) == 2
    assert server.port not in range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    server.control.reset_prefix_cache()
    assert server.control.detokenize("some/model", server.control.tokenize("some/model", "héllo")) == "héllo"
    temporary = server._temporary
    report = server.stop()
    assert report.clean
    assert report.requested
    assert (report.exit_code, report.signals) == (0, ("SIGTERM",))
    assert len(report.segments) == 1, "its engine's segment was left, and removed"
    assert temporary is not None
    assert not temporary.exists()
    assert server.liveness() is Liveness.STOPPED
    assert server.stop() is report, "stopping again changes nothing"


def test_environment_of_the_process(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    server = ready(make())
    entries = Path(f"/proc/{server.pids[0]}/environ").read_bytes().decode().split("\0")
    seen = dict(entry.split("=", 1) for entry in entries if entry)
    assert "VLLM_API_KEY" not in seen
    assert seen["VLLM_SERVER_DEV_MODE"] == "1"
    assert seen["VLLM_CACHE_ROOT"] == str(tmp_path / "cache")
    assert (seen["HF_TOKEN"], seen["HF_HUB_OFFLINE"]) == ("hf-secret", "1"), "the user's own settings reach the server"
    recorded = server.environment
    assert recorded["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "secret" not in json.dumps([dict(recorded), server.command])
    assert os.getsid(server.pids[0]) == os.getpgid(server.pids[0]) == server.pids[0] != os.getsid(0)


def test_a_refused_reset_is_no_reset(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.server.control._RESET_TRIES_S", 0.3)
    with pytest.raises(ServerFailure, match="refused"):
        ready(make(reset=False)).control.reset_prefix_cache()


def test_control_call_that_fails(make: Make) -> None:
    server = ready(make())
    with pytest.raises(ServerFailure, match="404"):
        server.control.metrics_text()
    server.stop()


# --- starts that go wrong ------------------------------------------------------------------------------------------


def test_dies_while_starting(make: Make) -> None:
    server = make(start_s=5, die_s=0.1, die_code=7)
    server.launch()
    with pytest.raises(ServerFailure, match="exit code 7") as caught:
        server.wait_ready(LIMITS)
    assert (caught.value.reason, caught.value.exit_code) == (FailureReason.EXITED, 7)
    report = server.stop()
    assert report.clean
    assert not report.requested, "it ended before it was asked"


def test_silent_start_is_a_hang(make: Make) -> None:
    server = make(start_s=60, quiet=True)
    server.launch()
    with pytest.raises(ServerFailure) as caught:
        server.wait_ready(ReadyLimits(silent_s=1.0, cap_s=30))
    assert caught.value.reason is FailureReason.SILENT


def test_repeating_that_it_waits_is_a_hang_too(make: Make) -> None:
    server = make(babble=True)
    server.launch()
    with pytest.raises(ServerFailure) as caught:
        server.wait_ready(ReadyLimits(silent_s=1.0, cap_s=30))
    assert caught.value.reason is FailureReason.SILENT


def test_slow_but_progressing_start_is_waited_for(make: Make) -> None:
    server = make(start_s=3.0)
    server.launch()
    assert server.wait_ready(ReadyLimits(silent_s=1.5, cap_s=30)) > 2.5


def test_progress_does_not_help_for_ever(make: Make) -> None:
    server = make(start_s=60)
    server.launch()
    with pytest.raises(ServerFailure) as caught:
        server.wait_ready(ReadyLimits(silent_s=20, cap_s=1.0))
    assert caught.value.reason is FailureReason.TIMEOUT


def test_foreign_server_on_the_port(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Foreign) as foreign:
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        monkeypatch.setattr(commands, "free_port", lambda: foreign.server_port)
        server = make(start_s=30)
        server.launch()
        with pytest.raises(ServerFailure, match=f"pid {os.getpid()}") as caught:
            server.wait_ready(LIMITS)
        assert caught.value.reason is FailureReason.FOREIGN
        report = server.stop(settle_s=0.5)
        assert report.leftovers == (f"port {foreign.server_port}",), "the port is not free, and that is said"
        foreign.shutdown()


def test_wrong_model(make: Make) -> None:
    server = ready(make(model="other/model"))
    with pytest.raises(ServerFailure, match="serves other/model where some/model was asked for") as caught:
        server.identify()
    assert caught.value.reason is FailureReason.WRONG_MODEL


def test_stop_from_another_thread_ends_the_wait(make: Make) -> None:
    server = make(start_s=60)
    server.launch()
    threading.Timer(0.5, server.stop).start()
    with pytest.raises(ServerFailure) as caught:
        server.wait_ready(LIMITS)
    assert caught.value.reason is FailureReason.STOPPED
    assert server.stop().clean
    with pytest.raises(ValueError, match="once"):
        server.launch()


def test_stopped_before_launch(make: Make) -> None:
    server = make()
    assert server.stop().clean
    with pytest.raises(ServerFailure):
        server.launch()


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "signals", "exit_code"),
    [
        ("ignore", ("SIGTERM", "SIGTERM", "SIGKILL"), -signal.SIGKILL),
        ("swallow-first", ("SIGTERM", "SIGTERM"), 0),
    ],
)
@pytest.mark.parametrize("when", ["starting", "ready"])
def test_sigterm_that_does_not_work(make: Make, term: str, signals: tuple[str, ...], exit_code: int, when: str) -> None:
    server = make(term=term, start_s=0.2 if when == "ready" else 60)
    server.launch()
    if when == "ready":
        server.wait_ready(LIMITS)
    else:
        wait_until(lambda: "loading step" in server.log_path.read_text())
    report = server.stop(grace_s=1.5)
    assert (report.signals, report.exit_code) == (signals, exit_code)
    assert report.clean


def test_no_grace_kills_at_once(make: Make) -> None:
    server = ready(make(term="ignore"))
    report = server.stop(grace_s=0)
    assert report.signals == ("SIGKILL",)
    assert report.stop_s < 5
    assert report.clean


def test_dead_children_that_a_killed_main_leaves_to_us_are_collected(make: Make) -> None:
    server = ready(make())
    os.kill(server.pids[1], signal.SIGKILL)
    wait_until(lambda: not server.alive())  # a zombie now, and still its parent's
    server.stop(grace_s=0)
    assert uncollected(server) == []


def test_hurry_cuts_a_stop_short(install: VllmInstall, tmp_path: Path) -> None:
    hurry = threading.Event()
    server = Server(
        install,
        model="m",
        log_path=tmp_path / "log",
        cache_root=tmp_path,
        extra_environment={"FAKE_VLLM": '{"term": "ignore", "start_s": 60}'},
        hurry=hurry,
    )
    with server:
        server.launch()
        wait_until(lambda: "loading step" in server.log_path.read_text())
        threading.Timer(0.5, hurry.set).start()
        report = server.stop(grace_s=200)
    assert report.stop_s < 60
    assert report.exit_code == -signal.SIGKILL
    assert report.clean


def test_hurry_cuts_the_wait_for_gpu_memory_short(
    install: VllmInstall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(baseline: IdleBaseline, *, timeout_s: float) -> tuple[str, ...]:
        time.sleep(timeout_s)
        return ("GPU 0: 30 GiB above its idle baseline",)

    monkeypatch.setattr("tuner.server.process.wait_idle", never)
    hurry = threading.Event()
    idle = IdleBaseline({0: 0}, {0: 140 << 30})
    server = Server(install, model="m", log_path=tmp_path / "log", cache_root=tmp_path, baseline=idle, hurry=hurry)
    server.launch()
    threading.Timer(0.5, hurry.set).start()
    report = server.stop(grace_s=0)
    assert report.settle_s < 20
    assert report.leftovers == ("GPU 0: 30 GiB above its idle baseline",)


def test_exit_that_nobody_asked_for_is_a_failure_whatever_its_code(make: Make) -> None:
    server = ready(make(leave_s=0.2))
    wait_until(lambda: server.exit_code is not None)
    assert server.exit_code == 0
    assert server.liveness() is Liveness.MAIN_DEAD
    assert not server.stop().requested


def test_main_killed_leaves_an_engine_that_is_found(make: Make) -> None:
    server = ready(make(orphan_engine=True))
    main, engine = server.pids
    os.kill(main, signal.SIGKILL)
    wait_until(lambda: server.exit_code is not None)
    assert server.liveness() is Liveness.MAIN_DEAD
    assert look_up(engine) is not None, "the engine outlives it"
    report = server.stop()
    assert report.killed == (engine,)
    assert report.clean
    assert look_up(engine) is None


def test_engine_dead_behind_a_healthy_server(make: Make) -> None:
    server = ready(make())
    os.kill(server.pids[1], signal.SIGKILL)
    wait_until(lambda: not server.alive())
    assert server.liveness() is Liveness.ENGINE_DEAD
    assert server.control.healthy()


@pytest.mark.parametrize("which", [0, 1])
def test_suspended_process_is_seen_and_stopped(make: Make, which: int) -> None:
    server = ready(make())
    os.kill(server.pids[which], signal.SIGSTOP)
    wait_until(lambda: server.liveness() is Liveness.SUSPENDED)
    report = server.stop(grace_s=2)
    assert report.clean


def test_runaway_grandchild_is_found(make: Make) -> None:
    server = ready(make(escape=True))
    wait_until(lambda: len(server.pids) == 3)
    runaway = max(server.pids)
    assert os.getsid(runaway) != server.pids[0]
    report = server.stop()
    assert runaway in report.killed
    assert len(report.segments) == 2
    assert report.clean


def test_only_our_segments_are_removed(make: Make) -> None:
    before = SHARED_MEMORY / f"psm_before{os.getpid()}"
    during = SHARED_MEMORY / f"psm_during{os.getpid()}"
    try:
        before.write_bytes(b"x")
        server = ready(make())
        during.write_bytes(b"x")
        time.sleep(0.6)
        assert len(server.stop().segments) == 1
        assert before.exists()
        assert during.exists()
    finally:
        before.unlink(missing_ok=True)
        during.unlink(missing_ok=True)


def test_leaving_the_context_stops(make: Make) -> None:
    with pytest.raises(KeyError), make() as server:  # noqa: PT012
        server.launch()
        raise KeyError
    assert server.liveness() is Liveness.STOPPED


# --- the tuner itself ends -----------------------------------------------------------------------------------------

TUNER = """
import json, signal, sys, time
from pathlib import Path
from tuner.errors import EnvironmentFault, InputError
from tuner.ownership import Run, ServerEntry, remove_dead_runs
from tuner.server import Server, find_vllm

class Stop(BaseException): pass
def stop(*_): raise Stop
signal.signal(signal.SIGTERM, stop)
executable, folder, script, mode = sys.argv[1:]
install = find_vllm(executable, cache=Path(folder) / "cache")
with Run("study-x", Path(folder), Path(folder) / "registry") as run:
    server = Server(install, model="m", log_path=Path(folder) / "server.log", cache_root=Path(folder) / "c",
                    extra_environment={"FAKE_VLLM": script}, run=run)
    if mode == "context":
        with server:
            server.launch()
            print("launched", flush=True)
            server.wait_ready()
            print("ready", flush=True)
            time.sleep(60)
    else:
        server.launch()
        print("launched", flush=True)
        server.wait_ready()
        print("ready", flush=True)
        if mode == "sleep":
            time.sleep(60)
"""


@pytest.fixture
def tuner(install: VllmInstall, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(mode: str, until: str, **script: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TUNER), install.path, str(tmp_path), json.dumps(script), mode],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[1],
        )
        started.append(process)
        assert process.stdout is not None
        while (line := process.stdout.readline().strip()) != until:
            assert line, "the tuner ended"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("until", ["launched", "ready"])
@pytest.mark.parametrize("delay_s", [0.0, 0.15])
def test_signal_that_raises_leaves_nothing(
    tuner: Callable[..., subprocess.Popen[str]], tmp_path: Path, until: str, delay_s: float
) -> None:
    process = tuner("context", until, escape=True, term="swallow-first")
    time.sleep(delay_s)
    mark = servers_of(tmp_path)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # the second one, while it is stopping
    process.wait(30)
    assert marked(mark) == set()
    assert segments(mark) == []
    assert not (tmp_path / "run.json").exists()


def test_end_without_stop_leaves_nothing(tuner: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = tuner("fall-through", "ready", orphan_engine=True)
    assert process.wait(30) == 0
    assert (tmp_path / "registry").exists()
    assert list((tmp_path / "registry").iterdir()) == [], "removed only when nothing is left"


@pytest.mark.parametrize("until", ["launched", "ready"])
def test_next_start_removes_what_a_killed_tuner_left(
    tuner: Callable[..., subprocess.Popen[str]], tmp_path: Path, until: str
) -> None:
    process = tuner("context", until, orphan_engine=True, escape=True, term="ignore")
    mark = servers_of(tmp_path)
    registry = tmp_path / "registry"
    assert remove_dead_runs(registry=registry) == (), "its tuner is alive"
    process.kill()
    process.wait()
    left = marked(mark)
    assert left
    (report,) = remove_dead_runs([tmp_path], registry)
    assert len(report.processes) >= len(left)
    assert report.study == "study-x"
    assert marked(mark) == set()
    assert segments(mark) == []
    assert list(registry.iterdir()) == []
    assert not (tmp_path / "run.json").exists()


def servers_of(folder: Path) -> list[str]:
    return [server["marker"] for server in json.loads((folder / "run.json").read_text())["servers"]]


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_run_file_that_cannot_be_written_does_not_end_the_account(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("night-7", registry=tmp_path / "registry")
    server = make(run=run)
    put = run.put

    def refuse(entry: ServerEntry) -> None:
        if entry.processes:
            raise InputError(where="run.json", field="path", value="", rule="cannot be used", remedy="Name another.")
        put(entry)

    monkeypatch.setattr(run, "put", refuse)
    ready(server)
    assert len(server.pids) == 2
    assert server.stop().clean
