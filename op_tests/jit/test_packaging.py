"""The wheel works without the source tree, imports are lazy, and the README is complete."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hipforge import settings

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **kwargs) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **kwargs)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def tracked_files(*folders: str) -> list[str]:
    command = ["git", "ls-files", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # Built from a copy, so that no leftover of an earlier build gets in and nothing is written to the checkout.
    out, tree = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tree")
    for name in tracked_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = out.glob("hipforge-*.whl")
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
    wanted = {f"hipforge/{name}" for name in tracked_files("csrc", "configs", "emulator/native")}
    wanted |= {"hipforge/jit/optCompilerConfig.json", "hipforge/jit/call/binding.c", "hipforge/py.typed"}
    assert wanted <= set(names), sorted(wanted - set(names))
    tops = {name.split("/")[0] for name in names}
    assert all(top == "hipforge" or top.endswith(".dist-info") for top in tops), tops


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


def test_a_wheel_built_ahead_needs_no_compiler_and_writes_nothing(tmp_path):
    """--march native takes the emulator that this machine's cache already holds; the packing is the same."""
    script = [sys.executable, str(ROOT / ".ci" / "wheel_aot.py"), "--march", "native", "--outdir", str(tmp_path)]
    result = subprocess.run([*script, "--modules", "module_fp8_quant"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = tmp_path.glob("hipforge-*linux_x86_64.whl")
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


def test_op_families_are_found_without_an_import_of_their_own():
    code = "import hipforge; print(hipforge.ops.reference.BLOCK, hipforge.ops.moe.__name__, *dir(hipforge.ops))"
    words = run(code).split()
    assert words[:2] == ["32", "hipforge.ops.moe"] and "fp8_quant" in words


def test_explain_knows_every_op_by_its_name_alone():
    code = """
import torch, hipforge
q = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
print(hipforge.explain("mxfp8_gemv", *q, *q, torch.float16).path)
"""
    assert run(code).split() == ["none"]


def test_the_readme_lists_every_setting_with_its_default():
    text = (ROOT / "README.md").read_text()
    documented = set(re.findall(r"^\| `(HIPFORGE_[A-Z_<>]+)`", text, re.MULTILINE))
    known = {setting.env for setting in settings.ALL} | {settings.CONFIG_PREFIX + "<FAMILY>"}
    assert documented == known
    assert len({setting.env for setting in settings.ALL}) == len(settings.ALL)
    for setting in settings.ALL:
        default = "–" if setting.default in (None, (), "") else setting.default
        shown = int(default) if isinstance(default, bool) else default
        assert f"| `{setting.env}` | {shown} | {setting.doc} Accepts {setting.accepts}. |" in text


def test_the_readme_example_runs_as_pasted(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example, *_, counting = blocks
    printed = run(example + counting, cwd=tmp_path).split()
    loaded, mfmas = printed[-2:]
    assert (int(loaded), int(mfmas)) == (768 * 6144, 0)  # the GEMV reads each weight byte once


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    result = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip()
