"""The package docstring of hipforge.jit lists its files in dependency order, and docs/architecture.md all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hipforge.jit
from hipforge.emulator import library

FOLDER = Path(hipforge.jit.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


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
            room = not inside or (FOLDER / inside.replace(".", "/")).is_dir()
            found |= {f"{inside}.{alias.name}".removeprefix(".") for alias in node.names} if room else {inside}
    return found


def test_every_file_is_listed_once() -> None:
    order = documented_order()
    files = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.py") if path.stem != "__init__")
    assert sorted(order) == sorted(str(path).replace("/", ".") for path in files)


def test_no_file_imports_a_later_one() -> None:
    order = documented_order()
    for name in order:
        later = imports_at_load(FOLDER / f"{name.replace('.', '/')}.py") - set(order[: order.index(name)])
        assert not later, f"{name}.py imports {later}, which come later"


def test_the_architecture_page_names_every_file_of_jit_and_the_emulator() -> None:
    page = ARCHITECTURE.read_text()
    jit, emulator = page.split("## jit/", 1)[1].split("\n## ", 1)[0], page.split("## The emulator", 1)[1]
    files = (path for path in FOLDER.rglob("*") if path.suffix in (".py", ".c", ".json") and path.name != "__init__.py")
    named = set(re.findall(r"`([a-zA-Z_/]+\.(?:py|c|json))`", jit.split("\n\n")[2]))
    assert named == {str(path.relative_to(FOLDER)) for path in files}
    patterns = re.findall(r"`([a-z_*]+\.(?:cpp|inc|h))`", emulator)
    sources = list((ARCHITECTURE.parent.parent / "emulator" / "native").glob("*.cpp"))
    assert [path.name for path in sources if not any(path.match(pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not list(sources[0].parent.glob(pattern))] == []


def test_every_source_of_the_emulator_is_in_one_unit_that_is_built() -> None:
    native = ARCHITECTURE.parent.parent / "emulator" / "native"
    units = {path.stem: path.read_text() for path in (native / "units").glob("*.cpp")}
    assert set(units) == set(library.UNITS)
    included = re.findall(r'^#include "\.\./(.*)"$', "".join(units.values()), re.MULTILINE)
    assert sorted(included) == sorted(path.name for path in native.glob("*.cpp"))
    assert set(library.UNIT_CFLAGS) <= {f"{name}.cpp" for name in units}
