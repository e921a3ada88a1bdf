"""How is a module obtained? Prebuilt, else cached, else the error that an earlier build left, else built now.

The only place that defines this order, and the second look-up under the lock of a build. The loader, host libraries,
builds of many modules, ``hipforge inspect`` and ``hipforge cache why`` all use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hipforge import settings
from hipforge.errors import BuildError, HipforgeError, MissingModuleError, ToolchainError
from hipforge.jit.cache import cache_dir, limits, prebuilt, store
from hipforge.jit.spec import Binary, BuildSpec, Request

_ATTEMPTS = 4
"""Requests of one module during which somebody edits a source, before that is an error."""


@dataclass(frozen=True)
class Ready:
    """An entry that may be loaded: whether it was built ahead of time, and whether this call built it."""

    entry: store.Entry
    prebuilt: bool = False
    built: bool = False


@dataclass(frozen=True)
class Failed:
    """It cannot be used. ``entry`` is the one that exceeds its limits; None when an earlier build left ``error``."""

    error: BuildError
    path: Path
    entry: store.Entry | None


@dataclass(frozen=True)
class Missing:
    """It has to be built. ``spec`` is None when no compiler can, and ``error`` says why."""

    spec: BuildSpec | None
    error: ToolchainError | None = None


def module(request: Request, *, attempts: int = _ATTEMPTS) -> Ready:
    """Return the entry for ``request``, building it if need be; again if a source was edited meanwhile.

    Raises:
        BuildError: it does not compile, or its kernels exceed the limits of its registry entry.
        ConfigError: the cache directory that the user named cannot be used.
        MissingModuleError: it is not built and ``HIPFORGE_DISABLE_JIT=1``.
        ToolchainError: it is not built and no compiler can build it.
    """
    found = look(request)
    if isinstance(found, Ready):
        if not found.prebuilt:
            cache_dir.digests().save()
        return found
    has_entry = isinstance(found, Failed) and found.entry is not None
    if settings.DISABLE_JIT.get() and not has_entry:
        raise MissingModuleError(request.how_to_get()) from (found.error if isinstance(found, Missing) else None)
    spec = _to_build(found)
    request.check_buildable()
    from hipforge.jit.cache.stability import InputsChanged  # only a miss pays for importing what builds

    try:
        return _build(spec)
    except InputsChanged as error:
        if not error.in_key or attempts <= 1:
            raise
        return module(request.again(), attempts=attempts - 1)


def binary(spec: BuildSpec) -> Ready:
    """Return what the cache has for ``spec``, building it if need be; nothing prebuilt.

    Raises:
        BuildError: it cannot be built; a compile error is raised again, without a build, until something it
            depended on changes.
        ConfigError: the cache directory that the user named cannot be written.
    """
    found = look_for(spec, cache_dir.reading_roots())
    return found if isinstance(found, Ready) else _build(_to_build(found))


def look(request: Request, *, use: bool = True) -> Ready | Failed | Missing:
    """Return what there is for ``request``. Nothing is built; a compiler is started only if its version is not known.

    Args:
        request: what is wanted.
        use: hold a cached entry, so that nobody removes it while this process lives, and note that it was used.
    """
    ahead = prebuilt.find(request)
    if ahead is not None:
        return _within_limits(Ready(ahead, prebuilt=True), request)
    try:
        spec = request.specify()
    except ToolchainError as error:
        return Missing(None, error)
    return look_for(spec, cache_dir.reading_roots(), use=use)


def look_for(spec: BuildSpec, roots: list[Path], *, use: bool = True) -> Ready | Failed | Missing:
    """Return what the cache directories ``roots`` have for ``spec``; ``use`` as in :func:`look`."""
    digests = cache_dir.digests()
    entry = store.find(roots, spec, digests)
    if entry is not None and (not use or store.hold(entry)):
        return _within_limits(Ready(entry), spec)
    from hipforge.jit.cache import failures  # a hit needs none

    for root in roots:
        error = failures.recall([root], spec, digests)
        if error is not None:
            return Failed(error, failures.directory(root, spec), None)
    return Missing(spec)


def _within_limits(ready: Ready, wanted: Binary) -> Ready | Failed:
    error = limits.problem(ready.entry, wanted)
    return ready if error is None else Failed(error, ready.entry.path, ready.entry)


def _to_build(found: Failed | Missing) -> BuildSpec:
    if isinstance(found, Failed) or found.spec is None:
        raise found.error or HipforgeError("no compiler was found")
    return found.spec


def _build(spec: BuildSpec) -> Ready:
    """Build an entry that was missing, or return the one that another process built first."""
    return cache_dir.written(lambda root: _build_in(root, spec))


def _build_in(root: Path, spec: BuildSpec) -> Ready:
    from hipforge.jit import build
    from hipforge.jit.cache import locks

    with locks.building(root, store.build_name(spec), spec.title):
        found = look_for(spec, [root])
        if isinstance(found, Ready):
            return found
        made = Ready(build.make(_to_build(found), root), built=True)
    build.keep_limit(root)
    return made
