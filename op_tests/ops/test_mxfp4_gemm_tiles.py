"""What both kernels of the MXFP4 GEMM load and refuse; rows of the table, and which shapes get tiles.

What they compute is in test_block_gemm_kernels.py.
"""

from __future__ import annotations

from math import ceil

import pytest
import torch
from helpers.block_gemm_subjects import check_tile
from helpers.mxfp4_cases import BENCH, CODE_OF_ONE, TASKS, Operands, assert_close, codes, operands, oracle, random_codes
from helpers.mxfp8_cases import SCALE_ONE, assert_bits, embedded
from helpers.mxfp8_grouped_cases import sparse_bytes

import hipforge
from hipforge import emulator
from hipforge.emulator.timing.capture import RUN, SKIP, Capture
from hipforge.errors import ConfigError, GuardError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.kernel import best
from hipforge.ops.core.tiles import tile_number
from hipforge.ops.core.tuned import read_rows
from hipforge.ops.mxfp4_gemm import (
    mxfp4_gemm,
    mxfp4_gemm_tiles_out,
    mxfp4_linear,
    run_mxfp4,
    run_mxfp4_tiles,
)
from hipforge.ops.mxfp4_gemm.family import FAMILY, TABLE
from hipforge.ops.mxfp4_gemm.kernels.tiles import TILED
from hipforge.ops.mxfp4_gemm.kernels.waves import WAVES
from hipforge.ops.reference import shuffle_scale, shuffle_weight
from hipforge.tuning.cases import Cell

TILE_NUMBERS = tuple(tile_number(tile) for tile in TILED.step_us)
SMALL = tile_number((64, 64))
# Per matrix instruction, scales included.
LOOP_INSTRUCTIONS = {
    256256: 6.7, 192256: 8.1, 192128: 8.3, 128192: 8.3, 128128: 10.8, 64128: 18.3, 64064: 32.2, 32064: 34.3
}  # fmt: skip


full = pytest.mark.full


def run(case: Operands, tile: int, shuffled: bool) -> torch.Tensor:
    out = case.out()
    mxfp4_gemm_tiles_out(out, *case.args(shuffled), None, shuffled, tile, 1)
    return out


def test_shuffled_scales_off_four_bytes_are_copied() -> None:
    case = random_codes(70, 16, 640)
    xq, xs, wq, ws = case.args(shuffled=True)
    ws = embedded(ws, 0xFF, margin=63)
    with pytest.raises(GuardError, match="shuffled Ws must start at a multiple of 4 bytes"):
        mxfp4_gemm_tiles_out(case.out(), xq, xs, wq, ws, None, True, SMALL, 1)
    assert_bits(run_mxfp4_tiles(xq, xs, wq, ws, shuffled=True, tile=SMALL), oracle(case))


@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("tile", TILE_NUMBERS)
def test_what_one_tile_loads_and_multiplies(tile: int, shuffled: bool) -> None:
    cases = [random_codes(*divmod(tile, 1000), k, scales=(127, 128)) for k in (2048, 6144)]
    check_tile(cases, lambda case: run(case, tile, shuffled=shuffled), LOOP_INSTRUCTIONS[tile])


@pytest.mark.parametrize("shuffled", (False, True))
def test_a_weight_of_more_than_4_gib_is_read_to_its_last_row(shuffled: bool) -> None:
    n, k = 8208, 1 << 20
    xq, wq = torch.zeros(1, k // 2, dtype=torch.uint8), sparse_bytes(n, k // 2)
    xs = torch.full((1, k // 32), SCALE_ONE, dtype=torch.uint8)
    ws = torch.full((-(-n // 256) * 256 if shuffled else n, k // 32), SCALE_ONE, dtype=torch.uint8)
    assert wq.numel() > 2**32
    xq[0, -1] = CODE_OF_ONE << 4
    flat = wq.view(-1)
    for row in (5, n - 1):
        # The last byte of a row; shuffled, the last of its 16 in the last column of the row's tile.
        at = (
            row // 16 * 16 * (k // 2) + (k // 2 // 16 - 1) * 256 + row % 16 * 16 + 15
            if shuffled
            else row * (k // 2) + k // 2 - 1
        )
        flat[at] = 7 << 4
    with pytest.raises(GuardError, match=r"Wq has 43\d+ bytes.*2 GB.*signed 32-bit"):
        run_mxfp4(xq, xs, wq, ws, shuffled=shuffled)
    found = hipforge.explain(mxfp4_gemm, xq, xs, wq, ws, shuffled=shuffled)
    assert found.kernel == TILED.name and "2^31 - 1 bytes" in found.reason

    def written(groups: list[int], *operands: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(1, n, dtype=torch.bfloat16)
        # Where it reads is in question; the other checks take five times as long.
        with emulator.options(checks="memory"), Capture().recording(dict.fromkeys(groups, RUN), others=SKIP):
            mxfp4_gemm_tiles_out(out, *operands, None, shuffled, SMALL, 1)
        return out[0]

    # Two work-groups of 129 run, which touch 64 MiB: those that write the two columns of a product of ones.
    ones = [torch.full(shape, 0x22, dtype=torch.uint8) for shape in ((1, 32), (n, 32))]
    scales = [torch.full(shape, SCALE_ONE, dtype=torch.uint8) for shape in ((1, 2), (len(ws), 8 if shuffled else 2))]
    of_group = [written([group], ones[0], scales[0], ones[1], scales[1]) for group in range(-(-n // 64))]
    groups = [group for group, out in enumerate(of_group) if out[5] or out[-1]]
    out = written(groups, xq, xs, wq, ws)
    assert len(groups) == 2 and out.nonzero().flatten().tolist() == [5, n - 1] and out[-1] == 6


def default_choice(m: int, n: int, k: int) -> Choice:
    return best(FAMILY.kernels, Cell(n, k, m), "gfx950", 256)


def test_large_problems_get_tiles_and_small_ones_waves() -> None:
    assert default_choice(4, 3072, 1536).kernel == WAVES.name
    assert dict(default_choice(4096, 4096, 4096).configuration) == {"tile": 256256, "k_splits": 1}
    for m in (1, 33, 65, 300, 16384):
        for k in (32, 256, 768, 6144):
            chosen = default_choice(m, 768, k)
            assert chosen.kernel == WAVES.name or chosen.configuration["k_splits"] <= TILED.steps(k)
    case = random_codes(300, 272, 512)
    for shuffled in (False, True):
        args = case.args(shuffled)
        assert hipforge.explain(mxfp4_linear, *args, shuffled=shuffled).kernel == TILED.name
        assert_bits(mxfp4_linear(*args, shuffled=shuffled), oracle(case))


def test_past_the_largest_k_of_tiles_waves_are_chosen() -> None:
    assert default_choice(300, 16, (1 << 22) + 32).kernel == WAVES.name


@pytest.mark.parametrize(
    ("row", "message"),
    (
        ("6144,mxfp4_gemm_tiles,tile=64048;k_splits=1", "a row of mxfp4_gemm_tiles needs tile of .* got .*tile=64048"),
        ("256,mxfp4_gemm_tiles,tile=64064;k_splits=2", "no more k_splits than steps of 256; got .*K=256"),
        ("8388608,mxfp4_gemm_tiles,tile=64064;k_splits=2", "K of at most 4194304, .*K=8388608"),
        ("6144,mxfp4_gemm,m_sub=4;n_sub=3;k_splits=1", "n_sub of 1, 2 or 4; got .*n_sub=3"),
        ("6144,mxfp4_gemm,m_sub=4;n_sub=4;k_splits=8", "at most 64; got .*k_splits=8"),
        ("64,mxfp4_gemm,m_sub=4;n_sub=4;k_splits=2", "no more k_splits than steps of 128"),
        ("6144,lds,tile=64064", "kernel must be one of mxfp4_gemm, mxfp4_gemm_tiles"),
    ),
)
def test_a_row_that_no_kernel_takes_is_refused(row: str, message: str, tmp_path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(TABLE.header) + f"\ngfx950,256,64,768,{row},1,,1.0,,,0.001,model:test\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(TABLE, path)


GOOD = random_codes(70, 16, 512)


def test_a_split_k_needs_its_workspace() -> None:
    with pytest.raises(GuardError, match=r"k_splits = 2 needs a workspace: float32 \[16388\]; got None"):
        mxfp4_gemm_tiles_out(GOOD.out(), *GOOD.args(), None, False, SMALL, 2)


def test_refused_configurations() -> None:
    with pytest.raises(GuardError, match=r"tile must be 256256, .* or 32064; got 64032"):
        run_mxfp4_tiles(*GOOD.args(), tile=64032)
    with pytest.raises(
        GuardError, match=r"k_splits must not exceed the number of K steps, ceil\(K/256\) = 2 for K = 512"
    ):
        run_mxfp4_tiles(*GOOD.args(), k_splits=4)
    with pytest.raises(GuardError, match="k_splits must be 1, 2, 4 or 8; got 3"):
        run_mxfp4_tiles(*GOOD.args(), k_splits=3)


# An eighth of the columns of two tasks, and, in the long run, every task; few rows take waves and many take tiles.
@pytest.mark.parametrize(
    ("m", "n", "k", "seed"),
    [(16, 384, 1536, 6635), (4, 368, 512, 1), *(pytest.param(*task, marks=full) for task in TASKS + BENCH)],
)
@pytest.mark.parametrize("shuffled", (False, True))
def test_a_call_loads_and_multiplies_everything_once(m: int, n: int, k: int, seed: int, shuffled: bool) -> None:
    parts, _ = operands(m, n, k, seed)
    xq, xs, wq, ws = parts
    weights = (shuffle_weight(wq), shuffle_scale(ws)) if shuffled else (wq, ws)
    with emulator.counters() as counted:
        got = mxfp4_gemm(xq, xs, *weights, shuffled=shuffled)
    assert_close(got, parts, k)
    chosen = hipforge.explain(mxfp4_gemm, xq, xs, *weights, shuffled=shuffled).configuration
    assert counted.launches == 1
    if "tile" in chosen:
        rows, columns = divmod(chosen["tile"], 1000)
        assert counted.mfma_count == ceil(m / rows) * ceil(n / columns) * rows * columns // 1024 * 4 * ceil(k / 256)
        assert counted.tensors["Wq"].loaded == ceil(m / rows) * wq.numel()
        return
    m_sub, n_sub = chosen["m_sub"], chosen["n_sub"]
    assert counted.mfma_count == ceil(m / (16 * m_sub)) * m_sub * ceil(n / (16 * n_sub)) * n_sub * ceil(k / 128)
    assert counted.tensors["Wq"].loaded == ceil(m / (16 * m_sub)) * wq.numel()


def test_what_the_waves_do_not_take_is_refused() -> None:
    parts = codes(4, 32, 64, (127,))
    with pytest.raises(GuardError, match="m_sub"):
        run_mxfp4(*parts, m_sub=3)
    with pytest.raises(GuardError, match="number of K steps"):
        run_mxfp4(*parts, k_splits=2)
    with pytest.raises(GuardError, match=r"m_sub \* n_sub \* k_splits must be at most 64; got 4 \* 4 \* 8"):
        run_mxfp4(*codes(4, 32, 1024, (127,)), m_sub=4, n_sub=4, k_splits=8)
    with pytest.raises(GuardError, match="N % 16 == 0"):
        run_mxfp4(*codes(4, 24, 64, (127,)), shuffled=True)
