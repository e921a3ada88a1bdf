"""Obtain a module: what :mod:`hipforge.jit.lookup` finds, else a build of it, else the error."""

from __future__ import annotations

from dataclasses import dataclass

from hipforge import settings
from hipforge.errors import MissingModuleError
from hipforge.jit import lookup
from hipforge.jit.cache import cache_dir
from hipforge.jit.cache.store import Entry


@dataclass(frozen=True)
class Obtained:
    """An entry that may be loaded, and whether this call built it."""

    entry: Entry
    built: bool


def obtain(request: lookup.Request, *, attempts: int = 4) -> Obtained:
    """Return the entry for ``request``, building it if need be; again if a source was edited meanwhile.

    Raises:
        BuildError: it does not compile, or its kernels exceed the limits of its registry entry.
        ConfigError: the cache directory that the user named cannot be used.
        MissingModuleError: it is not built and ``HIPFORGE_DISABLE_JIT=1``.
        ToolchainError: it is not built and no compiler can build it.
    """
    found = lookup.look(request)
    if isinstance(found, lookup.Ready):
        if not found.prebuilt:
            cache_dir.digests().save()
        return Obtained(found.entry, built=False)
    if isinstance(found, lookup.Failed) and found.entry is not None:
        raise found.error
    if settings.DISABLE_JIT.get():
        raise MissingModuleError(request.how_to_get) from getattr(found, "problem", None)
    if isinstance(found, lookup.Failed):
        raise found.error
    spec = found.buildable()
    request.check_buildable()
    # Only a miss pays for importing what builds.
    from hipforge.jit import build

    try:
        made = build.make(spec)
    except build.InputsChanged as error:
        if not error.in_key or attempts <= 1:
            raise
        return obtain(request.again(), attempts=attempts - 1)
    return Obtained(made.entry, made.built)
