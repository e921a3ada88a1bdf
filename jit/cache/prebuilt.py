"""Modules built ahead of time: read-only directories with the cache's layout, which need no compiler.

``HIPFORGE_PREBUILT_DIR`` is looked at first, then the ``prebuilt`` folder of an installed wheel. An entry fits when
module, variant, target, flags, ABI and the digests of the sources (and of every header of the project that they
include) are those of this installation; compiler and system headers may be others or missing. Nothing is written.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import hipforge
from hipforge import settings
from hipforge.jit.cache import cache_dir, store, trust
from hipforge.jit.cache.store import Entry
from hipforge.jit.digest import DigestStore
from hipforge.jit.host_cpu import can_run
from hipforge.jit.spec import PORTABLE, BuildSpec, Request, category

log = logging.getLogger("hipforge")

_OWN_FILES = ("${CSRC}/", "${JIT}/", "${EMULATOR}/", "${MODULE_DIR}/", "${SOURCE")
_KEY_DIGITS = 16


def directories() -> list[Path]:
    """Return the directories of prebuilt modules that exist, in order."""
    named = [cache_dir.checked(path, settings.PREBUILT_DIR.env) for path in settings.PREBUILT_DIR.get()]
    # Who can write into the package can run code without a prebuilt module.
    return [path for path in (*named, _packaged()) if path.is_dir()]


def _packaged() -> Path:
    return Path(hipforge.__file__).parent / "prebuilt"


def entries() -> list[Entry]:
    """Return every readable prebuilt entry in the order of the search; some may not fit here."""
    found = (
        store.read_entry(directory / target / name)
        for directory in directories()
        for target in _folders(directory)
        for name in _folders(directory / target)
    )
    return [entry for entry in found if entry is not None]


def _folders(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(directory))
    return []


def find(request: Request) -> Entry | None:
    """Return the prebuilt entry that fits ``request``, or None."""
    for directory in directories():
        for path in _named(directory / request.target, request.stem):
            reason = store.distrusted(path) if directory != _packaged() else None
            entry = store.read_entry(path) if reason is None else None
            if entry is not None:
                reason = misfit(entry, request)
                if reason is None:
                    return entry
            log.debug("prebuilt %s does not fit: %s", path, reason or "it cannot be read")
    return None


def _named(directory: Path, stem: str) -> Iterable[Path]:
    suffix = 2 * (_KEY_DIGITS + 1)
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            if name[:-suffix] == stem:
                yield directory / name


def misfit(entry: Entry, request: Request) -> str | None:
    """Return why a prebuilt entry cannot be used here, or None."""
    theirs = {name: value for name, value in entry.manifest.ingredients.items() if category(name) in PORTABLE}
    for name in sorted({*theirs, *request.portable}):
        if category(name) in PORTABLE and theirs.get(name) != request.portable.get(name):
            return f"{name} differs"
    cpu = entry.manifest.ingredients.get("host cpu")
    if cpu is not None and not can_run(cpu):
        return "it was built for another CPU"
    digests = _in_memory()
    for hidden, digest in entry.manifest.dependencies:
        if hidden.startswith(_OWN_FILES):
            try:
                path = request.roots.show(hidden)
            except KeyError as error:
                return f"{hidden}: this installation has no ${{{error.args[0]}}}"
            if digests.of_any(path) != digest:
                return f"{hidden} changed"
    return store.damage(entry, digests)


@functools.cache
def _in_memory() -> DigestStore:
    return DigestStore(None)


def export(entries: Iterable[Entry], directory: Path) -> list[Path]:
    """Copy entries into a directory for ``HIPFORGE_PREBUILT_DIR`` or a wheel; returns where they lie.

    Raises:
        OSError: the directory cannot be written.
    """
    written: list[Path] = []
    for entry in entries:
        target = directory / entry.manifest.target / entry.path.name
        trust.make_directory(target.parent)
        target.mkdir(mode=0o700, exist_ok=True)
        for name in (BuildSpec.library, store.MANIFEST):
            shutil.copyfile(entry.path / name, target / name)
        trust.seal(target)
        written.append(target)
    return written
