"""One lock per device, over all users of the machine, so that two studies cannot measure on one card by accident.

It does not know whether a device is busy with something else; `environment` tells that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.environment import gpus
from tuner.errors import EnvironmentFault

_FOLDER_VARIABLE = "VLLM_TUNE_LOCKS"
_TRIES = 5  # `holders` of another process takes each free lock for a moment


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as written by the holder."""

    device: str
    text: str


def locks_folder() -> Path:
    """One place for every user: not below TMPDIR or a home folder, which differ between sessions."""
    return Path(os.environ.get(_FOLDER_VARIABLE) or "/tmp/vllm-tune-locks")


class DeviceLocks:
    """Locks on devices, e.g. `gpu-GPU-5f0c…` or `cpu`; taken all or none on entering, freed on leaving or on death."""

    def __init__(self, devices: Sequence[str], *, study: str, folder: Path | None = None) -> None:
        self._devices = sorted(set(devices))
        self._study = study
        self._folder = folder or locks_folder()
        self._handles: list[int] = []

    def __enter__(self) -> DeviceLocks:
        try:
            for device in self._devices:
                self._handles.append(self._take(device))
        except EnvironmentFault:
            self.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _take(self, device: str) -> int:
        path = self._folder / f"{device}.lock"
        try:
            handle = _open(path)
        except OSError as error:
            raise EnvironmentFault(
                f"{path}: the lock of {device} cannot be opened ({error.strerror}). Make the folder writable, or name "
                f"another by {_FOLDER_VARIABLE}."
            ) from error
        if not any(_try_lock(handle, wait_s=0.05) for _ in range(_TRIES)):
            holder = _content(handle)
            os.close(handle)
            raise EnvironmentFault(
                f"{device} is in use by another study: {holder}. Two studies on one device would measure each other. "
                "Wait for it, stop it, or choose other devices with --gpus."
            )
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()}, {self._study}, since {time.strftime('%F %T')}".encode(), 0)
        return handle


def devices_of(indices: Sequence[int]) -> tuple[str, ...]:
    """Names of the locks for a study on these GPUs; `cpu` for one without any."""
    return tuple(f"gpu-{gpu.uuid}" for gpu in gpus(indices)) or ("cpu",)


def holders(folder: Path | None = None) -> tuple[Holder, ...]:
    """Every lock that is held now."""
    found = []
    for path in sorted((folder or locks_folder()).glob("*.lock")):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not _try_lock(handle):
                    found.append(Holder(path.stem, _content(handle)))
            finally:
                os.close(handle)
    return tuple(found)


def _open(path: Path) -> int:
    """Opened, or made so that every other user can open it too (never through a link)."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if not path.parent.exists():
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o1777)
    try:
        # Without O_CREAT first: fs.protected_regular forbids it on other users' files in a sticky folder.
        return os.open(path, flags)
    except FileNotFoundError:
        handle = os.open(path, flags | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):
            os.fchmod(handle, 0o666)  # whatever the umask
        return handle


def _try_lock(handle: int, wait_s: float = 0.0) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            time.sleep(wait_s)
            return False
        raise
    return True


def _content(handle: int) -> str:
    return os.pread(handle, 4096, 0).decode(errors="replace").strip() or "holder unknown"
