"""The MX-FP8 GEMM with K split over the waves of a work-group, on gfx950 and on gfx942 in its own fp8 format."""

from __future__ import annotations

import os
from math import ceil

import pytest
import torch
from helpers.mxfp8_cases import (
    Operands,
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
from hipforge.ops.mxfp8_gemm.kernels.wave_split import ROWS, max_waves

pytestmark = pytest.mark.gfx942

EMULATED = os.environ.get("HIPFORGE_EMULATE", "gfx950")
COLUMNS = (16, 24, 32, 36, 48, 64, 76)  # one to five tiles, the last one whole or in part
TILES = tuple((rows, columns) for rows in ROWS for columns in COLUMNS if columns == 16 or EMULATED == "gfx950")


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


@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_weights_are_loaded_once_in_one_launch(arch: str, rows: int, columns: int) -> None:
    case = integers(rows, 64, 3072, scales=(126, 128))
    with emulator.counters() as counters:
        run(case, rows, 4, columns=columns)
    assert counters.tensors["Wq"].loaded == case.wq.numel()
    tiles = ceil(64 / columns) * ceil(columns / 16)  # of 16 columns
    assert counters.mfma_count == 24 * tiles * (rows // 16) * (1 if arch == "gfx950" else 4)
    assert counters.launches == 1 and not counters.scratch_bytes and not counters.lds_bank_conflicts


# Wave instructions of a work-group, by architecture: those of (K, N) = (6144, 2304) over its 144.
RECORDED = {
    "gfx950": {
        (16, 16): 1580,
        (16, 24): 1930,
        (16, 32): 1930,
        (16, 36): 1900,
        (16, 48): 1900,
        (16, 64): 2230,
        (16, 76): 2620,
        (32, 16): 1890,
        (32, 24): 2280,
        (32, 32): 2280,
        (32, 36): 2430,
        (32, 48): 2430,
        (32, 64): 2890,
        (32, 76): 3400,
        (64, 16): 2590,
        (64, 24): 3320,
        (64, 32): 3320,
        (64, 36): 3600,
        (64, 48): 3600,
        (64, 64): 4310,
        (64, 76): 5040,
    },
    "gfx942": {(16, 16): 6030, (32, 16): 9670, (64, 16): 16320},
}


@pytest.mark.parametrize("tile", TILES)
def test_one_work_group_takes_no_more_instructions_than_recorded(arch: str, tile: tuple[int, int]) -> None:
    case = integers(*tile, 6144, scales=(127, 128))
    with emulator.counters() as counters:
        run(case, tile[0], min(8, max_waves(*tile)), columns=tile[1])
    assert counters.wave_instructions <= RECORDED[arch][tile]


@pytest.mark.full
def test_a_weight_of_more_than_2_gib_is_read_to_its_last_row(arch: str) -> None:
    n, k = 2049, 1 << 20
    case = Operands(
        torch.zeros(1, k, dtype=torch.uint8),
        torch.full((1, k // 32), 127, dtype=torch.uint8),
        torch.zeros(n, k, dtype=torch.uint8),
        torch.full((n, k // 32), 127, dtype=torch.uint8),
    )
    assert case.wq.numel() > 2**31
    case.xq[0, -1] = case.wq[-1, -1] = case.wq[5, -1] = 0x40
    assert run(case, 16, 16)[0].nonzero().flatten().tolist() == [5, n - 1]


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
