"""Find and load ``libcudart``: the copy that torch already uses, so that both share one context."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from hipforge.errors import LaunchError

_SONAME = "libcudart.so"


def candidates() -> Iterator[Path]:
    """Yield where the library may be, best first: mapped by this process, torch's own copy, then a toolkit's."""
    import torch

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(_SONAME):
            yield Path(path)
            break
    packages = Path(torch.__file__).parent.parent
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    for directory in (
        Path(torch.__file__).parent / "lib",
        *sorted(packages.glob("nvidia/cu*/lib")),
        packages / "nvidia/cuda_runtime/lib",
        *(Path(home) / "lib64" for home in homes if home),
        Path("/usr/local/cuda/lib64"),
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/usr/lib64"),
    ):
        yield from sorted(directory.glob(f"{_SONAME}*"))


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load the CUDA runtime with global symbols, so that modules bind to it.

    Raises:
        LaunchError: no ``libcudart`` can be loaded; the message lists what was tried.
    """
    tried = []
    for path in candidates():
        try:
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            tried.append(f"{path}: {error}")
    listing = "; ".join(tried) or f"no {_SONAME} in this process, torch's wheels, CUDA_HOME or /usr/lib"
    raise LaunchError(
        f"the CUDA runtime cannot be loaded ({listing}); pip install nvidia-cuda-runtime, or set "
        "HIPFORGE_DEVICE=emulator"
    )
