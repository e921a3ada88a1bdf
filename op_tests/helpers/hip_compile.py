"""Compiles HIP text with the toolchain that the JIT would choose, straight to one file: no registry, no cache."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from hipforge.jit import toolchain
from hipforge.jit.roots import Roots


def _command(arch: str) -> list[str]:
    chosen = toolchain.select(arch)
    roots = Roots(chosen.roots())
    return [*map(roots.show, ("${HIPCXX}", "-x", "hip", *chosen.tree_flags(), "-O3"))]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def _offload(archs: Sequence[str]) -> list[str]:
    return [f"--offload-arch={arch}" for arch in archs]


def shared_library(text: str, directory: Path, archs: Sequence[str] = ("gfx950",), flags: Sequence[str] = ()) -> Path:
    """Return a host library whose HIP symbols are undefined, as a module's are."""
    source, library = directory / "source.hip", directory / "module.so"
    source.write_text(text)
    _run([*_command(archs[0]), *_offload(archs), "-shared", "-fPIC", "-no-hip-rt", *flags, str(source),
          "-o", str(library)])  # fmt: skip
    return library


def host_object(text: str, directory: Path, archs: Sequence[str] = ("gfx950",), flags: Sequence[str] = ()) -> Path:
    """Return a host object file."""
    source, made = directory / "source.hip", directory / "source.o"
    source.write_text(text)
    _run([*_command(archs[0]), *_offload(archs), "-fPIC", *flags, "-c", str(source), "-o", str(made)])
    return made


def device_elf(text: str, directory: Path, arch: str = "gfx950", flags: Sequence[str] = ()) -> Path:
    """Return a bare AMDGPU ELF."""
    source, made = directory / "device.hip", directory / f"device-{arch}.co"
    source.write_text(text)
    _run([*_command(arch), *_offload([arch]), "--cuda-device-only", "--no-gpu-bundle-output", *flags, str(source),
          "-o", str(made)])  # fmt: skip
    return made


def device_bundle(text: str, directory: Path, archs: Sequence[str] = ("gfx950",), flags: Sequence[str] = ()) -> Path:
    """Return an offload bundle."""
    source, made = directory / "device.hip", directory / "device.hipfb"
    source.write_text(text)
    _run([*_command(archs[0]), *_offload(archs), "--cuda-device-only", "--gpu-bundle-output", *flags, str(source),
          "-o", str(made)])  # fmt: skip
    return made
