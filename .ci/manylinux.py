"""Which manylinux platform may a wheel with these libraries claim? The oldest whose C and C++ libraries have enough.

The limits are those of PEP 600's policies as auditwheel keeps them: the newest symbol versions of glibc, libstdc++, the
C++ ABI and libgcc on the platform, and the libraries that a wheel may take from the system.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

Version = tuple[int, ...]

# (glibc minor version of the tag, newest GLIBCXX, CXXABI and GCC versions)
POLICIES: tuple[tuple[int, Version, Version, Version], ...] = (
    (17, (3, 4, 19), (1, 3, 7), (4, 8, 0)),
    (28, (3, 4, 24), (1, 3, 11), (8, 0, 0)),
    (31, (3, 4, 28), (1, 3, 12), (9, 0, 0)),
    (34, (3, 4, 29), (1, 3, 13), (11, 0)),
    (35, (3, 4, 30), (1, 3, 13), (12, 0, 0)),
    (36, (3, 4, 30), (1, 3, 13), (12, 0, 0)),
    (38, (3, 4, 32), (1, 3, 14), (13, 0, 0)),
    (39, (3, 4, 33), (1, 3, 15), (14, 0)),
)
SYSTEM_LIBRARIES = frozenset(
    {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1",
     "ld-linux-x86-64.so.2"}
)  # fmt: skip
_DYNAMIC, _VERNEED = 6, 0x6FFFFFFE
_DT_NEEDED = 1


def _sections(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield (type, offset, size, linked section's offset) of each section of an ELF64 file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    rows = [struct.unpack_from("<IIQQQQII", data, table + size * i) for i in range(count)]
    for row in rows:
        yield row[1], row[4], row[5], rows[row[6]][4] if row[6] < count else 0


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def needs(data: bytes) -> tuple[set[str], set[str]]:
    """Return (libraries, symbol versions such as ``GLIBC_2.34``) that an ELF64 library asks the system for."""
    libraries: set[str] = set()
    versions: set[str] = set()
    for kind, offset, size, names in _sections(data):
        if kind == _DYNAMIC:
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<qQ", data, at)
                if tag == _DT_NEEDED:
                    libraries.add(_text(data, names + value))
        elif kind == _VERNEED:
            at = offset
            while True:
                _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
                inner = at + first
                for _ in range(count):
                    _, _, _, name, step = struct.unpack_from("<IHHII", data, inner)
                    versions.add(_text(data, names + name))
                    inner += step
                if following == 0:
                    break
                at += following
    return libraries, versions


def _newest(versions: Iterable[str], family: str) -> Version:
    numbers = (name.removeprefix(f"{family}_") for name in versions if name.startswith(f"{family}_"))
    return max((tuple(map(int, text.split("."))) for text in numbers if text[:1].isdigit()), default=())


def platform(libraries: Iterable[Path]) -> str:
    """Return the platform tag of a wheel with ``libraries``; ``linux_x86_64`` where no policy allows them."""
    needed: set[str] = set()
    versions: set[str] = set()
    for path in libraries:
        found = needs(path.read_bytes())
        needed |= found[0]
        versions |= found[1]
    if not needed <= SYSTEM_LIBRARIES or any("PRIVATE" in name for name in versions):
        return "linux_x86_64"
    for minor, glibcxx, cxxabi, gcc in POLICIES:
        limits = {"GLIBC": (2, minor), "GLIBCXX": glibcxx, "CXXABI": cxxabi, "GCC": gcc}
        if all(_newest(versions, family) <= limit for family, limit in limits.items()):
            return f"manylinux_2_{minor}_x86_64"
    return "linux_x86_64"
