"""Maintaining the cache: what is in it, why something missed, and removing what is not used.

Pruning removes least recently used entries first and never one in use: a process that loaded an entry holds a shared
flock on its manifest until it ends (``cache.store.hold``), and removal needs the exclusive one. Only what
hipforge wrote, recognised by its name, is listed, measured or removed: the directory may hold other people's files.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hipforge.jit import hip_module, lookup, registry, tools
from hipforge.jit.cache import cache_dir, failures, leftovers, locks, store
from hipforge.jit.cache.store import Entry
from hipforge.jit.digest import ABSENT, holds_digests, text_digest
from hipforge.jit.spec import BuildSpec, VariantValue

_OTHER_DIRS = ("failed", "staging", "locks", "rocm-tree")
_STATE_FILES = {"digests.json": holds_digests, "toolchains.json": tools.holds_answers}
_TRITON = "triton"
_TRITON_NAME = re.compile(r"[A-Z2-7]{52}")
"""Triton names its entries by sha256 in base32; it keeps them here when its kernels are compiled for the emulator."""

_ROCM_TREE_NAME = re.compile(r"[0-9a-f]{16}")
_SHORT = 72


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


@dataclass(frozen=True)
class Change:
    """One ingredient or file that differs: its name, the digest (or short value) then and now, and what changed."""

    name: str
    old: str | None
    new: str | None
    detail: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why a module is a hit or a miss; ``compared_with`` is the entry that the changes are relative to."""

    title: str
    status: Literal["hit", "prebuilt", "miss", "failed"]
    path: Path | None
    compared_with: Path | None
    changes: tuple[Change, ...]
    note: str


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
        # Where nobody can hold a file, removing one that is loaded is safe too: its pages stay until it is unloaded.
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


def why(module: str, variant: Mapping[str, VariantValue] | None, arch: str) -> Explanation:
    """Return whether a module would be a hit, and if not, what exactly changed since it was last built.

    Raises:
        ArchError: the module has no code for ``arch``.
        ConfigError: the module or the variant is not known.
    """
    wanted = hip_module.request(registry.module(module), variant, arch)
    title = f"{wanted.stem} for {wanted.arch}"
    found = lookup.look(wanted, use=False)
    if isinstance(found, lookup.Failed):
        compared = None if found.entry is None else found.path
        return Explanation(title, "failed", found.path, compared, (), str(found.error))
    if isinstance(found, lookup.Missing):
        if found.spec is None:
            return Explanation(title, "miss", None, None, (), str(found.problem))
        return _explain_miss(title, found.spec, cache_dir.reading_roots())
    path = found.entry.path
    if found.prebuilt:
        return Explanation(title, "prebuilt", path, path, (), "built ahead of time; no compiler is needed")
    return Explanation(title, "hit", path, path, (), "every ingredient and every file is unchanged")


def _explain_miss(title: str, spec: BuildSpec, roots: list[Path]) -> Explanation:
    found = [
        item
        for root in roots
        for item in _entries(root)
        if item.path.parent.name == spec.target and item.path.name.rsplit("-", 2)[0] == spec.stem
    ]
    readable = [(item, item.entry) for item in found if item.entry is not None]
    if not readable:
        note = f"{found[0].path} is damaged: its manifest cannot be read" if found else "it was never built here"
        return Explanation(title, "miss", None, found[0].path if found else None, (), note)
    # The same key with other headers explains more than the latest build with another key.
    item, entry = max(readable, key=lambda pair: (pair[1].manifest.key == spec.key, pair[1].manifest.built_at))
    changes = tuple(changed(entry, spec))
    note = "" if changes else f"{item.path}: {store.damage(entry, cache_dir.digests())}"
    return Explanation(title, "miss", None, item.path, changes, note)


def changed(entry: Entry, spec: BuildSpec) -> Iterator[Change]:
    """Yield every ingredient and every file whose value in ``entry`` is not the present one."""
    old, new = entry.manifest.ingredients, spec.ingredients
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield _change(name, old.get(name), new.get(name))
    digests = cache_dir.digests()
    for hidden, digest in entry.manifest.dependencies:
        try:
            now = digests.of_any(spec.roots.show(hidden))
        except KeyError:
            now = ABSENT
        if now != digest and f"source:{hidden}" not in new:
            yield Change(f"file:{hidden}", digest, now)


def _change(name: str, old: str | None, new: str | None) -> Change:
    detail = ""
    if old is not None and new is not None and max(len(old), len(new)) > _SHORT:
        words = difflib.ndiff(old.split(), new.split())
        detail = " ".join(word for word in words if word.startswith(("+ ", "- ")))
    return Change(name, _short(old), _short(new), detail)


def _short(value: str | None) -> str | None:
    return value if value is None or len(value) <= _SHORT else text_digest(value)
