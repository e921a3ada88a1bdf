"""What the MoE grouped GEMM holds to in every format, by the kernel whose waves share K and the one that streams W.

On gfx950, and on gfx942 in its own fp8 format. What a format or a kernel has alone is in the files named after it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.grouped_formats import ARCH, FORMATS, STREAM, counts, operands
from helpers.mxfp8_cases import assert_bits
from helpers.mxfp8_grouped_cases import UNTOUCHED, Moe, random_owners

import hipforge
from hipforge import emulator

pytestmark = pytest.mark.gfx942

# A short K, ones with a partial step and with scales that start between words, and ones with many steps (2880:
# gpt-oss); N that ends within a tile, and past 128 columns.
SHAPES = ((40, 32, 1), (131, 352, 4), (260, 2208, 1), (13, 416, 1), (24, 640, 2), (40, 2880, 4))
LONG = (8, 6528, 1)  # of which fp8's data is not exact

Run = Callable[..., torch.Tensor]
KERNELS = [
    *(pytest.param(name, FORMATS[name].split, (352, 1024), id=f"{name}-split") for name in FORMATS),
    *(pytest.param(name, FORMATS[name].stream, (128, 384), id=f"{name}-stream") for name in STREAM if ARCH == "gfx950"),
]
each_kernel = pytest.mark.parametrize(("form", "run", "ks"), KERNELS)


@pytest.mark.parametrize(
    ("form", "shape"), [(name, shape) for name in FORMATS for shape in (*SHAPES, *([LONG] if name == "mxfp4" else []))]
)
def test_sums_are_exact_and_rounded_once(form: str, shape: tuple[int, int, int], path: str) -> None:
    n, k, a_div = shape
    of = FORMATS[form]
    case = of.case(random_owners(22, 3), 3, n, k, a_div)
    told = of.told(case)
    assert told.kernel == f"{of.op}_grouped_split" if path == "kernel" else told.path == "torch"
    got = of.linear(case)
    assert_bits(got, of.oracle(case))
    if of.op != "mxfp8" and path == "kernel":
        assert torch.equal(getattr(hipforge, f"grouped_gemm_{of.op}")(*operands(case), *counts(case)), got)


@pytest.mark.parametrize("waves", (1, 2, 8))
@pytest.mark.parametrize("rows", (16, 32))
@pytest.mark.parametrize("form", [name for name in FORMATS if name != "mxfp8"])
def test_every_shape_of_work_group(form: str, rows: int, waves: int) -> None:
    of = FORMATS[form]
    case = of.case((*(1,) * 35, 0, 2, 2), 3, 150, 1056, block_m=40, weighted=True)
    bias = torch.randint(-8, 9, (3, 150), generator=torch.Generator().manual_seed(2)) * 0.5
    for columns in (16, 64) if waves <= 2 else (16,):
        with emulator.options(checks="all", wave_order="random"), emulator.counters() as counted:
            got = of.split(case, rows, waves, columns, bias)
        assert_bits(got, of.oracle(case, bias))
        assert counted.launches == 1 and not counted.scratch_bytes and not counted.lds_bank_conflicts
        assert counted.tensors["w"].loaded >= counted.tensors["w"].unique_loaded == case.w.numel()


@each_kernel
def test_bias_and_weight_come_before_the_only_rounding(form: str, run: Run, ks: tuple[int, int]) -> None:
    owners, of = (0, 0, 2, 1, *(2,) * 18), FORMATS[form]
    bias = torch.randint(-8, 9, (3, 22), generator=torch.Generator().manual_seed(2)) * 0.37 + 1e-3
    for k in ks:
        case = of.case(owners, 3, 22, k, weighted=True)
        assert case.weights is not None
        want = of.oracle(case.but(weights=None), bias).float().double() * case.weights.double()[:, None]
        for more in ({"waves": 1}, {"waves": 4}) if run == of.split else ({},):
            assert_bits(run(case, bias=bias, **more), want)
        if run == of.split:
            assert_bits(of.linear(case, bias=bias), want)


@each_kernel
def test_a_nan_scale_reaches_exactly_its_outputs(form: str, run: Run, ks: tuple[int, int]) -> None:
    of = FORMATS[form]
    for k in ks:
        case = of.spoilt(of.case((0, 1, 1, 2), 3, 200, k), 1)
        want = of.oracle(case)
        assert want[1].isnan().any() and not want[3].isnan().any()
        assert_bits(run(case), want)


@each_kernel
def test_bytes_that_do_not_belong_to_a_row_never_take_part(form: str, run: Run, ks: tuple[int, int]) -> None:
    of = FORMATS[form]
    for k, owners in ((ks[0], (1,) * 5), (ks[1], (1,) * 20)):
        case = of.case(owners, 3, 131, k)
        with emulator.options(checks="all"):
            assert_bits(run(of.surrounded(case)), of.oracle(case))


@each_kernel
def test_slots_of_experts_elsewhere_stay_or_are_zero(form: str, run: Run, ks: tuple[int, int]) -> None:
    of = FORMATS[form]
    case: Moe = of.case((0, -1, 2, 2, 9, 0), 3, 70, ks[0])
    assert_bits(run(case), of.oracle(case, elsewhere=UNTOUCHED))
    assert_bits(of.linear(case), of.oracle(case))
    out = torch.full((6, 70), 7.0).bfloat16()
    of.linear(case, out=out, uncovered="undefined")
    assert_bits(out, of.oracle(case, elsewhere=7.0))
