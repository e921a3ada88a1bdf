"""Builds that were killed: their compilers end with them, and their staging directories are swept by the next build."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hipforge.jit.cache import store
from hipforge.jit.cache.locks import remove_idle, try_building

_LOCKS_KEPT_S = 86_400.0
_DISCARDED_FOR_S = 3600.0
"""Age in seconds at which a directory without a lock is a leftover; no build of many modules uses one for so long."""


_PR_SET_PDEATHSIG = 1
_SWEEPS = 10
_SWEEP_PAUSE_S = 0.05
"""How often, and after which pause, to remove a directory again while a process that is ending still writes into it."""


def ending_with_parent() -> Callable[[], None]:
    """Return what a child process runs before ``exec`` so that it gets SIGTERM when this one ends, even by SIGKILL.

    ninja passes the signal on to its compilers. Without it they would compile on, into a directory that the next build
    sweeps. The calling thread has to outlive the child, as one that waits for it does.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: a forked child should do next to nothing

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it could be asked
            os._exit(1)

    return before_exec


def _remove(path: Path) -> None:
    for attempt in range(_SWEEPS):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(_SWEEP_PAUSE_S * (attempt > 0))


def sweep(root: Path, *, own: str = "") -> None:
    """Remove staging directories whose builder is gone, and old locks; the caller holds that of the build ``own``."""
    remove_idle(root, _LOCKS_KEPT_S)
    parent = root / "staging"
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        name = store.staged_build(path.name)
        if name is None:
            continue
        if name == own:
            _remove(path)
        elif name == store.DISCARDED:
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _DISCARDED_FOR_S:
                    shutil.rmtree(path, ignore_errors=True)
        else:
            with try_building(root, name) as free:
                if free:
                    _remove(path)
