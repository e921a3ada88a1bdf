"""Read and write hipforge's small files: regular files that their owner alone can write."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path


def read(path: Path) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: it cannot be read, or it is no regular file: opening a FIFO would wait for a writer for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # before open(), which leaves a folder's descriptor open
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with open(descriptor, "rb") as file:
        return file.read()


def is_a(kind: Callable[[Path], bool], path: Path) -> bool:
    """Return whether a path is of a kind, as ``Path.is_file`` says; one too long for a file's name is not."""
    try:
        return kind(path)
    except OSError:
        return False


def write(path: Path, text: str, *, durably: bool = False) -> None:
    """Replace a file by one rename; its mode is 0644 from its first byte on, less what the umask takes.

    Args:
        path: it need not be there; its folder must be.
        text: the new contents.
        durably: after a crash of the machine too, the file is whole or absent.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
            if durably:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
