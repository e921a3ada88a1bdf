"""The MX-FP8 GEMM with K split over work-groups and their waves, on gfx950."""

from __future__ import annotations

import itertools
from math import ceil
from pathlib import Path

import pytest
import torch
from helpers.mxfp8_cases import (
    Operands,
    assert_bits,
    integers,
    oracle,
)
from helpers.planted_faults import planted

from hipforge import emulator, jit
from hipforge.ops.mxfp8_gemm import mxfp8_group_split, mxfp8_group_split_out
from hipforge.ops.mxfp8_gemm.kernels.group_split import COLUMNS, K_SPLITS, ROWS, split_workspace

TILES = tuple((rows, columns) for rows in ROWS for columns in COLUMNS)


def run(
    case: Operands, rows: int = 32, columns: int = 48, k_splits: int = 2, bias: torch.Tensor | None = None
) -> torch.Tensor:
    m, n, _ = case.mnk
    out = case.out()
    workspace = split_workspace(m, n, rows, columns, k_splits, case.xq.device)
    workspace.fill_(float("nan"))  # what is in it beforehand must not matter
    mxfp8_group_split_out(out, *case.args(), bias, workspace, rows, columns, k_splits)
    return out


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
