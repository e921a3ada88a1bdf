"""The MX-FP8 GEMM for up to 8 rows on sm_90 that copies X to shared memory: its raw op and its value.

It is the row stream (:mod:`hipforge.ops.mxfp8_gemm.kernels.row_stream`) for blocks that make many passes, each of which
reads all of X: from L2 X takes as long as W there, at 8 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic, row_stream
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed, ceil_div
from hipforge.ops.mxfp8_gemm.kernels import row_stream_made
from hipforge.ops.mxfp8_gemm.kernels.row_stream import BYTES_PER_US, START_US, mxfp8_row_stream
from hipforge.ops.mxfp8_gemm.raw import k_steps, run_raw

LEAST_ROWS = 3  # of X: below, X is little beside W
LEAST_PASSES = 4  # of a block: each reads X
FEW_PASSES, MUCH_W = 2, 16 << 20  # with so few, W has so many bytes at least: a step is faster, not each call alone
SHARE = 0.9  # of the row stream's time


def configurations(m: int, n: int, k: int, units: int) -> list[Configuration]:
    """Return what a tuner may try."""
    if row_stream_made.copied_refusal(m, n, k) is not None:
        return []
    blocks = row_stream.fewest(n, k, row_stream.blocks_for(n, k, units), row_stream_made.TILES)
    most = min(row_stream_made.WARPS, k_steps(k))
    return [
        {"tiles": row_stream_made.TILES, "sharers": sharers, "blocks": blocks}
        for sharers in row_stream.SHARERS
        if sharers <= most and refusal({"sharers": sharers, "blocks": blocks}, (m, n, k), "sm_90") is None
    ]


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return configurations(m, n, k, archs.get(arch).cu_count)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    given = row_stream_made.configuration(n, k, cu_count)
    passes = ceil_div(n, 8 * given["tiles"] * given["blocks"])
    enough = passes >= LEAST_PASSES or (passes >= FEW_PASSES and n * k >= MUCH_W)
    if m >= LEAST_ROWS and enough and given in configurations(m, n, k, cu_count):
        rows = row_stream_made.ROWS
        yield SHARE * (START_US[rows] + n * k / BYTES_PER_US[rows]), given


def refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    """Return what a configuration needs and does not get, or None."""
    m, n, k = key
    if (reason := row_stream_made.copied_refusal(m, n, k)) is not None:
        return reason
    if given["blocks"] > n:
        return "blocks of at most N"
    most = row_stream_made.shared_bytes(m, row_stream_made.TILES, ceil_div(n, given["blocks"]), k)
    room = row_stream.SHARED_BYTES
    return None if most <= room else f"more blocks: shared memory of {most} bytes exceeds {room}"


def _launch(out: torch.Tensor, *given: Any) -> None:
    row_stream_made.mxfp8_row_copied_out(out, *given, programmatic.active())


@documented_like(mxfp8_row_stream)
def mxfp8_row_copied(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tiles: int = row_stream_made.TILES,
    sharers: int = row_stream_made.SHARERS,
    blocks: int = 132,
) -> torch.Tensor:
    """Run the kernel on up to 8 contiguous rows of X whose bytes are at most 32 KiB; K a multiple of 128."""
    return run_raw(ROW_COPIED, Xq, Wq, Xq, Xs, Wq, Ws, bias, tiles=tiles, sharers=sharers, blocks=blocks)


ROW_COPIED = Kernel(
    "mxfp8_row_copied",
    archs=("sm_90",),
    parameters={
        "tiles": (row_stream_made.TILES,),
        "sharers": row_stream.SHARERS,
        "blocks": range(1, row_stream.MOST_BLOCKS + 1),
    },
    launch=_launch,
    candidates=_candidates,
    refusal=refusal,
    default=_default,
)
