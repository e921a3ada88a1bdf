"""What both kernels of the MXFP4 GEMM hold to in both layouts; rows of the table, and which shapes get tiles.

Every instance runs under all checks, with its own scales, elements and neighbours. Extents, parts of K and turns are of
the source that all instances share: ``few`` has one instance for each path through it.
"""

from __future__ import annotations

from math import ceil

import pytest
import torch
from helpers.mxfp4_cases import (
    BENCH,
    CODE_OF_ONE,
    E2M1,
    TASKS,
    Operands,
    among_nans,
    assert_close,
    codes,
    operands,
    oracle,
    pack,
    random_codes,
)
from helpers.mxfp8_cases import SCALE_NAN, SCALE_ONE, assert_bits, embedded
from helpers.mxfp8_grouped_cases import sparse_bytes

import hipforge
from hipforge import emulator
from hipforge.emulator.timing.capture import RUN, SKIP, Capture
from hipforge.errors import ConfigError, GuardError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.kernel import best
from hipforge.ops.core.tiles import split_workspace, tile_number
from hipforge.ops.core.tuned import read_rows
from hipforge.ops.mxfp4_gemm import (
    SUB_TILES,
    mxfp4_gemm,
    mxfp4_gemm_out,
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
from hipforge.tuning.families.mxfp4_gemm import TUNER

TILE_NUMBERS = tuple(tile_number(tile) for tile in TILED.step_us)
SMALL = tile_number((64, 64))
# Per matrix instruction, scales included.
LOOP_INSTRUCTIONS = {
    256256: 6.7, 192256: 8.1, 192128: 8.3, 128192: 8.3, 128128: 10.8, 64128: 18.3, 64064: 32.2, 32064: 34.3
}  # fmt: skip


Instance = int | tuple[int, int]  # a tile by its number, or how many sub-tiles of 16 a wave has along m and n
WAVE_INSTANCES = tuple((m_sub, n_sub) for m_sub in SUB_TILES for n_sub in SUB_TILES)
INSTANCES = (*TILE_NUMBERS, *WAVE_INSTANCES)
# Two stages in LDS and eight waves, three, four, and two waves; rings of four steps and of two, and the most registers.
FEW: tuple[Instance, ...] = (256256, 128192, SMALL, 32064, (1, 1), (2, 4), (4, 4))
ORDERS = ("forward", "reverse", "random")
full = pytest.mark.full
instances = pytest.mark.parametrize("tile", INSTANCES, ids=str)
few = pytest.mark.parametrize("tile", FEW, ids=str)


def extent(tile: Instance) -> tuple[int, int]:
    return divmod(tile, 1000) if isinstance(tile, int) else (16 * tile[0], 16 * tile[1])


def run(case: Operands, tile: Instance = SMALL, k_splits: int = 1, shuffled: bool = False) -> torch.Tensor:
    m, n, _ = case.mnk
    out = case.out()
    if isinstance(tile, tuple):
        mxfp4_gemm_out(out, *case.args(shuffled), shuffled, *tile, k_splits)
        return out
    workspace = split_workspace(m, n, tile, k_splits, case.xq.device)
    if workspace is not None:
        workspace.fill_(float("nan"))  # what is in it beforehand must not matter
    mxfp4_gemm_tiles_out(out, *case.args(shuffled), workspace, shuffled, tile, k_splits)
    return out


@pytest.mark.parametrize("shuffled", (False, True))
@instances
def test_every_instance_is_exact_under_all_checks(tile: Instance, shuffled: bool) -> None:
    rows, columns = extent(tile)
    # Two and a bit tiles down, one along; 10 steps are two loads of scales, the second partial, as the last step is.
    case = random_codes(2 * rows + 7, columns + 16, 9 * 256 + 64)
    with emulator.options(checks="all", wave_order=ORDERS[(INSTANCES.index(tile) + shuffled) % len(ORDERS)]):
        assert_bits(run(case, tile, shuffled=shuffled), oracle(case))


@pytest.mark.parametrize(("shuffled", "k"), ((False, 4096 + 192), (True, 4096)))
@few
def test_turns_of_one_instruction_change_nothing(tile: Instance, shuffled: bool, k: int) -> None:
    case = random_codes(33, 80, k)
    with emulator.options(checks="all", quantum=1):
        assert_bits(run(case, tile, shuffled=shuffled), oracle(case))


@pytest.mark.parametrize(  # 2880: gpt-oss
    "k", (32, 64, 96, 128, 160, 192, 224, 256, 288, 384, 512, 960, 1024, 2048, 2080, 2304, 2880, 4224)
)
def test_every_number_of_steps_and_kind_of_tail_is_exact(k: int) -> None:
    case = random_codes(35, 48, k)
    want = oracle(case)
    for tile in FEW:
        assert_bits(run(case, tile), want)
        if k % 64 == 0:
            assert_bits(run(case, tile, shuffled=True), want)


# Each number of splits and each kind of tail by default, not each with each.
@pytest.mark.parametrize(
    ("k_splits", "k"),
    [
        pytest.param(splits, k, marks=() if (splits, k) in ((2, 2112), (4, 2880), (8, 2048), (8, 2304)) else full)
        for splits in (2, 4, 8)
        for k in (2048, 2112, 2304, 2880)
    ],
)
@pytest.mark.parametrize("shuffled", (False, True))
def test_uneven_splits_are_exact(shuffled: bool, k_splits: int, k: int) -> None:
    case = random_codes(70, 48, k)
    want = oracle(case)
    with emulator.options(checks="all"):
        for tile in FEW[:-1]:  # (4, 4) takes four parts at most
            assert_bits(run(case, tile, k_splits, shuffled), want)


# Of a wave's tiles each count: rows past M and columns past N begin in any of them.
EDGES: tuple[Instance, ...] = (SMALL, (1, 1), (2, 4), (4, 2))


@pytest.mark.parametrize("m", (1, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200))
def test_every_m_is_exact(m: int) -> None:
    case = random_codes(m, 80, 512)
    want = oracle(case)
    for tile in EDGES:
        assert_bits(run(case, tile), want)


@pytest.mark.parametrize("k_splits", (1, 2))
@pytest.mark.parametrize("n", (1, 3, 4, 5, 8, 12, 20, 63, 64, 65, 66, 68, 127, 136))
def test_every_n_is_exact(n: int, k_splits: int) -> None:
    # Whether n is a multiple of 4 or 8 decides how outputs are stored.
    case = random_codes(70, n, 512)
    want = oracle(case)
    for tile in EDGES:
        assert_bits(run(case, tile, k_splits), want)


@pytest.mark.parametrize("n", (16, 32, 48, 80, 112, 240, 256, 272))
def test_every_shuffled_n_is_exact(n: int) -> None:
    case = random_codes(35, n, 576)
    want = oracle(case)
    for tile in (192256, *EDGES):
        assert_bits(run(case, tile, shuffled=True), want)


@pytest.mark.parametrize("shuffled", (False, True))
@instances
def test_each_row_and_block_uses_its_own_scale(tile: Instance, shuffled: bool) -> None:
    (m, n), k = extent(tile), 2048 + 256
    codes = torch.zeros(1, k, dtype=torch.int32)
    codes[:, 5::32] = CODE_OF_ONE
    ones = pack(codes)
    # Every row differs from its neighbours, every block from the one before; sums stay below 2^24 units of 2^-8.
    rows, blocks = torch.arange(max(m, n))[:, None], torch.arange(k // 32)
    case = Operands(
        ones.expand(m, k // 2).contiguous(),
        (125 + (rows[:m] + 3 * blocks) % 5).to(torch.uint8),
        ones.expand(n, k // 2).contiguous(),
        (125 + (rows[:n] // 2 + blocks) % 4).to(torch.uint8),
    )
    assert_bits(run(case, tile, shuffled=shuffled), oracle(case))


@pytest.mark.parametrize("shuffled", (False, True))
@instances
def test_each_element_meets_its_own_counterpart(tile: Instance, shuffled: bool) -> None:
    # Row m of X selects element m of W's rows, whose codes are all different within 13; a whole step and a partial one.
    n, k = extent(tile)[1], 320
    codes = (torch.arange(n)[:, None] * 5 + torch.arange(k) * 7) % 13
    eye = torch.zeros(k, k, dtype=torch.int64)
    eye[torch.arange(k), torch.arange(k)] = CODE_OF_ONE
    one = torch.full((1, k // 32), SCALE_ONE, dtype=torch.uint8)
    case = Operands(pack(eye), one.expand(k, -1).contiguous(), pack(codes), one.expand(n, -1).contiguous())
    want = E2M1[codes].T
    assert torch.equal(oracle(case), want)
    assert_bits(run(case, tile, shuffled=shuffled), want)


@pytest.mark.parametrize("k_splits", (1, 4))
@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("block", (0, 3, 17, 63, 64, 71, 72))
def test_a_nan_scale_makes_exactly_its_outputs_nan(block: int, shuffled: bool, k_splits: int) -> None:
    case = random_codes(70, 48, 2304 + 64)
    want = oracle(case)
    case.xs[68, block] = SCALE_NAN
    case.ws[33, block] = SCALE_NAN
    want[68, :] = want[:, 33] = float("nan")
    for tile in (SMALL, (1, 1), (2, 4)):
        assert_bits(run(case, tile, k_splits, shuffled), want)


@pytest.mark.parametrize("byte", (0, 1, 127, 254))
def test_extreme_scales_that_cancel_lose_nothing(byte: int) -> None:
    case = random_codes(65, 7, 544)
    case.xs.fill_(byte)
    case.ws.fill_(254 - byte)
    case.xs[:, ::3] = 254 - byte
    case.ws[:, ::3] = byte
    for tile in (SMALL, (1, 1), (4, 4)):
        assert_bits(run(case, tile), oracle(case))


@pytest.mark.parametrize("k", (32, 96, 128, 384, 544, 2176))
def test_neighbouring_bytes_never_take_part(k: int) -> None:
    surrounded, want = among_nans(random_codes(70, 66, k))
    for tile in INSTANCES:
        assert_bits(run(surrounded, tile), want)


@pytest.mark.parametrize("n", (24, 25))
def test_output_outside_the_result_is_untouched(n: int) -> None:
    case = random_codes(70, n, 256)
    for start in (16, 17):  # with and without the alignment that wide stores need
        for write in (lambda out: mxfp4_gemm_tiles_out(out, *case.args(), None, False, SMALL, 1),
                      lambda out: mxfp4_gemm_out(out, *case.args(), False, 2, 2, 2)):  # fmt: skip
            buffer = torch.full((70 * n + 33,), -123.0, dtype=torch.bfloat16)
            out = buffer[start : start + 70 * n].view(70, n)
            write(out)
            assert_bits(out, oracle(case))
            assert (buffer[:start] == -123).all() and (buffer[start + 70 * n :] == -123).all()


def test_plain_scales_need_no_alignment_and_shuffled_ones_are_copied() -> None:
    case = random_codes(70, 16, 640)
    want = oracle(case)
    moved = case.but(xs=embedded(case.xs, 0xFF, margin=61), ws=embedded(case.ws, 0xFF, margin=63))
    assert_bits(run(moved), want)
    xq, xs, wq, ws = case.args(shuffled=True)
    ws = embedded(ws, 0xFF, margin=63)
    with pytest.raises(GuardError, match="shuffled Ws must start at a multiple of 4 bytes"):
        mxfp4_gemm_tiles_out(case.out(), xq, xs, wq, ws, None, True, SMALL, 1)
    assert_bits(run_mxfp4_tiles(xq, xs, wq, ws, shuffled=True, tile=SMALL), want)


@pytest.mark.parametrize("k_splits", (2, 4, 8))
def test_results_do_not_depend_on_which_work_group_comes_last(k_splits: int) -> None:
    # Scales far apart: sums are rounded, so that another order would show.
    case = random_codes(150, 140, 4096)
    case.xs.copy_(torch.randint(90, 160, case.xs.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    first = run(case, SMALL, k_splits)
    waves = run(case, (2, 2), k_splits)
    for order in ORDERS:
        with emulator.options(checks="all", wave_order=order):
            again, other = run(case, SMALL, k_splits), run(case, (2, 2), k_splits)
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))
        assert torch.equal(other.view(torch.int16), waves.view(torch.int16))


@pytest.mark.parametrize("shuffled", (False, True))
@pytest.mark.parametrize("tile", TILE_NUMBERS)
def test_what_one_tile_loads_and_multiplies(tile: int, shuffled: bool) -> None:
    m, n = tile // 1000, tile % 1000
    conflicts, issued = set(), []
    for k in (2048, 6144):
        case = random_codes(m, n, k, scales=(127, 128))
        with emulator.counters() as counters:
            run(case, tile, shuffled=shuffled)
        assert counters.mfma_count == m // 32 * (n // 32) * (k // 64)
        assert counters.tensors["Xq"].loaded == case.xq.numel()
        assert counters.tensors["Wq"].loaded == case.wq.numel()
        assert counters.scratch_bytes == 0 and counters.launches == 1
        conflicts.add(counters.lds_bank_conflicts)
        issued.append((counters.wave_instructions, counters.mfma_count))
    (few, few_matrix), (more, more_matrix) = issued
    # Of the loop alone, as clang 22 compiles it; another compiler may need a few more.
    assert (more - few) / (more_matrix - few_matrix) < 1.1 * LOOP_INSTRUCTIONS[tile]
    assert len(conflicts) == 1, "only results on their way out may meet in a bank, not operands"


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


def test_every_candidate_is_a_row_and_comes_back_from_it(tmp_path) -> None:
    cell = TUNER.default_cells[0]
    path = tmp_path / "rows.csv"
    for choice in FAMILY.choices(cell, "gfx950"):
        values = TUNER.row_of(choice)
        row = {"gfx": "gfx950", "cu_num": 256, "M": cell.m, "N": cell.n, "K": cell.k, **values, "use_hip": 1}
        fields = [str(row.get(name, "")) for name in TABLE.header[:-1]]
        path.write_text(",".join(TABLE.header) + "\n" + ",".join(fields) + ",model:test\n")
        assert FAMILY.choice_of(read_rows(TABLE, path)[0]) == choice


@pytest.mark.parametrize(
    ("columns", "values", "kernel", "given"),
    (
        ("m_sub,n_sub,k_splits", "4,4,2", "mxfp4_gemm", {"m_sub": 4, "n_sub": 4, "k_splits": 2}),
        ("kernel,m_sub,n_sub,k_splits", "waves,1,2,8", "mxfp4_gemm", {"m_sub": 1, "n_sub": 2, "k_splits": 8}),
        ("kernel,m_sub,n_sub,k_splits", "tiles,4,4,1", "mxfp4_gemm_tiles", {"tile": 64064, "k_splits": 1}),
    ),
)
def test_rows_of_earlier_formats_are_read(columns: str, values: str, kernel: str, given: object, tmp_path) -> None:
    path = tmp_path / "rows.csv"
    for evidence, figures in (("us,model_us,stock_us", ",6.1,"), ("us,stock_us", ",")):
        header = f"gfx,cu_num,M,N,K,{columns},use_hip,{evidence},best_baseline_us,err,source"
        path.write_text(f"{header}\ngfx950,256,64,768,6144,{values},1,{figures},,0.001,model:test\n")
        chosen = FAMILY.choice_of(read_rows(TABLE, path)[0])
        assert chosen.kernel == kernel and dict(chosen.configuration) == given


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
    workspace = torch.empty(16388)
    inside = workspace.view(torch.uint8)[: GOOD.xq.numel()].view(GOOD.xq.shape)
    with pytest.raises(GuardError, match="workspace is written and must not share memory with Xq"):
        mxfp4_gemm_tiles_out(GOOD.out(), *GOOD.but(xq=inside).args(), workspace, False, SMALL, 2)


def test_refused_configurations() -> None:
    with pytest.raises(GuardError, match=r"tile must be 256256, .* or 32064; got 64032"):
        run_mxfp4_tiles(*GOOD.args(), tile=64032)
    with pytest.raises(
        GuardError, match=r"k_splits must not exceed the number of K steps, ceil\(K/256\) = 2 for K = 512"
    ):
        run_mxfp4_tiles(*GOOD.args(), k_splits=4)
    with pytest.raises(GuardError, match="k_splits must be 1, 2, 4 or 8; got 3"):
        run_mxfp4_tiles(*GOOD.args(), k_splits=3)
    with pytest.raises(GuardError, match="out is written and must not share memory with Wq"):
        held = GOOD.wq.view(-1)[:].view(torch.bfloat16)[: 70 * 16].view(70, 16)
        mxfp4_gemm_tiles_out(held, *GOOD.args(), None, False, SMALL, 1)


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
    with pytest.raises(GuardError, match="out is written and must not share memory with Wq"):
        mxfp4_gemm_out(parts[2].view(-1)[:256].view(torch.bfloat16).view(4, 32), *parts, False, 1, 1, 1)
