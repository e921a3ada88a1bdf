"""One builder per key at a time, across processes, with a wait that speaks and ends.

flock is released by the kernel when its holder dies, so a killed builder never blocks the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from hipforge import settings
from hipforge.errors import BuildError

log = logging.getLogger("hipforge")

_SPEAK_EVERY_S = 5.0


@contextlib.contextmanager
def building(root: Path, name: str, title: str) -> Iterator[None]:
    """Hold the lock of the build ``name``; ``title`` is what messages call it.

    Raises:
        BuildError: another process holds it for longer than ``HIPFORGE_LOCK_TIMEOUT`` seconds.
        OSError: the lock file cannot be made.
    """
    path = root / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        _acquire(lock, path, title)
    except NotImplementedError:
        # A file system without flock: two builds of one module may run, and the rename keeps either result whole.
        log.debug("%s: no file locks here, building without one", root)
        yield
        return
    try:
        with contextlib.suppress(OSError):
            _holder_file(path).write_text(
                json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
            )
        yield
    finally:
        with contextlib.suppress(OSError):
            _holder_file(path).unlink()
        lock.release()


@contextlib.contextmanager
def try_building(root: Path, name: str) -> Iterator[bool]:
    """Hold the lock of the build ``name`` if nobody else does; yields whether it is held."""
    path = root / "locks" / f"{name}.lock"
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _acquire(lock: FileLock, path: Path, title: str) -> None:
    started = time.monotonic()
    limit = settings.LOCK_TIMEOUT.get()
    while True:
        waited = time.monotonic() - started
        slice_s = 0.0 if not waited else min(_SPEAK_EVERY_S, max(limit - waited, 0.01))
        try:
            lock.acquire(timeout=slice_s, poll_interval=0.02)
            return
        except Timeout:
            waited = time.monotonic() - started
        holder = describe_holder(path)
        if waited >= limit:
            raise BuildError(
                f"waited {waited:.0f} s for {title}, which {holder} is building; end that process, or raise "
                f"HIPFORGE_LOCK_TIMEOUT (now {limit:.0f} s)"
            )
        log.info("waiting for %s, which %s is building (%.0f s so far)", title, holder, waited)


def _holder_file(lock_path: Path) -> Path:
    return lock_path.with_suffix(".holder")


def describe_holder(lock_path: Path) -> str:
    """Return words for who holds a lock: process, host and for how long."""
    try:
        holder = json.loads(_holder_file(lock_path).read_text())
        return f"process {holder['pid']} on {holder['host']} (for {time.time() - holder['since']:.0f} s)"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
