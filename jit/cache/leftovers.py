"""Builds that were killed: their staging directories are swept by the next build."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from hipforge.jit.cache import store
from hipforge.jit.cache.locks import remove_idle, try_building

_LOCKS_KEPT_S = 86_400.0
_DISCARDED_FOR_S = 3600.0
"""Age in seconds at which a directory without a lock is a leftover; no build of many modules uses one for so long."""


_SWEEPS = 10
_SWEEP_PAUSE_S = 0.05
"""How often, and after which pause, to remove a directory again while a process that is ending still writes into it."""


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
