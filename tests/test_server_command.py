"""Command line, environment and port of a server: reachable from loopback only, and without secrets in any record."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.ownership import MARKER
from tuner.secrecy import HIDDEN
from tuner.serve_args import ServeFlags
from tuner.server import FailureReason, ReadyLimits, VllmInstall, cache_root
from tuner.server.command import (
    command,
    environment,
    free_port,
    port_free,
    redacted,
    telling_environment,
    users_environment,
)
from tuner.server.ready import Progress

INSTALL = VllmInstall("/opt/vllm", "0.32.0", ServeFlags("0.32.0", {}), "cuda")


def test_address_comes_last_and_is_loopback() -> None:
    words = command(INSTALL, "m", ("--max-num-seqs", "8"), 21000)
    assert words == ("/opt/vllm", "serve", "m", "--max-num-seqs", "8", "--host", "127.0.0.1", "--port", "21000")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--hf-token", "hf_1", "--seed", "1"), ("--hf-token", HIDDEN, "--seed", "1")),
        (("--api-key=sk-1",), (f"--api-key={HIDDEN}",)),
        (("--api-key", "sk-1", "sk-2", "--port", "1"), ("--api-key", HIDDEN, HIDDEN, "--port", "1")),
        (("s3://me:pw@host/model",), (f"s3://{HIDDEN}@host/model",)),
        (("--max-num-batched-tokens", "2048"), ("--max-num-batched-tokens", "2048")),
        (("--tokenizer", "x"), ("--tokenizer", "x")),
        (("--kv-transfer-config.auth_token", "s"), ("--kv-transfer-config.auth_token", HIDDEN)),
        (("--kv-transfer-config.tokens+", "s"), ("--kv-transfer-config.tokens+", "s")),
        (("--x", '{"a": {"auth_token": "s", "n": 1}}'), ("--x", '{"a": {"auth_token": "***", "n": 1}}')),
        (('--x={"s3_secret_access_key":"s"}',), ('--x={"s3_secret_access_key": "***"}',)),
        (("--x", '[{"credentials": {"user": "u"}}]'), ("--x", '[{"credentials": {"user": "***"}}]')),
        (("--x", '{"url": "https://me:pw@host"}'), ("--x", '{"url": "https://***@host"}')),
        (("--x", '{"api_key": "s", broken'), ("--x", '{"api_key": ***, broken')),
        (("--x", '{"level":3, "max_tokens":5}'), ("--x", '{"level":3, "max_tokens":5}')),
        (("--x", "Authorization: Bearer abc"), ("--x", "Authorization: Bearer ***")),
    ],
)
def test_redacted(words: tuple[str, ...], shown: tuple[str, ...]) -> None:
    assert redacted(words) == shown


@given(st.text(st.characters(categories=["L", "N"]), min_size=8), st.booleans())
def test_no_secret_survives(secret: str, joined: bool) -> None:
    words = (f"--hf-token={secret}",) if joined else ("--hf-token", secret)
    recorded = telling_environment({"HF_TOKEN": secret, "VLLM_API_KEY": secret, "OTHER": secret, "LD_PRELOAD": "x"})
    assert secret not in json.dumps([redacted(("vllm", *words)), recorded], ensure_ascii=False)
    assert recorded["LD_PRELOAD"] == "x"


@pytest.mark.parametrize(
    "value", ["Authorization: Bearer abcSECRET", '{"token": "SECRET"}', "http://me:SECRET@proxy", "password=SECRET"]
)
def test_no_secret_value_under_a_harmless_name_is_recorded(value: str) -> None:
    assert "SECRET" not in telling_environment({"VLLM_HTTP_HEADERS": value})["VLLM_HTTP_HEADERS"]


def test_environment() -> None:
    base = {"HOME": "/h", "VLLM_API_KEY": "k", "VLLM_PORT": "tcp://1", "HF_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "3"}
    made = environment(
        base, marker="m", gpus=(0, 2), cache_root=Path("/c"), temporary=Path("/t"), extra={"VLLM_ATTENTION": "x"}
    )
    assert "VLLM_API_KEY" not in made
    assert "VLLM_PORT" not in made
    assert (made["CUDA_VISIBLE_DEVICES"], made["CUDA_DEVICE_ORDER"]) == ("0,2", "PCI_BUS_ID")
    assert (made[MARKER], made["TMPDIR"], made["VLLM_CACHE_ROOT"], made["HF_TOKEN"]) == ("m", "/t", "/c", "t")
    assert made["TORCHINDUCTOR_CACHE_DIR"] == "/c/torchinductor"
    assert made["VLLM_ATTENTION"] == "x"
    assert "VLLM_LOGGING_LEVEL" not in users_environment({"VLLM_LOGGING_LEVEL": "error"}), "the log is read"
    assert users_environment({"VLLM_LOGGING_LEVEL": "DEBUG"}) == {"VLLM_LOGGING_LEVEL": "DEBUG"}
    untouched = environment(base, marker="m", gpus=None, cache_root=Path("/c"), temporary=Path("/t"))
    assert untouched["CUDA_VISIBLE_DEVICES"] == "3"


def test_cache_root_by_version_model_and_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = VllmInstall("/opt/vllm", "0.33.0", ServeFlags("0.33.0", {}), "cuda")
    roots = {
        cache_root(INSTALL, "a/m", "(0,)"),
        cache_root(INSTALL, "b/m", "(0,)"),
        cache_root(INSTALL, "a/m", "(0, 1)"),
        cache_root(other, "a/m", "(0,)"),
    }
    assert len(roots) == 4
    assert all(root.is_relative_to(tmp_path / "vllm-tune" / "vllm") for root in roots)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/fast/disk")
    assert cache_root(INSTALL, "a/m", "(0,)").is_relative_to("/fast/disk/vllm-tune"), "the user's disk is kept"


def test_free_port_can_be_bound_and_is_not_ephemeral() -> None:
    port = free_port()
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not low <= port <= high
    with socket.create_server(("127.0.0.1", port)):
        assert not port_free(port)
    assert port_free(port)


# --- readiness, without a process ----------------------------------------------------------------------------------


def test_limits() -> None:
    limits = ReadyLimits(silent_s=10, cap_s=100)
    assert limits.judge(50, 9) is None
    silent, late = limits.judge(50, 10), limits.judge(100, 1)
    assert silent is not None
    assert silent.reason is FailureReason.SILENT
    assert late is not None
    assert late.reason is FailureReason.TIMEOUT


def test_progress_counts_news_only(tmp_path: Path) -> None:
    log = tmp_path / "log"
    progress = Progress(log, started=0.0)
    assert progress.silent_s(5.0) == 5.0, "no log yet"
    log.write_bytes(b"INFO loading\n")
    assert progress.silent_s(6.0) == 0.0
    with open(log, "ab") as file:
        file.write(b"INFO Waiting for 1 local, 0 remote core engine proc(s) to start.\n")
    assert progress.silent_s(8.0) == 2.0
    with open(log, "ab") as file:
        file.write(b"Loading shards: 10%|#  |\rLoading sha")
    assert progress.silent_s(9.0) == 0.0, "a progress bar"
    with open(log, "ab") as file:
        file.write(b"rds: 20%")
    assert progress.silent_s(11.0) == 2.0, "half a line is not read twice"
