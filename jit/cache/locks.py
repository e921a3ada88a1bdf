"""One builder per key at a time, one writer per tuned table, across processes; waiters log progress and time out.

flock is released by the kernel when its holder dies, so a killed builder never blocks the next one. On a file system
without flock (some network ones) a file that is created exclusively takes its place. It names the process that made it,
so that the lock of a dead process is broken on the same host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from hipforge import settings
from hipforge.errors import BuildError, ConfigError
from hipforge.jit.cache import files
from hipforge.jit.cache.store import NO_FLOCK, is_build_name
from hipforge.jit.cache.trust import own_directory

log = logging.getLogger("hipforge")

_SPEAK_EVERY_S = 5.0
_POLL_S = 0.02
_MODE = 0o644  # of a lock file; filelock's own default is the umask's


@contextlib.contextmanager
def building(root: Path, name: str, title: str) -> Iterator[None]:
    """Hold the lock of the build ``name``; ``title`` is what messages call it.

    Raises:
        BuildError: another process holds it for longer than ``HIPFORGE_LOCK_TIMEOUT`` seconds.
        ConfigError: something else lies where the lock file should.
        OSError: the lock file cannot be made.
    """
    path = root / "locks" / f"{name}.lock"
    own_directory(path.parent)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(holding(path, title, "building"))
        except NotImplementedError:
            # filelock found out by itself that flock is missing. Two builds of one module may run, and the rename keeps
            # either result whole.
            log.debug("%s: no file locks here, building without one", root)
        except IsADirectoryError:
            raise ConfigError(f"{path} is a directory, where hipforge keeps a lock file; remove it") from None
        except Busy as error:
            raise BuildError(f"waited {error.waited_s:.0f} s for {error}") from None
        yield


class Busy(Exception):
    """Another process held a lock for longer than ``HIPFORGE_LOCK_TIMEOUT`` seconds: what, who, and what to do."""

    def __init__(self, text: str, waited_s: float) -> None:
        super().__init__(text)
        self.waited_s = waited_s


@contextlib.contextmanager
def holding(path: Path, what: str, doing: str, *, remove: bool = False) -> Iterator[None]:
    """Hold the lock file at ``path``, whose name ends in ``.lock``; log whom it waits for.

    Args:
        path: it is made; its folder must be there.
        what: the name of the locked thing in messages.
        doing: what messages say of its holder: "building".
        remove: remove the file before the lock is released; a process that waits for it makes a new file.

    Raises:
        Busy: another process holds it for longer than ``HIPFORGE_LOCK_TIMEOUT`` seconds.
        NotImplementedError: there are no locks on this file system.
        OSError: the lock file cannot be made.
    """
    lock = _lock(path)
    _acquire(lock, path, what, doing)
    try:
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last used
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            files.write(_holder_file(path), json.dumps(holder))
        yield
    finally:
        with contextlib.suppress(OSError):
            _holder_file(path).unlink()
        if remove:
            path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def try_building(root: Path, name: str) -> Iterator[bool]:
    """Hold the lock of the build ``name`` if nobody else does; yields whether it is held."""
    path = root / "locks" / f"{name}.lock"
    try:
        own_directory(path.parent)
        lock = _lock(path)
        lock.acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield _guards_its_name(lock, path)
    finally:
        lock.release()


def _lock(path: Path) -> BaseFileLock:
    """Return the lock at ``path`` of the kind that its file system has; a soft one of a dead process is broken."""
    if _has_flock(path):
        return FileLock(path, mode=_MODE)
    soft = path.with_suffix(".soft")
    _break_if_dead(soft, path)
    return SoftFileLock(soft, mode=_MODE)


_flock_works: dict[Path, bool] = {}


def _has_flock(path: Path) -> bool:
    if path.parent not in _flock_works:
        _flock_works[path.parent] = _try_flock(path)
    return _flock_works[path.parent]


def _try_flock(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_FLOCK
    finally:
        os.close(descriptor)
    return True


def _break_if_dead(soft: Path, path: Path) -> None:
    """Remove a soft lock whose holder, a process of this host, no longer runs."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        holder = json.loads(files.read(_holder_file(path)))
        if holder["host"] == socket.gethostname() and not _runs(int(holder["pid"])):
            soft.unlink()
            log.debug("%s: broke the lock of process %s, which has ended", soft, holder["pid"])


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _acquire(lock: BaseFileLock, path: Path, what: str, doing: str) -> None:
    started = time.monotonic()
    limit = settings.LOCK_TIMEOUT.get()
    while True:
        waited = time.monotonic() - started
        slice_s = 0.0 if not waited else min(_SPEAK_EVERY_S, max(limit - waited, 0.01))
        try:
            lock.acquire(timeout=slice_s, poll_interval=_POLL_S)
            if _guards_its_name(lock, path):
                return
            lock.release()
            continue
        except Timeout:
            waited = time.monotonic() - started
        held = f"{what}, which {describe_holder(path)} is {doing}"
        if waited >= limit:
            raise Busy(f"{held}; end that process, or raise HIPFORGE_LOCK_TIMEOUT (now {limit:g} s)", waited)
        # A wait of a few seconds is normal where many processes start together; report longer ones.
        level = logging.WARNING if waited >= _SPEAK_EVERY_S else logging.INFO
        log.log(level, "waiting for %s (%.0f s so far)", held, waited)
        if isinstance(lock, SoftFileLock):
            _break_if_dead(Path(lock.lock_file), path)


def _guards_its_name(lock: BaseFileLock, path: Path) -> bool:
    """Return whether the file that was locked is still the one at ``path``: an idle one may be removed at any time."""
    if isinstance(lock, SoftFileLock):
        return True
    descriptor = getattr(getattr(lock, "_context", None), "lock_file_fd", None)
    if descriptor is None:
        return True
    try:
        return os.fstat(descriptor).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


def remove_idle(root: Path, unused_s: float) -> None:
    """Remove lock files that nobody holds and nobody has used for ``unused_s`` seconds.

    A builder that opened one just before sees under the lock that the name is gone, and takes the new file.
    """
    parent = root / "locks"
    with contextlib.suppress(OSError):
        for path in parent.iterdir():
            if path.suffix != ".lock" or not is_build_name(path.stem):
                continue
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < unused_s:
                    continue
                with try_building(root, path.stem) as free:
                    if free:
                        path.unlink()


def _holder_file(lock_path: Path) -> Path:
    return lock_path.with_suffix(".holder")


def describe_holder(lock_path: Path) -> str:
    """Return words for who holds a lock: process, host and for how long."""
    try:
        holder = json.loads(files.read(_holder_file(lock_path)))
        return f"process {int(holder['pid'])} on {str(holder['host'])!r} (for {time.time() - holder['since']:.0f} s)"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "another process"
