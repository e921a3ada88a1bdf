"""What each module of an aiter checkout needs, from its JSON entry and the headers that its sources include."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipforge.aiter_compat import config
from hipforge.errors import ConfigError
from hipforge.jit import hip_module, registry
from hipforge.jit.backends.amd import compilers
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
_OF_KERNELS = re.compile(r"/csrc/(ck_|cktile_|py_itfs_ck/)")
_INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)[>"]')
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
    found = {name: _judge(registry.module(name), root) for name in added}
    values = json.loads(path.read_text())
    for name, reason in added.refused.items():
        kernels = "{CK_DIR}" in json.dumps([values[name].get(key) for key in ("srcs", "blob_gen_cmd")])
        lacking = kernels and not (config.composable_kernel(root) / "include").is_dir()
        found[name] = Module(name, KERNELS if lacking else REFUSED, reason)
    return [found[name] for name in sorted(found)]


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


def _judge(entry: ModuleEntry, root: Path) -> Module:
    kernels = str(config.composable_kernel(root.resolve()))
    has_kernels = (Path(kernels) / "include").is_dir()
    for text in (*entry.srcs, *(word for command in entry.blob_gen_cmd for word in command)):
        if text.startswith(kernels) and not Path(text).exists():
            return Module(entry.name, KERNELS, f"there is no {text}")
        if re.match(r"/[^:*]*\.[^:*/]*$", text) and not Path(text).exists():
            return Module(entry.name, REFUSED, f"there is no {text}")
    for text in entry.srcs:  # kernels of Composable Kernel's that a generator writes
        if not has_kernels and _OF_KERNELS.search(text):
            return Module(entry.name, KERNELS, f"{text} is made of its templates")
    csrc = str(package_dir("csrc"))
    folders = [Path(text.replace("${CSRC}", csrc)) for text in entry.extra_include]
    system = [*system_folders(), *([] if entry.torch_exclude else hip_module.torch_includes())]
    seen: set[Path] = set()
    for source in entry.srcs:
        for header, where in _includes(Path(source), folders, seen, has_kernels=has_kernels):
            state = next((state for start, state in _HEADERS.items() if header.startswith(start)), None)
            if state is not None and not any((folder / header).is_file() for folder in (*folders, *system)):
                return Module(entry.name, state, f"{where.name} includes {header}, which is not there")
    return Module(entry.name, BUILDS)


def _includes(
    path: Path, folders: Sequence[Path], seen: set[Path], *, has_kernels: bool
) -> Iterator[tuple[str, Path]]:
    """Yield what a source and its headers include, and where; branches for the other ENABLE_CK are left out."""
    if path in seen or not path.is_file():
        return
    seen.add(path)
    skipping: list[bool | None] = []
    for line in path.read_text(errors="replace").splitlines():
        condition = _CONDITION.match(line)
        if condition is not None:
            _branch(skipping, condition[1], condition[2], has_kernels=has_kernels)
            continue
        found = None if any(skipping) else _INCLUDE.match(line)
        if found is not None:
            yield found[1], path
            for folder in (path.parent, *folders):
                if (folder / found[1]).is_file():
                    yield from _includes(folder / found[1], folders, seen, has_kernels=has_kernels)
                    break


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
