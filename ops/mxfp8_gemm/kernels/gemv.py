"""The MX-FP8 GEMV, whose waves each compute whole columns without matrix instructions: its stub, raw op and value."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline
from hipforge.ops.mxfp8_gemm.raw import MAX_ELEMENTS, new_result, run_raw

MAX_M = 16
BLOCK_N = (4, 8, 16, 32, 64)
DEFAULT_BLOCK_N = 8
WAVES = 4  # of a work-group
STEP_BYTES = 1024  # of one weight row, per wave and step
STEPS_AHEAD = 2
MOST_COLUMNS = {1: 4, 2: 4, 4: 4, 8: 4, 16: 2}  # that a wave accumulates at once, by accumulated rows
# Past 16 rows any variant does: its guard refuses M.
_ROWS = (1, 1, 2, 4, 4, 8, 8, 8, 8, *(16,) * 8)


def gemv_rows(m: int) -> int:
    """Return how many rows the GEMV variant that serves M = ``m`` accumulates."""
    return _ROWS[m] if m <= MAX_M else MAX_M


@compile_ops("module_mxfp8_gemm_gemv", variant=lambda out, x, *given: {"HF_ROWS": gemv_rows(x.shape[0])})
def smallm_mxfp8_gemv_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    block_n: int,
    bias: torch.Tensor | None = None,
) -> None:
    """Write Xq @ Wq^T + ``bias`` into ``out`` [M, N] bf16; ``block_n`` columns per work-group."""


@documented_like(run_raw)
def smallm_mxfp8_gemv(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    out_dtype: torch.dtype,
    block_n: int = DEFAULT_BLOCK_N,
) -> torch.Tensor:
    """Run the GEMV kernel on contiguous tensors; shapes and dtypes as in the module's docstring, M from 1 to 16.

    Args:
        out_dtype: ``torch.bfloat16``.
        block_n: columns per work-group: 4, 8, 16, 32 or 64.
    """
    out = new_result(Xq, Wq, out_dtype)
    smallm_mxfp8_gemv_out(out, Xq, Xs, Wq, Ws, block_n)
    return out


def _run_gemv(
    xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, block_n: int
) -> None:
    if xq.size(0) > MAX_M:
        raise GuardError(f"the GEMV kernel needs M<={MAX_M}; got M={xq.shape[0]}")
    x, x_scales, w, w_scales = (packed(each, out) for each in (xq, x_scale, wq, w_scale))
    smallm_mxfp8_gemv_out(out, x, x_scales, w, w_scales, block_n)


def _launch(
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    block_n: int,
) -> None:
    smallm_mxfp8_gemv_out(out, xq, x_scale, wq, w_scale, block_n, *(() if bias is None else (bias,)))


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    takes = key[0] <= MAX_M and key[1] * key[2] <= MAX_ELEMENTS
    return None if takes else f"M of at most {MAX_M} and N*K of at most 2^31 - 1"


def _pipeline(given: Configuration, cell: Any, arch: str) -> Pipeline:
    columns = given["block_n"] // WAVES
    at_once = min(columns, MOST_COLUMNS[gemv_rows(cell.m)])
    return Pipeline(STEPS_AHEAD * STEP_BYTES * at_once, columns // at_once)


GEMV = Kernel(
    "smallm_mxfp8_gemv",
    archs=("gfx950",),
    parameters=MappingProxyType({"block_n": BLOCK_N}),
    launch=_launch,
    candidates=lambda cell, arch: [{"block_n": block_n} for block_n in BLOCK_N if cell.m <= MAX_M],
    pipeline=_pipeline,
    refusal=_refusal,
)
