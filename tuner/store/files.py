"""Writing files so that a reader, or a power cut, sees the old content or the new, never half of either."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import EnvironmentFault, InputError

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the file system's refusals into one clear message; what was already on disk stays as it was."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise EnvironmentFault(
                f"{path}: the disk is full; nothing finished was lost. Free space there and run again with --resume."
            ) from error
        if error.errno == errno.EFBIG:
            raise EnvironmentFault(
                f"{path}: files may not grow any more here ({error.strerror}); nothing finished was lost. Raise the "
                "limit (`ulimit -f`) and run again with --resume."
            ) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise EnvironmentFault(f"{path}: cannot be written ({error.strerror}). Choose another --out.") from error
        raise InputError(
            where=str(path)[:200],
            field="path",
            value=path.name[:60],
            rule=f"cannot be used ({error.strerror})",
            remedy="Name another file or folder.",
        ) from error


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step that survives power loss; EnvironmentFault when the disk is full."""
    data = content.encode() if isinstance(content, str) else content
    with disk_errors(path):
        path = path.resolve() if path.is_symlink() else path  # a link stays one, its target is replaced
        irregular = path.exists() and not path.is_file()
    if irregular:
        raise InputError(
            where=str(path),
            field="path",
            value=path.name,
            rule="is no regular file",
            remedy="Name a file that may be replaced.",
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must reach the disk
        finally:
            os.close(folder)


def append_line(path: Path, line: str) -> None:
    """Append one line; a torn last line from an earlier crash is closed off first so that it damages only itself."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            torn = file.tell() > 0 and not _ends_with_newline(path)
            file.write(((b"\n" if torn else b"") + line.encode()) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_text(path: Path) -> str:
    """The file's text; undecodable bytes are shown, not fatal (server logs hold anything)."""
    try:
        with disk_errors(path):
            return path.read_text(encoding="utf-8", errors="replace")
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, PermissionError):
            raise EnvironmentFault(f"{path}: may not be read. Check its owner and permissions.") from fault
        raise


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
