"""May this binary be used?

Layout, under the cache directory::

    <target>/<module>[-<variant>]-<key>-<dependencies>/   module.so, manifest.json, build.log, build.ninja
    failed/<target>-<module>[-<variant>]-<key>/           failure.json, build.log: deterministic compile errors
    staging/<...>/                                        builds under way; nothing here is ever loaded
    locks/<target>-<module>[-<variant>]-<key>.lock        held while that key is being built
    digests.json, toolchains.json                         digests of files and answers of compilers, by stat

``<key>`` is the digest of the spec's ingredients, known before any compiler runs; ``<dependencies>`` that of the
headers that the compiler reported. An entry is usable when its key is the spec's, every dependency has the digest in
the manifest now, and ``module.so`` has its own.

Invariant: an entry appears by one rename of a finished directory, and is never changed afterwards (its manifest's
mtime alone moves: it is the time of last use). Readers never wait for a lock: a shared flock on the manifest, for the
life of the process, tells :mod:`hipforge.jit.maintenance` that the entry is in use.

Other programs may use the directory too (a home directory, ``~/.cache``): only files whose name ends in digests are
removed.

Known gap: a new file that shadows a header earlier on the include path, or that makes a false ``__has_include`` true,
is not noticed. Compilers do not report failed look-ups, and reading the include path at every look-up would cost more
than all other checks together. Nor is a new compiler behind a wrapper script, if the script is unchanged and
``--version`` reports the same.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hipforge import settings
from hipforge.archs import ARCHS
from hipforge.jit.backends import vendors
from hipforge.jit.cache import files, trust
from hipforge.jit.cache.shapes import NUMBER, fits
from hipforge.jit.digest import DigestStore, file_digest, text_digest
from hipforge.jit.spec import FORMAT, BuildSpec

log = logging.getLogger("hipforge")

MANIFEST = "manifest.json"

NO_FLOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EIO})
"""How a file system says that it has no flock, or that its lock server does not answer."""

_ENTRY_NAME = re.compile(r".+-[0-9a-f]{16}-[0-9a-f]{16}")
_BUILD_NAME = re.compile(r"[^-]+-.+-[0-9a-f]{24}")
DISCARDED = "discarded"
"""Name of staging directories that no lock guards: what is being removed, and what is assembled for a moment."""

_STAGING_SUFFIX = re.compile(r"\.[0-9a-f]{8}")


_SHAPE = {
    "module": str, "variant": {str: (int | str)}, "target": str, "key": str, "ingredients": {str: str},
    "dependencies": [(str, str)], "library_sha256": str, "library_bytes": int, "build_seconds": NUMBER,
    "built_at": NUMBER, "toolchain": str, "commands": [str], "gfx_targets": [str], "kernels": {str: {"name": str}},
    "generated": {str: str}, "checks": [str],
}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """What an entry knows about itself. Paths are written with placeholders.

    ``kernels`` holds per-kernel resources, ``checks`` those of its vendor's ``code_checks`` that its code passed;
    times are in seconds.
    """

    module: str
    variant: dict[str, int | str]
    target: str
    key: str
    ingredients: dict[str, str]
    dependencies: list[tuple[str, str]]
    library_sha256: str
    library_bytes: int
    build_seconds: float
    built_at: float
    toolchain: str
    commands: list[str]
    gfx_targets: list[str] = field(default_factory=list)
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    generated: dict[str, str] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    format: int = FORMAT

    @property
    def unchecked(self) -> list[str]:
        """The checks of its vendor that the device code, if any, has not passed."""
        checks = vendors.of(self.target).code_checks if self.gfx_targets else ()
        return [name for name in checks if name not in self.checks]

    def to_json(self) -> str:
        """Return the manifest's text, a line for each field: with ``indent``, json would not use its encoder in C."""
        values = (f"{json.dumps(item.name)}: {json.dumps(getattr(self, item.name))}" for item in fields(self))
        return "{\n " + ",\n ".join(values) + "\n}"

    @staticmethod
    def from_json(text: bytes | str) -> Manifest:
        """Parse a manifest.

        Raises:
            ValueError: it is not one of this format.
        """
        try:
            raw = json.loads(text)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError("not a manifest of this format")
        if not fits(raw, _SHAPE) or not _has_numbers(raw["target"], raw["kernels"]):
            raise ValueError("not what a manifest of this format holds")
        missing = [item.name for item in fields(Manifest) if item.name not in raw]
        if missing:
            raise ValueError(f"manifest lacks {', '.join(missing)}")
        return Manifest(**{item.name: raw[item.name] for item in fields(Manifest)})


def _has_numbers(target: str, kernels: Mapping[str, Any]) -> bool:
    """Return whether each kernel has the numbers that its vendor's manifests hold."""
    if not kernels:
        return True
    shape = dict.fromkeys(vendors.of(target).kernel_numbers, int) if target in ARCHS else {}
    return bool(shape) and fits(kernels, {str: shape})


@dataclass(frozen=True)
class Entry:
    """A usable (or at least readable) entry on disk."""

    path: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.path / BuildSpec.library


def dependencies_digest(dependencies: list[tuple[str, str]], generated: Mapping[str, str]) -> str:
    """Return the digest of the headers read and of a generator's output."""
    return text_digest(json.dumps([sorted(map(list, dependencies)), sorted(generated.items())]))


def entry_name(spec: BuildSpec, dependencies: str) -> str:
    """Return the directory name of an entry."""
    return f"{spec.stem}-{spec.key[:16]}-{dependencies[:16]}"


def build_name(spec: BuildSpec) -> str:
    """Return the name of this build's lock, staging directories and failure record."""
    return f"{spec.target}-{spec.stem}-{spec.key[:24]}"


def is_entry_name(name: str) -> bool:
    """Return whether a directory of this name is one that :func:`publish` made."""
    return _ENTRY_NAME.fullmatch(name) is not None


def is_build_name(name: str) -> bool:
    """Return whether ``name`` is what :func:`build_name` returns for some spec."""
    return _BUILD_NAME.fullmatch(name) is not None


def staged_build(name: str) -> str | None:
    """Return the build, or ``discarded``, to which a directory under ``staging`` belongs; None if it is not ours."""
    stem, suffix = name[:-9], name[-9:]
    ours = _STAGING_SUFFIX.fullmatch(suffix) is not None and (stem == DISCARDED or is_build_name(stem))
    return stem if ours else None


def read_entry(path: Path) -> Entry | None:
    """Return the entry at ``path``, or None if it is half-written, foreign or unreadable."""
    try:
        return Entry(path, Manifest.from_json(files.read(path / MANIFEST)))
    except (OSError, ValueError, TypeError):
        return None


def candidates(root: Path, spec: BuildSpec) -> Iterator[Path]:
    """Yield the directories under ``root`` that carry the spec's key, whatever their headers were."""
    prefix = f"{spec.stem}-{spec.key[:16]}-"
    with contextlib.suppress(OSError), os.scandir(root / spec.target) as items:
        for item in items:
            if item.name.startswith(prefix):
                yield Path(item.path)


def stale_reason(entry: Entry, spec: BuildSpec, digests: DigestStore) -> str | None:
    """Return why ``entry`` may not be used for ``spec``, or None if it may."""
    manifest = entry.manifest
    if manifest.key != spec.key:
        return "its key differs"
    for hidden, digest in manifest.dependencies:
        try:
            if digests.of(spec.roots.show(hidden)) != digest:
                return f"{hidden} changed"
        except KeyError as error:
            return f"{hidden}: this machine has no ${{{error.args[0]}}}"
        except (OSError, ValueError):
            return f"{hidden} cannot be read"
    return damage(entry, digests)


def distrusted(path: Path, *names: str) -> str | None:
    """Return why an entry at ``path`` may not be used, given that its root may: others could have written ``names``.

    Those are manifest and library where none are named.
    """
    if settings.TRUST_SHARED_DIRS.get():
        return None
    return trust.entry_problem(path, names or (MANIFEST, BuildSpec.library))


def damage(entry: Entry, digests: DigestStore) -> str | None:
    """Return what is wrong with an entry's library, or None."""
    unchecked = entry.manifest.unchecked
    if unchecked:
        return f"its device code was not checked for: {', '.join(unchecked)}"
    try:
        if entry.library.stat().st_size != entry.manifest.library_bytes:
            return "module.so is truncated"
        if digests.of(str(entry.library)) != entry.manifest.library_sha256:
            return "module.so is not what was built"
    except OSError as error:
        return f"module.so cannot be read: {error.strerror}"
    return None


def find(roots: list[Path], spec: BuildSpec, digests: DigestStore) -> Entry | None:
    """Return a usable entry, or None. Takes no lock, starts no process, writes nothing."""
    for root in roots:
        for path in candidates(root, spec):
            reason = distrusted(path)
            entry = read_entry(path) if reason is None else None
            if entry is None:
                log.debug("%s is not an entry: %s", path, reason or "its manifest cannot be read")
                continue
            reason = stale_reason(entry, spec, digests)
            if reason is None:
                return entry
            log.debug("%s may not be used: %s", path, reason)
    return None


_held: dict[Path, int] = {}


def hold(entry: Entry) -> bool:
    """Mark ``entry`` as used now and in use until this process ends; False if it is being removed."""
    if entry.path in _held:
        return True
    try:
        descriptor = os.open(entry.path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        pass  # a file system without locks: the last-use time alone protects the entry
    if not entry.library.exists():
        os.close(descriptor)
        return False
    with contextlib.suppress(OSError):
        os.utime(descriptor)
    _held[entry.path] = descriptor
    return True


def publish(staging: Path, root: Path, spec: BuildSpec, manifest: Manifest) -> Path:
    """Make the finished build in ``staging`` visible under ``root`` by one rename; returns where it lies.

    If an equal entry is already there (another host won the race), that one stays. A damaged one is put aside.

    Raises:
        OSError: the directory cannot be written.
    """
    target = root / spec.target / entry_name(spec, dependencies_digest(manifest.dependencies, manifest.generated))
    trust.own_directory(target.parent)
    files.write(staging / MANIFEST, manifest.to_json(), durably=True)
    trust.seal(staging)
    for _ in range(3):
        try:
            staging.rename(target)
            return target
        except OSError:
            if not target.exists():
                raise
        present = read_entry(target)
        if present is not None and _intact(present):
            return target
        discard(target, root)
    raise OSError(f"{target} cannot be replaced")


def _intact(entry: Entry) -> bool:
    if entry.manifest.unchecked:
        return False
    try:
        return file_digest(entry.library) == entry.manifest.library_sha256
    except OSError:
        return False


def staging_dir(root: Path, name: str) -> Path:
    """Make an empty directory for a build called ``name``, which nobody else can enter until it is sealed.

    Raises:
        OSError: it cannot be made.
    """
    path = root / "staging" / f"{name}.{secrets.token_hex(4)}"
    trust.own_directory(path.parent)
    path.mkdir(mode=0o700)
    return path


def discard(path: Path, root: Path) -> None:
    """Remove a directory so that no reader ever sees half of it; failing to is not an error."""
    with contextlib.suppress(OSError):
        aside = staging_dir(root, DISCARDED) / path.name
        path.rename(aside)
        path = aside.parent
    shutil.rmtree(path, ignore_errors=True)
