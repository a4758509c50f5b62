"""`tune diagnose`: words, JSON and exit codes."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tuner.cli import Parser, diagnose
from tuner.errors import InputError

RECORDED = Path(__file__).parent / "recorded"


def run(*words: str) -> int:
    parser = Parser(prog="tune")
    diagnose.register(parser.add_subparsers(parser_class=Parser))
    arguments = parser.parse_args(["diagnose", *words])
    assert isinstance(arguments, argparse.Namespace)
    return diagnose.run(arguments)


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(RECORDED / "h200-0.26.0/fail_kv_len.log"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "INFEASIBLE"
    assert document["kind"] == "kv-cache-none"
    assert document["moves"]["gpu-memory-utilization"] == "up"
    assert document["cause"].startswith("ValueError: No available memory")
    assert {"explanation", "remedy", "evidence", "violation"} <= document.keys()
    assert document["exit_code"] == 1


@pytest.mark.parametrize("name", ["cpu-0.32.0/metrics.txt", "h200-0.26.0/fail_engine_killed_client.txt"])
def test_what_is_no_log_of_vllm_is_unknown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(RECORDED / name), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["kind"]) == ("unknown", "unknown")
    assert "looks like" in document["explanation"]


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(RECORDED / "h200-0.26.0/fail_batched_lt_seqs.log")) == 0
    out = capsys.readouterr().out
    assert out.startswith("verdict  STATIC")
    assert "--max-num-batched-tokens up, --max-num-seqs down" in out


def test_the_idle_baseline_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    log = str(RECORDED / "h200-0.26.0/fail_cotenant.log")
    assert run(log, "--json", "--idle-free-gib", "139.29", "--device-gib", "139.8") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "TRANSIENT"
    assert run(log, "--json", "--idle-free-gib", "78.77") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "INFEASIBLE"


@pytest.mark.parametrize("name", ["cpu-0.32.0/serve_ok", "h200-0.26.0/serve_ok_default"])
def test_a_good_start_is_called_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(RECORDED / f"{name}.log"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["kind"]) == ("ok", "started")


def test_standard_input_and_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"INFO hello\n\xff\xfe\n")))
    assert run("-", "--exit-code", "137") == 0
    assert "killed" in capsys.readouterr().out


def test_of_a_very_long_log_both_ends_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.log"
    cause = b"ValueError: No available memory for the cache blocks.\n"
    with path.open("wb") as file:
        file.write(cause)
        file.truncate(diagnose.HEAD_BYTES + diagnose.TAIL_BYTES + 1000)
        file.seek(0, io.SEEK_END)
        file.write(b"\n# exit code 1, time-to-exit 5 s\n")
    assert run(str(path), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["exit_code"]) == ("kv-cache-none", 1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("filler", [0, diagnose.HEAD_BYTES, diagnose.HEAD_BYTES + diagnose.TAIL_BYTES])
def test_other_encodings_are_read(
    encoding: str, filler: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = "" if encoding in ("utf-16", "utf-32", "utf-8-sig") else "\ufeff"
    text = f"{mark}INFO hello\n{'x' * (filler // 2)}\nValueError: No available memory for the cache blocks.\n"
    path = tmp_path / "log"
    path.write_bytes(text.encode(encoding))
    assert run(str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "kv-cache-none"


@pytest.mark.parametrize("name", ["/dev/zero", "-"])
def test_what_does_not_end_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "ENDLESS_BYTES", 2**26)
    with open("/dev/zero", "rb") as zero:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=zero))
        with pytest.raises(InputError, match="does not end"):
            run(name)


def test_of_a_long_pipe_both_ends_are_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    middle = (b"INFO nothing" + b"." * 1988 + b"\n") * ((diagnose.HEAD_BYTES + 3 * diagnose.TAIL_BYTES) // 2000)
    whole = b"ValueError: No available memory for the cache blocks.\n" + middle + b"# exit code 1\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(whole)))
    assert run("-", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["exit_code"]) == ("kv-cache-none", 1)


@pytest.mark.parametrize("name", ["missing.log", ".", "bad\0name"])
def test_a_bad_file_is_an_input_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="FILE"):
        run(str(tmp_path / name) if name != "." else str(tmp_path))


@pytest.mark.parametrize(("flag", "value"), [("--idle-free-gib", "-1"), ("--device-gib", "nan")])
def test_bad_numbers_are_input_errors(flag: str, value: str) -> None:
    with pytest.raises(InputError, match=flag):
        run(str(RECORDED / "cpu-0.32.0/serve_ok.log"), flag, value)
