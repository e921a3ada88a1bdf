"""aiter's way of declaring ops, on hipforge's build: ``compile_ops`` with aiter's arguments, and its module JSON.

A package that was written against ``aiter.jit.core`` changes one import. Modules with a ``PYBIND11_MODULE`` build and
load as they are; what hipforge does not support is refused, with the name of its replacement.
docs/guide/moving-from-aiter.md walks through one kernel.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from hipforge.errors import ConfigError
from hipforge.jit import registry
from hipforge.jit.call.signature import OPTIONAL_TENSOR, TENSOR, signature_of
from hipforge.jit.compile_ops import compile_ops as _compile_ops

__all__ = ["compile_ops", "convert_json", "register"]

F = TypeVar("F", bound=Callable[..., Any])

_FFI = {"pybind": "pybind11", "ctypes": "abi"}
_BUILD_ARGUMENTS = (
    "srcs", "flags_extra_cc", "flags_extra_hip", "extra_ldflags", "extra_include", "verbose", "blob_gen_cmd",
    "torch_exclude",
)  # fmt: skip
# Keys of aiter's JSON that say nothing about the binary here.
_IGNORED = frozenset({"md_name", "isASM", "is_asm", "is_python_module", "hipify", "third_party"})
_REFUSED = {
    "is_standalone": "an executable is built by a Makefile of its own; hipforge builds libraries",
    "hip_clang_path": "the compiler is chosen for all modules: HIPFORGE_HIPCC names it",
    "flags_extra_hip_per_source": "give the source a module of its own with these flags in flags_extra_hip",
}
_HIP_SOURCES = (".cu", ".hip", ".cpp", ".cc", ".cxx", ".c")


def compile_ops(
    _md_name: str,
    fc_name: str | None = None,
    gen_func: Callable[..., dict[str, Any]] | None = None,
    gen_fake: Callable[..., Any] | None = None,
    ffi_type: str = "pybind",
    develop: bool = False,
) -> Callable[[F], F]:
    """Make a stub call a function of a HIP module, with the arguments of ``aiter.jit.core.compile_ops``.

    Args:
        _md_name: the module, from a JSON file given to :func:`register` or to ``hipforge.jit.register``.
        fc_name: name of the function in the module, if it is not the stub's.
        gen_func: takes the call's arguments and returns build arguments for it: ``md_name``, and any of srcs,
            flags_extra_cc, flags_extra_hip, extra_ldflags, extra_include, blob_gen_cmd, verbose, torch_exclude that
            differ from the module's entry. One module is built per ``md_name``.
        gen_fake: what a traced call returns. A stub that returns a tensor needs it under torch.compile.
        ffi_type: ``"pybind"``: the module brings its PYBIND11_MODULE. ``"ctypes"``: its entry has ``"ffi": "abi"``,
            takes ``hf::Tensor`` where aiter's takes ``aiter_tensor_t*``, and ends in ``HF_EXPORT``.
        develop: must be False: aiter_tensor_t does not exist here.

    A stub that returns None counts as writing every tensor it takes, as aiter's operators do; one that returns a value
    as writing none.

    Raises:
        ConfigError: at decoration, an argument that is not supported, or annotations other than ``torch.Tensor``,
            ``torch.Tensor | None``, ``int``, ``float``, ``bool``, ``str``; at the first call, a module of the other
            ``ffi_type``, or build arguments of ``gen_func`` that are not known.
    """
    if develop:
        raise ConfigError(
            f"{_md_name}: develop=True passes aiter_tensor_t, which is aiter's own type; take torch::Tensor in the "
            "module's PYBIND11_MODULE and leave develop out, or take hf::Tensor, end the source in HF_EXPORT(function) "
            'and use ffi_type="ctypes" (docs/guide/moving-from-aiter.md)'
        )
    if ffi_type not in _FFI:
        raise ConfigError(f"{_md_name}: ffi_type={ffi_type!r}: expected 'pybind' or 'ctypes'")

    def decorate(function: F) -> F:
        mutates = _written(function)
        stubs: dict[str, Callable[..., Any]] = {}

        def stub_of(module: str) -> Callable[..., Any]:
            if module not in stubs:
                _check_ffi(module, ffi_type)
                make = _compile_ops(module, fc_name=fc_name, mutates=mutates, gen_fake=gen_fake)
                stubs[module] = make(function)
            return stubs[module]

        if gen_func is None:
            make = _compile_ops(_md_name, fc_name=fc_name, mutates=mutates, gen_fake=gen_fake)
            stub = make(function)

            @functools.wraps(function)
            def first(*args: Any, **kwargs: Any) -> Any:
                if _md_name not in stubs:
                    _check_ffi(_md_name, ffi_type)
                    stubs[_md_name] = stub
                return stub(*args, **kwargs)

            first.stub = stub.stub  # type: ignore[attr-defined]
            return cast(F, first)

        @functools.wraps(function)
        def generated(*args: Any, **kwargs: Any) -> Any:
            return stub_of(_derived(_md_name, gen_func(*args, **kwargs)))(*args, **kwargs)

        return cast(F, generated)

    return decorate


def _written(function: Callable[..., Any]) -> tuple[str, ...]:
    signature = signature_of(function, mutates=())
    if signature.returns != "None":
        return ()
    return tuple(item.name for item in signature.parameters if item.kind in (TENSOR, OPTIONAL_TENSOR))


def _check_ffi(module: str, ffi_type: str) -> None:
    entry = registry.module(module)
    if entry.ffi != _FFI[ffi_type]:
        other = next(name for name, ffi in _FFI.items() if ffi == entry.ffi)
        raise ConfigError(
            f'{module} has "ffi": "{entry.ffi}" in {entry.origin}, and its stub says ffi_type={ffi_type!r}; '
            f"use ffi_type={other!r} or change the entry"
        )


def _derived(base: str, changes: Mapping[str, Any]) -> str:
    """Register the module that ``changes`` make of ``base``, once, and return its name."""
    name = str(changes.get("md_name", base))
    values = {key: value for key, value in changes.items() if key != "md_name"}
    unknown = sorted(set(values) - set(_BUILD_ARGUMENTS))
    if unknown:
        raise ConfigError(
            f"{base}: gen_func returned {unknown[0]!r}; accepted: md_name, {', '.join(_BUILD_ARGUMENTS)}"
        )
    if name in registry.modules():
        return name
    entry = registry.module(base)
    fields = {item.name: getattr(entry, item.name) for item in dataclasses.fields(entry)}
    kept = {key: _json_value(fields[key]) for key in fields if key not in ("name", "origin", "by_vendor")}
    kept.update(_json_value(entry.by_vendor))
    made = {key: _plain_value(key, value) for key, value in values.items()}
    registry.register_values(entry.origin, {name: {**kept, **{k: v for k, v in made.items() if v is not None}}})
    return name


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [shlex.join(item) if isinstance(item, tuple) else item for item in value]
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    return value


def register(path: str | Path, **places: str | Path) -> list[str]:
    """Add the modules of one of aiter's JSON files, ``optCompilerConfig.json``; return their names.

    Args:
        path: the file.
        **places: what names in its strings stand for, such as ``AITER_CSRC_DIR=...``.

    Raises:
        ConfigError: the file cannot be read, or :func:`convert_json` refuses an entry.

    Example::

        from hipforge import aiter_compat

        aiter_compat.register("modules.json", AITER_CSRC_DIR="/my/package/csrc")
    """
    path = Path(path).resolve()
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    return registry.register_values(path, convert_json(found, places))


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
    made: dict[str, Any] = {"ffi": "pybind11"}
    for key, raw in entry.items():
        value = _value(module, key, raw, places)
        if key in _IGNORED:
            continue
        if key in _REFUSED:
            if value:
                raise ConfigError(f"{module}: {key}: {_REFUSED[key]}")
            continue
        if key not in _BUILD_ARGUMENTS:
            known = ", ".join((*_BUILD_ARGUMENTS, *sorted(_IGNORED)))
            raise ConfigError(f"{module}: unknown key {key!r}; known: {known}")
        plain = _plain_value(key, value)
        if plain is not None:
            made[key] = plain
    return made


def _plain_value(key: str, value: Any) -> Any:
    """Return a build argument as the registry takes it; None for one that says nothing."""
    if value is None or value == "":
        return None
    if key in ("verbose", "torch_exclude"):
        return bool(value)
    items = [str(item) for item in (value if isinstance(value, (list, tuple)) else [value]) if item]
    if key == "blob_gen_cmd":
        return [_command(item) for item in items]
    if key == "srcs":
        return [source for item in items for source in _sources(item)]
    return items


def _command(text: str) -> str:
    text = text.replace("{}", "${GEN}")
    return f"${{PYTHON}} {text}" if text.split(maxsplit=1)[0].endswith(".py") else text


def _sources(path: str) -> list[str]:
    if path.endswith((".h", ".hpp", ".cuh")):
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
    raise ConfigError(
        f"{module}: {key}: {raw!r} is neither a literal nor an f-string of names; write the value itself"
    )


def _part(module: str, key: str, part: ast.expr, places: Mapping[str, str | Path]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        if part.value.id in places:
            return os.fspath(places[part.value.id])
        raise ConfigError(
            f"{module}: {key}: {{{part.value.id}}} is not defined; pass {part.value.id}=... (given: "
            f"{', '.join(places) or 'nothing'})"
        )
    raise ConfigError(f"{module}: {key}: {ast.unparse(part)!r} is not a name; write the value itself")
