"""One run: a study that is hit once and resumed to its end, and what became of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.faults import CONTROL, Fault, Hit, Undisturbed, hit, small_disk
from benchmarks.chaos.scene import MARK, Scene, private_temporary
from benchmarks.chaos.target import KNOB, MANY, ROOT, Target, Truth, command, resume
from benchmarks.chaos.tune import SILENT_S
from tuner.environment import IdleBaseline
from tuner.errors import TunerError
from tuner.ownership.processes import look_up, send
from tuner.records import TrialState
from tuner.store import ResultsFolder
from tuner.study import Status, read_study

_RESUMES = 4
_HUNG_S = 120.0  # longer than anything that a study may wait for: the 30 s for a silent worker, twice
_LASTING = (TrialState.COMPLETE, TrialState.SCREENED, TrialState.INFEASIBLE)
_DISK_S = 10.0  # that the disk stays full for
_COPY_S = 5.0  # for the tuner's last words


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run; everything but the first block should be empty."""

    index: int
    target: str
    truth: str
    kind: str
    done: str  # what was done to it; empty where nothing was there to hit
    moment: str
    duration_s: float
    codes: tuple[int, ...]  # exit codes of the tuner, the resumed ones too
    finished: int  # trials on disk when the fault came

    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    tracebacks: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (self.lost or self.left or self.wrong or self.unfinished or self.tracebacks)


@dataclass
class _Run:
    folder: Path
    study: Path
    environment: Mapping[str, str]
    log: Path
    copier: threading.Thread | None = None
    codes: list[int] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


def run(
    index: int, target: Target, truth: Truth, fault: Fault | None, folder: Path, whole: Undisturbed, idle: IdleBaseline
) -> Outcome:
    """Start, hit, resume until the end, look what is left. `whole`: the undisturbed study."""
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    mark = f"{os.getpid()}-{index}"
    temporary = private_temporary(mark)
    this = _Run(
        folder=folder,
        study=folder / "study",
        environment=_environment(target, truth, folder, temporary, mark),
        log=folder / "tuner.log",
    )
    first = command(target, truth, folder / "inputs", this.study)
    unmount = small_disk(this.study) if fault is not None and fault.kind == "disk full" else None
    done: Hit | None = None
    before: dict[str, bytes] = {}
    left: list[str] = []
    finished, later_s = (0, 0.0) if fault is None else fault.moment(whole)
    limit_s = 3 * whole.duration_s + _HUNG_S
    try:
        with Scene(mark, folder / "state", temporary, idle) as scene:
            tuner = _start(this, first)
            if fault is not None:
                done = _hit(this, fault, scene, tuner, finished, later_s)
                before = _finished(this.study)
            ended = _ended(this, tuner, limit_s, done)
            at_the_fault = len(before)
            before = {**_finished(this.study), **before}
            if fault is not None and fault.kind == "tuner ended":
                left += [f"before the resume: {thing}" for thing in scene.left()]
            _resume_all(this, ended, first, limit_s)
            left += scene.left()
            for process in scene.processes():  # so that the next run starts clean, whatever this one did
                send(process.id, signal.SIGKILL)
        lost = [name for name, content in before.items() if _finished(this.study).get(name) != content]
        return Outcome(
            index=index,
            target=target.name,
            truth=truth.name,
            kind=CONTROL if fault is None else fault.kind,
            done=done.words if done is not None else "",
            moment="" if fault is None else f"{later_s:.1f} s after {finished} trials",
            duration_s=round(time.monotonic() - started, 1),
            codes=tuple(this.codes),
            finished=len(before) if fault is None else at_the_fault,
            lost=tuple(lost),
            left=tuple(left),
            wrong=tuple(_wrong(this.study, truth)),
            unfinished=tuple(this.unfinished),
            tracebacks=_tracebacks(this),
        )
    finally:
        if unmount is not None:
            shutil.copytree(this.study, folder / "kept", dirs_exist_ok=True)
            unmount()
        shutil.rmtree(temporary, ignore_errors=True)


def _environment(target: Target, truth: Truth, folder: Path, temporary: Path, mark: str) -> dict[str, str]:
    """The user's own, with every place where the tuner keeps something moved into the run's folder."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder.parent / "cache"),  # shared: what vLLM answers is asked once
        "XDG_STATE_HOME": str(folder / "state"),
        "VLLM_TUNE_LOCKS": str(folder / "locks"),
        "TMPDIR": str(temporary),
        MARK: mark,
        SILENT_S: f"{target.silent_s:g}",
        **target.environment,
        **truth.environment,
    }


def _start(this: _Run, words: list[str]) -> subprocess.Popen[bytes]:
    with open(this.log, "ab") as log:
        log.write(f"\n$ {' '.join(words)}\n".encode())
    # Through a pipe: what the tuner prints is no file of its own that a limit on files could hit.
    tuner = subprocess.Popen(
        words,
        env=this.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    )
    this.copier = threading.Thread(target=_copy, args=(tuner, this.log), daemon=True)
    this.copier.start()
    return tuner


def _copy(tuner: subprocess.Popen[bytes], path: Path) -> None:
    assert tuner.stdout is not None
    with open(path, "ab", buffering=0) as log:
        while data := os.read(tuner.stdout.fileno(), 1 << 16):
            log.write(data)
    tuner.stdout.close()


def _hit(
    this: _Run, fault: Fault, scene: Scene, tuner: subprocess.Popen[bytes], finished: int, later_s: float
) -> Hit | None:
    while len(list(this.study.glob("trials/*[0-9]/trial.json"))) < finished and tuner.poll() is None:
        time.sleep(0.05)
    _poll(tuner, later_s)
    info = look_up(tuner.pid)
    return None if tuner.poll() is not None or info is None else hit(fault, scene, info.id, this.study)


def _ended(this: _Run, tuner: subprocess.Popen[bytes], limit_s: float, done: Hit | None) -> bool:
    """Wait for the tuner's end and note its exit code; one that never comes is a hang."""
    if done is not None and done.undo is not None:
        _poll(tuner, _DISK_S)
        done.undo()
    code = _poll(tuner, limit_s)
    if code is None:
        this.unfinished.append(f"hung for {limit_s:.0f} s")
        tuner.kill()
        code = tuner.wait()
    this.codes.append(code)
    if this.copier is not None:
        this.copier.join(_COPY_S)
    return code == 0


def _poll(tuner: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return tuner.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def _resume_all(this: _Run, ended: bool, first: list[str], limit_s: float) -> None:
    """As a user would: resume, or start again where the study had not begun."""
    for _ in range(_RESUMES):
        if ended:
            break
        begun = (this.study / "study.json").exists()
        ended = _ended(this, _start(this, resume(this.study) if begun else first), limit_s, None)
    if not ended:
        this.unfinished.append(f"exit codes {this.codes}")
        return
    try:
        file = read_study(ResultsFolder(this.study))
    except TunerError as error:
        this.unfinished.append(str(error))
        return
    if file.status is not Status.DONE or file.result is None:
        this.unfinished.append(f"status {file.status}")


def _finished(study: Path) -> dict[str, bytes]:
    """Records of finished trials, by folder."""
    found = {}
    for path in study.glob("trials/*/trial.json"):
        content = path.read_bytes()
        if "." not in path.parent.name and json.loads(content)["state"] in _LASTING:
            found[path.parent.name] = content
    return found


def _wrong(study: Path, truth: Truth) -> list[str]:
    """The verdict of the study, and of every trial, against the truth."""
    wrong = []
    folder = ResultsFolder(study)
    try:
        file, records = read_study(folder), folder.trials()
    except TunerError as error:
        return [str(error)]
    if file.result is not None:
        said, config = file.result.conclusion.decision, file.result.config
        if not truth.holds(said, config):
            wrong.append(f"{said} with {dict(config)} instead of {truth.decision} with {KNOB} {truth.best}")
    for record in records:
        impossible = record.config.get(KNOB, MANY) == truth.impossible
        if record.state in _LASTING and (record.state is TrialState.INFEASIBLE) is not impossible:
            kind = record.failure.kind if record.failure is not None else ""
            wrong.append(f"trial {record.number}-{record.replicate} {dict(record.config)}: {record.state} {kind}")
    return wrong


def _tracebacks(this: _Run) -> tuple[str, ...]:
    text = this.log.read_text(errors="replace")
    return ("a traceback in tuner.log",) if "Traceback (most recent call last)" in text else ()
