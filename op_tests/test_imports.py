"""No file imports or includes itself through others: Python anywhere in a file and by name, C++ by quoted names."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import hipforge

FACE, TESTS = Path(hipforge.__file__).parent, Path(__file__).parent


def modules_of(root: Path, package: str | None) -> dict[str, Path]:
    """Module name → file, for every Python file below a folder, whose folders may be links."""
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(root, followlinks=True):
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            found[".".join(part for part in parts if part not in (None, "__init__"))] = path
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
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            # Of a name that is put together, the package that it begins with; hipforge alone says nothing.
            if called == "import_module" and isinstance(named, ast.Constant) and named.value != "hipforge.":
                found.add(str(named.value).rstrip("."))
    return found & names.keys()


# folder -> the folders that its files may import; the files beside the folders are anybody's
FOLDERS = {
    "jit": set[str](),
    "emulator": {"jit"},
    "ops": {"jit"},
    "nn": {"ops"},
    "weights": {"jit", "ops"},
    "integrations": {"nn", "ops"},
    "tuning": {"emulator", "jit", "ops"},
    "cli": {"emulator", "jit", "nn", "ops", "tuning"},
}


def between_folders(files: Mapping[str, Path]) -> set[tuple[str, str]]:
    """The pairs of folders of which a file of the first imports one of the second."""
    arrows = {(name, other) for name, path in files.items() for other in imports(path.read_text(), files)}
    pairs = {("".join(name.split(".")[1:2]), "".join(other.split(".")[1:2])) for name, other in arrows}
    return {(one, other) for one, other in pairs if one != other and {one, other} <= FOLDERS.keys()}


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
        "hipforge.c": imports("import importlib\nx = importlib.import_module(f'hipforge.a.{y}')\n", names),
        "hipforge.d": imports("if TYPE_CHECKING:\n    from hipforge import d\nimport hipforge.a\n", names),
    }
    assert circles(graph) == [["hipforge.a", "hipforge.b", "hipforge.c"]]


def test_no_file_imports_itself_through_others() -> None:
    for root, package in ((FACE, "hipforge"), (TESTS, None)):
        files = modules_of(root, package)
        assert len(files) > 100
        graph = {name: imports(path.read_text(), files) for name, path in files.items()}
        assert circles(graph) == []


def includes(path: Path, roots: tuple[Path, ...]) -> set[Path]:
    """The files that a C++ file includes by a name in quotes, found beside it or below a root."""
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
    candidates = ([place / name for place in (path.parent, *roots)] for name in names)
    return {found[0].resolve() for given in candidates if (found := [each for each in given if each.is_file()])}


def test_no_file_includes_itself_through_others() -> None:
    roots = (FACE / "csrc" / "include", FACE / "emulator", FACE / "emulator" / "native")
    files = {
        path.resolve()
        for folder in (FACE / "csrc", FACE / "emulator", FACE / "jit")
        for path in folder.resolve().rglob("*")
        if path.suffix in (".h", ".c", ".cpp", ".cu", ".inc", ".cuh", ".hpp")
    }
    graph = {path: includes(path, roots) & files for path in files}
    assert sum(map(len, graph.values())) > 300
    named = {str(path): {str(each) for each in seen} for path, seen in graph.items()}
    assert circles(named) == []


def test_imports_between_folders_go_one_way(tmp_path: Path) -> None:
    assert circles(FOLDERS) == []
    allowed = {(folder, other) for folder, others in FOLDERS.items() for other in others}
    files = modules_of(FACE, "hipforge")
    assert between_folders(files) <= allowed
    upward = tmp_path / "upward.py"
    upward.write_text("def f(name):\n    return import_module(f'hipforge.tuning.families.{name}')\n")
    assert between_folders({**files, "hipforge.ops.upward": upward}) - allowed == {("ops", "tuning")}


def test_units_of_the_emulators_interface_do_not_need_each_other_both_ways() -> None:
    """A unit is a header and its source: streams know nothing of graphs, signal handlers nothing of the interface."""
    native = (FACE / "emulator" / "native").resolve()
    units = ("api", "hip_graph", "hip_streams", "python_poll")
    graph: dict[str, set[str]] = {unit: set() for unit in units}
    for unit in units:
        for path in (native / f"{unit}.h", native / f"{unit}.cpp"):
            graph[unit] |= {each.stem for each in includes(path, ()) if each.stem in units} - {unit}
    assert circles(graph) == [] and graph["api"] == {"hip_graph", "hip_streams", "python_poll"}
