"""The nvccs on this machine, and what each can build."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hipforge.errors import ToolchainError
from hipforge.jit.backends.nvidia.backend import WHEELS
from hipforge.jit.backends.nvidia.nvcc import BARE, BARE_FLAGS, ENVIRONMENT, Nvcc, gencode, host_compiler
from hipforge.jit.cache import cache_dir
from hipforge.jit.roots import package_roots
from hipforge.jit.spec import KEY_ENVIRONMENT
from hipforge.jit.tools import Tool, ask, identify, stamp

MIN_RELEASE = (12, 0)
"""The first nvcc that has sm_90a."""

SEARCH_ENVIRONMENT = ("PATH", "CUDA_HOME", "CUDA_PATH", *KEY_ENVIRONMENT, *ENVIRONMENT)
"""The variables that decide what is found."""

_WHEELS = f"pip install {WHEELS}"
# Files that a toolkit made of wheels may lack -> the wheel that has each.
_PIECES = {"nvvm/bin/cicc": "nvidia-nvvm", "bin/ptxas": "nvidia-cuda-nvcc", "bin/cudafe++": "nvidia-cuda-nvcc"}
_HEADERS = {"crt/": "nvidia-cuda-crt", "cuda_": "nvidia-cuda-runtime", "nv/target": "nvidia-cuda-cccl"}


def compilers(named: Path | None) -> Iterator[tuple[str, Path | None]]:
    """Yield (name for people, path) of each candidate in order of preference; None where none was found.

    Args:
        named: the compiler of ``HIPFORGE_NVCC``, which comes first.
    """
    if named is not None:
        found = shutil.which(str(named)) if len(named.parts) == 1 else None
        yield f"HIPFORGE_NVCC={named}", Path(found) if found else named
    seen: set[str] = set()
    for path in _places():
        real = os.path.realpath(path)
        if path.is_file() and os.access(path, os.X_OK) and real not in seen:
            seen.add(real)
            yield str(path), path
    if not seen:
        yield "nvcc", None


def _places() -> Iterator[Path]:
    yield from (Path(home) / "bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name)))
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(location).glob("cu*/bin/nvcc"), reverse=True)  # cu13 before cu12


def inspect(path: Path, arch: str) -> Nvcc:
    """Return a compiler as a toolchain.

    Raises:
        ToolchainError: it cannot build for ``arch``; the message says why.
    """
    if not path.exists():
        raise ToolchainError("there is no such file")
    if not path.is_file():
        raise ToolchainError("it is a directory; name the compiler in it, as in <directory>/bin/nvcc")
    if not os.access(path, os.X_OK):
        raise ToolchainError("it is not executable")
    digests = cache_dir.digests()
    tool = identify(path, digests)
    release = _release(tool)
    plan = _plan(path, arch)
    top = _top(plan, path)
    for piece, wheel in _PIECES.items():
        if not (top / piece).is_file():
            raise ToolchainError(f"{top / piece} is missing: {_WHEELS} (or {wheel})")
    host = host_compiler(plan)
    found = shutil.which(host) if host else None
    if found is None:
        raise ToolchainError(f"its host compiler {host or 'g++'} is not on PATH: install g++, or set NVCC_CCBIN")
    parts = {piece.rsplit("/", 1)[1]: identify(top / piece, digests) for piece in _PIECES}
    parts["host compiler"] = identify(Path(found), digests)
    if Path(os.path.realpath(top / "bin/nvcc")) != Path(os.path.realpath(path)):
        parts["nvcc"] = identify(top / "bin/nvcc", digests)  # `path` is a script that calls it
    _check_host(path, Path(found), arch, top)
    return Nvcc(tool, top, parts, release, _takes_bare(path, Path(found), arch, top))


def _release(tool: Tool) -> str:
    match = re.search(r"release (\d+)\.(\d+)", tool.version_text)
    if match is None:
        raise ToolchainError(f"its --version does not report a release of nvcc: {tool.version!r}")
    if (int(match.group(1)), int(match.group(2))) < MIN_RELEASE:
        least = ".".join(map(str, MIN_RELEASE))
        raise ToolchainError(f"it is nvcc {match.group(1)}.{match.group(2)}; {least} or newer is needed: {_WHEELS}")
    return f"{match.group(1)}.{match.group(2)}"


def _environment() -> str:
    return " ".join(f"{name}={os.environ.get(name, '')}" for name in SEARCH_ENVIRONMENT)


def _plan(path: Path, arch: str) -> str:
    argv = [str(path), "-dryrun", gencode(arch), "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
    status, text = ask(f"{path} plan {arch} {_environment()}", argv, Path(os.path.realpath(path)))
    if status:
        raise ToolchainError(f"it cannot build for {arch}: {_first_error(text)}")
    return text


def _top(plan: str, path: Path) -> Path:
    match = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    return Path(os.path.normpath(match.group(1).strip())) if match else Path(os.path.realpath(path)).parent.parent


def _check_host(path: Path, host: Path, arch: str, top: Path) -> None:
    """Let the host compiler read CUDA's headers, also if they do not know it, and the headers that they include."""
    argv = [str(path), gencode(arch), "-x", "cu", "-include", "cuda_bf16.h", "-E", "/dev/null", "-o", "/dev/null"]
    question = f"{path} cuda_bf16.h {arch} {stamp(host)} {_environment()}"
    status, text = ask(question, argv, Path(os.path.realpath(path)), (top, top / "include"))
    if not status:
        return
    error = _first_error(text)
    if "unsupported" in text and "version" in text:
        raise ToolchainError(f"it refuses the host compiler {host}: {error}; set NVCC_CCBIN to one that it takes")
    wheel = next((wheel for header, wheel in _HEADERS.items() if header in error), None)
    raise ToolchainError(f"its headers cannot be read: {error}" + (f"; {_WHEELS} (or {wheel})" if wheel else ""))


def _takes_bare(path: Path, host: Path, arch: str, top: Path) -> bool:
    """Return whether a launch and kernels' functions compile over the headers in place of CUDA's.

    What nvcc makes of a launch calls functions of CUDA's headers, others in each release.
    """
    roots = package_roots()
    files = [Path(roots.show(f"{BARE}/{name}")) for name in ("probe.cu", "cuda_runtime.h", "builtins.h")]
    argv = [str(path), gencode(arch), *map(roots.show, BARE_FLAGS), "-c", str(files[0]), "-o", "/dev/null"]
    question = f"{path} bare {arch} {stamp(host)} {_environment()}"
    status, _ = ask(question, argv, Path(os.path.realpath(path)), (top, top / "include", *files))
    return status == 0


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line.lower()] or text.splitlines()[-1:]
    return lines[0].strip() if lines else "no message"
