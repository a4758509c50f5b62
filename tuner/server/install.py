"""Which vLLM is installed: its path, version, device and flags, by asking the executable; it is never imported."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import EnvironmentFault, InputError, TunerError
from tuner.serve_args import ServeFlags, parse_help
from tuner.store.files import user_folder, write_atomic

_ASK_S = 300.0  # imports alone take 7-40 s; a cold network disk takes longer
_CACHE_VERSION = 1
_VERSION = re.compile(r"(?<![\w.])\d+\.\d+(?:\.\d+)?[\w.+-]*")
_WIDTH = "80"  # argparse wraps at COLUMNS; fixed, so that the same vLLM always says the same


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """An executable that understands `vllm serve`."""

    path: str  # absolute
    version: str  # as it says itself, e.g. `0.32.0+cpu`
    flags: ServeFlags
    device: str  # `cuda` or `cpu`
    simulated: bool = False
    python_version: str = ""  # of its interpreter; empty where that cannot be told without running it


def cache_home() -> Path:
    """This user's cache folder for the tuner."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "vllm-tune"


def find_vllm(executable: str = "vllm", *, cache: Path | None = None) -> VllmInstall:
    """Locate vLLM and learn what it can do.

    The answers (7-40 s of imports) are cached by path, time and size of the executable and of the packages beside it.
    InputError when a path that the user named is none; EnvironmentFault when vLLM is missing or does not run.
    """
    path = _resolve(executable)
    entry = (cache or cache_home() / "install") / f"{_fingerprint(path)}.json"
    texts = _cached(entry)
    fresh = texts is None
    if texts is None:
        texts = _ask(path)
    version = parse_version(texts["version"], path)
    flags = parse_help(texts["help"], version)
    if "max-num-seqs" not in flags.flags:
        raise EnvironmentFault(
            f"{path}: `serve --help=all` does not look like vLLM's (no --max-num-seqs among {len(flags.flags)} flags). "
            f"Name another executable by --vllm. It began: {texts['help'][:200]!r}"
        )
    if fresh:
        with contextlib.suppress(TunerError, OSError):  # a cache that cannot be written costs time, nothing else
            write_atomic(entry, json.dumps(texts))
    return VllmInstall(
        path=str(path),
        version=version,
        flags=flags,
        device="cpu" if "cpu" in version.partition("+")[2] else "cuda",
        simulated="sim" in texts["version"].strip().splitlines()[-1].lower(),
        python_version=_python_version(path),
    )


def parse_version(text: str, path: Path) -> str:
    """The version on the last line that holds one; warnings of imports may stand before it."""
    for line in reversed(text.splitlines()):
        if match := _VERSION.search(line):
            return match[0]
    raise EnvironmentFault(
        f"{path}: `--version` names no version: {text.strip()[-300:]!r}. Name another one by --vllm."
    )


def _resolve(executable: str) -> Path:
    found = shutil.which(os.path.expanduser(executable))
    if found is None and executable == "vllm":
        found = shutil.which("vllm", path=str(Path(sys.executable).parent))  # our own environment, not activated
    if found is not None:
        return Path(found).absolute()
    if executable == "vllm":
        raise EnvironmentFault(
            "no `vllm` on PATH. Install vLLM, activate its environment, or name its executable by --vllm PATH."
        )
    there = Path(os.path.expanduser(executable)).exists()  # Path's own expanduser() raises for an unknown user
    rule = "is not executable" if there else "is no executable file and not on PATH"
    raise InputError(
        where="command line",
        field="--vllm",
        value=executable,
        rule=rule,
        remedy="Give the path of the `vllm` script, such as /opt/vllm/bin/vllm.",
    )


def _fingerprint(path: Path) -> str:
    """Changes whenever the executable is replaced or a package named vllm* beside its interpreter is."""
    packages = sorted(path.resolve().parent.parent.glob("lib/python3*/site-packages/*vllm*"))
    seen = [(str(place), place.stat().st_mtime_ns, place.stat().st_size) for place in (path, *packages)]
    return hashlib.sha256(json.dumps([_CACHE_VERSION, seen]).encode()).hexdigest()[:32]


def _cached(entry: Path) -> dict[str, str] | None:
    try:
        stored = json.loads(entry.read_text())
    except (OSError, ValueError):
        return None
    if isinstance(stored, dict) and isinstance(stored.get("version"), str) and isinstance(stored.get("help"), str):
        return {"version": stored["version"], "help": stored["help"]}
    return None


def _ask(path: Path) -> dict[str, str]:
    """Both questions at once: each is mostly imports."""
    environment = {**os.environ, "COLUMNS": _WIDTH, "VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
    with (
        _asking([str(path), "--version"], environment) as version,
        _asking([str(path), "serve", "--help=all"], environment) as help_all,
    ):
        return {
            "version": _answer(version, f"{path} --version"),
            "help": _answer(help_all, f"{path} serve --help=all"),
        }


@contextlib.contextmanager
def _asking(command: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A question under way in a session of its own; nothing of it is left afterwards, whatever happens."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFault(
            f"{command[0]}: cannot be run ({error.strerror}). Reinstall vLLM or name another one by --vllm."
        ) from error
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _answer(process: subprocess.Popen[str], question: str) -> str:
    try:
        output, errors = process.communicate(timeout=_ASK_S)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"{question} gave no answer within {_ASK_S:.0f} s. Check that this vLLM starts by hand."
        ) from error
    if process.returncode != 0:
        tail = "\n".join((errors.strip() or output.strip()).splitlines()[-8:])
        raise EnvironmentFault(
            f"{question} failed with exit code {process.returncode}; reinstall vLLM or name another one by "
            f"--vllm. Its last words:\n{tail}"
        )
    return output


def _python_version(path: Path) -> str:
    """From the environment's pyvenv.cfg; our own when it runs on our interpreter."""
    with contextlib.suppress(OSError):
        text = (path.resolve().parent.parent / "pyvenv.cfg").read_text()
        if match := re.search(r"^version(?:_info)?\s*=\s*([\d.]+)", text, re.MULTILINE):
            return match[1].rstrip(".")
    return ".".join(map(str, sys.version_info[:3])) if path.parent == Path(sys.executable).parent else ""
