"""The skinny fp8 GEMM of sm_90, which streams b once: its stub and its value."""

from __future__ import annotations

from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.kernel import Configuration, Kernel
from hipforge.ops.core.row_stream import RowStream
from hipforge.ops.core.stub import stub
from hipforge.ops.fp8_skinny_gemm.raw import HOPPER, column_major, row_major

PLANS = RowStream((8, 16, 32), step_k=128, x_per_row=0.045, scaled=False)
MAX_PITCH = 1 << 30

skinny_row_stream_out = stub(
    "skinny_row_stream_out",
    "module_fp8_skinny_gemm_row_stream",
    "out, a, b, scale: Tensor; accumulate: bool; rows, tiles, sharers, blocks: int; programmatic: bool",
    "Write or add (``accumulate``) scale * (a @ b) to ``out`` fp16 [m, n].",
    variant={"HF_ROWS": "rows", "HF_TILES": "tiles"},
)


def _launch(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    accumulate: bool,
    deterministic: bool,
    *given: int,
) -> None:
    left, right = row_major(a, out), column_major(b, out, MAX_PITCH)
    skinny_row_stream_out(out, left, right, scale, accumulate, *given, programmatic.active())


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return PLANS.configurations(m, n, k, archs.get(arch).cu_count)


ROW_STREAM = Kernel(
    "skinny_row_stream",
    archs=(HOPPER,),
    parameters=PLANS.parameters,
    launch=_launch,
    candidates=_candidates,
    refusal=PLANS.refusal,
)
