"""No file of the package imports itself through others, whether at module level, inside a function or by name."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import hipforge

FACE = Path(hipforge.__file__).parent


def files_of_the_package() -> dict[str, Path]:
    """Module name → file, for every Python file of the package, whose folders may be links."""
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(FACE, followlinks=True):
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            parts = ["hipforge", *path.relative_to(FACE).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not _is_type_checking(node):
            yield node
            yield from _nodes(node)


def imports(text: str, names: Mapping[str, object]) -> set[str]:
    """The modules among ``names`` that a file's text imports; a package that is only on the way to one is not."""
    found: set[str] = set()
    for node in _nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & names.keys() or {node.module}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "import_module":
                found.add(str(node.args[0].value))
    return found & names.keys()


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one file, each sorted."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def test_a_circle_is_found_at_module_level_in_a_function_and_by_name() -> None:
    names = {"hipforge.a": 0, "hipforge.b": 0, "hipforge.c": 0, "hipforge.d": 0}
    graph = {
        "hipforge.a": imports("from hipforge import b\n", names),
        "hipforge.b": imports("def f():\n    from hipforge.c import g\n", names),
        "hipforge.c": imports("import importlib\nx = importlib.import_module('hipforge.a')\n", names),
        "hipforge.d": imports("if TYPE_CHECKING:\n    from hipforge import d\nimport hipforge.a\n", names),
    }
    assert circles(graph) == [["hipforge.a", "hipforge.b", "hipforge.c"]]


def test_no_file_imports_itself_through_others() -> None:
    files = files_of_the_package()
    assert len(files) > 100
    graph = {name: imports(path.read_text(), files) for name, path in files.items()}
    assert circles(graph) == []
