"""Content digests of files, remembered by stat so that an unchanged file is not read twice.

Question: what are the bytes of this file now? A digest is remembered with the file's size, mtime, inode and ctime; all
four equal means the same bytes. ctime cannot be set by a user, so restoring an mtime does not deceive it.

A digest is remembered only if the file was last written ``_RACE_NS`` or longer before it was read. Sooner, a second
write within one tick of the file system's clock would leave the four values alike. Known gap: with a network file
system whose clock runs ahead by more, nothing is remembered; with one that runs behind, a digest may be remembered too
early.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from hipforge.jit.cache import files

ABSENT = "absent"
"""Digest of a path where there is no file: a build can depend on that too."""

UNREADABLE = "unreadable"
"""The digest given for a directory, a file without permission, or a name that no file can have."""

# Linux stamps files with the time of the last scheduler tick: at most 10 ms (HZ=100) old. Network file systems stamp
# with the server's clock; 2 s covers clocks kept by NTP and file systems that store whole seconds.
_RACE_NS = 2_000_000_000

_MAX_REMEMBERED = 50_000

_Stamp = tuple[int, int, int, int]
_Row = tuple[int, int, int, int, str]


def text_digest(text: str) -> str:
    """Return the sha256 of ``text`` in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return the sha256 of a file's bytes in hexadecimal, always reading it.

    Raises:
        OSError: the file cannot be read.
    """
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def _stamp(stat: os.stat_result) -> _Stamp:
    return (stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)


class DigestStore:
    """Digests by path, kept in ``file`` between processes (``None``: in memory only)."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._known: dict[str, _Row] = {}
        self._loaded = file is None
        self._dirty: set[str] = set()
        self._fresh: set[str] = set()  # changed so shortly before they were read that an equal stat proves nothing
        self._lock = threading.Lock()
        self.reads = 0
        """How many files were read in full: zero on a warm path."""

    def of(self, path: str) -> str:
        """Return the digest of ``path``, or :data:`ABSENT`; reads the file only if its stat changed.

        Raises:
            OSError: the file exists but cannot be read.
        """
        if not self._loaded:
            self._load()
        try:
            stat = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT
        known = self._known.get(path)
        if (
            known is not None
            and known[0] == stat.st_size
            and known[1] == stat.st_mtime_ns
            and known[2] == stat.st_ino
            and known[3] == stat.st_ctime_ns
            and path not in self._fresh
        ):
            return known[4]
        stamp = _stamp(stat)
        self.reads += 1
        opened_at = time.time_ns()
        digest = file_digest(path)
        if _stamp(os.stat(path)) != stamp:  # changed while it was read
            return digest
        self._known[path] = (*stamp, digest)
        if opened_at - max(stat.st_mtime_ns, stat.st_ctime_ns) > _RACE_NS:
            self._fresh.discard(path)
            self._dirty.add(path)
        else:
            self._fresh.add(path)
            self._dirty.discard(path)
        return digest

    def of_any(self, path: str) -> str:
        """Return the digest of ``path``, :data:`ABSENT`, or :data:`UNREADABLE` for a file that cannot be read."""
        try:
            return self.of(path)
        except (OSError, ValueError):
            return UNREADABLE

    def all_match(self, expected: Iterable[tuple[str, str]]) -> bool:
        """Return whether every (path, digest) pair still holds."""
        return all(self.of_any(path) == digest for path, digest in expected)

    def save(self) -> None:
        """Write new digests back, merged with what other processes wrote; failing to is not an error."""
        if self.file is None or not self._dirty:
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            settled = {path: self._known[path] for path in self._dirty}
            there = _read(self.file)
            if there is None:
                return  # somebody else's file of that name stays as it is
            merged = {**there, **settled}
            if len(merged) > _MAX_REMEMBERED:
                merged = dict(list(merged.items())[-_MAX_REMEMBERED // 2 :])
            files.write(self.file, json.dumps(merged))
            self._dirty.difference_update(settled)

    def _load(self) -> None:
        with self._lock:
            if not self._loaded and self.file is not None:
                self._known = {**(_read(self.file) or {}), **self._known}
            self._loaded = True


def _read(file: Path) -> dict[str, _Row] | None:
    """Return the digests in a file, none where there is no file, or None for a file of something else."""
    try:
        rows: dict[str, _Row] = json.loads(files.read(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    return rows if holds_digests(rows) else None


def holds_digests(document: object) -> bool:
    """Return whether parsed JSON is what a store of digests writes."""
    # Rows are lists here; of what is in them, only the digest is used other than by comparison.
    return isinstance(document, dict) and all(
        type(row) is list and len(row) == 5 and type(row[4]) is str for row in document.values()
    )
