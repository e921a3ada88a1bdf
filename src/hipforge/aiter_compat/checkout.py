"""What each module of an aiter checkout needs, from its JSON entry and the headers that its sources include."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hipforge.aiter_compat import config
from hipforge.errors import ConfigError
from hipforge.jit import hip_module, registry
from hipforge.jit.backends.amd import compilers
from hipforge.jit.cache.files import is_a
from hipforge.jit.registry import ModuleEntry
from hipforge.jit.roots import package_dir

BUILDS, KERNELS, ROCPRIM, TORCH, REFUSED = (
    "builds", "needs Composable Kernel", "needs rocPRIM", "needs ROCm's torch headers", "refused",
)  # fmt: skip

# The start of an included path -> what has it, and the state of a module without it. First match.
_HEADERS = {
    "rocprim/": ROCPRIM, "hipcub/": ROCPRIM, "ck_tile/": KERNELS, "ck/": KERNELS, "torch/": TORCH, "ATen/": TORCH,
    "c10/": TORCH,
    "hiprand/": REFUSED, "hipblaslt/": REFUSED, "hipblas": REFUSED, "rocblas": REFUSED, "kittens": REFUSED,
}  # fmt: skip
# Headers of any torch that need rocThrust where they are compiled as HIP.
_WITH_THRUST = ("torch/extension.h", "torch/all.h", "torch/torch.h")
_THRUST = "thrust/complex.h"
_OF_KERNELS = re.compile(r"/csrc/(ck_|cktile_|py_itfs_ck/)")
_INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)[>"]')
_NAMESPACE = re.compile(r"\s*namespace\s+ck_tile\b")
_OF_NAMESPACE = re.compile(r"\bck_tile::([A-Za-z_]\w*)")
_WORD = re.compile(r"[A-Za-z_]\w*")
_MACRO = re.compile(r"\s*#\s*define\b")
_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)")


@dataclass(frozen=True)
class Module:
    """One module: ``state`` is one of the constants above, ``reason`` says what is missing or wrong."""

    name: str
    state: str
    reason: str = ""


def modules(root: Path, include: Sequence[Path] = (), defines: Sequence[str] = ()) -> list[Module]:
    """Register the modules of a checkout and return what each needs.

    Args:
        root: the checkout.
        include: further folders for its sources, such as rocPRIM's headers.
        defines: macros as ``NAME=VALUE``.

    Raises:
        ConfigError: ``root`` is not a checkout of aiter.
    """
    path = config_of(root)
    pairs = (text.partition("=") for text in defines)
    added = config.register(path, include=include, defines={name: value or 1 for name, _, value in pairs})
    files = _Files(has_kernels=(config.composable_kernel(root.resolve()) / "include").is_dir())
    found = {name: _judge(registry.module(name), root, files) for name in added}
    values = json.loads(path.read_text())
    for name, reason in added.refused.items():
        found[name] = _judge_refused(name, values[name], reason, path, include, files)
    return [found[name] for name in sorted(found)]


def _judge_refused(
    name: str, values: Mapping[str, Any], reason: str, path: Path, include: Sequence[Path], files: _Files
) -> Module:
    """Return what a module needs of which an entry cannot be taken: Composable Kernel or torch, else it is refused."""
    root = path.parents[2]
    if not isinstance(values, Mapping):
        return Module(name, REFUSED, reason)
    if "{CK_DIR}" in json.dumps([values.get(key) for key in ("srcs", "blob_gen_cmd")]):
        return Module(name, REFUSED if files.has_kernels else KERNELS, reason)
    try:
        entry = config.sources_of(path, name, include)
    except ConfigError:
        return Module(name, REFUSED, reason)
    needed = _judge(entry, root, files)
    return Module(name, REFUSED, reason) if needed.state in (BUILDS, ROCPRIM) else needed


def config_of(root: Path) -> Path:
    """Return the module JSON of a checkout.

    Raises:
        ConfigError: there is none, or no ``csrc/include/aiter_tensor.h``.
    """
    path = root.resolve() / "aiter/jit/optCompilerConfig.json"
    if config.checkout_of(path) is None or not path.is_file():
        raise ConfigError(
            f"{root} is not a checkout of aiter of 2026: it needs aiter/jit/optCompilerConfig.json and "
            "csrc/include/aiter_tensor.h; an older one is registered with hipforge.aiter_compat.register()"
        )
    return path


def system_folders() -> list[Path]:
    """Return the folders of headers that compilers search by themselves: those of ROCm and of the distribution."""
    return [*(rocm / "include" for rocm in compilers.rocm_dirs()), Path("/usr/include")]


def _judge(entry: ModuleEntry, root: Path, files: _Files) -> Module:
    kernels = str(config.composable_kernel(root.resolve()))
    for text in (*entry.srcs, *(word for command in entry.blob_gen_cmd for word in command)):
        if text.startswith(kernels) and not is_a(Path.exists, Path(text)):
            return Module(entry.name, KERNELS, f"there is no {text}")
        if re.match(r"/[^:*]*\.[^:*/]*$", text) and not is_a(Path.exists, Path(text)):
            return Module(entry.name, REFUSED, f"there is no {text}")
    for text in entry.srcs:  # kernels of Composable Kernel's that a generator writes
        if not files.has_kernels and _OF_KERNELS.search(text):
            return Module(entry.name, KERNELS, f"{text} is made of its templates")
    csrc = str(package_dir("csrc"))
    folders = [Path(text.replace("${CSRC}", csrc)) for text in entry.extra_include]
    system = [*system_folders(), *([] if entry.torch_exclude else hip_module.torch_includes())]
    seen: dict[Path, _File] = {}
    for source in entry.srcs:
        for header, where in _includes(Path(source), folders, seen, files):
            state = next((state for start, state in _HEADERS.items() if header.startswith(start)), None)
            if state is not None and not any(
                is_a(Path.is_file, folder / header) for folder in (*folders, *system)
            ):
                return Module(entry.name, state, f"{where.name} includes {header}, which is not there")
            if header in _WITH_THRUST and not any((folder / _THRUST).is_file() for folder in (*folders, *system)):
                return Module(entry.name, TORCH, f"{where.name} includes {header}, which as HIP includes {_THRUST}")
    lacking = None if files.has_kernels else _undeclared(seen)
    if lacking is not None:
        return Module(entry.name, KERNELS, lacking)
    return Module(entry.name, BUILDS)


@dataclass(frozen=True)
class _File:
    """A source as it is compiled with or without Composable Kernel.

    ``includes`` may lie under other conditions. ``used`` are names of ``ck_tile`` under no condition and in no macro;
    ``declared`` are the words of a file that opens this namespace.
    """

    includes: tuple[str, ...]
    used: tuple[str, ...]
    declared: frozenset[str]


class _Files:
    """The sources and headers of a checkout, each read once."""

    def __init__(self, *, has_kernels: bool) -> None:
        self.has_kernels = has_kernels
        self.known: dict[Path, _File | None] = {}

    def get(self, path: Path) -> _File | None:
        """Return a file, or None if there is none."""
        if path not in self.known:
            self.known[path] = self._read(path) if is_a(Path.is_file, path) else None
        return self.known[path]

    def _read(self, path: Path) -> _File:
        skipping: list[bool | None] = []
        compiled: list[str] = []
        includes: list[str] = []
        used: list[str] = []
        macro = False
        for line in path.read_text(errors="replace").splitlines():
            condition = _CONDITION.match(line)
            if condition is not None:
                _branch(skipping, condition[1], condition[2], has_kernels=self.has_kernels)
                continue
            if any(skipping):
                continue
            compiled.append(line)
            found = _INCLUDE.match(line)
            if found is not None:
                includes.append(found[1])
            macro = macro or _MACRO.match(line) is not None
            if not macro and not skipping and "ck_tile::" in line:
                used += _OF_NAMESPACE.findall(line.partition("//")[0])
            macro = macro and line.endswith("\\")
        opens = any(_NAMESPACE.match(line) for line in compiled)
        declared = frozenset(_WORD.findall("\n".join(compiled))) if opens else frozenset()
        return _File(tuple(includes), tuple(used), declared)


def _undeclared(seen: Mapping[Path, _File]) -> str | None:
    """Return which name of Composable Kernel's a source uses that no header declares in its place, if there is one."""
    for path, file in seen.items():
        for name in file.used:
            if not any(name in other.declared for other in seen.values()):
                return f"{path.name} uses ck_tile::{name}, which no header here declares"
    return None


def _includes(
    path: Path, folders: Sequence[Path], seen: dict[Path, _File], files: _Files
) -> Iterator[tuple[str, Path]]:
    """Yield what a source and its headers include, and where; branches for the other ENABLE_CK are left out."""
    waiting = [path]
    while waiting:
        path = waiting.pop()
        file = None if path in seen else files.get(path)
        if file is None:
            continue
        seen[path] = file
        found: list[Path] = []
        for header in file.includes:
            yield header, path
            places = (folder / header for folder in (path.parent, *folders))
            found += itertools.islice((place for place in places if files.get(place) is not None), 1)
        waiting += reversed(found)


def _branch(skipping: list[bool | None], word: str, condition: str, *, has_kernels: bool) -> None:
    """Follow one preprocessor condition; None is one that is not about Composable Kernel: both branches are read."""
    if word == "endif":
        del skipping[-1:]
    elif word in ("else", "elif"):
        if skipping and skipping[-1] is not None:
            skipping[-1] = not skipping[-1]
    else:
        text = re.sub(r"\bdefined|[\s()]", "", condition)
        negated = (word == "ifndef") != text.startswith("!")
        holds = {"ENABLE_CK": has_kernels, "AITER_CK_FREE": not has_kernels, "0": False}.get(text.removeprefix("!"))
        skipping.append(None if holds is None else holds == negated)
