"""MXFP4 weights times few rows of X on sm_90, W streamed once: the kernel's stub, its raw op and its value.

Activations are MXFP4 or bfloat16; W is read as it is and becomes bfloat16 with its scale, exactly, in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.row_stream import RowStream
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp4_gemm.raw import run_raw

ROWS = (8, 16)  # of X that a block multiplies at once
PLANS = RowStream(ROWS, step_k=128, x_per_row=0.045, word_tiles=(3,))

mxfp4_row_stream_out = stub(
    "mxfp4_row_stream_out",
    "module_mxfp4_gemm_row_stream",
    "out, x: Tensor; Xs: Tensor?; Wq, Ws: Tensor; bits, rows, tiles, sharers, blocks: int; programmatic: bool",
    "Write X @ Wq^T into ``out`` [M, N] bf16; ``bits`` of X's elements are 4, with ``Xs``, or 16.",
    variant={"HF_BITS": "bits", "HF_ROWS": "rows", "HF_TILES": "tiles"},
)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    xs: torch.Tensor | None,
    wq: torch.Tensor,
    ws: torch.Tensor,
    shuffled: bool,
    *given: int,
) -> None:
    mxfp4_row_stream_out(out, x, xs, wq, ws, 16 if xs is None else 4, *given, programmatic.active())


def run_mxfp4_row_stream(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    rows: int = ROWS[0],
    tiles: int = 2,
    sharers: int = 8,
    blocks: int = 132,
) -> torch.Tensor:
    """Run the kernel of sm_90, as configured; shapes and dtypes as in :mod:`hipforge.ops.mxfp4_gemm`.

    Args:
        x: activations [M, K/2] with ``x_scale``, or bfloat16 [M, K] without.
        x_scale: e8m0 bytes [M, K/32], or None.
        wq: weights [N, K/2] in plain order.
        w_scale: e8m0 bytes [N, K/32].
        rows: rows of X that a block takes at once: 8 or 16. W is read once for each.
        tiles: rows of W in a pass over 8: 1 to 4; 3 where K is a multiple of 128.
        sharers: warps that share K: a power of two up to 16, or 8 with 4 tiles.
        blocks: how many blocks the rows of W are spread over, at most N.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    configuration = {"rows": rows, "tiles": tiles, "sharers": sharers, "blocks": blocks}
    return run_raw(ROW_STREAM, configuration, x, x_scale, wq, w_scale, False)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    """Yield it first where making X float16 takes longer than W's fewer instructions save, as measured on an H100."""
    m, n, k = problem.key
    few = n <= cu_count * PLANS.fitting(m) * 5 // 2 or k <= 1024
    preferred = few and m > 1 and k % PLANS.step_k == 0 and getattr(problem, "bf16", False)
    yield 0.5 if preferred else 2.0, PLANS.best(m, n, k, cu_count)


def invariant(problem: Any, cu_count: int) -> Configuration:
    """Return a configuration whose warps share K as those of few rows do: that alone decides the order of sums."""
    m, n, k = problem.key
    most = PLANS.best(ROWS[-1], n, k, cu_count)
    return {**most, "rows": PLANS.fitting(m)}


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return PLANS.configurations(m, n, k, archs.get(arch).cu_count)


ROW_STREAM = Kernel(
    "mxfp4_row_stream",
    archs=("sm_90",),
    parameters=PLANS.parameters,
    launch=_launch,
    candidates=_candidates,
    refusal=PLANS.refusal,
    default=_default,
)
