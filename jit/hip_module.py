"""A registry entry, a variant and an architecture → the spec of one HIP module.

The *portable* ingredients (sources, flags, variant, target, ABI) need no compiler; prebuilt modules are matched by
them.

Known gap: what a generator reads is taken from its command line; a file it opens by itself is not noticed, unless it
is a Python file beside the script.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import json
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hipforge import archs
from hipforge.errors import ArchError, ConfigError
from hipforge.jit import registry, spec, toolchain
from hipforge.jit.cache import cache_dir
from hipforge.jit.digest import ABSENT, DigestStore
from hipforge.jit.ninja import Step, body
from hipforge.jit.registry import ModuleEntry
from hipforge.jit.roots import Roots, package_roots
from hipforge.jit.spec import BuildSpec, Generator, VariantValue, common_ingredients, variant_label
from hipforge.jit.toolchain import Toolchain
from hipforge.jit.units import Unit

GENERATED = "gen"
"""The folder in the build directory that ``${GEN}`` stands for."""

_HIP_SUFFIXES = (".cu", ".hip")
_SOURCE_SUFFIXES = (*_HIP_SUFFIXES, ".cpp", ".cc", ".cxx", ".c")


_TORCH_INCLUDES = ("-isystem${TORCH}/include", "-isystem${TORCH}/include/torch/csrc/api/include")
_TORCH_LIBRARIES = ("c10", "c10_hip", "torch", "torch_cpu", "torch_hip", "torch_python", "c10_cuda", "torch_cuda")


@dataclass(frozen=True, kw_only=True)
class Request(spec.Request):
    """One module, variant and architecture, before any compiler is known."""

    entry: ModuleEntry

    @property
    def arch(self) -> str:
        """The architecture."""
        return self.target

    def how_to_get(self) -> str:
        """Return the error's text for a module that is not built where building is disabled."""
        entry = self.entry
        own = "" if entry.name in registry.shipped() else f" --register {shlex.quote(str(entry.origin))}"
        every = "" if self.variant in list(entry.ahead_variants(self.arch)) else " --every-variant"
        return (
            f"{self.stem} for {self.arch} is not built and HIPFORGE_DISABLE_JIT=1; "
            f"build it ahead of time: hipforge build {entry.name} --arch {self.arch}{every}{own}"
        )

    def specify(self) -> BuildSpec:
        """Return the spec as the selected toolchain would build it.

        Raises:
            ToolchainError: no toolchain can build for the architecture.
        """
        return specification(self, toolchain.select(self.arch))

    def again(self) -> Request:
        """Return the same request with the sources as they are now."""
        return request(self.entry, self.variant, self.arch)


_LONGEST_NAME = 200  # of the 255 that a file system takes; digests and suffixes follow


def request(entry: ModuleEntry, variant: Mapping[str, VariantValue] | None, arch: str) -> Request:
    """Check and complete a request for a module.

    Raises:
        ArchError: the module has no code for ``arch``.
        ConfigError: the variant or the architecture is not known, or a source is missing.
    """
    arch = archs.get(arch).name
    if arch not in entry.archs:
        raise ArchError(f"{entry.name} is built for {', '.join(entry.archs)}; this device is {arch}")
    entry = entry.for_vendor(archs.get(arch).vendor)
    checked = entry.check_variant(variant or {})
    length = len(entry.name) + len(variant_label(checked)) + bool(checked)
    if length > _LONGEST_NAME:
        raise ConfigError(
            f"{entry.name}: name and variant have {length} characters together; {_LONGEST_NAME} is the most, since a "
            "folder has their name"
        )
    roots = package_roots().with_paths(MODULE_DIR=entry.module_dir, PYTHON=sys.executable)
    if entry.ffi == "pybind11":
        roots = roots.with_paths(PYTHON_INCLUDE=sysconfig.get_path("include"), PYBIND11_INCLUDE=_pybind11_include())
        if not entry.torch_exclude:
            roots = roots.with_paths(TORCH=_torch_dir())
    digests = cache_dir.digests()
    portable = common_ingredients(entry.name, checked, arch)
    portable["flags"] = json.dumps(
        {
            "cc": entry.flags_extra_cc,
            "hip": entry.flags_extra_hip,
            "ld": entry.extra_ldflags,
            "include": entry.extra_include,
            "bare": entry.bare,
            "ffi": entry.ffi,
        }
    )
    for pattern, flags in entry.flags_extra_hip_per_source.items():
        portable[f"flags:{pattern}"] = json.dumps(flags)
    for source in entry.srcs:
        portable[f"source:{source}"] = _source_digest(entry, roots.show(source), digests)
    for path in _files_linked(entry.extra_ldflags, roots):
        portable[f"source:{path}"] = digests.of_any(roots.show(path))
    for number, command in enumerate(entry.blob_gen_cmd):
        portable[f"generator:{number}"] = " ".join(command)
        for word in _files_read(command, roots):
            portable[f"generator:{word}"] = digests.of(roots.show(word))
    if entry.ffi == "pybind11":
        portable["python"] = f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}"
        portable["pybind11"] = str(importlib.import_module("pybind11").__version__)
        if not entry.torch_exclude:
            from importlib import metadata  # a third of what all of hipforge.jit imports: only where it is needed

            portable["torch"] = metadata.version("torch")
    return Request(
        module=entry.name,
        variant=checked,
        target=arch,
        roots=roots,
        limits=entry.resource_limits,
        portable=portable,
        entry=entry,
    )


def _files_read(command: tuple[str, ...], roots: Roots) -> list[str]:
    """Return the files a generator is known to read: those its command names, and the Python files beside a script."""
    found: dict[str, None] = {}
    for word in command:
        if word == "${PYTHON}" or "${GEN}" in word:
            continue
        path = Path(roots.show(word))
        if path.is_absolute() and path.is_file():
            found[word] = None
            if path.suffix == ".py":
                found.update(dict.fromkeys(roots.hide(beside) for beside in sorted(path.parent.glob("*.py"))))
    return list(found)


def _files_linked(flags: tuple[str, ...], roots: Roots) -> list[str]:
    """Return the files that link flags name, by path or as ``-l`` with the ``-L`` before it, with placeholders.

    A library that the linker finds on its own search path is part of the system, like its headers.
    """
    folders = [roots.show(flag[2:]) for flag in flags if flag.startswith("-L")]
    found: list[str] = []
    for flag in flags:
        path = Path(roots.show(flag))
        if flag.startswith("-l"):
            names = [flag[3:]] if flag.startswith("-l:") else [f"lib{flag[2:]}.so", f"lib{flag[2:]}.a"]
            places = (Path(folder) / name for folder in folders for name in names)
            path = next((place for place in places if place.is_file()), path)
        if path.is_absolute() and path.is_file():
            found.append(roots.hide(path))
    return found


def _source_digest(entry: ModuleEntry, path: str, digests: DigestStore) -> str:
    try:
        digest = digests.of(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{entry.origin}: {entry.name}: srcs: {path!r} cannot be read: {error}") from None
    if digest == ABSENT:
        raise ConfigError(f"{entry.origin}: {entry.name}: srcs: there is no {path}")
    return digest


def _torch_dir() -> Path:
    """Return torch's folder without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError('modules with "ffi": "pybind11" may include torch\'s headers, and torch is not installed')
    return Path(spec.origin).parent


def torch_includes() -> list[Path]:
    """Return the folders of torch's headers; none where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    return [_torch_dir() / flag.partition("}/")[2] for flag in _TORCH_INCLUDES]


def _torch_flags(entry: ModuleEntry) -> tuple[str, ...]:
    """Return link flags for torch's libraries, which the process has loaded already; unused ones are not recorded."""
    if entry.ffi != "pybind11" or entry.torch_exclude:
        return ()
    there = sorted(path.name[3:-3] for path in (_torch_dir() / "lib").glob("lib*.so"))
    names = [name for name in there if name in _TORCH_LIBRARIES]
    return ("-Wl,--as-needed", "-L${TORCH}/lib", *(f"-l{name}" for name in names))


def _pybind11_include() -> str:
    return str(importlib.import_module("pybind11").get_include())


def specification(wanted: Request, compiler: Toolchain) -> BuildSpec:
    """Return the spec of ``wanted`` as the toolchain ``compiler`` would build it."""
    entry = wanted.entry
    generator = None
    sample: tuple[str, ...] = ()
    if entry.blob_gen_cmd:
        generator = Generator(
            tuple(_expand_generated(command) for command in entry.blob_gen_cmd),
            GENERATED,
            _SOURCE_SUFFIXES,
            lambda generated: _plan(wanted, compiler, generated),
        )
        # A placeholder for the sources to come: their flags are then in the key.
        sample = ("generated.cu",)
    steps, files = _plan(wanted, compiler, sample)
    ingredients = {**wanted.portable, **compiler.ingredients(wanted.arch)}
    ingredients["steps"] = body(steps, wanted.stem)
    ingredients["files"] = json.dumps(files)
    return BuildSpec(
        module=entry.name,
        variant=wanted.variant,
        target=wanted.arch,
        roots=wanted.roots.with_paths(**compiler.roots()),
        steps=steps,
        files=files,
        ingredients=ingredients,
        toolchain=compiler.description,
        generator=generator,
        is_device_code=generator is not None or any(Path(source).suffix in _HIP_SUFFIXES for source in entry.srcs),
        limits=entry.resource_limits,
        verbose=entry.verbose,
    )


def _plan(
    wanted: Request, compiler: Toolchain, generated: tuple[str, ...]
) -> tuple[tuple[Step, ...], Mapping[str, str]]:
    entry = wanted.entry
    sources = (*entry.srcs, *(f"{GENERATED}/{name}" for name in generated))
    compiled = [
        compiler.compile(_unit(wanted, number, source, compiler.host_flags()), entry.name, wanted.arch)
        for number, source in enumerate(sources)
    ]
    objects = [name for part in compiled for name in part.objects]
    flags = (*_expand_generated(entry.extra_ldflags), *_torch_flags(entry))
    parts = [*compiled, compiler.link(objects, flags, BuildSpec.library)]
    files = {name: text for part in parts for name, text in part.files.items()}
    return tuple(step for part in parts for step in part.steps), files


def _unit(wanted: Request, number: int, source: str, host_flags: tuple[str, ...]) -> Unit:
    entry = wanted.entry
    is_hip = Path(source).suffix in _HIP_SUFFIXES
    defines = tuple(f"-D{name}={value}" for name, value in wanted.variant.items())
    includes = ("-I${CSRC}/include", *(f"-I{path}" for path in entry.extra_include))
    if entry.ffi == "pybind11":
        includes = (*includes, "-I${PYTHON_INCLUDE}", "-I${PYBIND11_INCLUDE}", f"-DTORCH_EXTENSION_NAME={entry.name}")
        if not entry.torch_exclude:
            includes = (*includes, *_TORCH_INCLUDES)
        if not is_hip:
            includes = (*includes, *host_flags)
    extra = entry.flags_extra_hip if is_hip else entry.flags_extra_cc
    if is_hip:
        for pattern, flags in entry.flags_extra_hip_per_source.items():
            extra = (*extra, *flags) if fnmatch.fnmatch(source, pattern) else extra
    standard = () if source.endswith(".c") else (_standard(entry),)
    maps = ("-ffile-prefix-map=${CSRC}=csrc", "-ffile-prefix-map=${MODULE_DIR}=.")
    return Unit(number, source, is_hip, (*standard, *maps, *includes, *defines, *_expand_generated(extra)), entry.bare)


def _standard(entry: ModuleEntry) -> str:
    """Return the C++ standard: C++20 where torch's headers may be included, which require it from torch 2.10 on."""
    return "-std=c++20" if entry.ffi == "pybind11" and not entry.torch_exclude else "-std=c++17"


def _expand_generated(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.replace("${GEN}", GENERATED) for word in words)
