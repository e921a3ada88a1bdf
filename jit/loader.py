"""From a module's name to its loaded library: prebuilt, else cached, else built.

A library is loaded once per process. What it is (targets, digest) is checked before ``dlopen``, because loading code
for another GPU cannot be undone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hipforge import devices, settings
from hipforge.errors import BuildError, MissingModuleError
from hipforge.jit import build, cache, cache_dir, hip_module, registry, toolchain
from hipforge.jit.spec import VariantValue

log = logging.getLogger("hipforge")


@dataclass(frozen=True)
class LoadedModule:
    """A loaded module: ``handle`` is what ``dlopen`` returned, ``seconds`` how long finding or building it took."""

    path: Path
    manifest: cache.Manifest
    library: ctypes.CDLL
    seconds: float
    built: bool

    @property
    def handle(self) -> int:
        """The ``dlopen`` handle."""
        return int(self.library._handle)


_Key = tuple[str, tuple[tuple[str, VariantValue], ...], str]

_loaded: dict[_Key, LoadedModule] = {}
_lock = threading.RLock()


def load(module: str, variant: Mapping[str, VariantValue] | None, arch: str) -> LoadedModule:
    """Return the loaded library of ``module``, building it if need be; once per process for each variant and arch.

    Raises:
        ArchError: the module has no code for ``arch``.
        BuildError: it does not compile, or its library cannot be loaded.
        ConfigError: the module or the variant is not known.
        MissingModuleError: it is not built and ``HIPFORGE_DISABLE_JIT=1``.
        ToolchainError: it is not built and no compiler can build it.
    """
    key = (module, tuple(sorted((variant or {}).items())), arch)
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(module, variant, arch)
        return _loaded[key]


def loaded() -> tuple[LoadedModule, ...]:
    """Return the modules that this process has loaded, in order."""
    return tuple(_loaded.values())


def _load(module: str, variant: Mapping[str, VariantValue] | None, arch: str) -> LoadedModule:
    started = time.perf_counter()
    wanted = hip_module.request(registry.module(module), variant, arch)
    devices.current().load_runtime()
    held: list[ctypes.CDLL] = []

    def open_in_staging(library: Path) -> None:
        held.append(open_library(library))

    if settings.DISABLE_JIT.get():
        spec = hip_module.specification(wanted, toolchain.select(wanted.arch))
        entry = cache.find(cache_dir.reading_roots(), spec, cache_dir.digests())
        if entry is None:
            raise MissingModuleError(missing_message(wanted))
        built = False
    else:
        spec = hip_module.specification(wanted, toolchain.select(wanted.arch))
        result = build.ensure(spec, validate=open_in_staging)
        entry, built = result.entry, result.built
    cache_dir.digests().save()
    library = held[0] if held else open_library(entry.library)
    return LoadedModule(entry.path, entry.manifest, library, time.perf_counter() - started, built)


def missing_message(wanted: hip_module.Request) -> str:
    """Return the error for a module that is not built where building is disabled."""
    return (
        f"{wanted.stem} for {wanted.arch} is not built and HIPFORGE_DISABLE_JIT=1; "
        f"build it ahead of time: hipforge build {wanted.entry.name} --arch {wanted.arch}"
    )


def open_library(library: Path) -> ctypes.CDLL:
    """Load a shared library with its symbols kept to itself.

    Raises:
        BuildError: the dynamic linker refused it.
    """
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise BuildError(f"{library} was built but cannot be loaded: {error}") from error
