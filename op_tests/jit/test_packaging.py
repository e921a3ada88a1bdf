"""The wheel works without the source tree, imports are lazy, and the pages are complete."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import click
import pytest

import hipforge
from hipforge import settings, shapes
from hipforge.cli import new_op
from hipforge.cli.main import cli
from hipforge.cli.profile_subjects import SUBJECTS
from hipforge.errors import ConfigError
from hipforge.jit import registry

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **kwargs) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **kwargs)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def tracked_files(*folders: str) -> list[str]:
    command = ["git", "ls-files", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if (ROOT / name).is_file() or (ROOT / name).is_symlink()]


def built_wheel(source: Path, out: Path) -> Path:
    """Build a wheel from a source tree or a source distribution; returns its path."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = out.glob("hipforge-*.whl")
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy, so that no leftover of an earlier build gets in and nothing is written to the checkout."""
    copy = tmp_path_factory.mktemp("tree")
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """As ``make wheel`` makes it, with the binding compiled; what a build for another target left stays."""
    out, other = tmp_path_factory.mktemp("wheel"), tree / "build" / "of_another_target"
    other.mkdir(parents=True)
    script = [sys.executable, str(tree / ".ci" / "wheel_aot.py"), "--binding-only", "--outdir", str(out)]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    other.rmdir()
    (path,) = out.glob("hipforge-*-py3-none-manylinux_2_*_x86_64.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked elsewhere, in front of the editable install of this environment."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return site


def test_the_wheel_carries_sources_tables_and_registry_and_nothing_stray(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    files = tracked_files("csrc", "configs", "emulator/native", "jit/call/*.c", "jit/call/*.h")
    wanted = {f"hipforge/{name}" for name in files if not name.endswith(".md")}
    wanted |= {"hipforge/jit/optCompilerConfig.json", "hipforge/py.typed"}
    assert wanted <= set(names), sorted(wanted - set(names))
    assert len(names) == len(set(names))
    tops = {name.split("/")[0] for name in names}
    assert all(top == "hipforge" or top.endswith(".dist-info") for top in tops), tops


def test_a_script_beside_the_checkout_imports_the_package_and_not_the_folder(tmp_path):
    """A folder named hipforge in the script's directory is searched first; it has no __init__.py and must not win."""
    (tmp_path / "hipforge").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import hipforge\nprint(hipforge.__file__, hipforge.mxfp8_gemv.__name__)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "script.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [hipforge.__file__, "mxfp8_gemv"]


@pytest.mark.full
def test_a_wheel_from_the_source_distribution_has_what_one_from_the_tree_has(tree, tmp_path):
    code = f"import setuptools.build_meta as build; build.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=True)
    (source,) = tmp_path.glob("hipforge-*.tar.gz")
    for name in ("again", "first"):
        (tmp_path / name).mkdir()
    again = zipfile.ZipFile(built_wheel(source, tmp_path / "again"))
    first = zipfile.ZipFile(built_wheel(tree, tmp_path / "first"))
    record = next(name for name in first.namelist() if name.endswith("/RECORD"))
    # RECORD has the digest of every file.
    assert sorted(again.read(record).decode().splitlines()) == sorted(first.read(record).decode().splitlines())


def test_an_op_runs_from_the_wheel_alone(installed, tmp_path):
    out = run(
        """
import torch, hipforge
from hipforge.ops.reference import quantize_mxfp8, mxfp8_mm
x = torch.randn(4, 256, dtype=torch.bfloat16); w = torch.randn(48, 256, dtype=torch.bfloat16)
q = (*quantize_mxfp8(x), *quantize_mxfp8(w))
y = hipforge.mxfp8_gemv(*q)
print(hipforge.__file__)
# Both sum in float32 and round to bf16 once, in different orders: they may end one bf16 step apart, 2^-7 of the value.
print(torch.allclose(y.float(), mxfp8_mm(*q).float(), rtol=2**-7, atol=2**-7))
""",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
    ).split()
    assert Path(out[0]).is_relative_to(installed)
    assert out[1] == "True"


def test_the_wheel_carries_the_binding_compiled(installed, tmp_path):
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path / "home"), "PYTHONPATH": str(installed)}
    code = (
        "from hipforge.jit.call import abi; abi.make_binder(abi.Environment('host'));"
        "print(abi.extension_entry().library)"
    )
    assert Path(run(code, cwd=tmp_path, env=environment).strip()).is_relative_to(installed)


def test_a_wheel_built_ahead_needs_no_compiler_and_writes_nothing(tmp_path):
    """--march native takes the emulator that this machine's cache already holds; the packing is the same."""
    script = [sys.executable, str(ROOT / ".ci" / "wheel_aot.py"), "--march", "native", "--outdir", str(tmp_path)]
    result = subprocess.run([*script, "--modules", "module_fp8_quant"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = tmp_path.glob("hipforge-*linux*x86_64.whl")
    assert "manylinux_2_" in path.name, "the emulator and the kernels ask the system for no more than libstdc++"
    site, home = tmp_path / "site", tmp_path / "home"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    environment = {"PATH": "/nonexistent", "HOME": str(home), "PYTHONPATH": str(site), "HIPFORGE_EMULATOR_QUIET": "1"}
    out = run(
        """
import torch, hipforge
from hipforge.ops.fp8_linear import to_fp8
from hipforge.ops.fp8_quant import fp8_quant_tensorwise
from hipforge.jit import loader
x = torch.randn(64, 64)
got, inv, _ = fp8_quant_tensorwise(x)
want, want_inv = to_fp8(x, got.dtype)
assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) and torch.equal(inv, want_inv)
print(hipforge.__file__, *(module.path for module in loader.loaded()))
""",
        cwd=tmp_path,
        env=environment,
    ).split()
    assert all(Path(name).is_relative_to(site) for name in out), out
    assert not home.exists()


def ci(name):
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / ".ci"))


@pytest.mark.parametrize(
    ("line", "tag"),
    [
        ("", "manylinux_2_17_x86_64"),
        ('extern "C" int a(); asm(".symver a,stat@GLIBC_2.33"); int b() { return a(); }', "manylinux_2_34_x86_64"),
        ('extern "C" int x(); asm(".symver x,_x@GLIBC_2.99"); int b() { return x(); }', None),
    ],
)
def test_a_library_gets_the_oldest_platform_that_has_its_symbols(line, tag, tmp_path):
    (tmp_path / "a.cpp").write_text(line or "int nothing() { return 0; }")
    library = tmp_path / "a.so"
    command = ["g++", "-shared", "-fPIC", "-nostartfiles", "a.cpp", "-o", str(library)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if tag is None:  # no library has that version: the linker would have refused it, so nothing can need it
        assert done.returncode != 0
        return
    assert done.returncode == 0, done.stderr
    assert ci("manylinux").platform([library]) == tag


def test_a_library_of_somebody_else_allows_no_manylinux(tmp_path):
    import torch

    library = next(Path(torch.__file__).parent.glob("lib/libtorch_python.so"))
    assert ci("manylinux").platform([library]) == "linux_x86_64"
    assert {"libtorch_cpu.so", "libc.so.6"} <= ci("manylinux").needs(library.read_bytes())[0] | {"libtorch_cpu.so"}


def test_the_modules_of_an_op_are_found_through_the_ops_that_it_calls():
    modules_of = ci("wheel_aot").modules_of
    # fp8_quant.py has the quantisers by rows, and by blocks of MX through another op.
    assert modules_of(["fp8_quant_tensorwise"]) == ["module_fp8_quant", "module_fp8_quant_rows", "module_mx_quantize"]
    assert modules_of(["router_gemm"]) == ["module_router_gemm"]
    assert set(modules_of(["grouped_gemm_mxfp8"])) < set(modules_of(["fused_moe_mxfp8"]))
    with pytest.raises(ConfigError, match=r"no op 'rmsnorm'; known: .*rms_norm"):
        modules_of(["rmsnorm"])


def test_importing_is_quick_and_imports_no_torch(tmp_path):
    code = """
import sys, time
start = time.process_time()  # not the clock: other test processes run beside this one
import hipforge
seconds = time.process_time() - start
heavy = [name for name in ("torch", "triton", "numpy", "rich", "click", "ninja") if name in sys.modules]
print(seconds, *heavy)
"""
    runs = [run(code, cwd=tmp_path).split() for _ in range(5)]
    assert all(len(words) == 1 for words in runs), runs
    assert min(float(words[0]) for words in runs) < 0.05


def test_every_public_name_resolves():
    import hipforge

    for name in hipforge.__all__:
        assert getattr(hipforge, name) is not None
    assert set(hipforge.__all__) <= set(dir(hipforge))
    with pytest.raises(AttributeError, match="no_such_name"):
        hipforge.no_such_name  # noqa: B018
    with pytest.raises(AttributeError, match=r"no_such_name.*it has .*fp8_linear"):
        hipforge.ops.no_such_name  # noqa: B018


def test_families_and_ops_are_known_without_an_import_of_their_own_and_bring_no_sympy():
    code = """
import sys
import hipforge
print(hipforge.ops.reference.BLOCK, hipforge.ops.moe.__name__, "fp8_quant" in dir(hipforge.ops))
import torch
q = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
hipforge.rms_norm, hipforge.rope_and_cache, hipforge.decode_attention_fp8
print(hipforge.explain("mxfp8_gemv", *q, *q, torch.float16).path, "sympy" in sys.modules)
"""
    assert run(code).split() == ["32", "hipforge.ops.moe", "True", "none", "False"]


def test_the_page_of_settings_lists_every_one_with_its_default():
    text = (ROOT / "docs/guide/settings.md").read_text()
    documented = set(re.findall(r"^\| `(HIPFORGE_[A-Z_<>]+)`", text, re.MULTILINE))
    known = {setting.env for setting in settings.ALL} | {settings.CONFIG_PREFIX + "<FAMILY>"}
    assert documented == known
    assert len({setting.env for setting in settings.ALL}) == len(settings.ALL)
    for setting in settings.ALL:
        default = "–" if setting.default in (None, (), "") else setting.default
        shown = int(default) if isinstance(default, bool) else default
        assert f"| `{setting.env}` | {shown} | {setting.doc} Accepts {setting.accepts}. |" in text


def test_the_readme_example_runs_as_pasted(tmp_path):
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "kernel" in run(example + "print(y.shape, y.dtype)", cwd=tmp_path)
    assert len(text.splitlines()) <= 110


def shell_lines(path: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def check(command: click.Command, words: list[str]) -> None:
    """Parse a command line to its last subcommand, as a shell would give it, and run nothing."""
    try:
        context = command.make_context(command.name or "hipforge", words)
    except click.exceptions.Exit as ended:  # --help
        assert ended.exit_code == 0
        return
    if isinstance(command, click.Group):
        _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        check(inner, rest)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@mock.patch.dict(SUBJECTS)
@mock.patch.dict(registry._registered)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_of_the_documentation_parse_as_they_are_pasted(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new_op.write("scale", tmp_path, here=True)  # what commands with --register take
    (tmp_path / "~" / "aiter").mkdir(parents=True)  # a checkout, where no shell expands its name
    commands = [shlex.split(line, comments=True) for line in shell_lines(path) if line.startswith("hipforge ")]
    assert commands or path.name != "README.md"
    for words in commands:
        check(cli, words[1:])
        if words[1] in ("explain", "profile", "time", "trace"):
            subject = SUBJECTS[words[2]]
            shapes.parse(words[3], subject.shape, subject.example)
        if words[1] in ("inspect", "disasm", "build"):
            names = [word for word in words[2:] if word.startswith("module_")]
            assert set(names) <= set(registry.modules()), names
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in (shlex.split(line, comments=True) for line in shell_lines(path)):
        if words and words[0] == "make":
            assert words[1] in targets, words
        if words and words[0].endswith("python") and words[1] != "-m":
            assert (ROOT / words[1]).is_file() or not words[1].startswith(("op_tests", "examples", ".ci")), words


def test_a_command_that_does_not_paste_is_seen():
    for line in ("cache list | size", "inspect", "profile mxfp8_gmm 1,2,3", "build --everything"):
        with pytest.raises(click.UsageError):
            check(cli, line.split())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    environment = {**os.environ, "HIPFORGE_EMULATOR_CHECKS": "memory"}  # as a user runs it
    command = [sys.executable, str(path)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip()
