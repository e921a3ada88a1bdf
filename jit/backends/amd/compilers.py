"""The compilers for AMD GPUs on this machine, and what each can build."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hipforge.errors import ToolchainError
from hipforge.jit.backends.amd import rocm_tree
from hipforge.jit.backends.amd.hip_clang import HipClang, bitcode_dir
from hipforge.jit.cache import cache_dir
from hipforge.jit.spec import KEY_ENVIRONMENT
from hipforge.jit.tools import Tool, ask, identify

MIN_CLANG = 20
"""The first clang that knows gfx950."""

_NEWEST_CLANG = 40
_MIN_HIPCC_CLANG = 19
"""ROCm 6.4; its clang names the fat binary of a translation unit the way the link step needs."""

SEARCH_ENVIRONMENT = ("PATH", "ROCM_PATH", "HIP_PATH", *KEY_ENVIRONMENT)
"""The variables that decide what is found."""


def compilers(named: Path | None) -> Iterator[tuple[str, Path | None]]:
    """Yield (name for people, path) of each candidate in order of preference; None for a kind that was not found.

    Args:
        named: the compiler of ``HIPFORGE_HIPCC``, which comes first.
    """
    if named is not None:
        # A bare name is looked for on PATH, as in CXX=clang++.
        yield f"HIPFORGE_HIPCC={named}", next(_on_path(str(named)), named) if len(named.parts) == 1 else named
    seen: set[str] = set()
    for kind, paths in (("hipcc", _hipccs()), ("amdclang++ or clang++", _clangs())):
        found = False
        for path in paths:
            found = True
            # hipcc and clang may be links to one file; what they do depends on the name they are called by.
            real = os.path.realpath(path) + path.name
            if real not in seen:
                seen.add(real)
                yield str(path), path
        if not found:
            yield kind, None


def rocm_dirs() -> list[Path]:
    """Return the ROCm installations to look into, in order."""
    named = [os.environ.get("ROCM_PATH"), os.environ.get("HIP_PATH"), "/opt/rocm"]
    return [Path(path) for path in dict.fromkeys(named) if path and Path(path).is_dir()]


def _hipccs() -> Iterator[Path]:
    yield from _executables(rocm / "bin/hipcc" for rocm in rocm_dirs())
    yield from _on_path("hipcc")


def _clangs() -> Iterator[Path]:
    inside = ("bin/amdclang++", "llvm/bin/amdclang++", "llvm/bin/clang++")
    yield from _executables(rocm / name for rocm in rocm_dirs() for name in inside)
    numbered = (f"clang++-{version}" for version in range(_NEWEST_CLANG, MIN_CLANG - 1, -1))
    for name in ("amdclang++", "clang++", *numbered):
        yield from _on_path(name)


def _on_path(name: str) -> Iterator[Path]:
    found = shutil.which(name)
    if found:
        yield Path(found)


def _executables(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in paths if path.is_file() and os.access(path, os.X_OK))


def inspect(path: Path, arch: str) -> HipClang:
    """Return a compiler as a toolchain.

    Raises:
        ToolchainError: it cannot build for ``arch``; the message says why.
        NoHeadersError: all it lacks is HIP headers and device libraries.
    """
    if not path.exists():
        raise ToolchainError("there is no such file")
    if not path.is_file():
        raise ToolchainError("it is a directory; name the compiler in it, as in <directory>/bin/hipcc")
    if not os.access(path, os.X_OK):
        raise ToolchainError("it is not executable")
    digests = cache_dir.digests()
    tool = identify(path, digests)
    version = _clang_version(tool)
    is_hipcc = "hipcc" in path.name
    least = _MIN_HIPCC_CLANG if is_hipcc else MIN_CLANG
    if version < least:
        raise ToolchainError(f"it is clang {version}; clang {least} or newer is needed")
    llvm = _installed_dir(tool, path)
    inner = identify(llvm / "clang++", digests) if is_hipcc and (llvm / "clang++").is_file() else tool
    if not is_hipcc:
        _check_parts(llvm, version)
    rocm = _rocm_for(path, is_hipcc, version)
    found = HipClang(
        cxx=tool,
        inner=inner,
        linker=identify(llvm / "ld.lld", digests) if (llvm / "ld.lld").is_file() else None,
        llvm=llvm.parent,
        rocm=rocm,
        is_hipcc=is_hipcc,
    )
    return replace(found, bitcode=_check_arch(found, arch))


def _clang_version(tool: Tool) -> int:
    match = re.search(r"clang version (\d+)", tool.version_text)
    if match is None:
        raise ToolchainError(f"its --version does not report a clang version: {tool.version!r}")
    return int(match.group(1))


def _installed_dir(tool: Tool, path: Path) -> Path:
    match = re.search(r"^InstalledDir: (.+)$", tool.version_text, re.MULTILINE)
    if match and Path(match.group(1)).is_dir():
        return Path(match.group(1))
    return Path(os.path.realpath(path)).parent


def _check_parts(llvm: Path, version: int) -> None:
    if not (llvm / "ld.lld").exists():
        raise ToolchainError(f"{llvm / 'ld.lld'} is missing: install lld-{version} (Debian's name)")
    status, text = ask(f"{llvm / 'ld.lld'} --version", [str(llvm / "ld.lld"), "--version"], llvm / "ld.lld")
    match = re.search(r"LLD (\d+)", text)
    if status or match is None or int(match.group(1)) != version:
        raise ToolchainError(f"{llvm / 'ld.lld'} is not of version {version}: {text.strip().splitlines()[:1]}")


def has_hip(tree: Path) -> bool:
    """Return whether ``tree`` holds HIP headers and device libraries."""
    return (tree / "include/hip/hip_runtime.h").is_file() and bitcode_dir(tree) is not None


class NoHeadersError(ToolchainError):
    """A compiler without HIP headers and device libraries."""

    lacks_headers_only = True


def _rocm_for(path: Path, is_hipcc: bool, version: int) -> Path:
    beside = [path.parent.parent] if is_hipcc else []
    for tree in [*beside, *rocm_dirs()]:
        if has_hip(tree):
            return tree
    if is_hipcc:
        # hipcc finds its own tree; the path here is only for the names in a manifest.
        return path.parent.parent
    source = rocm_tree.triton_files()
    if source is None:
        raise NoHeadersError(
            "it has no HIP headers and device libraries: no ROCm in ROCM_PATH or /opt/rocm, and no triton wheel; "
            "pip install triton"
        )
    name = rocm_tree.name_of(source, str(version), cache_dir.digests())
    for root in cache_dir.reading_roots():
        if rocm_tree.is_usable(root / name):
            return root / name
    return cache_dir.written(lambda root: rocm_tree.assemble(source, root, name, path))


_DEVICE_LIBRARY = re.compile(r'"-mlink-builtin-bitcode" "([^"]+)/ocml\.bc"')


def _check_arch(toolchain: HipClang, arch: str) -> Path | None:
    """Let the driver plan a compile; returns the folder of the device libraries that it would link.

    The driver refuses an unknown architecture or a broken ROCm tree, and only the driver knows where a distribution
    keeps the device libraries: Debian has them among clang's own files.
    """
    flags = [word.replace("${ROCM}", str(toolchain.rocm)) for word in toolchain.device_flags(arch)]
    environment = " ".join(f"{name}={os.environ.get(name, '')}" for name in SEARCH_ENVIRONMENT[1:])
    status, text = ask(
        f"{toolchain.cxx.path} {toolchain.rocm} {arch} {environment}",
        [str(toolchain.cxx.path), *flags, "-###", "-c", "/dev/null", "-o", "/dev/null"],
        Path(os.path.realpath(toolchain.cxx.path)),
        (toolchain.rocm / "share/hip/version", bitcode_dir(toolchain.rocm) or toolchain.rocm, *_own_bitcode(toolchain)),
    )
    if status:
        lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()[-1:]
        raise ToolchainError(f"it cannot build for {arch}: {lines[0].strip() if lines else f'status {status}'}")
    planned = _DEVICE_LIBRARY.search(text)
    return Path(planned.group(1)) if planned else bitcode_dir(toolchain.rocm)


def _own_bitcode(toolchain: HipClang) -> list[Path]:
    """Return the folders among clang's own files that hold device libraries, or would."""
    return [version / "amdgcn/bitcode" for version in sorted((toolchain.llvm / "lib/clang").glob("*"))]
