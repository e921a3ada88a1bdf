"""Caches deterministic compile errors, so that a broken module is compiled once and not once per call.

A record holds the files that the attempt read, with digests, and the places of headers that it did not find. When any
of these changes, the module is built again. A build that was killed or ran out of memory or disk leaves no record.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from hipforge.errors import BuildError
from hipforge.jit.cache import files
from hipforge.jit.cache.shapes import fits
from hipforge.jit.cache.store import build_name, discard, distrusted, is_build_name
from hipforge.jit.cache.trust import own_directory, seal
from hipforge.jit.digest import DigestStore
from hipforge.jit.spec import BuildSpec

_RECORD = "failure.json"
_SHAPE = {"key": str, "message": str, "dependencies": [(str, str)]}


def directory(root: Path, spec: BuildSpec) -> Path:
    """Return where a failed build of ``spec`` keeps its log, ninja file and record."""
    return root / "failed" / build_name(spec)


def keep(staging: Path, root: Path, spec: BuildSpec) -> Path:
    """Move a failed build's directory to the place of readable logs; returns that place."""
    target = directory(root, spec)
    with contextlib.suppress(OSError):
        own_directory(target.parent)
        # Each edit of a broken source has a key of its own; only the latest failure is of use.
        same_stem = target.name.rpartition("-")[0]
        for earlier in target.parent.iterdir():
            if earlier.name.rpartition("-")[0] == same_stem:
                discard(earlier, root)
        seal(staging)
        staging.rename(target)
        return target
    return staging


def remember(place: Path, spec: BuildSpec, message: str, dependencies: list[tuple[str, str]]) -> None:
    """Write the record of a deterministic failure."""
    record = {"key": spec.key, "message": message, "dependencies": dependencies}
    with contextlib.suppress(OSError):
        files.write(place / _RECORD, json.dumps(record, indent=1), durably=True)


def recall(roots: list[Path], spec: BuildSpec, digests: DigestStore) -> BuildError | None:
    """Return the error of an earlier attempt if nothing it depended on has changed since."""
    for root in roots:
        try:
            place = directory(root, spec)
            if distrusted(place, _RECORD) is not None:
                continue
            record = json.loads(files.read(place / _RECORD))
            if not fits(record, _SHAPE) or record["key"] != spec.key:
                continue
            pairs = [(spec.roots.show(path), digest) for path, digest in record["dependencies"]]
            if digests.all_match(pairs):
                return BuildError(record["message"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
    return None


def forget(root: Path, spec: BuildSpec) -> None:
    """Remove the record and the log of a build that has since succeeded."""
    target = directory(root, spec)
    if target.exists():
        shutil.rmtree(target, ignore_errors=True)


def directories(root: Path) -> list[Path]:
    """Return the directories of every failed build under ``root``."""
    with contextlib.suppress(OSError):
        return sorted(path for path in (root / "failed").iterdir() if is_build_name(path.name))
    return []


def forget_all(root: Path) -> None:
    """Remove the records and logs of every failed build under ``root``."""
    for path in directories(root):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        (root / "failed").rmdir()
