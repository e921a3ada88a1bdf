"""aiter's module JSON, ``optCompilerConfig.json``, as registry entries: read, never evaluated."""

from __future__ import annotations

import ast
import json
import logging
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hipforge import archs
from hipforge.errors import ConfigError
from hipforge.jit import registry
from hipforge.jit.backends.amd import compilers

log = logging.getLogger("hipforge")

BUILD_ARGUMENTS = (
    "srcs", "flags_extra_cc", "flags_extra_hip", "flags_extra_hip_per_source", "extra_ldflags", "extra_include",
    "verbose", "blob_gen_cmd", "torch_exclude",
)  # fmt: skip
# Keys of aiter's JSON that say nothing about the binary here.
_IGNORED = frozenset({"md_name", "isASM", "is_asm", "is_python_module", "is_experimental", "hipify", "third_party"})
_REFUSED = {
    "is_standalone": "an executable is built by a Makefile of its own; hipforge builds libraries",
    "hip_clang_path": "the compiler is chosen for all modules: HIPFORGE_HIPCC names it",
}
_HIP_SOURCES = (".cu", ".hip", ".cpp", ".cc", ".cxx", ".c")
_SHOWN = 120  # characters of a value in a message
_ABORT = "${CSRC}/aiter/abort.cpp"
# Header library -> its header that sources include; ${CSRC}/aiter/stand_ins has a folder of own headers for each.
_STAND_INS = {"rocprim": "rocprim/rocprim.hpp", "hipcub": "hipcub/hipcub.hpp", "hiprand": "hiprand/hiprand_kernel.h"}

# aiter compiles all C++ that its generators write as HIP.
_AS_HIP = "find ${GEN} -name *.cpp -exec mv {} {}.cu ;"

# What aiter's build passes to every source, where it changes results or what compiles.
_AITER_FLAGS = (
    "-std=c++20", "-DUSE_ROCM=1", "-D__HIP_PLATFORM_AMD__=1", "-DCUDA_HAS_FP16=1", "-DHIPBLAS_V2",
    "-DLEGACY_HIPBLAS_DIRECT", "-DUSE_PROF_API=1", "-U__HIP_NO_HALF_CONVERSIONS__", "-U__HIP_NO_HALF_OPERATORS__",
    "-fgpu-flush-denormals-to-zero", "-DENABLE_ROPE_POSITIONS_INT32=0", "-Wno-undefined-func-template",
    "-Wno-macro-redefined", "-I${GEN}",
)  # fmt: skip
# The macro of the 4-bit format, for which gfx942 has no instructions; one host object serves all architectures.
_FP4 = ("-Xarch_host", "-D__Float4_e2m1fn_x2", "-Xarch_gfx950", "-D__Float4_e2m1fn_x2")

refused: dict[str, str] = {}
"""Modules that :func:`register` did not add, and why."""


class Registered(list[str]):
    """The names of the modules that were added; ``refused`` says why each other one was not."""

    def __init__(self, names: Iterable[str], refused: Mapping[str, str]) -> None:
        super().__init__(names)
        self.refused = dict(refused)


def register(
    path: str | Path,
    *,
    only: Iterable[str] | None = None,
    include: Iterable[str | Path] = (),
    defines: Mapping[str, int | str] | None = None,
    **places: str | Path,
) -> Registered:
    """Add the modules of one of aiter's JSON files, ``optCompilerConfig.json``; return their names.

    An entry that cannot be taken is left out: ``refused`` of the result says why, and so does a call of its stubs.
    For the file of a checkout, ``aiter/jit/optCompilerConfig.json`` in a tree with ``csrc/include``, the places are
    known, sources are compiled with the flags that aiter's own build passes, and modules are built without Composable
    Kernel unless the checkout has it.

    Args:
        path: the file.
        only: names of the modules to add; the default is all.
        include: folders for every source beside those of the entries, such as one with rocPRIM's headers.
        defines: macros for every source, such as ``{"ENABLE_CK": 0}``.
        **places: what names in its strings stand for, such as ``AITER_CSRC_DIR=...``.

    Raises:
        ConfigError: the file cannot be read, or a module that ``only`` names is not there or cannot be taken.

    Example::

        from hipforge import aiter_compat

        aiter_compat.register("modules.json", AITER_CSRC_DIR="/my/package/csrc")
        aiter_compat.register("/src/aiter/aiter/jit/optCompilerConfig.json", only=["module_activation"])
    """
    path = Path(path).resolve()
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected an object of modules; got {type(found).__name__}")
    named = None if only is None else list(only)
    missing = [name for name in named or () if name not in found]
    if missing:
        raise ConfigError(f"{path}: there is no module {missing[0]!r}; it has {', '.join(found)}")
    root = checkout_of(path)
    known = {**(_places(root) if root else {}), **{name: os.fspath(place) for name, place in places.items()}}
    flags = [f"-D{name}={value}" for name, value in {**(_defines(root) if root else {}), **(defines or {})}.items()]
    further = [os.fspath(Path(folder).resolve()) for folder in include]
    added: list[str] = []
    reasons: dict[str, str] = {}
    for name in found if named is None else named:
        try:
            entry = _convert(name, found[name], known)
            if root:
                _as_aiter_builds(entry, root, further)
            elif further:
                entry["extra_include"] = [*entry.get("extra_include", ()), *further]
            for key in ("flags_extra_cc", "flags_extra_hip"):
                if flags:
                    entry[key] = [*flags, *entry.get(key, ())]
            added += registry.register_values(path, {name: entry})
            refused.pop(name, None)
        except ConfigError as error:
            reasons[name] = str(error)
        except OSError as error:  # a name that no file can have
            reasons[name] = f"{name}: {error}"
    if named is not None and reasons:
        raise ConfigError(next(iter(reasons.values())))
    if reasons:
        refused.update(reasons)
        log.info("%s: %d of %d modules cannot be taken: %s", path, len(reasons), len(found), ", ".join(reasons))
    return Registered(added, reasons)


def sources_of(path: Path, name: str, include: Iterable[str | Path] = ()) -> registry.ModuleEntry:
    """Return the sources and folders of a checkout's module whose entry cannot be taken as a whole.

    Raises:
        ConfigError: these cannot be taken either.
    """
    root = path.parents[2]
    values = json.loads(path.read_text())[name]
    kept = {key: values[key] for key in ("srcs", "extra_include", "torch_exclude") if key in values}
    entry = _convert(name, kept, _places(root))
    try:
        _as_aiter_builds(entry, root, [os.fspath(Path(folder).resolve()) for folder in include])
    except OSError as error:
        raise ConfigError(f"{name}: {error}") from None
    folders = tuple(entry["extra_include"])
    exclude = entry.get("torch_exclude", False)
    return registry.ModuleEntry(name, tuple(entry["srcs"]), path, extra_include=folders, torch_exclude=exclude)


def checkout_of(path: Path) -> Path | None:
    """Return the root of the aiter checkout whose module JSON ``path`` is, or None."""
    root = path.parents[2] if len(path.parents) > 2 else path
    return root if path.parts[-3:-1] == ("aiter", "jit") and (root / "csrc/include/aiter_tensor.h").is_file() else None


def _places(root: Path) -> dict[str, str]:
    """Return what the names in a checkout's JSON stand for; its tuned tables are those of aiter/configs."""
    found: dict[str, str | Path] = {
        "AITER_ROOT_DIR": root, "AITER_META_DIR": root, "AITER_CSRC_DIR": root / "csrc",
        "AITER_GRADLIB_DIR": root / "gradlib",
        "CK_DIR": composable_kernel(root), "CK_3RDPARTY_DIR": composable_kernel(root),
        "CK_HELPER_DIR": root / "3rdparty/ck_helper",
        "HIP_KITTENS_DIR": os.environ.get("HIP_KITTENS_DIR", root / "3rdparty/HipKittens"),
    }  # fmt: skip
    tables = {
        "GEMM_A4W4": "a4w4_blockscale_tuned_gemm", "GEMM_A8W8": "a8w8_tuned_gemm",
        "GEMM_A8W8_BPRESHUFFLE": "a8w8_bpreshuffle_tuned_gemm", "GEMM_A8W8_BLOCKSCALE": "a8w8_blockscale_tuned_gemm",
        "GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE": "a8w8_blockscale_bpreshuffle_tuned_gemm", "FMOE": "tuned_fmoe",
        "A8W8_BATCHED_GEMM": "a8w8_tuned_batched_gemm", "BF16_BATCHED_GEMM": "bf16_tuned_batched_gemm",
        "GEMM_BF16": "bf16_tuned_gemm",
    }  # fmt: skip
    for name, table in tables.items():
        found[f"AITER_CONFIGS.AITER_CONFIG_{name}_FILE"] = root / f"aiter/configs/{table}.csv"
    return {name: os.fspath(place) for name, place in found.items()}


def composable_kernel(root: Path) -> Path:
    """Return where a checkout's build looks for Composable Kernel."""
    return Path(os.environ.get("CK_DIR", root / "3rdparty/composable_kernel"))


def _defines(root: Path) -> dict[str, int]:
    has_it = (composable_kernel(root) / "include").is_dir()
    return {"ENABLE_CK": 1} if has_it else {"ENABLE_CK": 0, "AITER_CK_FREE": 1}


def _as_aiter_builds(entry: dict[str, Any], root: Path, further: Sequence[str]) -> None:
    """Add what aiter's ``build_module`` adds to every module: flags, include folders, generators' environment.

    ``further`` are the caller's own folders.

    Kernels are chosen by architecture when they run, so that generated tables hold those of all architectures.
    """
    kernels = composable_kernel(root)
    include = [root / "csrc/include", kernels / "include", kernels / "library/include", root / "csrc/include/torch"]
    own = [path for path in entry.get("extra_include", ()) if Path(path).is_dir()]
    folders = [*own, *(os.fspath(path) for path in include if path.is_dir()), *further]
    entry["extra_include"] = [*folders, *_stand_ins(folders, entry.get("srcs", ()))]
    for key in ("flags_extra_cc", "flags_extra_hip"):
        entry[key] = [*_AITER_FLAGS, *(_FP4 if key == "flags_extra_hip" else ()), *entry.get(key, ())]
    names = ";".join(_architectures())
    environment = f"env 'AITER_GPU_ARCHS={names}' 'GPU_ARCHS={names}'"
    if "blob_gen_cmd" in entry:
        commands = [f"{environment} {command}" for command in entry["blob_gen_cmd"]]
        entry["blob_gen_cmd"] = [*commands, _AS_HIP]
    entry["srcs"] = [*dict.fromkeys(entry.get("srcs", ())), _ABORT]
    entry["archs"] = _architectures()


def _stand_ins(folders: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return the folders of own headers for libraries that neither ROCm nor ``folders`` have.

    That of rocPRIM is for sources that include it and use nothing of it; hipCUB itself uses it. The distribution's
    folders do not count: Debian's rocPRIM and rocRAND 5.3 do not compile with HIP 7.
    """
    searched = [*map(Path, folders), *(rocm / "include" for rocm in compilers.rocm_dirs())]
    lacking = [name for name, header in _STAND_INS.items() if not any((each / header).is_file() for each in searched)]
    if _mentions(sources, ("rocprim::",) if "hipcub" in lacking else ("rocprim::", "hipcub")):
        lacking = [name for name in lacking if name != "rocprim"]
    return [f"${{CSRC}}/aiter/stand_ins/{name}" for name in lacking]


def _mentions(sources: Iterable[str], words: Sequence[str]) -> bool:
    """Return whether one of ``words`` stands in one of the source files."""
    texts = (Path(source).read_text(errors="replace") for source in sources if Path(source).is_file())
    return any(word in text for text in texts for word in words)


def convert_json(values: Mapping[str, Any], places: Mapping[str, str | Path]) -> dict[str, dict[str, Any]]:
    """Return hipforge's registry values for aiter's: each string there is a Python literal or f-string of names.

    Nothing is evaluated: a string may be ``None``, ``True``, ``False``, a quoted text or an f-string whose braces hold
    names of ``places``. Folders among ``srcs`` become the sources in them. ``blob_gen_cmd`` writes into ``${GEN}`` and
    runs under this Python where its first word is a ``.py`` file.

    Args:
        values: module name -> aiter's keys.
        places: what the names stand for, such as ``{"AITER_CSRC_DIR": "/my/package/csrc"}``.

    Raises:
        ConfigError: an expression of another kind, a name that ``places`` lacks, or a key that hipforge refuses.

    >>> entry = {"srcs": ["f'{AITER_CSRC_DIR}/a.cu'"], "extra_ldflags": "None", "verbose": "False"}
    >>> convert_json({"module_a": entry}, {"AITER_CSRC_DIR": "/src"})
    {'module_a': {'ffi': 'pybind11', 'srcs': ['/src/a.cu'], 'verbose': False}}
    """
    return {name: _convert(name, entry, places) for name, entry in values.items()}


def _convert(module: str, entry: Mapping[str, Any], places: Mapping[str, str | Path]) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{module}: expected an object of build arguments; got {type(entry).__name__}")
    made: dict[str, Any] = {"ffi": "pybind11"}
    for key, raw in entry.items():
        if key in _IGNORED:
            continue
        try:
            value = _value(module, key, raw, places)
            plain = plain_value(key, value)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, OSError, RecursionError, MemoryError) as error:
            shown = repr(raw)[:_SHOWN]
            raise ConfigError(f"{module}: {key}: {shown} is not what aiter's JSON has there: {error}") from None
        if key in _REFUSED:
            if value:
                raise ConfigError(f"{module}: {key}: {_REFUSED[key]}")
            continue
        if key not in BUILD_ARGUMENTS:
            known = ", ".join((*BUILD_ARGUMENTS, *sorted(_IGNORED)))
            raise ConfigError(f"{module}: unknown key {key!r}; known: {known}")
        if plain is not None:
            made[key] = plain
    return made


def plain_value(key: str, value: Any) -> Any:
    """Return a build argument as the registry takes it; None for one that says nothing."""
    if value is None or value == "":
        return None
    if isinstance(value, Mapping):
        return {name: _words(flags) for name, flags in value.items()}
    if key in ("verbose", "torch_exclude"):
        return bool(value)
    items = [str(item) for item in (value if isinstance(value, (list, tuple)) else [value]) if item]
    if key == "blob_gen_cmd":
        return [_command(item) for item in items]
    if key == "srcs":
        return [source for item in items for source in _sources(item)]
    return items if key == "extra_include" else _words(items)


def _words(flags: Iterable[str]) -> list[str]:
    """Return flags as single words: aiter writes options that take a value, ``-mllvm -x``, as one string."""
    return [word for flag in flags for word in shlex.split(flag)]


def _command(text: str) -> str:
    text = text.replace("{}", "${GEN}").replace("{0}", "${GEN}")
    first = text.split(maxsplit=1)[:1]
    return f"${{PYTHON}} {text}" if first and first[0].endswith(".py") else text


def _sources(path: str) -> list[str]:
    if path.endswith((".h", ".hpp", ".cuh", ".inc")):
        return []
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    return sorted(os.fspath(item) for item in folder.iterdir() if item.suffix in _HIP_SOURCES)


def _value(module: str, key: str, raw: Any, places: Mapping[str, str | Path]) -> Any:
    if isinstance(raw, list):
        return [_value(module, key, item, places) for item in raw]
    if not isinstance(raw, str):
        return raw
    try:
        tree = ast.parse(raw, mode="eval").body
    except SyntaxError:
        return raw  # a plain string, as hipforge's own files have them
    if isinstance(tree, ast.Constant):
        return tree.value
    if isinstance(tree, ast.JoinedStr):
        return "".join(_part(module, key, part, places) for part in tree.values)
    if isinstance(tree, ast.List):
        return [_value(module, key, ast.unparse(item), places) for item in tree.elts]
    setting = _setting(tree)
    if setting is not None:
        return os.environ.get(*setting)
    if isinstance(tree, ast.IfExp):
        holds = _holds(tree.test)
        if holds is not None:
            return _value(module, key, ast.unparse(tree.body if holds else tree.orelse), places)
    raise ConfigError(f"{module}: {key}: {raw!r} is neither a literal nor an f-string of names; write the value itself")


def _setting(tree: ast.expr) -> tuple[str, ...] | None:
    """Return the arguments of ``os.environ.get("NAME", default)``, or None for anything else."""
    if isinstance(tree, ast.Call) and ast.unparse(tree.func) == "os.environ.get" and not tree.keywords:
        values = [item.value for item in tree.args if isinstance(item, ast.Constant)]
        if len(values) == len(tree.args) in (1, 2):
            return tuple(map(str, values))
    return None


def _holds(test: ast.expr) -> bool | None:
    """Return whether a condition on the architecture holds for all that hipforge builds for; None: differs, or unclear.

    What is understood: ``get_gfx() == "..."``, ``"..." in os.environ.get(...)``, and both joined by ``or``.
    """
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        parts = [_holds(part) for part in test.values]
        return True if True in parts else None if None in parts else False
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return None
    left, right = test.left, test.comparators[0]
    if isinstance(test.ops[0], ast.Eq) and ast.unparse(left) == "get_gfx()" and isinstance(right, ast.Constant):
        same = {name == right.value for name in _architectures()}
        return same.pop() if len(same) == 1 else None
    setting = _setting(right)
    if isinstance(test.ops[0], ast.In) and isinstance(left, ast.Constant) and setting is not None:
        return str(left.value) in os.environ.get(*setting, *([""] if len(setting) == 1 else []))
    return None


def _architectures() -> list[str]:
    return [name for name, arch in archs.ARCHS.items() if arch.vendor == "amd"]


def _part(module: str, key: str, part: ast.expr, places: Mapping[str, str | Path]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    setting = _setting(part.value) if isinstance(part, ast.FormattedValue) else None
    if setting is not None:
        return os.environ.get(setting[0], setting[1] if len(setting) > 1 else "None")
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name | ast.Attribute):
        name = ast.unparse(part.value)
        if name in places:
            return os.fspath(places[name])
        raise ConfigError(
            f"{module}: {key}: {{{name}}} is not defined; pass {name}=... (given: {', '.join(places) or 'nothing'})"
        )
    raise ConfigError(f"{module}: {key}: {ast.unparse(part)!r} is not a name; write the value itself")


def json_value(value: Any) -> Any:
    """Return a value of a registry entry as its JSON file would hold it."""
    if isinstance(value, tuple):
        return [shlex.join(item) if isinstance(item, tuple) else item for item in value]
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    return value
