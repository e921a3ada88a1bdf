"""GPU ops: one package per tuned op family, one module per simple op.

Lists of ops are derived from these files: a line ``PUBLIC = ("router_gemm",)`` in a package or module names its public
ops, and a package with a ``family.py``, or a module with a line ``FAMILY = Family(``, has a tuned table and a tuner. A
line ``EXAMPLES = {"scale": "R=16,C=1024"}`` gives the shapes of the calls that its function ``example`` makes for
``hipforge profile``. The lines are read as text, because the modules import torch; they are imported on first use.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent
_LINE = re.compile(r"^(PUBLIC|EXAMPLES|FAMILY) = (.+?[)}])$", re.MULTILINE | re.DOTALL)
_TABLES = {"decode_attention": "decode_attention_fp8"}  # of a family whose table is older than its package's name


@functools.cache
def _homes() -> dict[str, dict[str, str]]:
    """Return the modules and packages here, each with its lines of these names."""
    files = {path.stem: path / "__init__.py" if path.is_dir() else path for path in sorted(_FOLDER.iterdir())}
    del files["__init__"]
    found = {home: path for home, path in files.items() if path.is_file()}
    return {home: dict(_LINE.findall(path.read_text(encoding="utf-8"))) for home, path in found.items()}


def public_names() -> dict[str, str]:
    """Return the public ops by name, each with the module that defines it.

    Example:
        >>> public_names()["router_gemm"]
        'hipforge.ops.router_gemm'
    """
    found = {name: home for home, lines in _homes().items() for name in re.findall(r"\w+", lines.get("PUBLIC", ""))}
    return {name: f"{__name__}.{found[name]}" for name in sorted(found)}


def examples() -> dict[str, str]:
    """Return the shape in ``EXAMPLES`` of each op that has one.

    Example:
        >>> {op for op in examples() if op not in public_names()}
        set()
    """
    lines = (lines.get("EXAMPLES", "") for lines in _homes().values())
    return {op: shape for line in lines for op, shape in re.findall(r'"(\w+)": "([^"]+)"', line)}


@functools.cache
def families() -> dict[str, str]:
    """Return the tuned op families: the name of each one's table, and its home below ``hipforge.ops``.

    Example:
        >>> families()["decode_attention_int4"]
        'decode_attention.int4'
    """
    found = (path.parent.relative_to(_FOLDER) for path in _FOLDER.rglob("family.py"))
    packages = {".".join(folder.parts) for folder in found if folder.name != "core"}
    modules = {home for home, lines in _homes().items() if "FAMILY" in lines}
    return {_TABLES.get(home, home.replace(".", "_")): home for home in sorted(packages | modules)}


def family_of(table: str) -> Any:
    """Return the family of a tuned table; raises KeyError for a name that :func:`families` does not have.

    Example:
        >>> [kernel.name for kernel in family_of("fp8_grouped_gemm").kernels][0]
        'fp8_grouped_split'
    """
    home = families()[table]
    package = (_FOLDER / home.replace(".", "/")).is_dir()
    return importlib.import_module(f"{__name__}.{home}.family" if package else f"{__name__}.{home}").FAMILY


def schema_of(table: str) -> Any:
    """Return the schema of a tuned table; raises KeyError for a name that :func:`families` does not have.

    Example:
        >>> [column.name for column in schema_of("mxfp4_gemm").shape]
        ['M', 'N', 'K']
    """
    return family_of(table).table


def register_operators() -> tuple[str, ...]:
    """Make every operator of hipforge known to torch, the stubs' included; return their names.

    Operators are registered when the module of their op is imported, or, for stubs, when a trace first needs them.
    A process that loads an exported program calls this first.

    Example:
        >>> "mxfp8_linear" in register_operators()
        True
    """
    from hipforge.jit.call import torch_library

    found: set[str] = set()
    for home in sorted(set(public_names().values())):
        importlib.import_module(home)
    for path, module in tuple(sys.modules.items()):
        if path.startswith(f"{__name__}."):
            functions = (value for value in vars(module).values() if callable(value))
            stubs = (getattr(function, "stub", None) for function in functions)
            found.update(stub.operator_name() for stub in stubs if stub is not None)
    return tuple(sorted(found.union(torch_library.registered())))


def __getattr__(name: str) -> ModuleType:
    if name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_homes()))}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
