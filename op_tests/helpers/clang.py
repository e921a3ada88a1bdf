"""The clang++ of the toolchain in use, for tests that assemble or compile something other than HIP."""

from __future__ import annotations

from pathlib import Path

from hipforge.jit import toolchain


def clang(arch: str = "gfx950") -> str:
    """Return its path; for a hipcc that of the clang++ it calls, since hipcc treats C++ and what it links as HIP."""
    return str(Path(toolchain.select(arch).roots()["LLVM"]) / "bin/clang++")
