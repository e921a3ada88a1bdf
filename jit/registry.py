"""Which modules are there, and what is each made of?

A ``modules.json`` in a folder of ``csrc`` describes the modules of its kernels, ``optCompilerConfig.json`` in ``jit``
the others, and :func:`register` adds a user's own file. Entries are data: strings may hold placeholders such as
``${CSRC}``, nothing is ever evaluated, and a key that is not known is refused by name. Paths that are not absolute and
start with no placeholder are relative to the JSON file.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hipforge.archs import ARCHS, VENDORS
from hipforge.errors import ConfigError, did_you_mean
from hipforge.jit.backends import vendors
from hipforge.jit.cache import files
from hipforge.jit.roots import PLACEHOLDER, name_problem, package_dir, unknown_placeholders
from hipforge.jit.spec import VariantValue

PLACEHOLDERS = {
    "CSRC": "the package's csrc folder",
    "JIT": "the package's jit folder",
    "EMULATOR": "the package's emulator folder",
    "ROCM": "the ROCm tree the compiler uses",
    "MODULE_DIR": "the folder of the JSON file",
    "GEN": "the folder into which blob_gen_cmd writes",
    "PYTHON": "this Python interpreter",
}
"""What ``${NAME}`` may be in an entry."""
_KNOWN = ", ".join(f"${{{name}}}" for name in PLACEHOLDERS)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_COMPILER = re.compile(r"clang \d+(\.\d+)*\Z")


@dataclass(frozen=True)
class ModuleEntry:
    """One HIP module as its JSON entry describes it.

    ``flags_extra_hip_per_source`` adds flags for the sources whose path matches a pattern such as ``*_device.cu``.
    ``srcs`` and ``flags_extra_hip`` are for every vendor; if the entry gives them by vendor, they are the first
    vendor's, and :meth:`for_vendor` returns the entry of another.
    ``bare``: the compiler reads no header, or a small one, before the sources and links no device library, so they
    include ``hipforge/amd/hip.h`` or ``hipforge/device/hip.h`` in place of ``hip/hip_runtime.h``.
    ``torch_exclude``: a module with ``"ffi": "pybind11"`` gets no headers and libraries of torch. ``variants`` names
    the ``-D`` macros a build is specialised on and the values each may have; ``build_ahead`` lists by architecture the
    combinations that the op's tuned table and default rule choose, if they are few of all. They are built ahead of
    their first call, the others on it. ``resource_limits`` bounds registers, spills, scratch, LDS and occupancy of
    every kernel, whatever compiled it; ``expected`` in it holds the figures of certain compilers, and under ``kernels``
    a pattern of kernel names may have its own of both kinds.
    """

    name: str
    srcs: tuple[str, ...]
    origin: Path
    flags_extra_cc: tuple[str, ...] = ()
    flags_extra_hip: tuple[str, ...] = ()
    flags_extra_hip_per_source: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extra_ldflags: tuple[str, ...] = ()
    extra_include: tuple[str, ...] = ()
    verbose: bool = False
    blob_gen_cmd: tuple[tuple[str, ...], ...] = ()
    archs: tuple[str, ...] = tuple(ARCHS)
    bare: bool = False
    ffi: Literal["abi", "pybind11"] = "abi"
    torch_exclude: bool = False
    variants: Mapping[str, tuple[VariantValue, ...]] = field(default_factory=dict)
    build_ahead: Mapping[str, tuple[tuple[VariantValue, ...], ...]] = field(default_factory=dict)
    resource_limits: Mapping[str, Any] = field(default_factory=dict)
    by_vendor: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def for_vendor(self, vendor: str) -> ModuleEntry:
        """Return the entry with the values of one vendor where there are several."""
        if not self.by_vendor:
            return self
        own = {key: values.get(vendor, ()) for key, values in self.by_vendor.items()}
        return replace(self, by_vendor={}, **own)  # type: ignore[arg-type]  # keys are of tuples of strings

    @property
    def module_dir(self) -> Path:
        """The folder of the JSON file."""
        return self.origin.parent

    def all_variants(self) -> Iterator[dict[str, VariantValue]]:
        """Yield every combination of variant values, in the JSON's order; one empty dict where there are none."""
        for values in itertools.product(*self.variants.values()):
            yield dict(zip(self.variants, values, strict=True))

    def ahead_variants(self, arch: str) -> Iterator[dict[str, VariantValue]]:
        """Yield the variants to build ahead of a first call on ``arch``: those of ``build_ahead``, or all."""
        if arch not in self.build_ahead:
            yield from self.all_variants()
        for values in self.build_ahead.get(arch, ()):
            yield dict(zip(self.variants, values, strict=True))

    @staticmethod
    def with_integers(variant: Mapping[str, Any]) -> dict[str, Any]:
        """Return a variant with ints for what counts as one, such as numpy's."""
        return {key: operator.index(value) if hasattr(value, "__index__") else value for key, value in variant.items()}

    def refused(self, variant: Mapping[str, VariantValue]) -> str | None:
        """Return the first name whose value is not one of the entry's, or None; 1.0 is not 1."""
        return next((name for name, value in variant.items() if not _is_in(value, self.variants[name])), None)

    def check_variant(self, variant: Mapping[str, VariantValue]) -> dict[str, VariantValue]:
        """Return ``variant`` in the entry's own order, with ints for what counts as one, such as numpy's.

        Raises:
            ConfigError: a name or a value is not one of the entry's.
        """
        if set(variant) != set(self.variants):
            raise ConfigError(
                f"{self.name}: variant names are {', '.join(self.variants) or '(none)'}; "
                f"got {', '.join(map(str, variant)) or '(none)'}"
            )
        values = self.with_integers(variant)
        name = self.refused(values)
        if name is not None:
            known = list(self.variants[name])
            raise ConfigError(f"{self.name}: {name}={values[name]!r} is not a variant; known: {known}")
        return {name: values[name] for name in self.variants}


class _Reader:
    """Checks one entry; every complaint names the file, the module and the key."""

    def __init__(self, origin: Path, module: str) -> None:
        self.origin = origin
        self.module = module

    def fail(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.origin}: {self.module}: {key}: {problem}")

    def strings(self, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, f"expected a list of strings; got {value!r}")
        for item in value:
            bad = next((character for character in item if not character.isprintable()), None)
            if bad is not None:
                raise self.fail(key, f"{item!r} contains {bad!r}; no line breaks, tabs or other control characters")
        self.known(key, value)
        return tuple(value)

    def known(self, key: str, texts: list[str]) -> None:
        unknown = unknown_placeholders(texts, PLACEHOLDERS)
        if unknown:
            raise self.fail(key, f"unknown placeholder ${{{unknown[0]}}}; known: {_KNOWN}")

    def paths(self, key: str, value: Any) -> tuple[str, ...]:
        found = self.strings(key, value)
        for path in found:
            if path.startswith("${") and not PLACEHOLDER.match(path):
                    raise self.fail(key, f"{path!r} starts with ${{ but with no placeholder; known: {_KNOWN}")
        return tuple(path if path.startswith(("/", "${")) else f"${{MODULE_DIR}}/{path}" for path in found)

    def by_vendor(self, key: str, value: Any) -> dict[str, tuple[str, ...]]:
        """Return the strings of each vendor, where an object has vendors as keys."""
        unknown = [name for name in value if name not in VENDORS]
        if unknown or not value:
            raise self.fail(key, f"expected a list, or an object with keys among {', '.join(VENDORS)}; got {value!r}")
        read = self.paths if key == "srcs" else self.strings
        return {vendor: read(f"{key}.{vendor}", values) for vendor, values in value.items()}

    def boolean(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false; got {value!r}")
        return value

    def commands(self, key: str, value: Any) -> tuple[tuple[str, ...], ...]:
        texts = [value] if isinstance(value, str) else value
        try:
            commands = tuple(tuple(shlex.split(text)) for text in self.strings(key, texts))
        except ValueError as error:  # an open quote
            raise self.fail(key, f"{error} in {value!r}") from None
        return tuple(command for command in commands if command)

    def archs(self, key: str, value: Any) -> tuple[str, ...]:
        found = self.strings(key, value)
        unknown = [arch for arch in found if arch not in ARCHS]
        if unknown or not found:
            raise self.fail(key, f"expected one or more of {', '.join(ARCHS)}; got {value!r}")
        return found

    def ffi(self, key: str, value: Any) -> str:
        if value not in ("abi", "pybind11"):
            raise self.fail(key, f'expected "abi" or "pybind11"; got {value!r}')
        return str(value)

    def variants(self, key: str, value: Any) -> dict[str, tuple[VariantValue, ...]]:
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object of lists; got {value!r}")
        for name, values in value.items():
            good = isinstance(values, list) and values and all(type(item) in (int, str) for item in values)
            if not good or not _NAME.match(name):
                raise self.fail(key, f"{name!r} must be a macro name with a list of integers or texts; got {values!r}")
            if len(set(values)) != len(values):
                raise self.fail(key, f"{name} lists a value twice: {values!r}")
        return {name: tuple(values) for name, values in value.items()}

    def per_source(self, key: str, value: Any) -> dict[str, tuple[str, ...]]:
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object, from patterns of source paths to lists of flags; got {value!r}")
        return {pattern: self.strings(f"{key}[{pattern!r}]", flags) for pattern, flags in value.items()}

    def build_ahead(self, key: str, value: Any) -> dict[str, tuple[tuple[VariantValue, ...], ...]]:
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object of architectures; got {value!r}")
        for arch, rows in value.items():
            if arch not in ARCHS:
                raise self.fail(key, f"{arch!r} is not one of {', '.join(ARCHS)}")
            if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
                raise self.fail(f"{key}.{arch}", f"expected a list of lists of variant values; got {rows!r}")
        return {arch: tuple(map(tuple, rows)) for arch, rows in value.items()}

    def limits(self, key: str, value: Any) -> dict[str, Any]:
        checked = self.limit_group(key, value, ("expected", "kernels"))
        expected = checked.get("expected")
        if expected is not None:
            self.compilers(f"{key}.expected", self.limit_group(f"{key}.expected", expected, ("compilers",)))
        kernels = checked.get("kernels", {})
        if not isinstance(kernels, dict):
            raise self.fail(f"{key}.kernels", f"expected an object of patterns; got {kernels!r}")
        for pattern, overrides in kernels.items():
            where = f"{key}.kernels[{pattern!r}]"
            inner = self.limit_group(where, overrides, ("expected",)).get("expected", {})
            self.limit_group(f"{where}.expected", inner, ())
            if inner and expected is None:
                raise self.fail(f"{where}.expected", f"{key}.expected must name the compilers of these figures")
        return checked

    def limit_group(self, key: str, value: Any, others: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object; got {value!r}")
        limits = vendors.limits()
        for name, limit in value.items():
            if name in others:
                continue
            if name not in limits:
                raise self.fail(key, f"unknown limit {name!r}; known: {', '.join([*limits, *others])}")
            if type(limit) is not int or limit < 0:
                raise self.fail(key, f"{name} must be an integer, 0 or more; got {limit!r}")
        return value

    def compilers(self, key: str, value: dict[str, Any]) -> None:
        names = value.get("compilers")
        if not isinstance(names, list) or not names or not all(_COMPILER.match(str(name)) for name in names):
            raise self.fail(key, f'compilers must be a list such as ["clang 22.1"]; got {names!r}')


_KEYS = {
    "srcs": _Reader.paths,
    "flags_extra_cc": _Reader.strings,
    "flags_extra_hip": _Reader.strings,
    "flags_extra_hip_per_source": _Reader.per_source,
    "extra_ldflags": _Reader.strings,
    "extra_include": _Reader.paths,
    "verbose": _Reader.boolean,
    "blob_gen_cmd": _Reader.commands,
    "archs": _Reader.archs,
    "bare": _Reader.boolean,
    "ffi": _Reader.ffi,
    "torch_exclude": _Reader.boolean,
    "variants": _Reader.variants,
    "build_ahead": _Reader.build_ahead,
    "resource_limits": _Reader.limits,
}


_BY_VENDOR = ("srcs", "flags_extra_hip")
"""Keys whose value may be an object with a list for each vendor."""


def read_file(path: Path) -> dict[str, ModuleEntry]:
    """Return the entries of a registry JSON file, by module name.

    Raises:
        ConfigError: it cannot be read, is not JSON, or an entry has an unknown key or a value of the wrong kind.
    """
    problem = name_problem(path)
    path = path if problem is not None else path.resolve()
    problem = problem or name_problem(path)
    if problem is not None:
        raise ConfigError(f"modules described in {str(path)!r} cannot be used: {problem}; rename the folder")
    try:
        raw = json.loads(files.read(path), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object of modules; got {type(raw).__name__}")
    return {name: _entry(path, name, values) for name, values in raw.items()}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice")
        found[key] = value
    return found


def _entry(origin: Path, name: str, values: Any) -> ModuleEntry:
    if not _NAME.match(name):
        raise ConfigError(f"{origin}: {name!r} is not a module name: letters, digits and underscores")
    if not isinstance(values, dict):
        raise ConfigError(f"{origin}: {name}: expected an object; got {values!r}")
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{origin}: {name}: unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    reader = _Reader(origin, name)
    several = {key: reader.by_vendor(key, values[key]) for key in _BY_VENDOR if isinstance(values.get(key), dict)}
    checked: dict[str, Any] = {
        key: several[key].get(VENDORS[0], ()) if key in several else _KEYS[key](reader, key, value)
        for key, value in values.items()
    }
    if not (checked.get("srcs") or several.get("srcs") or checked.get("blob_gen_cmd")):
        raise ConfigError(f"{origin}: {name}: srcs: at least one source, or a blob_gen_cmd that writes some")
    entry = ModuleEntry(name=name, origin=origin, by_vendor=several, **{"srcs": (), **checked})
    if "srcs" in several and not entry.blob_gen_cmd:
        entry = _where_there_are_sources(entry, reader, named="archs" in values)
    for arch, rows in entry.build_ahead.items():
        for row in rows:
            if len(row) != len(entry.variants) or not all(map(_is_in, row, entry.variants.values())):
                names = ", ".join(entry.variants) or "none"
                problem = f"{list(row)} is not a variant: give a value for each of {names}"
                raise reader.fail(f"build_ahead.{arch}", problem)
    return entry


def _where_there_are_sources(entry: ModuleEntry, reader: _Reader, *, named: bool) -> ModuleEntry:
    """Return an entry with sources by vendor for the architectures that have any; those that it names must."""
    bare = [arch for arch in entry.archs if not entry.for_vendor(ARCHS[arch].vendor).srcs]
    if bare and named:
        raise reader.fail("archs", f"{bare[0]} has no sources: srcs has none for {ARCHS[bare[0]].vendor}; leave it out")
    if len(bare) == len(entry.archs):
        raise reader.fail("srcs", "at least one source, or a blob_gen_cmd that writes some")
    return replace(entry, archs=tuple(arch for arch in entry.archs if arch not in bare))


def _is_in(value: VariantValue, accepted: tuple[VariantValue, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in accepted)


SHIPPED, BESIDE_KERNELS = "optCompilerConfig.json", "modules.json"
FORMER_NAMES = {
    "module_smallm_mxfp8_dense": "module_mxfp8_gemm_gemv",
    "module_smallm_mxfp8_dense_mfma": "module_mxfp8_gemm_mfma",
    "module_mxfp8_gemm": "module_mxfp8_gemm_tiles",
    "module_mxfp8_wave_split": "module_mxfp8_gemm_wave_split",
    "module_mxfp8_group_split": "module_mxfp8_gemm_group_split",
    "module_mxfp8_k_packed": "module_mxfp8_gemm_k_packed",
    "module_mxfp8_grouped_split": "module_mxfp8_grouped_gemm_split",
    "module_mxfp8_grouped_stream": "module_mxfp8_grouped_gemm_stream",
    "module_mxfp8_gate_up": "module_mxfp8_grouped_gemm_gate_up",
    "module_skinny_gemm_fp8": "module_fp8_skinny_gemm_queue",
    "module_skinny_wave_split": "module_fp8_skinny_gemm_wave_split",
}
"""Names that shipped modules had before; commands and stubs may still use them."""

_registered: dict[str, ModuleEntry] = {}


@functools.cache
def shipped() -> dict[str, ModuleEntry]:
    """Return the modules of the package itself.

    Raises:
        ConfigError: a file is malformed, or two describe a module of one name.
    """
    found = read_file(package_dir("jit") / SHIPPED)
    for path in sorted(package_dir("csrc").glob(f"*/{BESIDE_KERNELS}")):
        _add(read_file(path), found)
    return found


def register(path: str | Path) -> list[str]:
    """Add the modules of a JSON file; returns their names. Registering a file again reads it again.

    Raises:
        ConfigError: the file is malformed, or a name belongs to a module from another file.

    Example:
        >>> import json, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "modules.json")
        ...     _ = file.write_text(json.dumps({"module_of_mine": {"srcs": ["mine.cu"]}}))
        ...     register(file)
        ['module_of_mine']
    """
    return _add(read_file(Path(path)), _registered, shipped())


def register_values(origin: Path, values: Mapping[str, Any]) -> list[str]:
    """Add modules given as the values that a JSON file would hold; paths are relative to ``origin``'s folder.

    Raises:
        ConfigError: as :func:`register`.
    """
    return _add({name: _entry(origin, name, entry) for name, entry in values.items()}, _registered, shipped())


def _add(
    entries: Mapping[str, ModuleEntry], to: dict[str, ModuleEntry], *known: Mapping[str, ModuleEntry]
) -> list[str]:
    for name, entry in entries.items():
        present = next((others[name] for others in (to, *known) if name in others), None)
        if present is not None and present.origin != entry.origin:
            raise ConfigError(f"{entry.origin}: {name} is already defined by {present.origin}; choose another name")
    to.update(entries)
    return list(entries)


def modules() -> dict[str, ModuleEntry]:
    """Return every known module, shipped ones first."""
    return {**shipped(), **_registered}


def module(name: str) -> ModuleEntry:
    """Return the entry of one module, also by a name that it had before.

    Raises:
        ConfigError: there is none of that name.
    """
    entry = _registered.get(name) or shipped().get(FORMER_NAMES.get(name, name))
    if entry is None:
        raise ConfigError(
            f"there is no module {name!r}{did_you_mean(name, modules())}; "
            f"known: {', '.join(modules()) or '(none)'}. Modules are described in "
            f"csrc/*/{BESIDE_KERNELS}, in {SHIPPED}, or in a JSON file given to hipforge.jit.register(), on the "
            "command line to --register"
        )
    return entry
