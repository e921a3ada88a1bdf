"""Staging directories of builds that were killed."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from hipforge.jit.cache import store
from hipforge.jit.cache.locks import try_building

_DISCARDED_FOR_S = 3600.0
"""Age in seconds at which a directory without a lock is a leftover; no build of many modules uses one for so long."""


def sweep(root: Path, *, own: str = "") -> None:
    """Remove staging directories whose builder is gone; the caller holds the lock of the build ``own``."""
    parent = root / "staging"
    if not parent.is_dir():
        return
    for path in parent.iterdir():
        name = store.staged_build(path.name)
        if name is None:
            continue
        if name == own:
            shutil.rmtree(path, ignore_errors=True)
        elif name == store.DISCARDED:
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _DISCARDED_FOR_S:
                    shutil.rmtree(path, ignore_errors=True)
        else:
            with try_building(root, name) as free:
                if free:
                    shutil.rmtree(path, ignore_errors=True)
