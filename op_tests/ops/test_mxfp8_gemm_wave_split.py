"""The MX-FP8 GEMM with K split over the waves of a work-group, on gfx950 and on gfx942 in its own fp8 format."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp8_cases import (
    Operands,
    among_nans,
    assert_bits,
    assert_close,
    embedded,
    integers,
    normal,
    oracle,
)

import hipforge
from hipforge import archs, emulator
from hipforge.errors import GuardError
from hipforge.ops.mxfp8_gemm import (
    mxfp8_gemm,
    mxfp8_group_split,
    mxfp8_k_packed,
    mxfp8_linear,
    mxfp8_wave_split,
    mxfp8_wave_split_out,
)
from hipforge.ops.mxfp8_gemm.kernels import k_packed, launch, wave_split

pytestmark = pytest.mark.gfx942


def run(
    case: Operands, rows: int = 16, waves: int = 4, bias: torch.Tensor | None = None, columns: int = 16
) -> torch.Tensor:
    out = case.out()
    mxfp8_wave_split_out(out, *case.args(), bias, rows, columns, waves)
    return out


@pytest.mark.parametrize("m", (1, 8, 64, 100))
def test_the_ops_compute_on_either_architecture(arch: str, m: int) -> None:
    case = normal(m, 40, 1024)
    # Bytes of e4m3fn that e4m3fnuz has too: no -0 and nothing past its largest.
    case = case.but(xq=case.xq.masked_fill(case.xq == 0x80, 0), wq=case.wq.masked_fill(case.wq == 0x80, 0))
    want = oracle(case, arch)
    own = torch.float8_e4m3fn if arch == "gfx950" else torch.float8_e4m3fnuz
    typed = case.but(xq=case.xq.view(own), wq=case.wq.view(own))
    assert hipforge.explain(mxfp8_linear, *typed.args()).path == "kernel"
    got = mxfp8_gemm(*typed.args())
    assert got is not None
    assert_close(got, want)
    assert_close(mxfp8_linear(*typed.args()), want)
    # Bytes without a type are e4m3fn everywhere; gfx942 has no kernel for those.
    assert (mxfp8_gemm(*case.args()) is None) == (arch == "gfx942")
    assert_close(mxfp8_linear(*case.args()), oracle(case, "gfx950"))


@pytest.mark.parametrize("rows", (16, 32, 64))
@pytest.mark.parametrize("k", (*range(160, 1088, 96), 2880))
def test_every_number_of_steps_of_the_loop_is_exact(arch: str, rows: int, k: int) -> None:
    # One wave has all steps: runs of straight code with every rest. Five tiles of columns are the widest.
    for n, columns in ((17, 16), (50, 48), (85, 80)) if arch == "gfx950" else ((17, 16),):
        case, want = among_nans(integers(5, n, k, scales=(126, 128)), arch)
        with emulator.options(checks="all"):
            got = mxfp8_wave_split(*case.args(), rows=rows, columns=columns, waves=1)
        assert_bits(got, want)


def test_such_a_k_is_about_as_fast_as_the_next_aligned_one() -> None:
    # 22.5 and 23 steps (modelled); where each step waits for its own loads, it takes half as long again.
    def us(k: int) -> float:
        case = integers(1, 64, k, scales=(126, 128))
        mxfp8_wave_split(*case.args(), waves=1)
        with emulator.timed() as timed:
            mxfp8_wave_split(*case.args(), waves=1)
        return timed.result.replay_us

    assert us(2880) < 1.25 * us(2944)


GOOD = integers(2, 8, 256)


@pytest.mark.parametrize(("rows", "waves"), ((16, 0), (16, 3), (32, 16), (64, 16)))
def test_other_numbers_of_waves_are_refused(rows: int, waves: int) -> None:
    most = rf"at most \d+ with {rows} rows and 16 columns"
    with pytest.raises(GuardError, match=rf"waves must be 1, 2, 4, 8 or 16, {most}; got {waves}"):
        run(GOOD, rows, waves)


def test_other_columns_are_refused(arch: str) -> None:
    for columns in (12, 18, 84):
        with pytest.raises(GuardError, match=rf"columns must be a multiple of 4 from 16 to 80; got {columns}"):
            run(GOOD, columns=columns)
    if arch == "gfx942":
        with pytest.raises(GuardError, match="more than 16 columns are for gfx950; got 32"):
            run(GOOD, columns=32)
    else:
        with pytest.raises(GuardError, match="at most 4 with 16 rows and 36 columns; got 8"):
            run(GOOD, waves=8, columns=36)


def test_more_blocks_of_rows_than_a_grid_has_are_refused() -> None:
    m = 16 * 65535 + 1
    with pytest.raises(GuardError, match=f"at most 65,535 blocks of rows; M = {m} makes 65536"):
        run(integers(1, 8, 32).but(xq=torch.zeros(m, 32, dtype=torch.uint8), xs=torch.zeros(m, 1, dtype=torch.uint8)))


def test_dispatch_copies_scales_that_lie_off_four_bytes_and_a_raw_op_refuses_them(arch: str) -> None:
    case = integers(3, 20, 1024)
    moved = case.but(xs=embedded(case.xs, 0xFF, margin=61), ws=embedded(case.ws, 0xFF, margin=63))
    with pytest.raises(GuardError, match="must be aligned to 4 bytes"):
        mxfp8_k_packed(*moved.args(), columns=8, groups=2, waves=2)
    chosen = k_packed.K_PACKED.choice({"columns": 8, "groups": 1, "waves": 2})
    assert_bits(launch(chosen, moved.out(), *moved.args()), oracle(case, arch))


def test_a_raw_op_refuses_parameters_by_name() -> None:
    for raw, given, message in (
        (mxfp8_k_packed, {"columns": 16}, "columns must be 4 or 8; got 16"),
        (mxfp8_k_packed, {"groups": 0}, "groups must be 1 to 16; got 0"),
        (mxfp8_group_split, {"rows": 48}, "rows must be 16, 32 or 64; got 48"),
        (mxfp8_group_split, {"columns": 40}, "columns must be 16, 24, 32 or 48; got 40"),
        (mxfp8_group_split, {"k_splits": 8}, "k_splits must be 2 or 4; got 8"),
        (mxfp8_wave_split, {"rows": 48}, "rows must be 16, 32 or 64; got 48"),
    ):
        with pytest.raises(GuardError, match=message):
            raw(*GOOD.args(), **given)


def test_the_other_architecture_s_format_is_refused(arch: str) -> None:
    other = torch.float8_e4m3fnuz if arch == "gfx950" else torch.float8_e4m3fn
    with pytest.raises(GuardError, match=r"Xq must be contiguous float8_e4m3fn"):
        mxfp8_wave_split(GOOD.xq.view(other), *GOOD.args()[1:])


def test_more_than_32_rows_are_two_work_groups_on_gfx942_where_those_are_few() -> None:
    cu_count = archs.get("gfx942").cu_count

    def rows(m: int, n: int) -> int:
        return wave_split._on_gfx942(m, n, 6144, cu_count)["rows"]

    assert [rows(m, 2304) for m in (16, 32, 33, 64, 65)] == [16, 32, 32, 32, 64]
    most = 3 * 16 * cu_count // 2  # 64 rows would be one and a half work-groups for each compute unit
    assert (rows(64, most), rows(64, most + 1)) == (32, 64)
