"""What mxfp8_gemm and mxfp8_linear make of any M: which kernel by default, and that each is right through them."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.mxfp8_cases import (
    assert_bits,
    assert_close,
    bias_for,
    dequantize,
    embedded,
    integers,
    normal,
    oracle,
)

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.core.kernel import best
from hipforge.ops.mxfp8_gemm import mxfp8_gemm, mxfp8_gemm_tiles, mxfp8_gemv, mxfp8_linear
from hipforge.ops.mxfp8_gemm.family import TABLE
from hipforge.ops.mxfp8_gemm.kernels import KERNELS, wave_split
from hipforge.ops.mxfp8_gemm.kernels.tiles import TILED
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell
from hipforge.tuning.families.mxfp8_gemm import TUNER


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"),
    (
        (16, 8192, 8192, "mxfp8_wave_split"),
        (32, 4096, 4096, "mxfp8_wave_split"),
        (32, 1024, 4096, "mxfp8_group_split"),  # few columns: work-groups share K
        (33, 4096, 1024, "mxfp8_wave_split"),  # K too short for that
        (64, 1024, 4096, "mxfp8_group_split"),
        (64, 28672, 8192, "mxfp8_gemm_tiles"),  # W so large that X is read often
        (65, 40, 32, "mxfp8_gemm_tiles"),
    ),
)
def test_what_a_small_m_gets_without_a_tuned_row(m: int, n: int, k: int, kernel: str) -> None:
    x, w = torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    given = (x.expand(m, k), x.expand(m, k // 32), w.expand(n, k), w.expand(n, k // 32))
    assert hipforge.explain(mxfp8_gemm, *given).kernel == kernel
    assert (mxfp8_gemv(*given) is None) == (m > 16)


@pytest.mark.parametrize("cu_count", (1, 256, 304))
def test_what_any_m_gets_by_default_is_a_row_that_the_table_takes(cu_count: int) -> None:
    for m, n, k in itertools.product(
        (1, 4, 7, 8, 16, 17, 64, 65, 256, 16384), (1, 7, 768, 13312, 1 << 20), (32, 96, 512, 1536, 8192, 65568)
    ):
        chosen = best(KERNELS, Cell(n, k, m), "gfx950", cu_count)
        row = {"gfx": "gfx950", "M": m, "N": n, "K": k, **TUNER.row_of(chosen)}
        assert TABLE.check(row) is None, (chosen, TABLE.check(row))


def test_columns_are_tried_that_fit_the_compute_units() -> None:
    assert wave_split.columns_to_try(64, 6144, 32, 256) == [16, 24, 32, 48]  # 2 blocks of rows x 128
    assert wave_split.columns_to_try(8, 13312, 16, 256) == [16, 24, 28, 32, 52]  # 512 and 256 work-groups
    assert wave_split.columns_to_try(1, 768, 16, 256) == [16, 24, 32]  # fewer than 16 columns each
    assert wave_split.columns_to_try(64, 1 << 20, 32, 256) == [16, 24, 32]  # more than 80


def test_gfx942_gets_eight_waves_where_work_groups_do_not_fill_it() -> None:
    def waves(m: int, n: int, k: int) -> int:
        return best(KERNELS, Cell(n, k, m), "gfx942", 304).configuration["waves"]

    assert [waves(1, 2304, 6144), waves(16, 6144, 6144), waves(32, 2304, 6144), waves(1, 768, 256)] == [8, 4, 4, 1]


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"),
    (
        (16, 40, 256, "mxfp8_wave_split"), (33, 40, 256, "mxfp8_wave_split"), (40, 70, 2048, "mxfp8_group_split"),
        (65, 40, 256, "mxfp8_gemm_tiles"),
    ),
)  # fmt: skip
def test_each_kernel_is_right_through_the_ops_whatever_the_strides(m: int, n: int, k: int, kernel: str) -> None:
    case = integers(m, n, k, scales=(126, 128))
    bias, with_bias = bias_for(case, "gfx950")
    turned = [part.t().contiguous().t() for part in case.args()]
    apart = case.but(xq=embedded(case.xq, 0xFF, margin=61), wq=embedded(case.wq, 0xFF, margin=63))
    assert (mxfp8_gemv(*case.args()) is None) == (m > 16)
    for operands in (case.args(), turned, apart.args()):  # the last ones off a boundary of 16 bytes
        assert hipforge.explain(mxfp8_gemm, *operands).kernel == kernel
        out = case.out()
        assert mxfp8_gemm(*operands, out=out) is out
        assert_bits(out, oracle(case))
        with emulator.counters() as counted:
            assert_bits(mxfp8_linear(*operands, bias=torch.stack((bias, bias), 1)[:, 0]), with_bias)
        assert counted.launches == 1


def test_past_16384_rows_there_is_no_kernel() -> None:
    one = torch.zeros(1, 32, dtype=torch.uint8)
    x, xs = one.expand(16385, 32), one[:, :1].expand(16385, 1)
    assert mxfp8_gemm(x, xs, one, one[:, :1]) is None
    assert "M must be 1 to 16384" in str(hipforge.explain(mxfp8_gemm, x, xs, one, one[:, :1]))


def test_square_matrices_get_the_large_tile() -> None:
    assert dict(TILED.best(4096, 4096, 4096, 256)[1].configuration) == {"tile": 256256, "k_splits": 1}


@pytest.mark.full
@pytest.mark.parametrize(("k", "n"), (*MINIMAX_M3, (4096, 4096)))
def test_every_batch_size_of_serving_is_within_the_bounds(k: int, n: int) -> None:
    case = normal(max(DECODE_M), n, k)
    reference = dequantize(case.xq, case.xs) @ dequantize(case.wq, case.ws).T
    for m in sorted((*DECODE_M, 3, 5, 7, 9, 17, 33, 63)):
        got = mxfp8_gemm(case.xq[:m], case.xs[:m], case.wq, case.ws)
        assert got is not None
        assert_close(got, reference[:m])


def test_other_tiles_are_refused_by_name() -> None:
    tiles = "256256, 192256, 192128, 128192, 128128, 128064 or 64064"
    with pytest.raises(GuardError, match=f"tile must be {tiles}; got 64032"):
        mxfp8_gemm_tiles(*integers(70, 8, 256).args(), tile=64032)
