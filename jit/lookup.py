"""Is there a module that may be used? Prebuilt, else cached, else the error that an earlier build left, else missing.

The only place that defines this order; the loader, host libraries, builds of many modules, ``hipforge inspect`` and
``hipforge cache why`` all use it. Nothing is built and no compiler is started, except to ask
one that is new for its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hipforge.errors import BuildError, ToolchainError
from hipforge.jit.cache import cache_dir, limits, prebuilt, store
from hipforge.jit.cache.store import Entry
from hipforge.jit.roots import Roots
from hipforge.jit.spec import BuildSpec


class Request(Protocol):
    """What is wanted, before any compiler is known: a HIP module or a host library."""

    @property
    def stem(self) -> str:
        """The first part of an entry's directory name."""

    @property
    def target(self) -> str:
        """``gfx950``, ``gfx942`` or ``host``."""

    @property
    def title(self) -> str:
        """What messages call it."""

    @property
    def limits(self) -> Mapping[str, Any]:
        """The ``resource_limits`` of its registry entry."""

    @property
    def portable(self) -> Mapping[str, str]:
        """The ingredients that need no compiler."""

    @property
    def roots(self) -> Roots:
        """Where the files of this installation are."""

    @property
    def how_to_get(self) -> str:
        """What to say when it is missing and may not be built."""

    def specify(self) -> BuildSpec:
        """Return the spec, as the compiler that is selected for it would build it.

        Raises:
            ToolchainError: no compiler can build it.
        """

    def check_buildable(self) -> None:
        """Look for what only a build needs.

        Raises:
            ToolchainError: something is missing; the message says what to install.
        """

    def again(self) -> Request:
        """Return the same request with the files as they are now."""


@dataclass(frozen=True)
class Ready:
    """An entry that may be loaded."""

    entry: Entry
    prebuilt: bool


@dataclass(frozen=True)
class Failed:
    """It cannot be used. ``entry`` is the one that exceeds its limits; None when an earlier build left ``error``."""

    error: BuildError
    path: Path
    entry: Entry | None


@dataclass(frozen=True)
class Missing:
    """It has to be built. ``spec`` is None when no compiler can, and ``problem`` says why."""

    spec: BuildSpec | None
    problem: ToolchainError | None = None

    def buildable(self) -> BuildSpec:
        """Return the spec.

        Raises:
            ToolchainError: no compiler can build it.
        """
        if self.spec is None:
            raise self.problem or ToolchainError("no compiler was found")
        return self.spec


def look(request: Request, *, use: bool = True) -> Ready | Failed | Missing:
    """Return what there is for ``request``.

    Args:
        request: what is wanted.
        use: hold a cached entry, so that nobody removes it while this process lives, and note that it was used.
    """
    ready = prebuilt.find(request.stem, request.target, request.portable, request.roots)
    if ready is not None:
        return _within_limits(Ready(ready, prebuilt=True), request)
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
        return _within_limits(Ready(entry, prebuilt=False), spec)
    from hipforge.jit.cache import failures  # a hit needs none

    for root in roots:
        error = failures.recall([root], spec, digests)
        if error is not None:
            return Failed(error, failures.directory(root, spec), None)
    return Missing(spec)


def _within_limits(ready: Ready, wanted: Request | BuildSpec) -> Ready | Failed:
    error = limits.problem(ready.entry, wanted)
    return ready if error is None else Failed(error, ready.entry.path, ready.entry)
