"""From a module's name to its loaded library.

A library is loaded once per process. Its digest and its GPU are checked before ``dlopen``, because loading cannot be
undone.
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

from hipforge import devices
from hipforge.errors import BuildError
from hipforge.jit import hip_module, obtain, registry
from hipforge.jit.cache import store
from hipforge.jit.spec import VariantValue

log = logging.getLogger("hipforge")


@dataclass(frozen=True)
class LoadedModule:
    """A loaded module: ``path`` is its entry's directory, ``seconds`` the time from the question to the library."""

    name: str
    path: Path
    manifest: store.Manifest
    library: ctypes.CDLL
    seconds: float
    built: bool

    @property
    def handle(self) -> int:
        """What ``dlopen`` returned."""
        return int(self.library._handle)


_Key = tuple[str, tuple[tuple[str, VariantValue], ...], str]

_loaded: dict[_Key, LoadedModule] = {}
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A forked child has only its own thread and must not wait for one that was loading.
os.register_at_fork(after_in_child=_renew_lock)


def load(module: str, variant: Mapping[str, VariantValue] | None, arch: str) -> LoadedModule:
    """Return the loaded library of ``module``, building it if need be; once per process for each variant and arch.

    Raises:
        ArchError: the module has no code for ``arch``.
        BuildError: it does not compile, or its library cannot be loaded.
        ConfigError: the module or the variant is not known.
        HipforgeError: it is not loaded yet, and the current stream is being captured into a graph.
        MissingModuleError: it is not built and ``HIPFORGE_DISABLE_JIT=1``.
        ToolchainError: it is not built and no compiler can build it.

    Example:
        >>> from hipforge import devices, jit
        >>> runtime = devices.current().load_runtime()  # what a module's HIP calls are bound to
        >>> module = jit.load("module_fp8_quant", {"HF_INPUT": "f32"}, devices.current().arch_of())
        >>> any("amax_kernel" in symbol for symbol in module.manifest.kernels)
        True
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
    """Return what this process has loaded so far, in order."""
    return tuple(_loaded.values())


def _load(module: str, variant: Mapping[str, VariantValue] | None, arch: str) -> LoadedModule:
    devices.refuse_in_capture(f"load {module} for {arch} (and build it, unless it is cached)")
    started = time.perf_counter()
    obtained = obtain.module(hip_module.request(registry.module(module), variant, arch))
    entry = obtained.entry
    library = open_library(entry.library)
    seconds = time.perf_counter() - started
    log.debug("loaded %s in %.1f ms", entry.path, seconds * 1e3)
    return LoadedModule(module, entry.path, entry.manifest, library, seconds, obtained.built)


def open_library(library: Path) -> ctypes.CDLL:
    """Load a module's library, its symbols kept to itself, after the HIP runtime that it binds to.

    Raises:
        BuildError: the dynamic linker refused it.
    """
    devices.current().load_runtime()
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise BuildError(f"{library} was built but cannot be loaded: {error}") from error
