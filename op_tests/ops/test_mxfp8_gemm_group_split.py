"""The MX-FP8 GEMM with K split over work-groups and their waves, on gfx950."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from helpers.mxfp8_cases import (
    Operands,
    integers,
)

from hipforge import emulator
from hipforge.ops.mxfp8_gemm import mxfp8_group_split_out
from hipforge.ops.mxfp8_gemm.kernels.group_split import COLUMNS, ROWS, split_workspace

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
    (64, 16): 2910,
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
