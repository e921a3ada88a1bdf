"""Compiles HIP text with the toolchain that the JIT would choose, straight to one file: no registry, no cache.

A text that includes ``hip.h``, of this folder, is compiled without HIP's own headers and device libraries.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import hipforge.csrc
from hipforge.jit import toolchain
from hipforge.jit.roots import Roots

INCLUDE = (Path(__file__).parent, Path(hipforge.csrc.__file__).parent / "include")
WITHOUT_HIP = ("-nogpuinc", "-nogpulib", *(f"-I{folder}" for folder in INCLUDE))


def _command(text: str, archs: Sequence[str], flags: Sequence[str]) -> list[str]:
    chosen = toolchain.select(archs[0])
    roots = Roots(chosen.roots())
    command = ("${HIPCXX}", "-x", "hip", *chosen.tree_flags(), "-O3", *(f"--offload-arch={arch}" for arch in archs))
    return [*map(roots.show, command), *(WITHOUT_HIP if '#include "hip.h"' in text else ()), *flags]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def shared_library(text: str, directory: Path, archs: Sequence[str] = ("gfx950",), flags: Sequence[str] = ()) -> Path:
    """Return a host library whose HIP symbols are undefined, as a module's are."""
    source, library = directory / "source.hip", directory / "module.so"
    source.write_text(text)
    _run([*_command(text, archs, flags), "-shared", "-fPIC", "-no-hip-rt", str(source), "-o", str(library)])
    return library


def host_object(text: str, directory: Path, archs: Sequence[str] = ("gfx950",), flags: Sequence[str] = ()) -> Path:
    """Return a host object file."""
    source, made = directory / "source.hip", directory / "source.o"
    source.write_text(text)
    _run([*_command(text, archs, flags), "-fPIC", "-c", str(source), "-o", str(made)])
    return made


def device_elf(text: str, directory: Path, arch: str = "gfx950", flags: Sequence[str] = ()) -> Path:
    """Return a bare AMDGPU ELF."""
    source, made = directory / "device.hip", directory / f"device-{arch}.co"
    source.write_text(text)
    only = ("--cuda-device-only", "--no-gpu-bundle-output")
    _run([*_command(text, [arch], flags), *only, str(source), "-o", str(made)])
    return made


def device_bundle(text: str, directory: Path, archs: Sequence[str] = ("gfx950",), flags: Sequence[str] = ()) -> Path:
    """Return an offload bundle."""
    source, made = directory / "device.hip", directory / "device.hipfb"
    source.write_text(text)
    only = ("--cuda-device-only", "--gpu-bundle-output")
    _run([*_command(text, archs, flags), *only, str(source), "-o", str(made)])
    return made
