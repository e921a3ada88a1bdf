"""The emulator as this process's HIP runtime: :func:`load` is what :mod:`hipforge.devices` calls."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from hipforge.emulator import configuration


@dataclass(frozen=True)
class Runtime:
    """The loaded emulator. ``library`` has the C interface of ``emulator/native/api.h`` and every HIP symbol."""

    library: ctypes.CDLL

    @property
    def arch(self) -> str:
        """The architecture that the emulated device presents now."""
        return configuration.current().arch


@functools.lru_cache(maxsize=1)
def load() -> Runtime:
    """Load the library with global symbols, set its options from the environment, and let signals end launches.

    Raises:
        BuildError, ToolchainError: the library is not built yet and cannot be.
        ConfigError: an ``HIPFORGE_EMULATOR_*`` setting is not valid.
    """
    loaded = configuration.configured_library()
    loaded.hfemu_poll_python()
    return Runtime(loaded)
