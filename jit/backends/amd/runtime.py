"""Find and load ``libamdhip64``: the copy that torch already uses, so that both share one HIP context."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from hipforge.jit.backends import runtime_library

_SONAME = "libamdhip64.so"
_DISTRIBUTION_DIRS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))
"""Debian's and Ubuntu's multiarch folder, Fedora's and SUSE's, Arch's."""


def candidates() -> Iterator[Path]:
    """Yield where the library may be, best first: mapped, torch's own copy, ROCm's, then a distribution's."""
    import torch

    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "lib"
    own = Path(torch.__file__).parent / "lib"
    yield from runtime_library.candidates(_SONAME, (own, rocm, Path("/opt/rocm/lib"), *_DISTRIBUTION_DIRS))


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load the HIP runtime; raises LaunchError where no ``libamdhip64`` can be."""
    nowhere = f"no {_SONAME} in this process, torch's lib folder, /opt/rocm/lib or /usr/lib"
    return runtime_library.load(candidates(), "the HIP runtime", nowhere, "install ROCm")
