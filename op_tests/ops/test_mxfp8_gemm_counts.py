"""What the kernels of the dense MX-FP8 GEMM count: loads, instructions, matrix instructions."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from helpers.block_gemm_subjects import check_tile
from helpers.mxfp8_cases import Operands, assert_bits, assert_close, integers, normal, oracle

from hipforge import devices, emulator
from hipforge.ops.core.tiles import tile_number
from hipforge.ops.mxfp8_gemm.kernels import BY_NAME, group_split, wave_split
from hipforge.ops.mxfp8_gemm.kernels.tiles import TILED
from hipforge.ops.smallm_gemm_mxfp8 import smallm_mxfp8_mfma_out

pytestmark = pytest.mark.gfx942("wave_split")  # gfx950 has the others alone

MFMA = "v_mfma_scale_f32_16x16x128_f8f6f4"


def counted(case: Operands, kernel: str, **configuration: int) -> tuple[emulator.Counters, torch.Tensor]:
    out = case.out()
    with emulator.counters() as collector:
        BY_NAME[kernel].run(configuration, case.mnk, out, *case.args(), None)
    return collector.result, out


@pytest.mark.parametrize(("m", "block_n"), ((1, 4), (2, 16), (16, 64)))
def test_the_gemv_loads_each_weight_byte_once_by_wide_loads(m: int, block_n: int) -> None:
    case = integers(m, 128, 3072)
    counters, _ = counted(case, "smallm_mxfp8_gemv", block_n=block_n)
    weights, scales = counters.tensors["Wq"], counters.tensors["Ws"]
    assert weights.loaded == weights.unique_loaded == case.wq.numel()
    assert scales.unique_loaded == case.ws.numel()
    # 16 bytes per lane: a full step of a row is one instruction.
    assert counters.count("buffer_load_dwordx4") >= 128 * 3
    assert not counters.scratch_bytes and not counters.lds_bytes


def test_the_gemv_takes_few_instructions_per_kib_of_weight() -> None:
    # Two more steps of 256 rows at M = 1. A step of a row costs 8 conversions, 7 packed FMAs, a packed multiplication,
    # 4 scale instructions and a quarter of X's 8 conversions: 22. Loads (1.25 wide, 0.6 of scales), their offsets,
    # waits, the watch for NaN and the loop add 7. The bandwidth of an MI355X allows 79 (gemv_kernel.h).
    shallow, deep = (
        counted(integers(1, 256, k, scales=(126, 128)), "smallm_mxfp8_gemv", block_n=16)[0] for k in (4096, 6144)
    )
    steps = 2 * 256
    assert deep.count("v_pk_fma_f32") - shallow.count("v_pk_fma_f32") == 7 * steps
    assert deep.count("buffer_load_dwordx4") - shallow.count("buffer_load_dwordx4") == 1.25 * steps
    assert deep.wave_instructions - shallow.wave_instructions <= 30 * steps


@pytest.mark.parametrize(
    ("m", "n", "k", "n_sub", "k_splits"),
    (
        (16, 48, 1024, 1, 1), (17, 40, 544, 2, 4), (64, 128, 512, 4, 2), (1, 1, 32, 4, 1), (5, 130, 1440, 1, 8),
        (3, 128, 1408, 2, 4),
    ),
)  # fmt: skip
def test_one_mfma_per_tile_and_step(m: int, n: int, k: int, n_sub: int, k_splits: int) -> None:
    case = integers(m, n, k)
    counters, _ = counted(case, "smallm_mxfp8_mfma", n_sub=n_sub, k_splits=k_splits)
    assert counters.mfma_count == ceil(k / 128) * ceil(n / 16) * ceil(m / 16)
    weights = counters.tensors["Wq"]
    assert weights.unique_loaded == case.wq.numel()
    assert weights.loaded == ceil(m / 16) * case.wq.numel()
    assert not counters.scratch_bytes and not counters.lds_bytes


@pytest.mark.full
@pytest.mark.parametrize(("n_sub", "k_splits"), ((1, 1), (1, 8), (2, 4), (4, 2)))
def test_the_tp4_qkv_projection_takes_6912_mfmas(n_sub: int, k_splits: int) -> None:
    case = normal(16, 2304, 6144)
    counters, out = counted(case, "smallm_mxfp8_mfma", n_sub=n_sub, k_splits=k_splits)
    assert counters.count(MFMA) == counters.mfma_count == 6912
    assert counters.tensors["Wq"].loaded == case.wq.numel()
    assert_close(out, oracle(case))


def test_a_workspace_of_the_mfma_kernel_need_not_be_aligned() -> None:
    case = integers(3, 8, 256)
    workspace = torch.empty(2 * 24 + 1)[1:].view(2, 3, 8)
    out = case.out()
    smallm_mxfp8_mfma_out(out, *case.args(), workspace, 1, 2)
    assert_bits(out, oracle(case))
    assert torch.equal(workspace.double().sum(0), oracle(case))


ROWS_AND_COLUMNS = tuple(
    (rows, columns)
    for rows in wave_split.ROWS
    for columns in (16, 24, 32, 36, 48, 64, 76)  # one to five tiles, the last one whole or in part
    if columns == 16 or devices.current().default_arch == "gfx950"
)
# Wave instructions of a work-group, by architecture: those of (K, N) = (6144, 2304) over its 144.
WAVE_SPLIT = {
    "gfx950": {
        (16, 16): 1580, (16, 24): 1960, (16, 32): 1960, (16, 36): 1900, (16, 48): 1900, (16, 64): 2230, (16, 76): 2620,
        (32, 16): 1890, (32, 24): 2280, (32, 32): 2280, (32, 36): 2430, (32, 48): 2430, (32, 64): 2890, (32, 76): 3400,
        (64, 16): 2590, (64, 24): 3320, (64, 32): 3320, (64, 36): 3600, (64, 48): 3600, (64, 64): 4310, (64, 76): 5040,
    },
    "gfx942": {(16, 16): 6030, (32, 16): 9670, (64, 16): 16320},
}  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), ROWS_AND_COLUMNS)
def test_the_wave_split_loads_weights_once_and_takes_no_more_instructions_than_recorded(
    arch: str, rows: int, columns: int
) -> None:
    counters, _ = counted(
        integers(rows, 64, 3072, scales=(126, 128)), "mxfp8_wave_split", rows=rows, columns=columns, waves=4
    )
    assert counters.tensors["Wq"].loaded == 64 * 3072
    tiles = ceil(64 / columns) * ceil(columns / 16)  # of 16 columns
    assert counters.mfma_count == 24 * tiles * (rows // 16) * (1 if arch == "gfx950" else 4)
    assert counters.launches == 1 and not counters.scratch_bytes and not counters.lds_bank_conflicts
    waves = min(8, wave_split.max_waves(rows, columns))
    case = integers(rows, columns, 6144, scales=(127, 128))
    counters, _ = counted(case, "mxfp8_wave_split", rows=rows, columns=columns, waves=waves)
    assert counters.wave_instructions <= WAVE_SPLIT[arch][rows, columns]


# Wave instructions of a result with K = 6144 in two parts.
GROUP_SPLIT = {
    (16, 16): 1950, (16, 24): 2340, (16, 32): 2340, (16, 48): 2660,
    (32, 16): 2270, (32, 24): 2580, (32, 32): 2580, (32, 48): 3340,
    (64, 16): 2910, (64, 24): 3630, (64, 32): 3630, (64, 48): 4440,
}  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), GROUP_SPLIT)
def test_what_a_result_of_the_group_split_loads_multiplies_and_takes_in_instructions(rows: int, columns: int) -> None:
    assert set(GROUP_SPLIT) == {(rows, columns) for rows in group_split.ROWS for columns in group_split.COLUMNS}
    case = integers(rows, columns, 6144, scales=(126, 128))
    counters, _ = counted(case, "mxfp8_group_split", rows=rows, columns=columns, k_splits=2)
    assert counters.tensors["Wq"].loaded == case.wq.numel()
    assert counters.tensors["Xq"].loaded == case.xq.numel()
    tiles = rows // 16 * ceil(columns / 16)
    assert counters.mfma_count == 48 * tiles
    assert counters.tensors["workspace"].stored == 2 * tiles * 1024 + 3 * 8  # two parts, which meet at a word
    assert counters.launches == 1 and not counters.scratch_bytes and not counters.lds_bank_conflicts
    assert counters.wave_instructions <= GROUP_SPLIT[rows, columns]


# Per matrix instruction, scales included.
LOOP_INSTRUCTIONS = {256256: 8.6, 192256: 10.5, 192128: 11.4, 128192: 11.3, 128128: 15.0, 128064: 26.0, 64064: 43.9}


@pytest.mark.parametrize("tile", tuple(map(tile_number, TILED.step_us)))
def test_what_one_tile_loads_and_multiplies(tile: int) -> None:
    cases = [integers(*divmod(tile, 1000), k, scales=(126, 128)) for k in (1024, 3072)]
    check_tile(cases, lambda case: counted(case, "mxfp8_gemm_tiles", tile=tile, k_splits=1), LOOP_INSTRUCTIONS[tile])
