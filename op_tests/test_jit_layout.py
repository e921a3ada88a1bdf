"""The package docstring of hipforge.jit lists its files in dependency order; this holds it to that."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hipforge.jit

FOLDER = Path(hipforge.jit.__file__).parent


def documented_order() -> list[str]:
    block = (hipforge.jit.__doc__ or "").split("::\n", 1)[1]
    names: list[str] = []
    for line in block.splitlines():
        if line.startswith("    "):
            files, *_ = re.split(r"\s{3,}", line.strip())
            names += files.split(", ")
    return names


def imports_at_load(path: Path) -> set[str]:
    """The files of hipforge.jit that ``path`` imports at module level, not inside a function or for type checking."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hipforge.jit"):
            inside = (node.module or "").removeprefix("hipforge.jit").removeprefix(".")
            found |= {inside} if inside else {alias.name for alias in node.names}
    return found


def test_every_file_is_listed_once() -> None:
    order = documented_order()
    assert sorted(order) == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def test_no_file_imports_a_later_one() -> None:
    order = documented_order()
    for name in order:
        later = imports_at_load(FOLDER / f"{name}.py") - set(order[: order.index(name)])
        assert not later, f"{name}.py imports {later}, which come later"
