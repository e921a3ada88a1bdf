"""The MX-FP8 GEMM for few rows on sm_90, which streams W once: its stub, its raw op and its value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.row_stream import RowStream
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.raw import K_STEP, OPERANDS, run_raw

ROWS = (8, 16, 32)  # of X that a block multiplies at once
PLANS = RowStream(ROWS, K_STEP, x_per_row=0.045, word_tiles=(3,), most_meetings=4)
# Rough microseconds of a call on an H100: a start, and bytes of W over what the kernel reached with 8, 16 and 32 rows.
START_US = {8: 3.2, 16: 3.5, 32: 5.0}
BYTES_PER_US = {8: 2.9e6, 16: 2.5e6, 32: 2.1e6}


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    best = PLANS.best(m, n, k, cu_count)
    rows = best["rows"]
    yield -(-m // rows) * (START_US[rows] + n * k / BYTES_PER_US[rows]), best


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return PLANS.configurations(m, n, k, archs.get(arch).cu_count)


mxfp8_row_stream_out = stub(
    "mxfp8_row_stream_out",
    "module_mxfp8_gemm_row_stream",
    f"{OPERANDS}; rows, tiles, sharers, blocks: int; programmatic: bool",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_ROWS": "rows", "HF_TILES": "tiles"},
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_row_stream_out(out, *(*given, programmatic.active()))


@documented_like(run_raw)
def mxfp8_row_stream(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    rows: int = ROWS[0],
    tiles: int = 2,
    sharers: int = 8,
    blocks: int = 132,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        rows: rows of X that a block takes at once: 8, 16 or 32. W is read once for each.
        tiles: rows of W in a pass over 8: 1 to 4; 3 where K is a multiple of 128.
        sharers: warps that share K: a power of two up to 16, or 8 with 32 rows or 4 tiles.
        blocks: how many blocks the rows of W are spread over, at most N.
    """
    given = {"rows": rows, "tiles": tiles, "sharers": sharers, "blocks": blocks}
    return run_raw(ROW_STREAM, Xq, Wq, Xq, Xs, Wq, Ws, bias, **given)


ROW_STREAM = Kernel(
    "mxfp8_row_stream",
    archs=("sm_90",),
    parameters=PLANS.parameters,
    launch=_launch,
    candidates=_candidates,
    refusal=PLANS.refusal,
    default=_default,
)
