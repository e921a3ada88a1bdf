"""Find and load ``libcudart``: the copy that torch already uses, so that both share one context."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from hipforge.jit.backends import runtime_library

_SONAME = "libcudart.so"


def candidates() -> Iterator[Path]:
    """Yield where the library may be, best first: mapped by this process, torch's own copy, then a toolkit's."""
    import torch

    own = Path(torch.__file__).parent
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    folders = (
        own / "lib",
        *sorted(own.parent.glob("nvidia/cu*/lib")),
        own.parent / "nvidia/cuda_runtime/lib",
        *(Path(home) / "lib64" for home in homes if home),
        Path("/usr/local/cuda/lib64"),
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/usr/lib64"),
    )
    yield from runtime_library.candidates(_SONAME, folders)


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load the CUDA runtime; raises LaunchError where no ``libcudart`` can be."""
    nowhere = f"no {_SONAME} in this process, torch's wheels, CUDA_HOME or /usr/lib"
    return runtime_library.load(candidates(), "the CUDA runtime", nowhere, "pip install nvidia-cuda-runtime")
