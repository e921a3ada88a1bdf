"""The MX-FP8 GEMM with K split over the waves of a work-group, on gfx950 and on gfx942 in its own fp8 format."""

from __future__ import annotations

import itertools
import os
from math import ceil

import pytest
import torch
from helpers.mxfp8_cases import (
    SCALE_NAN,
    Operands,
    among_nans,
    assert_bits,
    assert_close,
    assert_writes_only,
    bias_for,
    embedded,
    integers,
    nan_byte,
    normal,
    oracle,
)

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.mxfp8_gemm import mxfp8_gemm, mxfp8_linear, mxfp8_wave_split, mxfp8_wave_split_out
from hipforge.ops.mxfp8_gemm.kernels.wave_split import ROWS, WAVES, max_waves

pytestmark = pytest.mark.gfx942

EMULATED = os.environ.get("HIPFORGE_EMULATE", "gfx950")
COLUMNS = (16, 24, 32, 36, 48, 64, 76)  # one to five tiles, the last one whole or in part
TILES = tuple((rows, columns) for rows in ROWS for columns in COLUMNS if columns == 16 or EMULATED == "gfx950")
INSTANCES = tuple((*tile, waves) for tile in TILES for waves in WAVES if waves <= max_waves(*tile))


def run(
    case: Operands, rows: int = 16, waves: int = 4, bias: torch.Tensor | None = None, columns: int = 16
) -> torch.Tensor:
    out = case.out()
    mxfp8_wave_split_out(out, *case.args(), bias, rows, columns, waves)
    return out


@pytest.mark.parametrize("order", ("forward", "reverse", "random"))
@pytest.mark.parametrize(("rows", "columns", "waves"), INSTANCES)
def test_every_instance_is_exact_on_integers_under_all_checks(
    arch: str, rows: int, columns: int, waves: int, order: str
) -> None:
    # 37 steps, the last partial: each wave has other steps than its neighbour; two and a bit tiles each way.
    case = integers(2 * rows + 5, 2 * columns + 5, 36 * 128 + 96, scales=(126, 128))
    with emulator.options(checks="all", wave_order=order):
        assert_bits(run(case, rows, waves, columns=columns), oracle(case, arch))


@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_turns_of_one_instruction_change_nothing(arch: str, rows: int, columns: int) -> None:
    case = integers(rows, columns, 1280)
    with emulator.options(checks="all", quantum=1):
        assert_bits(run(case, rows, min(8, max_waves(rows, columns)), columns=columns), oracle(case, arch))


@pytest.mark.parametrize("waves", (1, 2))
@pytest.mark.parametrize(
    "k", (32, 64, 96, 128, 160, 256, 384, 512, 544, 640, 768, 896, 1024, 1056, 1152, 1920, 2048, 2304)
)
def test_every_number_of_steps_and_kind_of_tail_is_exact(arch: str, k: int, waves: int) -> None:
    for rows, columns in TILES:
        case = integers(rows + 3, columns + 1, k, scales=(126, 128))
        assert_bits(run(case, rows, waves, columns=columns), oracle(case, arch))


@pytest.mark.parametrize("m", (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 100))
def test_every_m_is_taken_as_it_is(arch: str, m: int) -> None:
    case = integers(m, 20, 512)
    for rows in ROWS:
        assert_bits(run(case, rows), oracle(case, arch))


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 15, 16, 17, 18, 20, 63, 64, 65))
def test_every_n_is_exact(arch: str, n: int) -> None:
    case = integers(3, n, 512)
    for (rows, columns), waves in itertools.product(TILES[:2], (1, 4)):
        assert_bits(run(case, rows, waves, columns=columns), oracle(case, arch))


@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_each_row_and_block_uses_its_own_scale(arch: str, rows: int, columns: int) -> None:
    case = integers(rows, columns, 1088, scales=(126, 128))
    at_rows, blocks = torch.arange(80)[:, None], torch.arange(1088 // 32)
    case.xs.copy_((126 + (at_rows[:rows] + 2 * blocks) % 3).to(torch.uint8))
    case.ws.copy_((126 + (at_rows[:columns] // 2 + blocks) % 3).to(torch.uint8))
    assert_bits(run(case, rows, 2, columns=columns), oracle(case, arch))


@pytest.mark.parametrize("byte", (0, 1, 2, 126, 127, 128, 253, 254))
def test_extreme_scales_that_cancel_lose_nothing(arch: str, byte: int) -> None:
    case = integers(3, 7, 544)
    case.xs.fill_(byte)
    case.ws.fill_(254 - byte)
    case.xs[:, ::3] = 254 - byte
    case.ws[:, ::3] = byte
    assert_bits(run(case), oracle(case, arch))


@pytest.mark.parametrize("waves", (1, 4))
@pytest.mark.parametrize("block", (0, 3, 4, 15, 16, 17))
def test_a_nan_scale_makes_exactly_its_outputs_nan(arch: str, block: int, waves: int) -> None:
    case = integers(20, 23, 576)
    want = oracle(case, arch)
    case.xs[18, block] = SCALE_NAN
    case.ws[17, block] = SCALE_NAN
    case.wq[17, 32 * block : 32 * block + 32] = 0  # even where its block is zero
    want[18, :] = want[:, 17] = float("nan")
    for rows, columns in TILES:
        assert_bits(run(case, rows, waves, columns=columns), want)


@pytest.mark.parametrize("k_index", (0, 63, 64, 127, 128, 543))
def test_nan_payload_makes_exactly_its_outputs_nan(arch: str, k_index: int) -> None:
    case = integers(3, 9, 544)
    want = oracle(case, arch)
    case.xq[2, k_index] = nan_byte(arch)
    case.wq[5, k_index] = nan_byte(arch)
    want[2, :] = want[:, 5] = float("nan")
    assert_bits(run(case), want)


@pytest.mark.parametrize("k", (32, 96, 128, 544, 1056))
@pytest.mark.parametrize("m", (1, 17))
def test_neighbouring_bytes_never_take_part(arch: str, m: int, k: int) -> None:
    surrounded, want = among_nans(integers(2 * m, 36, k), arch)
    for rows, columns in TILES:
        assert_bits(run(surrounded, rows, 2, columns=columns), want)


@pytest.mark.parametrize("n", (12, 13))
def test_output_outside_the_result_is_untouched(arch: str, n: int) -> None:
    case = integers(3, n, 256)
    for start in (16, 17):  # with and without the alignment that wide stores need
        assert_writes_only(lambda out: mxfp8_wave_split_out(out, *case.args(), None, 16, 16, 2), case, start, arch)


def test_scales_need_no_alignment(arch: str) -> None:
    case = integers(35, 20, 640)
    moved = case.but(xs=embedded(case.xs, 0xFF, margin=61), ws=embedded(case.ws, 0xFF, margin=63))
    for rows, columns in TILES:
        assert_bits(run(moved, rows, columns=columns), oracle(case, arch))


@pytest.mark.parametrize("waves", (1, 4))
def test_the_bias_is_added_before_the_only_rounding(arch: str, waves: int) -> None:
    case = integers(6, 37, 256)
    bias, want = bias_for(case, arch)
    assert_bits(run(case, 16, waves, bias), want)


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
        (32, 76): 3390,
        (64, 16): 2590,
        (64, 24): 3320,
        (64, 32): 3320,
        (64, 36): 3590,
        (64, 48): 3590,
        (64, 64): 4300,
        (64, 76): 5040,
    },
    "gfx942": {(16, 16): 6010, (32, 16): 9660, (64, 16): 16310},
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


def test_other_rows_are_refused_by_name() -> None:
    with pytest.raises(GuardError, match=r"rows must be 16, 32 or 64; got 48"):
        mxfp8_wave_split(*GOOD.args(), rows=48)


def test_the_other_architecture_s_format_is_refused(arch: str) -> None:
    other = torch.float8_e4m3fnuz if arch == "gfx950" else torch.float8_e4m3fn
    with pytest.raises(GuardError, match=r"Xq holds e4m3fn"):
        mxfp8_wave_split(GOOD.xq.view(other), *GOOD.args()[1:])
