"""The AMD backend as the build machinery sees it; :mod:`hipforge.jit` imports nothing else of it.

Another vendor's backend answers the same three questions: which compilers there are (``compilers``), whether one can
build for an architecture and with which commands (``inspect`` -> :class:`hipforge.jit.toolchain.Toolchain`), and what
device code a finished library holds (``read_resources``). The runtime is loaded by :mod:`hipforge.devices`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hipforge.jit.backends.amd.compilers import NOWHERE, SEARCH_ENVIRONMENT, NoHeadersError, compilers, inspect

if TYPE_CHECKING:
    from hipforge.jit.backends.amd.resources import DeviceCode
    from hipforge.jit.spec import BuildSpec

__all__ = ["NOWHERE", "SEARCH_ENVIRONMENT", "NoHeadersError", "compilers", "inspect", "read_resources"]


def read_resources(spec: BuildSpec, library: Path) -> DeviceCode:
    """Return what a module's library holds: :func:`hipforge.jit.backends.amd.resources.read`."""
    from hipforge.jit.backends.amd import resources  # not imported in a process that builds nothing

    return resources.read(spec, library)
