"""Where the cache is, and what happens when it cannot be used.

A directory the user named (``HIPFORGE_CACHE_DIR``) is used or refused with an error, never silently replaced. The
default one falls back to a private directory with one warning: a full or read-only home must not stop a program.
A default directory that belongs to a third party is not even read, since loading a library is running its code.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from hipforge import settings
from hipforge.errors import ConfigError
from hipforge.jit.digest import DigestStore

log = logging.getLogger("hipforge")

UNUSABLE = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ELOOP,
    }
)
"""Errors that say something about the directory rather than about hipforge."""

_refused: dict[Path, str] = {}


def configured() -> tuple[Path, bool]:
    """Return the cache directory of this process, and whether the user named it."""
    named = settings.CACHE_DIR.get()
    if named is not None:
        return Path(os.path.abspath(named)), True  # noqa: PTH100 (resolve() would follow a link that may move)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "hipforge", False


def _foreign(path: Path) -> str | None:
    try:
        owner = path.stat().st_uid
    except OSError:
        return None
    if owner in (os.geteuid(), 0):
        return None
    return f"it belongs to user id {owner}, not to {os.geteuid()}"


def private_dir() -> Path:
    """Return this user's own directory under the temporary directory, made if need be.

    Raises:
        ConfigError: not even that can be written.
    """
    path = Path(tempfile.gettempdir()) / f"hipforge-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            path = _one_time_dir()
    except OSError as error:
        raise ConfigError(
            f"neither the cache directory nor {path} can be written ({error.strerror}); "
            "set HIPFORGE_CACHE_DIR to a writable directory"
        ) from error
    return path


@functools.lru_cache(maxsize=1)
def _one_time_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="hipforge-"))


def reading_roots() -> list[Path]:
    """Return the directories in which entries are looked up, in order."""
    path, named = configured()
    if named:
        return [path]
    roots = [] if _foreign(path) else [path]
    return [*roots, *_own_private_dir()]


def _own_private_dir() -> list[Path]:
    """Return the private directory if there is one and it is this user's."""
    private = Path(tempfile.gettempdir()) / f"hipforge-{os.geteuid()}"
    with contextlib.suppress(OSError):
        if private.lstat().st_uid == os.geteuid() or _one_time_dir.cache_info().currsize:
            return [private_dir()]
    return []


def writing_root() -> Path:
    """Return a directory in which entries can be made.

    Raises:
        ConfigError: the user named a directory that cannot be written, or nothing can.
    """
    path, named = configured()
    problem = _refused.get(path) or (None if named else _foreign(path)) or _write_problem(path)
    return path if problem is None else refuse(path, named, problem)


def refuse(path: Path, named: bool, problem: str) -> Path:
    """Give up on the cache directory ``path``: raise if the user named it, else warn once and return a private one.

    Raises:
        ConfigError: the user named the directory.
    """
    if named:
        raise ConfigError(
            f"HIPFORGE_CACHE_DIR={path} cannot be used: {problem}; name a writable directory, or unset the variable "
            "to let hipforge choose"
        )
    private = private_dir()
    if path not in _refused and path != private:
        _refused[path] = problem
        log.warning("cache directory %s cannot be used: %s; using %s instead", path, problem, private)
    return private


def _write_problem(path: Path) -> str | None:
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path, prefix=".probe-")
        try:
            os.write(descriptor, b"hipforge")
        finally:
            os.close(descriptor)
            Path(name).unlink()
    except OSError as error:
        if error.errno in UNUSABLE or isinstance(error, FileNotFoundError):
            return error.strerror or str(error)
        raise
    return None


def state_dir() -> Path | None:
    """Return where remembered digests and answers of compilers are kept; None if nowhere is both ours and writable."""
    path, named = configured()
    if named or (not _foreign(path) and (not path.exists() or os.access(path, os.W_OK))):
        return path
    return next(iter(_own_private_dir()), None)


@functools.lru_cache(maxsize=8)
def _store(path: Path | None) -> DigestStore:
    return DigestStore(path / "digests.json" if path else None)


def digests() -> DigestStore:
    """Return the stat-cached digests of the cache directory in use."""
    return _store(state_dir())
