"""Where the cache is, and what happens when it cannot be used.

A directory the user named (``HIPFORGE_CACHE_DIR``) is used or refused with an error, never silently replaced. The
default one falls back to a private directory with one warning: a full or read-only home must not stop a program.
A directory that a third party owns or can write is not even read, since loading a library runs its code. If the user
named it, that is an error, unless ``HIPFORGE_TRUST_SHARED_DIRS`` is set.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hipforge import settings
from hipforge.errors import ConfigError
from hipforge.jit.cache import files, store, trust
from hipforge.jit.digest import DigestStore, holds_digests
from hipforge.jit.roots import name_problem

T = TypeVar("T")

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
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }
)
"""Errors that say something about the directory rather than about hipforge."""

CACHE_DIR = settings.CACHE_DIR.env

_refused: dict[Path, str] = {}


def configured() -> tuple[Path, bool]:
    """Return the cache directory of this process, and whether the user named it."""
    named = settings.CACHE_DIR.get()
    if named is not None:
        return Path(os.path.abspath(named)), True  # resolve() would follow a link that may move
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # its specification: a relative one is to be ignored
        base = os.path.expanduser("~/.cache")  # stays as it is where there is no home
    return Path(base) / "hipforge", False


def _distrusted(path: Path, named: bool) -> str | None:
    """Return why code from ``path`` may not run, or None."""
    if not path.is_absolute():
        return f"HOME is not set, and user id {os.geteuid()} has no entry in /etc/passwd"
    unusable = name_problem(path)
    if unusable is not None or (named and settings.TRUST_SHARED_DIRS.get()):
        return unusable
    return trust.directory_problem(path)


def checked(path: Path, setting: str) -> Path:
    """Return a directory that the user named.

    Raises:
        ConfigError: it is something else; others own it or can write it, and HIPFORGE_TRUST_SHARED_DIRS is not set.
    """
    unusable = name_problem(path)
    if unusable is None and os.path.exists(path) and not os.path.isdir(path):  # whose mode is not to be changed
        unusable = "it is not a directory"
    if unusable is not None:
        raise ConfigError(f"{setting}={path} cannot be used: {unusable}; name another directory")
    problem = _distrusted(path, named=True)
    if problem is not None:
        raise ConfigError(
            f"{setting}={path} cannot be used: {problem}. Code in it would run as this user; make it this user's own, "
            "or set HIPFORGE_TRUST_SHARED_DIRS=1 if everyone who can write it is trusted"
        )
    return path


def temporary_dir() -> Path:
    """Return the directory for temporary files: ``TMPDIR`` where it can be used, else ``/tmp``.

    Raises:
        ConfigError: none can be written.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"no temporary directory can be used; set TMPDIR to a writable one ({error})") from None


def private_dir() -> Path:
    """Return this user's own directory under the temporary directory, made if need be.

    Raises:
        ConfigError: not even that can be written.
    """
    path = temporary_dir() / f"hipforge-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):  # somebody's file, or a link that leads nowhere
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
        return [checked(path, CACHE_DIR)]
    roots = [] if _distrusted(path, named) else [path]
    return [*roots, *_own_private_dir()]


def _own_private_dir() -> list[Path]:
    """Return the private directory if there is one and it is this user's."""
    private = temporary_dir() / f"hipforge-{os.geteuid()}"
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
    if named:
        checked(path, CACHE_DIR)
    problem = _refused.get(path) or (None if named else _distrusted(path, named)) or _write_problem(path)
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


def written(make: Callable[[Path], T]) -> T:
    """Return ``make(root)`` for a directory in which entries can be made; for the private one if the first is full.

    Raises:
        ConfigError: the user named a directory that cannot be written, or nothing can.
    """
    root = writing_root()
    try:
        return make(root)
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        path, named = configured()
        problem = error.strerror or str(error)
        if root != path:
            raise ConfigError(f"{root} cannot be used: {problem}; set {CACHE_DIR} to another directory") from error
        return make(refuse(path, named, problem))


def _write_problem(path: Path) -> str | None:
    try:
        trust.make_directory(path)
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
    if not _distrusted(path, named) and (named or not os.path.exists(path) or os.access(path, os.W_OK)):
        return path
    return next(iter(_own_private_dir()), None)


def private_folder(name: str) -> Path:
    """Return a folder of the cache that nobody else can enter, for programs that write there by the umask: Triton.

    One that others could have written is emptied.

    Raises:
        ConfigError: as :func:`writing_root`.
    """
    root = state_dir() or writing_root()
    path = root / name
    trust.make_directory(root)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if path.lstat().st_mode & 0o077 and not settings.TRUST_SHARED_DIRS.get():
        if trust.tree_problem(path) is not None:
            store.discard(path, root)
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)
    return path


def own_file(directory: Path | None, name: str, is_own: Callable[[object], bool]) -> Path | None:
    """Return the place of a file of remembered answers; None where another program has a file of this name.

    ``is_own`` says whether parsed JSON is what hipforge writes there. Such a file that others can write is removed. A
    link stays: the file that it leads to is read and replaced, in a directory as trusted as the cache.
    """
    if directory is None:
        return None
    path = directory / name
    linked = path.is_symlink()
    if linked:
        path = Path(os.path.realpath(path))
    if settings.TRUST_SHARED_DIRS.get():
        return path
    if linked and trust.directory_problem(path.parent) is not None:
        return None
    if trust.problem(path) is not None:
        if linked or not is_own_file(path, is_own):
            return None
        with contextlib.suppress(OSError):
            path.unlink()
    return path


def is_own_file(path: Path, is_own: Callable[[object], bool]) -> bool:
    """Return whether a file holds what hipforge writes there."""
    try:
        return is_own(json.loads(files.read(path)))
    except (OSError, ValueError, RecursionError):
        return False


@functools.lru_cache(maxsize=8)
def _store(path: Path | None) -> DigestStore:
    return DigestStore(own_file(path, "digests.json", holds_digests))


def digests() -> DigestStore:
    """Return the stat-cached digests of the cache directory in use."""
    return _store(state_dir())
