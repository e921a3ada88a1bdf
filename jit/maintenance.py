"""Maintenance of the cache: listing entries and removing unused ones.

Pruning removes least recently used entries first and never one in use: a process that loaded an entry holds a shared
flock on its manifest until it ends (``cache.store.hold``), and removal needs the exclusive one. Only what
hipforge wrote, recognised by its name, is listed, measured or removed: the directory may hold other people's files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hipforge.jit import tools
from hipforge.jit.cache import cache_dir, failures, leftovers, locks, store
from hipforge.jit.cache.store import Entry
from hipforge.jit.digest import holds_digests

_OTHER_DIRS = ("failed", "staging", "locks", "rocm-tree")
_STATE_FILES = {"digests.json": holds_digests, "toolchains.json": tools.holds_answers}
_TRITON = "triton"
_TRITON_NAME = re.compile(r"[A-Z2-7]{52}")
"""Triton names its entries by sha256 in base32; it keeps them here when its kernels are compiled for the emulator."""

_ROCM_TREE_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class CacheEntry:
    """One entry for a listing: its size on disk in bytes, and when it was last used as a Unix time.

    ``entry`` is None where there is no manifest to read: the entry is ``damaged``, or Triton's.
    """

    path: Path
    entry: Entry | None
    bytes: int
    last_used: float
    in_use: bool

    @property
    def damaged(self) -> bool:
        """Whether this is an entry of ours that nothing can use."""
        return self.entry is None and self.path.parent.name != _TRITON


def entries(root: Path | None = None) -> list[CacheEntry]:
    """Return every entry under ``root`` (default: the cache directory in use), most recently used first."""
    found = [item for place in _roots(root) for item in _entries(place)]
    return sorted(found, key=lambda item: -item.last_used)


def _roots(root: Path | None) -> list[Path]:
    return [root] if root is not None else cache_dir.reading_roots()


def _entries(root: Path) -> Iterator[CacheEntry]:
    for path in _entry_paths(root):
        yield _describe(path)


def _entry_paths(root: Path) -> Iterator[Path]:
    for target in _listed(root):
        if target.name not in _OTHER_DIRS and target.is_dir():
            ours = _TRITON_NAME.fullmatch if target.name == _TRITON else store.is_entry_name
            yield from (path for path in _listed(target) if ours(path.name) and path.is_dir())


def _listed(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(directory.iterdir())
    return []


def _own_paths(root: Path) -> Iterator[Path]:
    """Yield the files and directories under ``root`` that hipforge wrote."""
    yield from _entry_paths(root)
    yield from failures.directories(root)
    yield from (path for path in _listed(root / "staging") if store.staged_build(path.name) is not None)
    yield from (path for path in _listed(root / "locks") if store.is_build_name(path.stem))
    yield from (path for path in _listed(root / "rocm-tree") if _ROCM_TREE_NAME.fullmatch(path.name))
    yield from (root / name for name in _STATE_FILES)


def _describe(path: Path) -> CacheEntry:
    manifest = path / store.MANIFEST
    last_used = 0.0
    with contextlib.suppress(OSError):
        last_used = (path if path.parent.name == _TRITON else manifest).stat().st_mtime
    return CacheEntry(path, store.read_entry(path), tree_bytes(path), last_used, _is_held(manifest))


def _is_held(manifest: Path) -> bool:
    with _exclusive(manifest) as free:
        return not free


@contextlib.contextmanager
def _exclusive(manifest: Path) -> Iterator[bool]:
    """Yield whether nobody holds ``manifest``, keeping it so meanwhile; True where there is no manifest to hold."""
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Without locks a loaded file may be removed too: its pages stay until it is unloaded.
        yield error.errno in store.NO_FLOCK
    else:
        yield True
    finally:
        os.close(descriptor)


def tree_bytes(path: Path) -> int:
    """Return the size on disk of a file, or of everything under a directory, in bytes; links are not followed."""
    total = 0
    with contextlib.suppress(OSError):
        if not path.is_dir():
            return path.lstat().st_blocks * 512
    for directory, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def size(root: Path | None = None) -> int:
    """Return the size on disk of the whole cache, in bytes."""
    return sum(_own_bytes(place) for place in _roots(root))


def _own_bytes(root: Path) -> int:
    return sum(map(tree_bytes, _own_paths(root)))


def prune(max_bytes: int, root: Path | None = None) -> list[Path]:
    """Remove least recently used entries until the cache is at most ``max_bytes``; returns what was removed.

    Entries in use stay, even if the cache then remains larger. Leftovers of killed builds go first.
    """
    removed: list[Path] = []
    for place in _roots(root):
        leftovers.sweep(place)
        total = _own_bytes(place)
        for item in sorted(_entries(place), key=lambda item: item.last_used):
            if total <= max_bytes:
                break
            if _remove(item.path, place):
                removed.append(item.path)
                total -= item.bytes
    return removed


def clear(root: Path | None = None) -> list[Path]:
    """Remove every entry that is not in use, all records of failed builds, and leftovers; returns removed entries."""
    removed = prune(0, root)
    for place in _roots(root):
        failures.forget_all(place)
        for name, is_own in _STATE_FILES.items():
            if cache_dir.is_own_file(place / name, is_own):
                with contextlib.suppress(OSError):
                    (place / name).unlink()
        locks.remove_idle(place, 0.0)
    return removed


def _remove(path: Path, root: Path) -> bool:
    with _exclusive(path / store.MANIFEST) as free:
        if free:
            store.discard(path, root)
    return free and not path.exists()


def recorded_seconds(module: str, stem: str, target: str) -> float | None:
    """Return how long the last build of ``stem`` took, else the mean over the module's variants, else None."""
    times: dict[str, tuple[float, float]] = {}
    for root in cache_dir.reading_roots():
        with contextlib.suppress(OSError):
            for path in (root / target).glob(f"{module}*"):
                entry = store.read_entry(path)
                if entry is not None and entry.manifest.module == module:
                    name = path.name.rsplit("-", 2)[0]
                    this = (entry.manifest.built_at, entry.manifest.build_seconds)
                    times[name] = max(times.get(name, (0.0, 0.0)), this)
    if stem in times:
        return times[stem][1]
    return sum(seconds for _, seconds in times.values()) / len(times) if times else None
