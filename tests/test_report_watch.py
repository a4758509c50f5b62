"""`tune watch` and `tune dashboard` show a study from its files, running, dead or finished."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from tests.simulated_study import shared_study
from tuner.cli import main
from tuner.errors import ExitCode
from tuner.ownership import Run
from tuner.report.watch import Watcher
from tuner.store import ResultsFolder
from tuner.study.result import read_study, write_study


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ResultsFolder]:
    """A study in its search: three trials done, the fourth on its way, its tuner alive."""
    folder = ResultsFolder(tmp_path / "demo")
    shutil.copytree(shared_study(), folder.root)
    write_study(folder, replace(read_study(folder), result=None, plan=None))
    for record in folder.trials():
        if record.round is not None or record.number > 3 or record.replicate:
            shutil.rmtree(folder.trial_folder(record.number, record.replicate))
    (folder.trial_folder(3, 0) / "trial.json").rename(folder.root / "later.json")
    (folder.trial_folder(3, 0) / "server.log").write_text("INFO starting\nINFO [bold]capturing graphs[/bold]\n")
    with Run("demo", folder.root, registry=tmp_path / "runs"):
        yield folder


def finish_trial(folder: ResultsFolder) -> None:
    (folder.root / "later.json").rename(folder.trial_folder(3, 0) / "trial.json")


def test_a_running_study_shows_its_trial_in_progress(
    running: ResultsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    view = Watcher(running).look()
    assert view.alive is True
    assert view.current is not None
    assert (view.current.number, view.current.replicate) == (3, 0)
    assert view.current.log_line == "INFO [bold]capturing graphs[/bold]"
    assert len(view.current.probes) > 3
    assert main(["watch", str(running.root), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "No verdict yet" in shown
    assert "now: trial 3.0" in shown
    assert "[bold]capturing" in shown  # shown as written, not taken for markup
    assert "max-num-seqs 16 → 64" in shown


def test_records_are_read_again_only_when_one_has_come(running: ResultsFolder) -> None:
    watcher = Watcher(running)
    first = watcher.look()
    assert watcher.look().report is first.report
    finish_trial(running)
    assert len(watcher.look().report.trials) == len(first.report.trials) + 1


def test_files_that_come_and_go_meanwhile_do_not_end_the_watch(
    running: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (running.root / "trials" / "0098-0").write_text("a stray file")
    (running.root / "trials" / "0001-0" / "trial.json").rename(running.root / "gone.json")
    (running.root / "trials" / "0001-0" / "trial.json").symlink_to(running.root / "nowhere")
    (running.trial_folder(3, 0) / ".trial.json.1.tmp").symlink_to(running.root / "nowhere")
    watcher = Watcher(running)
    monkeypatch.setattr(ResultsFolder, "trials", lambda folder: ())
    view = watcher.look()
    assert view.current is not None
    assert view.current.number in (1, 3)
    (running.trial_folder(3, 0) / "server.log").unlink()
    real = Path.exists
    # Whatever is asked for is there at first and gone a moment later.
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "trial.json" or real(path))
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert watcher.look().current is not None


def test_what_a_terminal_would_obey_does_not_reach_it(
    running: ResultsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x1b[0m\x9b2K \x00\x08\x1bcend"
    (running.trial_folder(3, 0) / "server.log").write_text(f"one\n{nasty}\n")
    failed = next(record for record in running.trials() if record.failure is not None)
    assert failed.failure is not None
    running.write_trial(replace(failed, failure=replace(failed.failure, cause=nasty)))
    assert main(["watch", str(running.root), "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("red end") == 2
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


def test_a_study_that_nobody_works_on_says_so(running: ResultsFolder, capsys: pytest.CaptureFixture[str]) -> None:
    running.run_file.unlink()
    assert main(["watch", str(running.root)]) == 0
    assert "tune run --resume" in capsys.readouterr().out


def test_a_finished_study_is_shown_and_watching_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(shared_study())]) == 0
    shown = capsys.readouterr().out
    assert "Improved" in shown
    assert "now:" not in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_plain_lines_follow_the_trials_until_the_verdict(
    running: ResultsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    study = read_study(ResultsFolder(shared_study()))

    def go_on() -> None:
        time.sleep(0.3)
        finish_trial(running)
        time.sleep(0.3)
        write_study(running, study)

    thread = threading.Thread(target=go_on)
    thread.start()
    assert main(["watch", str(running.root), "--interval", "0.05"]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["0.0", "1.0", "2.0", "3.0"]
    assert "infeasible" in lines[2]
    assert lines[-1].startswith("Improved")


@pytest.mark.parametrize("words", [["nowhere"], [".", "--interval", "0"], [".", "--interval", "x"]])
def test_bad_input_is_one_clear_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *words]) == ExitCode.INPUT
    assert capsys.readouterr().err.count("\n") == 1


def test_the_dashboard_serves_the_storage(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard")
    database = ResultsFolder(tmp_path).database
    optuna.create_study(study_name="shown", storage=f"sqlite:///{database}")
    port = 21_000 + int(time.time()) % 9000
    command = [sys.executable, "-m", "tuner", "dashboard", str(tmp_path), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    try:
        assert server.stdout is not None
        assert re.match(rf"http://127\.0\.0\.1:{port}/", server.stdout.readline())
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/studies", timeout=5) as answer:
                    assert "shown" in answer.read().decode()
                    return
            except OSError:
                assert server.poll() is None
                time.sleep(0.2)
        pytest.fail("the dashboard did not answer")
    finally:
        server.terminate()
        server.wait(20)


def test_the_dashboard_needs_a_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path)]) == ExitCode.INPUT
    assert "optuna.db" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0 and no more", b"no database at all" * 99])
def test_the_dashboard_refuses_a_damaged_storage(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    ResultsFolder(tmp_path).database.write_bytes(content)
    assert main(["dashboard", str(tmp_path)]) == ExitCode.INPUT
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "empty or damaged" in err
    assert ResultsFolder(tmp_path).database.read_bytes() == content
