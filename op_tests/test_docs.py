"""The documentation: its examples run as they stand, and its generated parts are up to date."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import hipforge
from hipforge.cli.profile_subjects import SUBJECTS
from hipforge.jit import registry
from hipforge.ops import public_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.name: path for path in sorted((ROOT / "docs").rglob("*.md"))}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    return module


def run(code: str, folder: Path) -> None:
    (folder / "example.py").write_text(code)  # a file: torch.compile reads the source of what it traces
    command = [sys.executable, "example.py"]
    environment = {**os.environ, "HIPFORGE_EMULATOR_CHECKS": "memory"}  # as a user runs it
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{code}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", [name for name, path in PAGES.items() if BLOCK.search(path.read_text())])
def test_every_example_of_a_page_runs_alone_as_pasted(name: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGES[name].read_text())
    for number, block in enumerate(blocks):
        (tmp_path / f"block{number}.py").write_text(block)
    run(f"import runpy\nfor number in range({len(blocks)}):\n    runpy.run_path(f'block{{number}}.py')", tmp_path)


def test_the_modelled_times_are_of_ops_that_exist_on_both_architectures() -> None:
    times = json.loads((ROOT / "docs" / "op_times.json").read_text())
    assert set(times) == {"gfx950", "gfx942"}
    for of_arch in times.values():
        assert set(of_arch) <= set(SUBJECTS) and len(of_arch) > 10
        assert all(one["kernel_us"] > 0 for one in of_arch.values())


def test_an_example_that_breaks_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_op"):
        run("import hipforge; hipforge.no_such_op", tmp_path)


def test_what_type_checkers_see_of_the_package_is_up_to_date() -> None:
    names = script("public_names")
    text = names.FACE.read_text()
    assert names.with_imports(text) == text
    assert names.with_imports(text.replace("import mxfp8_gemv as mxfp8_gemv", "import mxfp8_gem as x")) == text


def test_dir_of_the_package_has_the_public_names_only() -> None:
    shown = {name for name in dir(hipforge) if not name.startswith("__")}
    assert shown == {name for name in hipforge.__all__ if not name.startswith("__")} | set(hipforge._SUBMODULES)


def test_a_release_with_a_path_of_this_machine_or_without_its_licence_is_refused(tmp_path: Path) -> None:
    release = script("release")
    wheel = tmp_path / f"hipforge-{hipforge.__version__}-py3-none-any.whl"
    stated = f"Name: hipforge\nVersion: {hipforge.__version__}\nLicense-Expression: {{}}\n\n"
    files = {"hipforge/a.py": f"# {ROOT}", "h.dist-info/METADATA": stated.format("GPL"), "h.dist-info/LICENSE": ""}
    for left_out, expected in ((None, 2), ("h.dist-info/LICENSE", 3), ("h.dist-info/METADATA", 2)):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in files.keys() - {left_out}:
                archive.writestr(name, files[name])
        assert len(release.problems(wheel)) == expected
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("h.dist-info/METADATA", stated.format("MIT"))
        archive.writestr("h.dist-info/LICENSE", "")
    assert not release.problems(wheel)


def test_the_readme_says_on_which_architectures_an_op_has_a_kernel() -> None:
    archs = {name: module.archs for name, module in registry.modules().items()}
    rows = [row for row in (ROOT / "README.md").read_text().splitlines() if row.startswith("| `")]
    assert len(rows) > 10
    for row in rows:
        _, ops, _, _, *cells, _ = row.split("|")
        said = {arch for arch, cell in zip(("gfx950", "gfx942", "sm_90"), cells, strict=True) if "yes" in cell}
        names = [name for name in re.findall(r"`(\w+)`", ops) if not name.startswith("_")]
        homes = [ROOT / public_names()[name].replace("hipforge.", "").replace(".", "/") for name in names]
        sources = [path for home in homes for path in (home.with_suffix(".py"), *home.rglob("*.py")) if path.exists()]
        named = set(re.findall(r'"(module_\w+)"', "".join(path.read_text() for path in sources)))
        named |= {name for name in archs for home in homes if home.is_dir() and name.startswith(f"module_{home.name}")}
        own = tuple(f"module_{name}" for name in names if f"module_{name}" in archs)  # modules of an op's own name
        named = {name for name in archs for module in own if f"{name}_".startswith(f"{module}_")} or named
        assert said == {arch for name in named for arch in archs[name]}, row


def test_versions_agree() -> None:
    version = hipforge.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_lines_of_code_leave_out_comments_docstrings_and_blanks() -> None:
    documented = '"""Module."""\n\ndef f():\n    """Function.\n\n    More.\n    """\n'
    assert script("code_lines").count(documented + "    return (  # one\n        1\n    )\n# two\n\nx = 1\n") == 5
