"""``hipforge new-op`` writes an op family that works; what a tuned op takes in files and lists is counted here."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from hipforge.cli import new_op
from hipforge.cli.main import cli
from hipforge.cli.options import add_calls_of
from hipforge.cli.profile_subjects import SUBJECTS
from hipforge.errors import ConfigError
from hipforge.jit import registry

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("jit", "csrc", "emulator", "ops", "tuning", "configs")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")

# What lists all ops: names, tuners, the subjects of the command line, calls to trace, random calls.
LISTS = """
import sys; sys.path.insert(0, "op_tests")
from hipforge import ops
from hipforge.cli import profile_subjects, tune
from helpers import op_calls
from stress import calls
print(*("toy_scale" in names for names in (ops.public_names(), tune.TUNERS, profile_subjects.SUBJECTS, op_calls.CALLS,
                                           {op.name for op in calls.OPS})))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout, whose ``src`` makes it importable as hipforge."""
    copy = tmp_path / "checkout"
    for part in (*PARTS, "src"):
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=IGNORED)
    for part in ("helpers", "stress"):
        shutil.copytree(ROOT / "op_tests" / part, copy / "op_tests" / part, ignore=IGNORED)
    (copy / ".ci").mkdir()
    for name in ("pyproject.toml", "op_tests/conftest.py", ".ci/public_names.py"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for part in (*PARTS, "src", "op_tests") for p in
            (root / part).rglob("*") if p.is_file() and p.suffix != ".pyc"}  # fmt: skip


def run(checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    return subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, text=True, capture_output=True, check=False
    )


def test_a_new_op_runs_its_own_tests_and_takes_four_places(checkout):
    before, packages = tree(checkout), (checkout / "pyproject.toml").read_text()
    done = run(checkout, "-c", "from hipforge.cli import main; main()", "new-op", "toy_scale")
    assert done.returncode == 0, done.stderr
    after = tree(checkout)
    added = {name for name in after if name not in before}
    assert added == {place.format(name="toy_scale") for place in new_op.FILES.values()}
    edited = {name for name in before if after[name] != before[name]}
    edited |= {"pyproject.toml"} if (checkout / "pyproject.toml").read_text() != packages else set()
    assert edited == {new_op.TYPED_NAMES}, "the only list that is text, and a generator writes it"
    places = {name.partition("/toy_scale/")[0] for name in added}
    assert len(places) == 4, places
    tests = run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "op_tests/ops/test_toy_scale.py")
    assert tests.returncode == 0 and " passed" in tests.stdout, tests.stdout[-3000:] + tests.stderr[-2000:]
    profile = "from hipforge.cli.main import cli; cli()", "profile", "toy_scale", "r=3,c=64", "--json"
    found = run(checkout, "-c", LISTS + profile[0], *profile[1:])
    lists, _, counted = found.stdout.partition("\n")
    assert lists.split() == ["True"] * 5, found.stdout + found.stderr[-2000:]
    assert '"launches": 1' in counted, found.stdout + found.stderr[-2000:]
    lint = run(checkout, "-m", "ruff", "check", "--no-cache", "ops", "op_tests", "src")
    assert lint.returncode == 0, lint.stdout


@mock.patch.dict(SUBJECTS)
@mock.patch.dict(registry._registered)
def test_an_op_of_ones_own_runs_its_tests_and_every_command_takes_it(tmp_path, monkeypatch):
    def command(*words: str) -> str:
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    monkeypatch.chdir(tmp_path)
    command("new-op", "toy_scale", "--here")
    tests = [sys.executable, "-m", "pytest", "-q", "test_toy_scale.py"]
    done = subprocess.run(tests, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    own = ("--register", "toy_scale.py")
    command("build", "module_toy_scale", *own)
    assert "toy_scale_kernel<__hip_bfloat16>" in command("inspect", "module_toy_scale", *own)
    assert "s_endpgm" in command("disasm", "module_toy_scale", *own)
    assert "hit" in command("cache", "why", "module_toy_scale", *own)
    assert "wave-instructions" in command("profile", "toy_scale", "rows=2,columns=64", *own)
    assert "modelled" in command("time", "toy_scale", "2,64", *own)
    assert "s_endpgm" in command("trace", "toy_scale", "2,64", *own)
    assert "kernel, toy_scale_out" in command("explain", "toy_scale", "2,64", *own)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no such Python file"),
        ("import os\nimport no_such_module", "ModuleNotFoundError in line 2: No module named 'no_such_mod"),
        ("CALLS = {", "cannot be imported: SyntaxError in line 1: "),
        ("CALLS = {'mine': lambda rows: None}", "each with an int as its default"),
        ("CALLS = {'rms_norm': lambda rows=1: None}", "hipforge has an op of that name"),
    ],
)
def test_a_file_of_calls_that_is_not_one_is_refused(text, words, tmp_path):
    path = tmp_path / "calls_of_mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        add_calls_of(path)


@pytest.mark.parametrize("name", ["torch", "random", "float"])
def test_an_op_of_ones_own_does_not_take_the_name_of_a_module(name, tmp_path):
    with pytest.raises(ConfigError, match=rf"{name}\.py would hide Python's .*{name}.*; choose another name"):
        new_op.write(name, tmp_path, here=True)
    assert not list(tmp_path.iterdir())


def test_a_registered_file_that_is_called_like_a_module_does_not_become_it(tmp_path):
    (tmp_path / "json.py").write_text("CALLS = {'of_json': lambda rows=1: None}")
    try:
        add_calls_of(tmp_path / "json.py")
        assert "of_json" in SUBJECTS and importlib.import_module("json") is json
    finally:
        SUBJECTS.pop("of_json", None)


@pytest.mark.parametrize("name", ["Toy", "1op", "a-b", "class", "../x", ""])
def test_a_name_that_is_no_identifier_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="identifier in lower case"):
        new_op.write(name, tmp_path)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a checkout of hipforge"):
        new_op.write("toy_scale", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_taken_changes_nothing(checkout):
    before = tree(checkout)
    with pytest.raises(ConfigError, match="mxfp4_gemm is taken"):
        new_op.write("mxfp4_gemm", checkout)
    with pytest.raises(ConfigError, match="swiglu_fp8 is taken"):
        new_op.write("swiglu_fp8", checkout)
    assert tree(checkout) == before
