"""The MX-FP8 GEMM with K split over work-groups and their waves, on gfx950."""

from __future__ import annotations

import itertools
from math import ceil
from pathlib import Path

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
from helpers.planted_faults import planted

from hipforge import emulator, jit
from hipforge.errors import GuardError
from hipforge.ops.mxfp8_gemm import mxfp8_group_split, mxfp8_group_split_out
from hipforge.ops.mxfp8_gemm.kernels.group_split import COLUMNS, K_SPLITS, ROWS, split_workspace

TILES = tuple((rows, columns) for rows in ROWS for columns in COLUMNS)
STEP = 128


def run(
    case: Operands, rows: int = 32, columns: int = 48, k_splits: int = 2, bias: torch.Tensor | None = None
) -> torch.Tensor:
    m, n, _ = case.mnk
    out = case.out()
    workspace = split_workspace(m, n, rows, columns, k_splits, case.xq.device)
    workspace.fill_(float("nan"))  # what is in it beforehand must not matter
    mxfp8_group_split_out(out, *case.args(), bias, workspace, rows, columns, k_splits)
    return out


@pytest.mark.parametrize("order", ("forward", "reverse", "random"))
@pytest.mark.parametrize("k_splits", K_SPLITS)
@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_every_instance_is_exact_on_integers_under_all_checks(
    rows: int, columns: int, k_splits: int, order: str
) -> None:
    # 37 steps, the last partial: each wave has other steps than its neighbour; one and a bit tiles each way.
    case = integers(rows + 5, columns + 5, 36 * STEP + 96, scales=(126, 128))
    with emulator.options(checks="all", wave_order=order):
        assert_bits(run(case, rows, columns, k_splits), oracle(case))


@pytest.mark.parametrize("k_splits", K_SPLITS)
@pytest.mark.parametrize(("rows", "columns"), ((16, 16), (32, 48), (64, 24)))
def test_turns_of_one_instruction_change_nothing(rows: int, columns: int, k_splits: int) -> None:
    case = integers(rows, columns, 2048)
    with emulator.options(checks="all", quantum=1):
        assert_bits(run(case, rows, columns, k_splits), oracle(case))


@pytest.mark.parametrize("k", (160, 256, 512, 544, 1024, 1056, 1152, 1920, 2304, 4096, 4128, 8192, 9216))
def test_every_number_of_steps_and_kind_of_tail_is_exact(k: int) -> None:
    for rows, columns in ((16, 24), (32, 16), (32, 48), (64, 48)):
        case = integers(rows + 3, columns + 1, k, scales=(126, 128))
        for k_splits in K_SPLITS:
            if k_splits <= ceil(k / STEP):
                assert_bits(run(case, rows, columns, k_splits), oracle(case))


@pytest.mark.parametrize("m", (1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100))
def test_every_m_is_taken_as_it_is(m: int) -> None:
    case = integers(m, 20, 512)
    for rows in ROWS:
        assert_bits(run(case, rows), oracle(case))


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 15, 17, 23, 24, 25, 47, 48, 49, 65))
def test_every_n_is_exact(n: int) -> None:
    case = integers(3, n, 512)
    for columns in COLUMNS:
        assert_bits(run(case, 16, columns), oracle(case))


@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_each_row_and_block_uses_its_own_scale(rows: int, columns: int) -> None:
    case = integers(rows, columns, 1088, scales=(126, 128))
    at_rows, blocks = torch.arange(64)[:, None], torch.arange(1088 // 32)
    case.xs.copy_((126 + (at_rows[:rows] + 2 * blocks) % 3).to(torch.uint8))
    case.ws.copy_((126 + (at_rows[:columns] // 2 + blocks) % 3).to(torch.uint8))
    assert_bits(run(case, rows, columns, 4), oracle(case))


@pytest.mark.parametrize("block", (0, 15, 16, 17))
def test_a_nan_scale_makes_exactly_its_outputs_nan(block: int) -> None:
    case = integers(20, 23, 576)
    want = oracle(case)
    case.xs[18, block] = SCALE_NAN
    case.ws[17, block] = SCALE_NAN
    case.wq[17, 32 * block : 32 * block + 32] = 0  # even where its block is zero
    want[18, :] = want[:, 17] = float("nan")
    for rows, columns in TILES:
        assert_bits(run(case, rows, columns), want)


@pytest.mark.parametrize("k_index", (0, 127, 128, 543))
def test_nan_payload_makes_exactly_its_outputs_nan(k_index: int) -> None:
    case = integers(3, 9, 544)
    want = oracle(case)
    case.xq[2, k_index] = nan_byte("gfx950")
    case.wq[5, k_index] = nan_byte("gfx950")
    want[2, :] = want[:, 5] = float("nan")
    assert_bits(run(case), want)


@pytest.mark.parametrize("k", (160, 544, 1056))
@pytest.mark.parametrize("m", (1, 17))
def test_neighbouring_bytes_never_take_part(m: int, k: int) -> None:
    surrounded, want = among_nans(integers(2 * m, 52, k), "gfx950")
    for rows, columns in TILES:
        assert_bits(run(surrounded, rows, columns), want)


@pytest.mark.parametrize("n", (12, 13))
def test_output_outside_the_result_is_untouched(n: int) -> None:
    case = integers(3, n, 512)
    workspace = split_workspace(3, n, 16, 16, 4, case.xq.device)
    for start in (16, 17):  # with and without the alignment that wide stores need
        assert_writes_only(
            lambda out: mxfp8_group_split_out(out, *case.args(), None, workspace, 16, 16, 4), case, start, "gfx950"
        )


def test_scales_need_no_alignment() -> None:
    case = integers(35, 50, 640)
    moved = case.but(xs=embedded(case.xs, 0xFF, margin=61), ws=embedded(case.ws, 0xFF, margin=63))
    for rows, columns in TILES:
        assert_bits(run(moved, rows, columns), oracle(case))


@pytest.mark.parametrize("k_splits", K_SPLITS)
def test_the_bias_is_added_once_before_the_only_rounding(k_splits: int) -> None:
    case = integers(6, 53, 512)
    bias, want = bias_for(case, "gfx950")
    assert_bits(run(case, 16, 48, k_splits, bias), want)


@pytest.mark.parametrize(("m", "n", "k"), ((17, 200, 3072), (64, 140, 1440)))
def test_real_data_is_within_the_bounds(m: int, n: int, k: int) -> None:
    case = normal(m, n, k)
    assert_close(mxfp8_group_split(*case.args()), oracle(case))


@pytest.mark.parametrize("k_splits", K_SPLITS)
def test_results_do_not_depend_on_which_work_group_comes_last(k_splits: int) -> None:
    case = normal(40, 100, 2048)
    first = run(case, 32, 48, k_splits)
    for order in ("forward", "reverse", "random"):
        with emulator.options(checks="all", wave_order=order):
            again = run(case, 32, 48, k_splits)
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))


def test_a_part_is_complete_and_past_the_caches_before_its_work_group_meets_another() -> None:
    # What the emulator cannot show: its stores are complete at once and its caches are coherent.
    for rows in ROWS:
        module = jit.load("module_mxfp8_gemm_group_split", {"HF_ROWS": rows}, "gfx950")
        kernels = emulator.CodeObject(module.path / "module.so").kernels
        assert len(kernels) == 3
        for kernel in kernels.values():
            code = [line.split(": ", 1)[1] for line in kernel.disassembly().splitlines()]
            last = max(i for i, text in enumerate(code) if text.startswith("buffer_store") and text.endswith("sc1"))
            meeting = next(i for i, text in enumerate(code) if text.startswith("global_atomic_swap_x2"))
            barrier = next(i for i in range(last, meeting) if code[i] == "s_barrier")
            assert "s_waitcnt vmcnt(0)" in code[last:barrier]
            assert any(text.startswith("buffer_load") and text.endswith("sc0 sc1") for text in code[meeting:])


def test_a_call_is_one_launch_that_a_graph_can_replay() -> None:
    case = integers(40, 70, 1024)
    run(case, 32, 48, 4)  # a module is not loaded in a capture
    with emulator.capture() as graph:
        out = mxfp8_group_split(*case.args(), rows=32, columns=48, k_splits=4)
    assert len(graph.nodes) == 1
    for _ in range(3):  # each replay has the number of the launch that was captured
        case.xq.copy_(case.xq.flip(0))
        with emulator.counters() as counted:
            graph.replay()
        assert_bits(out, oracle(case))
        assert counted.tensors["out"].stored == 2 * out.numel(), "more than one work-group took itself for the last"


def test_a_workspace_may_hold_what_another_launch_left() -> None:
    few, many = integers(40, 70, 1024), integers(70, 100, 2048)
    workspace = split_workspace(70, 100, 16, 16, 4, few.xq.device)
    for case, k_splits in ((many, 4), (few, 2), (many, 2), (few, 4)):
        out = case.out()
        with emulator.counters() as counted:
            mxfp8_group_split_out(out, *case.args(), None, workspace, 16, 16, k_splits)
        assert_bits(out, oracle(case))
        assert counted.tensors["out"].stored == 2 * out.numel()


@pytest.mark.parametrize(
    ("name", "line", "becomes"),
    (
        ("another_part_twice", "at[i], s * bytes);", "at[i], 0);"),
        ("own_first_part_forgotten", "split == 0 ? own[i] : loaded[i][0];", "loaded[i][0];"),
        ("own_part_forgotten", "sum += split == s ? own[i] : loaded[i][s];", "sum += loaded[i][s];"),
        ("all_results_meet_at_one_word", "words + (uint64_t{group} << log2_splits) - group", "words"),
        ("all_work_groups_take_the_first_part", "uint32_t part = split * kWaves + wave;", "uint32_t part = wave;"),
        ("columns_of_the_neighbour", "at[i] != dev::kOutOfRange && column < columns", "at[i] != dev::kOutOfRange"),
    ),
)  # fmt: skip
def test_a_mistake_is_noticed(tmp_path: Path, name: str, line: str, becomes: str) -> None:
    folder = "mxfp8_gemm/amd"
    entry = planted(
        tmp_path / name, mxfp8_group_split_out, f"{folder}/group_split_kernel.h", line, becomes,
        unit=f"{folder}/mxfp8_group_split.cu", variants={"HF_ROWS": [16]},
    )  # fmt: skip
    case = integers(20, 100, 2048, scales=(126, 128))
    right = []
    for k_splits, order in itertools.product(
        K_SPLITS, ("forward", "reverse")
    ):  # the last part or the first is the last
        workspace = split_workspace(20, 100, 16, 24, k_splits, case.xq.device)
        workspace.fill_(float("nan"))
        out, wrong = case.out(), case.out()
        with emulator.options(wave_order=order):
            mxfp8_group_split_out(out, *case.args(), None, workspace, 16, 24, k_splits)
            entry(wrong, *case.args(), None, workspace, 16, 24, k_splits)
        assert_bits(out, oracle(case))
        right.append(torch.equal(wrong, out))
    assert not all(right)


# Wave instructions of a result with K = 6144 in two parts.
RECORDED = {
    (16, 16): 1950,
    (16, 24): 2300,
    (16, 32): 2300,
    (16, 48): 2660,
    (32, 16): 2270,
    (32, 24): 2580,
    (32, 32): 2580,
    (32, 48): 3340,
    (64, 16): 2900,
    (64, 24): 3630,
    (64, 32): 3630,
    (64, 48): 4440,
}


@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_what_a_result_loads_multiplies_and_takes_in_instructions(rows: int, columns: int) -> None:
    case = integers(rows, columns, 6144, scales=(126, 128))
    with emulator.counters() as counters:
        run(case, rows, columns, 2)
    assert counters.tensors["Wq"].loaded == case.wq.numel()
    assert counters.tensors["Xq"].loaded == case.xq.numel()
    tiles = rows // 16 * ceil(columns / 16)
    assert counters.mfma_count == 48 * tiles
    assert counters.tensors["workspace"].stored == 2 * tiles * 1024 + 3 * 8  # two parts, which meet at a word
    assert counters.launches == 1 and not counters.scratch_bytes and not counters.lds_bank_conflicts
    assert counters.wave_instructions <= RECORDED[rows, columns]


GOOD = integers(2, 8, 512)


def test_what_the_kernel_does_not_take_is_refused_by_name() -> None:
    for given, message in (
        ({"rows": 48}, r"rows must be 16, 32 or 64; got 48"),
        ({"columns": 40}, r"columns must be 16, 24, 32 or 48; got 40"),
        ({"k_splits": 8}, r"k_splits must be 2 or 4; got 8"),
    ):
        with pytest.raises(GuardError, match=message):
            mxfp8_group_split(*GOOD.args(), **given)
    out, workspace = GOOD.out(), torch.empty(2000)
    with pytest.raises(GuardError, match=r"columns must be 16, 24, 32 or 48; got 40"):
        mxfp8_group_split_out(out, *GOOD.args(), None, workspace, 16, 40, 2)
    with pytest.raises(GuardError, match=r"k_splits must be 2 or 4; got 8"):
        mxfp8_group_split_out(out, *GOOD.args(), None, workspace, 16, 16, 8)
    with pytest.raises(GuardError, match=r"k_splits must not exceed the number of K steps"):
        mxfp8_group_split(*integers(2, 8, 256).args(), k_splits=4)


def test_the_workspace_is_apart_from_every_operand() -> None:
    case = integers(20, 48, 512)
    workspace = torch.empty(40_000)
    inside = workspace.view(torch.uint8)
    bias = torch.zeros(48, dtype=torch.bfloat16)
    for name, operand in (("Xq", case.xq), ("Xs", case.xs), ("Wq", case.wq), ("Ws", case.ws), ("bias", bias)):
        given = {"Xq": case.xq, "Xs": case.xs, "Wq": case.wq, "Ws": case.ws, "bias": bias}
        given[name] = inside[: operand.nbytes].view(operand.dtype).view(operand.shape)
        with pytest.raises(GuardError, match=rf"workspace is written and must not share memory with {name}"):
            mxfp8_group_split_out(case.out(), *given.values(), workspace, 16, 16, 2)
    out = inside[: 20 * 48 * 2].view(torch.bfloat16).view(20, 48)
    with pytest.raises(GuardError, match="workspace is written and must not share memory with out"):
        mxfp8_group_split_out(out, *case.args(), None, workspace, 16, 16, 2)


def test_the_workspace_is_needed_whole() -> None:
    with pytest.raises(GuardError, match=r"k_splits = 2 needs a workspace: float32 \[514\]; got None"):
        mxfp8_group_split_out(GOOD.out(), *GOOD.args(), None, None, 16, 16, 2)
    with pytest.raises(GuardError, match=r"workspace must be \[514\] or longer; got float32 \[513\]"):
        mxfp8_group_split_out(GOOD.out(), *GOOD.args(), None, torch.empty(513), 16, 16, 2)
