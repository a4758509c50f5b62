"""The fault campaign's own eyes: what it draws, what it finds left behind, and when it calls a verdict wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import scene as scene_room
from benchmarks.chaos.campaign import Outcome, _finished, _wrong
from benchmarks.chaos.faults import KINDS, Undisturbed, draw, hit
from benchmarks.chaos.scene import MARK, Scene
from benchmarks.chaos.table import line, table
from benchmarks.chaos.target import TRUTHS
from tests.simulated_study import shared_study
from tuner.environment import IdleBaseline
from tuner.finish import Decision
from tuner.ownership.processes import ProcessId, look_up

CLEAN = Outcome(3, "simulator", "keeps", "engine killed", "SIGKILL to 7", "1.0 s after 2 trials", 30.0, (0,), 2)


def test_faults_are_drawn_in_turn_and_alike_for_a_seed() -> None:
    drawn = [draw(1, index, KINDS) for index in range(140)]
    assert drawn == [draw(1, index, KINDS) for index in range(140)]
    assert drawn != [draw(2, index, KINDS) for index in range(140)]
    assert set(Counter(fault.kind for fault in drawn).values()) == {10}
    moments = [fault.moment(Undisturbed(60.0, 6)) for fault in drawn if fault.early_s is None]
    assert {finished for finished, _ in moments} == set(range(6))
    assert all(0 <= later_s < 10 for _, later_s in moments)
    assert {draw(1, index, KINDS, 5).kind for index in range(14)} == set(KINDS)


@pytest.fixture
def marked() -> Iterator[subprocess.Popen[bytes]]:
    mark = uuid.uuid4().hex
    command = ["sh", "-c", "exec sleep 60 # serve m --port 29999"]
    process = subprocess.Popen(command, env={**os.environ, MARK: mark}, start_new_session=True)
    process.mark = mark  # type: ignore[attr-defined]
    yield process
    process.kill()
    process.wait()


def test_what_is_left_of_a_run_is_found(
    marked: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene_room, "_LEFT_S", 0.3)
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    (state / "vllm-tune" / "runs").mkdir(parents=True)
    temporary.mkdir()
    segment = Path("/dev/shm") / f"psm_{marked.mark[:12]}"  # type: ignore[attr-defined]
    mark: str = marked.mark  # type: ignore[attr-defined]
    with Scene(mark, state, temporary, IdleBaseline({}, {})) as scene:
        assert [process.id.pid for process in scene.processes()] == [marked.pid]
        segment.write_bytes(b"x")
        (state / "vllm-tune" / "runs" / "1.json").write_text("{}")
        (temporary / "vllm-tune-x").mkdir()
        try:
            left = scene.left()
        finally:
            segment.unlink()
        for what in (f"process {marked.pid}", str(segment), "1.json", "vllm-tune-x"):
            assert any(what in thing for thing in left), (what, left)
        # The victim is hit, and nothing else.
        info = look_up(os.getpid())
        assert info is not None
        fault = replace(draw(1, KINDS.index("all killed"), KINDS), later_s=0.0)
        done = hit(fault, scene, info.id, tmp_path)
        assert done is not None
        assert done.words == f"SIGKILL to {marked.pid}"
        assert marked.wait(5) == -signal.SIGKILL
        (state / "vllm-tune" / "runs" / "1.json").unlink()
        (temporary / "vllm-tune-x").rmdir()
        assert scene.left() == []


def test_nothing_is_hit_once_the_tuner_has_ended(tmp_path: Path) -> None:
    gone = ProcessId(2**22 - 1, 1)
    with Scene("nobody", tmp_path, tmp_path, IdleBaseline({}, {})) as scene:
        for kind in ("tuner killed", "server killed", "all killed"):
            assert hit(draw(1, KINDS.index(kind), KINDS), scene, gone, tmp_path) is None


def test_another_verdict_than_the_truth_is_wrong() -> None:
    study = shared_study()
    found = _wrong(study, TRUTHS[1])
    assert any("instead of keep-defaults" in text for text in found)
    assert any("infeasible" in text for text in found), "a trial that could run was called infeasible"
    assert len(_finished(study)) > 5


def test_the_table_adds_up() -> None:
    outcomes = [CLEAN, replace(CLEAN, index=4, lost=("0001-0",), left=("port 1", "process 2")), replace(CLEAN, done="")]
    assert [outcome.clean for outcome in outcomes] == [True, False, True]
    assert "| simulator | engine killed | 3 | 2 | 1 | 2 | 0 | 0 | 0 |" in table(outcomes)
    assert "  lost: 0001-0\n  left: port 1" in line(outcomes[1])
    assert TRUTHS[0].holds(Decision.IMPROVED, {})
    assert not TRUTHS[0].holds(Decision.IMPROVED, {"max-num-seqs": 1})
