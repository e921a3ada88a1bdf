"""A vendor's runtime library: this process's copy, else the first one that loads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

from hipforge.errors import LaunchError


def candidates(soname: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Yield where the library may be, best first: mapped by this process, then each folder's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(soname):
            yield Path(path)
            break
    for folder in folders:
        yield from sorted(folder.glob(f"{soname}*"))


def load(paths: Iterable[Path], what: str, nowhere: str, remedy: str) -> ctypes.CDLL:
    """Load the first library that works, with global symbols, so that modules bind to it.

    Raises:
        LaunchError: none can; the message lists what was tried, or says ``nowhere``, and ends with the remedy.
    """
    tried = []
    for path in paths:
        try:
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            tried.append(f"{path}: {error}")
    raise LaunchError(
        f"{what} cannot be loaded ({'; '.join(tried) or nowhere}); {remedy}, or set HIPFORGE_DEVICE=emulator"
    )
