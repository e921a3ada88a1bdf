"""Find and load ``libamdhip64``: the copy that torch already uses, so that both share one HIP context."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from hipforge.errors import LaunchError

_SONAME = "libamdhip64.so"
_DISTRIBUTION_DIRS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))
"""Debian's and Ubuntu's multiarch folder, Fedora's and SUSE's, Arch's."""


def candidates() -> Iterator[Path]:
    """Yield where the library may be, best first.

    Mapped by this process, torch's own copy, ROCm's, then where distributions keep theirs.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(_SONAME):
            yield Path(path)
            break
    import torch

    for directory in (
        Path(torch.__file__).parent / "lib",
        Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "lib",
        Path("/opt/rocm/lib"),
        *_DISTRIBUTION_DIRS,
    ):
        yield from sorted(directory.glob(f"{_SONAME}*"))


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load the HIP runtime with global symbols, so that modules bind to it.

    Raises:
        LaunchError: no ``libamdhip64`` can be loaded; the message lists what was tried.
    """
    tried = []
    for path in candidates():
        try:
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            tried.append(f"{path}: {error}")
    listing = "; ".join(tried) or f"no {_SONAME} in this process, torch's lib folder, /opt/rocm/lib or /usr/lib"
    raise LaunchError(f"the HIP runtime cannot be loaded ({listing}); install ROCm, or set HIPFORGE_DEVICE=emulator")
