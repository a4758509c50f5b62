"""The store: what was written comes back equal; damage and newer formats are refused, never misread."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tests.edited import put
from tuner.errors import EnvironmentFault, InputError
from tuner.records import (
    FORMAT_VERSION,
    Bound,
    Capacity,
    PhaseTimes,
    RequestResult,
    RequestStatus,
    Step,
    StepKind,
    TrialRecord,
    TrialState,
)
from tuner.store import ResultsFolder, append_line, dumps, loads, read_requests, write_atomic
from tuner.store.files import disk_errors, read_text


def request(index: int, status: RequestStatus = RequestStatus.OK) -> RequestResult:
    return RequestResult(
        index, "a", status, 0.5, 0.501, 0.6, 0.9, 0.9, 10, 4, 10, 4, True, 4, (100_000, 99_000, 101_000)
    )


def trial(number: int = 0, replicate: int = 0) -> TrialRecord:
    step = Step(StepKind.ONE, {"max-num-seqs": (None, 64), "async-scheduling": (True, False)}, 0, "queueing")
    return TrialRecord(
        number=number,
        replicate=replicate,
        config={"max-num-seqs": 64, "async-scheduling": False, "gpu-memory-utilization": 0.9, "kv-cache-dtype": "fp8"},
        step=step,
        state=TrialState.COMPLETE,
        capacities={},
        probes=(),
        failure=None,
        effective={"max-num-seqs": 64},
        degraded=(),
        startup={"kv_tokens": 1.0, "odd": float("inf")},
        phases=PhaseTimes(launch_s=20.0),
        environment="abc",
        command=("vllm", "serve", "m"),
        started_at=1.0,
        ended_at=2.0,
        seed=3,
        simulated=False,
    )


def test_a_trial_comes_back_equal_with_its_types(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    folder.write_trial(trial(1))
    folder.write_trial(trial(0))
    back = folder.trials()
    assert back == (trial(0), trial(1))
    assert isinstance(back[0].config["async-scheduling"], bool)
    assert isinstance(back[0].config["max-num-seqs"], int)


def test_requests_come_back_equal(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    rows = (request(0), request(1, RequestStatus.EARLY_CLOSE))
    where = folder.new_attempt(0, 0)
    name = folder.write_requests(where, "short-0", rows)
    assert folder.requests(trial(), name) == rows


def test_a_requests_path_may_not_leave_the_trial(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    with pytest.raises(InputError, match="within the trial"):
        folder.requests(trial(), "../../../etc/passwd")


@pytest.mark.parametrize("part", ["..", "a/b", "", ".hidden", "a\0b", "x" * 200])
def test_names_stay_inside_the_folder(tmp_path: Path, part: str) -> None:
    with pytest.raises(InputError):
        ResultsFolder(tmp_path).inside("inputs", part)


def test_an_interrupted_attempt_is_kept_aside_and_never_read_as_a_trial(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    for _ in range(3):
        (folder.new_attempt(4, 0) / "server.log").write_text("x")
    assert folder.trials() == ()
    assert sorted(path.name for path in (tmp_path / "trials").iterdir()) == [
        "0004-0",
        "0004-0.attempt1",
        "0004-0.attempt2",
    ]
    folder.write_trial(trial(4))
    assert [record.number for record in folder.trials()] == [4]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format_version": 1}', '{"format_version": "x"}'])
def test_damage_is_one_clear_error(text: str) -> None:
    with pytest.raises(InputError, match=r"trial\.json"):
        loads(TrialRecord, text, "trial.json")


def test_a_newer_format_is_refused() -> None:
    document = json.loads(dumps(trial()))
    document["format_version"] = FORMAT_VERSION + 1
    with pytest.raises(InputError, match="newer"):
        loads(TrialRecord, json.dumps(document), "trial.json")


def test_a_torn_line_damages_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, '{"a": 1}')
    with path.open("a") as file:
        file.write('{"b": ')
    append_line(path, '{"c": 3}')
    assert path.read_text().splitlines() == ['{"a": 1}', '{"b": ', '{"c": 3}']


def test_a_limit_on_file_sizes_is_an_environment_fault(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "file"
    path.write_text("old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(EnvironmentFault, match="--resume"):
            write_atomic(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_a_full_disk_is_an_environment_fault() -> None:
    with (
        pytest.raises(EnvironmentFault, match="disk is full"),
        disk_errors(Path("/dev/full")),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_a_failed_write_keeps_the_old_file_and_leaves_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\udcff")
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="no regular file"):
        write_atomic(tmp_path / "taken", "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["study.json"]


def test_a_link_stays_a_link_and_a_device_stays_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text("old")
    link.symlink_to(target)
    write_atomic(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="no regular file"):
        write_atomic(pipe, "x")
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", ["file/x.md", "file/a/x.md", "n" * 300])
def test_an_impossible_path_is_one_clear_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"):
        write_atomic(tmp_path / place, "x")


def test_a_file_that_may_not_be_read_is_not_told_to_be_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", closed)
    with pytest.raises(EnvironmentFault, match=r"trial\.json: may not be read"):
        read_text(tmp_path / "trial.json")


def test_deep_nesting_is_one_clear_error() -> None:
    with pytest.raises(InputError, match="is not JSON"):
        loads(TrialRecord, "[" * 200_000, "trial.json")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT])
def test_what_no_other_path_would_mend_is_an_environment_fault(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentFault, match="the file system fails"), disk_errors(Path("results/x")):
        raise OSError(number, os.strerror(number))

    def failing(path: Path) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(EnvironmentFault):
        read_requests(tmp_path / "short-00.jsonl.gz")


@pytest.mark.parametrize("name", ["x\udcff", "a\0b"])
def test_a_folder_whose_name_is_no_text_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="no UTF-8 text"):
        ResultsFolder(Path(name))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[(("capacities", "short", "rate_rps"), value) for value in (0, -1, math.nan, math.inf, 1e308)],
        *[((field,), value) for field in ("started_at", "ended_at") for value in (math.nan, math.inf, 1e300, -1)],
        *[((field,), -1) for field in ("number", "replicate", "round")],
        (("phases", "launch_s"), math.nan),
        (("degraded",), ["\ud800"]),
    ],
)
def test_a_number_that_nothing_can_be_computed_from_is_named_when_it_is_read(
    path: tuple[str, ...], value: object
) -> None:
    one = Capacity("short", 4.0, math.inf, 1.0, Bound.BRACKETED, (), 60.0, 1.0)  # an unknown spread is legal
    document = json.loads(dumps(replace(trial(), capacities={"short": one})))
    assert loads(TrialRecord, json.dumps(document), "trial.json").capacities["short"].log_sd == math.inf
    put(document, path, value)
    with pytest.raises(InputError, match=r"trial\.json"):
        loads(TrialRecord, json.dumps(document), "trial.json")
