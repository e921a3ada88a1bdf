"""A vendor is one value: code that names one, an architecture or a vendor's tool outside its folder is listed here."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hipforge import archs, devices
from hipforge.errors import ConfigError
from hipforge.jit.backends import vendors

ROOT = Path(__file__).parents[1]
NAMES = re.compile(r"\b(amd|nvidia|gfx9\d\w|sm_\d+|hipcc|nvcc|libamdhip64|libcudart|gcnArchName)\b")
OWN = (
    "jit/backends/amd/", "jit/backends/nvidia/", "src/hipforge/archs.py",
    "src/hipforge/aiter_compat/", "src/hipforge/cli/aiter.py",  # a library for one vendor's GPUs
)  # fmt: skip

# Which kernels there are for which architecture, and the model of AMD's accelerators.
FAMILIES = (
    "ops/decode_attention/", "ops/fp8_gemm/", "ops/fp8_skinny_gemm/", "ops/mxfp4_gemm/", "ops/mxfp8_gemm/",
    "ops/gate_up_split.py", "ops/mxfp8_grouped_gemm/",
    "ops/triton/", "ops/reference/fnuz.py", "tuning/",
)  # fmt: skip
# The rest, which may only get shorter: defaults and words of commands, the format of the CPU.
OTHERS = {
    "jit/diagnostics.py", "ops/core/fp8.py", "src/hipforge/cli/build.py", "src/hipforge/cli/disasm.py",
    "src/hipforge/cli/doctor.py", "src/hipforge/cli/new_op.py",
    "src/hipforge/settings.py",
}  # fmt: skip


def _python_files() -> Iterator[tuple[str, Path]]:
    for folder in ("jit", "ops", "tuning", "src/hipforge"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not any(parent.is_symlink() for parent in path.parents):  # src/hipforge links to the others
                yield name, path


def _names(path: Path) -> list[str]:
    """The texts and imports of a file that name a vendor; neither docstrings nor comments."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found += NAMES.findall(node.value)
        elif isinstance(node, ast.ImportFrom):
            found += NAMES.findall((node.module or "").replace(".", " "))
        elif isinstance(node, ast.Attribute):
            found += NAMES.findall(node.attr)
    return found


def test_a_vendor_is_named_in_its_folder_and_in_the_listed_files_alone() -> None:
    naming = {name for name, path in _python_files() if not name.startswith((*OWN, *FAMILIES)) and _names(path)}
    assert naming == OTHERS


def test_kernels_of_every_vendor_name_none() -> None:
    shared = [*(ROOT / "csrc").glob("*/*.cu"), *(ROOT / "csrc/include/hipforge/device").glob("*.h")]
    assert len(shared) > 20
    code = {path.name: re.sub(r"//.*", "", path.read_text()) for path in shared}
    code["vendor.h"] = code["vendor.h"].replace("#define HF_VENDOR amd", "")  # the default
    vendor = re.compile(r"__gfx|__CUDA|__HIP|__builtin_amdgcn|hipforge/(amd|nvidia)/|\b(amd|nvidia)\b|gfx9|sm_\d")
    assert {name: vendor.findall(text) for name, text in code.items() if vendor.search(text)} == {}


def test_every_architecture_belongs_to_a_vendor_that_answers_for_itself() -> None:
    assert tuple(vendor.name for vendor in vendors.every()) == archs.VENDORS
    for vendor in vendors.every():
        numbers = {number for names, _ in vendor.limits.values() for number in names}
        assert numbers <= set(vendor.kernel_numbers)
        assert {number for names in vendor.columns.values() for number in names} <= set(vendor.kernel_numbers)
    assert len(vendors.limits()) == sum(len(vendor.limits) for vendor in vendors.every())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Lets torch see one NVIDIA GPU of an architecture."""

    def seen(arch: str) -> None:
        everybody = [replace(one, torch_arch=lambda index: None) for one in vendors.every()]
        other = next(number for number, one in enumerate(everybody) if one.device == "cuda")
        everybody[other] = replace(everybody[other], torch_arch=lambda index: arch)
        monkeypatch.setattr(vendors, "every", lambda: tuple(everybody))
        devices.current.cache_clear()

    yield seen
    devices.current.cache_clear()


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_a_card_without_kernels_is_refused_by_name_where_it_is_demanded_and_else_left_to_torch(
    card: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    card(arch)
    monkeypatch.setenv("HIPFORGE_DEVICE", "auto")
    assert devices.current().kind == "emulator"
    monkeypatch.setenv("HIPFORGE_DEVICE", "cuda")
    devices.current.cache_clear()
    with pytest.raises(ConfigError, match=f"its kernels are for sm_90 and GPU 0 is {arch}; HIPFORGE_DEVICE=auto takes"):
        devices.current()


def test_a_card_with_kernels_is_taken(card: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    card("sm_90")
    monkeypatch.setenv("HIPFORGE_DEVICE", "auto")
    assert devices.current() == devices.Device("cuda", "sm_90")
