"""A minimal ROCm tree for machines without ROCm, assembled once in the cache directory.

The ``triton`` wheel carries the HIP headers and the two device libraries of code (ocml, ockl). The headers of half
precision and bfloat16, which it lacks, are those of ``csrc/hip_headers``. clang also needs control constants (one-line
bitcode files that name the architecture and the floating-point mode), an empty OpenCL library and a version file.
``triton`` is located, never imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from hipforge import settings
from hipforge.errors import ToolchainError
from hipforge.jit import children
from hipforge.jit.cache import store, trust
from hipforge.jit.digest import DigestStore, text_digest
from hipforge.jit.roots import package_dir

_RECIPE = 4
"""Raised when the tree's contents change for the same triton."""

# name of the file: (name, LLVM type, value) of each constant in it. Both settings of a switch must exist, or clang
# rejects the whole tree.
_SWITCHES = {
    "finite_only": "finite_only_opt",
    "unsafe_math": "unsafe_math_opt",
    "daz_opt": "daz_opt",
    "correctly_rounded_sqrt": "correctly_rounded_sqrt32",
}
_CONSTANTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "oclc_isa_version_950": (("ISA_version", "i32", 9500),),
    "oclc_isa_version_942": (("ISA_version", "i32", 9402),),
    "oclc_abi_version_600": (("ABI_version", "i32", 600),),
    "oclc_wavefrontsize64_on": (("wavefrontsize64", "i8", 1), ("wavefrontsize_log2", "i8", 6)),
    "oclc_wavefrontsize64_off": (("wavefrontsize64", "i8", 0), ("wavefrontsize_log2", "i8", 5)),
    **{f"oclc_{file}_on": ((constant, "i8", 1),) for file, constant in _SWITCHES.items()},
    **{f"oclc_{file}_off": ((constant, "i8", 0),) for file, constant in _SWITCHES.items()},
}
_TRIPLE = 'target triple = "amdgcn-amd-amdhsa"\n'


@functools.cache
def triton_files() -> Path | None:
    """Return the folder of the triton wheel that holds ``include/`` and ``lib/*.bc``, or None."""
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location) / "backends" / "amd"
        if (folder / "include/hip/hip_runtime.h").is_file() and (folder / "lib/ocml.bc").is_file():
            return folder
    return None


def name_of(source: Path, clang_version: str, digests: DigestStore) -> Path:
    """Return where in a cache directory the tree made from ``source`` for one version of clang lies."""
    header = digests.of(str(source / "include/hip/hip_version.h"))
    own = " ".join(digests.of(str(path)) for path in own_headers())
    return Path("rocm-tree", text_digest(f"{_RECIPE} {source} {header} {own} {clang_version}")[:16])


def own_headers() -> list[Path]:
    """Return the HIP headers that are written here, in a fixed order."""
    return sorted((package_dir("csrc") / "hip_headers" / "hip").glob("*.h"))


def is_usable(tree: Path) -> bool:
    """Return whether there is a tree that only its owner can write; a rename published it, so it is complete."""
    if not os.path.isfile(tree / "share/hip/version"):  # False, too, where this user may not look
        return False
    return settings.TRUST_SHARED_DIRS.get() or (trust.problem(tree.parent) or trust.tree_problem(tree)) is None


def assemble(source: Path, root: Path, name: Path, clang: Path) -> Path:
    """Make the tree ``name`` in the cache directory ``root``, with ``clang`` for the constants (0.3 s); returns it.

    Raises:
        ToolchainError: the compiler could not make them.
        OSError: the directory cannot be written.
    """
    from hipforge.jit.cache.locks import building  # imports filelock, which a warm path never needs

    tree = root / name
    with building(root, f"rocm-tree-{tree.name}", "the ROCm tree"):
        if not is_usable(tree):
            _assemble(source, root, tree, clang)
    return tree


def _assemble(source: Path, root: Path, tree: Path, clang: Path) -> None:
    staging = store.staging_dir(root, store.DISCARDED)
    try:
        bitcode = staging / "amdgcn/bitcode"
        bitcode.mkdir(parents=True)
        _link_headers(source / "include", staging / "include")
        for library in ("ocml.bc", "ockl.bc"):
            (bitcode / library).symlink_to(source / "lib" / library)
        _compile_constants(bitcode, clang)
        (staging / "share/hip").mkdir(parents=True)
        (staging / "share/hip/version").write_text(_version_text(source / "include/hip/hip_version.h"))
        trust.own_directory(tree.parent)
        trust.seal(staging)
        if os.path.lexists(tree):  # others could have changed it
            store.discard(tree, root)
        try:
            staging.rename(tree)
        except OSError:
            if not is_usable(tree):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


# Clang 22 no longer defines the macro that the headers of HIP 6 in triton 3.5 and 3.6 use.
_WAVE_SIZE = "__AMDGCN_WAVEFRONT_SIZE"
_WITH_WAVE_SIZE = f"""\
#pragma once
#ifndef {_WAVE_SIZE}
#define {_WAVE_SIZE} 64
#endif
#include "hip_runtime_of_triton.h"
"""


def _link_headers(source: Path, include: Path) -> None:
    """Make ``include`` of links to the headers of ``source`` and copies of our own headers that it lacks."""
    (include / "hip").mkdir(parents=True)
    for item in (*source.iterdir(), *(source / "hip").iterdir()):
        if item == source / "hip":
            continue
        target = include / item.relative_to(source)
        if item.name == "hip_runtime.h" and _WAVE_SIZE in item.read_text():
            target.write_text(_WITH_WAVE_SIZE)
            target = target.with_name("hip_runtime_of_triton.h")
        target.symlink_to(item)
    for header in own_headers():
        if not (include / "hip" / header.name).exists():
            shutil.copyfile(header, include / "hip" / header.name)


def _compile_constants(bitcode: Path, clang: Path) -> None:
    sources = {"opencl": _TRIPLE}
    for file, constants in _CONSTANTS.items():
        sources[file] = _TRIPLE + "".join(
            f"@__oclc_{constant} = linkonce_odr hidden local_unnamed_addr addrspace(4) constant {kind} {value}\n"
            for constant, kind, value in constants
        )
    for file, text in sources.items():
        (bitcode / f"{file}.ll").write_text(text)
    command = [str(clang), "--target=amdgcn-amd-amdhsa", "-nogpulib", "-x", "ir", "-c", "-emit-llvm"]
    with children.waited_for():
        done = subprocess.run(
            [*command, *(f"{file}.ll" for file in sources)], cwd=bitcode, capture_output=True, text=True, check=False,
            env={**os.environ, "TMPDIR": "."},
        )  # fmt: skip
    missing = [file for file in sources if not (bitcode / f"{file}.bc").is_file()]
    if done.returncode or missing:
        raise ToolchainError(
            f"{clang} could not compile the device-library constants: {done.stderr.strip() or missing}; "
            "is its AMDGPU target built in?"
        )


def _version_text(header: Path) -> str:
    numbers = dict(re.findall(r"#define HIP_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text()))
    return "".join(f"HIP_VERSION_{part}={numbers.get(part, '0')}\n" for part in ("MAJOR", "MINOR", "PATCH"))
