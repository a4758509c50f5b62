"""Writing files so that a reader, or a power cut, sees the old content or the new, never half of either."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import EnvironmentFault, InputError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_OF_THE_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO),
}
"""What another path would mend. Everything else (EIO, ESTALE, EMFILE, …) is the machine's trouble."""


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
        if error.errno not in _OF_THE_PATH:
            raise EnvironmentFault(
                f"{path}: the file system fails ({error.strerror}); nothing finished was lost. Check the disk, its "
                "mount and the limits of this user, and run again with --resume."
            ) from error
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
    with _read_errors(path):
        return path.read_text(encoding="utf-8", errors="replace")


def read_bytes(path: Path) -> bytes:
    """The file's content; as `read_text` where it cannot be had."""
    with _read_errors(path):
        return path.read_bytes()


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        with disk_errors(path):
            yield
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, PermissionError):
            raise EnvironmentFault(f"{path}: may not be read. Check its owner and permissions.") from fault
        raise


def usable_name(path: Path, field: str) -> Path:
    """The path, whose name is also printed and recorded; InputError for bytes that are no text, and for a NUL."""
    text = str(path)
    if "\0" in text or text != text.encode("utf-8", "replace").decode():
        raise InputError(
            where="command line or profile",
            field=field,
            value=text,
            rule="holds bytes that are no UTF-8 text, so no record could name it",
            remedy="Choose a name of ordinary characters.",
        )
    return path


def user_folder(variable: str, below_home: str) -> Path:
    """A folder of this user: from an XDG variable, else below the home, else – a uid without any – a private one.

    The last lies in the temp directory, where everybody may create names: EnvironmentFault when it is somebody else's.
    """
    if base := os.environ.get(variable):
        return Path(base)
    try:
        return Path.home() / below_home
    except RuntimeError:  # neither HOME nor an entry in the user database
        folder = Path(tempfile.gettempdir()) / f"vllm-tune-{os.getuid()}"
    with disk_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat().st_uid
    if folder.is_symlink() or owner != os.getuid():
        raise EnvironmentFault(f"{folder}: belongs to somebody else. Set HOME to a folder of this user.")
    return folder / below_home


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
