"""The plain HIP module of the page on writing an op: one source, run on the emulator and by gpu-test on a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hipforge.errors import BuildError, GuardError
from hipforge.jit import compile_ops, hip_module, obtain, registry

PAGE = Path(__file__).parents[2] / "docs/guide/writing-an-op.md"


@pytest.fixture(scope="module")
def sum_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[torch.Tensor, torch.Tensor], None]]:
    """The stub of the page's module."""
    folder = tmp_path_factory.mktemp("plain")
    (source,) = (block for block in re.findall(r"```cpp\n(.*?)```", PAGE.read_text(), re.DOTALL) if "sum_out" in block)
    (folder / "sum.cu").write_text(source)
    registry.register_values(folder / "modules.json", {"module_sum": {"srcs": ["sum.cu"]}})

    @compile_ops("module_sum", mutates=("total",))
    def sum_out(total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the sum of x to total."""

    yield sum_out
    registry._registered.pop("module_sum")


@contextlib.contextmanager
def first_op(folder: Path, element: str = "float") -> Iterator[Callable[[torch.Tensor, torch.Tensor, float], None]]:
    """The stub of the page's first op, its elements of another type of HIP's."""
    name = f"module_scale_{element}"
    blocks = re.findall(r"```cpp\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (source,) = (block for block in blocks if "scale_out" in block)
    source = source.replace("float*", f"{element}*").replace("data<float>", f"data<{element}>")
    (folder / "scale.cu").write_text(f"#include <hip/hip_bfloat16.h>\n{source}")
    registry.register_values(folder / "modules.json", {name: {"srcs": ["scale.cu"]}})

    @compile_ops(name)
    def scale_out(out: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        """Write factor * x into out."""

    yield scale_out
    registry._registered.pop(name)


def test_the_first_op_of_the_page_takes_an_empty_tensor_and_refuses_gaps(tmp_path: Path) -> None:
    with first_op(tmp_path) as scale_out:
        x = torch.arange(600.0)
        scale_out(out := torch.empty(600), x, 3.0)
        assert torch.equal(out, 3 * x)
        scale_out(torch.empty(0), torch.empty(0), 3.0)
        with pytest.raises(GuardError, match="out and x must be contiguous"):
            scale_out(torch.empty(300), x[::2], 3.0)


def test_a_kernel_takes_bfloat16_as_the_older_type_of_hip(tmp_path: Path) -> None:
    with first_op(tmp_path, "hip_bfloat16") as scale_out:
        x = torch.arange(64).bfloat16()
        scale_out(out := torch.empty_like(x), x, 2.0)
        assert torch.equal(out, 2 * x)


def test_an_element_type_that_no_tensor_holds_is_refused_at_the_line_that_names_it(tmp_path: Path) -> None:
    with first_op(tmp_path, "__int128") as scale_out, pytest.raises(BuildError) as refused:
        scale_out(torch.empty(4), torch.ones(4), 2.0)
    lines = (tmp_path / "scale.cu").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "data<__int128>" in text)
    assert "T must be float, double, __half" in str(refused.value)
    assert re.search(rf"asked for at \S+/scale.cu:{line}\b", str(refused.value))  # where it failed first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 300, 40_000])
def test_the_sum_is_that_of_torch(sum_out: Callable[..., None], dtype: torch.dtype, count: int) -> None:
    x = torch.randint(-4, 5, (count,)).to(dtype)  # exact, whatever the order
    total = torch.ones(1)
    sum_out(total, x)
    assert total.item() == 1 + x.double().sum().item()


def test_another_dtype_is_refused(sum_out: Callable[..., None]) -> None:
    with pytest.raises(GuardError, match="x must be float32, float16 or bfloat16; got int32"):
        sum_out(torch.ones(1), torch.ones(4, dtype=torch.int32))


def test_the_same_source_is_built_by_nvcc(sum_out: Callable[..., None]) -> None:
    entry = obtain.module(hip_module.request(registry.module("module_sum"), {}, "sm_90")).entry
    assert len(entry.manifest.kernels) == 3 and entry.manifest.gfx_targets == ["sm_90"]
