"""The MX-FP8 GEMM for some rows on sm_90 in one launch: its stub, its raw op and its value.

For K a multiple of 512. ``docs/measured.md`` has times of an H100.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed, ceil_div
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.kernels.ring_tiles import slots
from hipforge.ops.mxfp8_gemm.raw import OPERANDS, run_raw

ROWS = (32, 64)  # of X that a block multiplies
COLUMNS = 64  # rows of W
SPAN = 512  # k whose scales are copied at once
MOST_K = 1 << 24
MOST_SPLITS = 8  # blocks of a cluster
# Rough microseconds of a call on an H100: of its start and end, of a block's span of K and of K that a cluster shares,
# both by rows, of each round of blocks after the first; bytes of W.
START_US, SPAN_US, SHARE_US, ROUND_US, BYTES_PER_US = 4.2, {32: 1.0, 64: 1.65}, {32: 0.4, 64: 2.0}, 1.8, 2.56e6


def _blocks(m: int, n: int, rows: int, k_splits: int) -> int:
    return ceil_div(m, rows) * ceil_div(n, COLUMNS) * k_splits


mxfp8_span_tiles_out = stub(
    "mxfp8_span_tiles_out",
    "module_mxfp8_gemm_span_tiles",
    f"{OPERANDS}; rows, k_splits: int; programmatic: bool",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_ROWS": "rows"},
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_span_tiles_out(out, *(*given, programmatic.active()))


@documented_like(run_raw)
def mxfp8_span_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    rows: int = ROWS[-1],
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, K a multiple of 512; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        rows: rows of X that a block multiplies by 64 of W: 32 or 64. W is read once for each.
        k_splits: blocks that share K, 1 to 8, each with at least 512 of it.
    """
    return run_raw(SPAN_TILES, Xq, Wq, Xq, Xs, Wq, Ws, bias, rows=rows, k_splits=k_splits)


def _configurations(m: int, n: int, k: int, units: int) -> list[Configuration]:
    """Return those worth trying: one round of blocks where they share K."""
    return [
        {"rows": rows, "k_splits": k_splits}
        for rows in ROWS
        for k_splits in range(1, min(MOST_SPLITS, k // SPAN) + 1)
        if k_splits == 1 or _blocks(m, n, rows, k_splits) <= slots(k_splits, units)
    ]


def _rough_us(m: int, n: int, k: int, given: Configuration, units: int) -> float:
    rows, k_splits = given["rows"], given["k_splits"]
    rounds = ceil_div(_blocks(m, n, rows, k_splits), slots(k_splits, units))
    busy = rounds * ceil_div(k // SPAN, k_splits) * SPAN_US[rows]
    shared = SHARE_US[rows] if k_splits > 1 else 0
    return START_US + max(busy, n * k / BYTES_PER_US) + shared + ROUND_US * (rounds - 1)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    if k % SPAN == 0 and k <= MOST_K:
        timed = [(_rough_us(m, n, k, given, cu_count), given) for given in _configurations(m, n, k, cu_count)]
        yield min(timed, key=lambda one: one[0])


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return _configurations(m, n, k, archs.get(arch).cu_count) if k % SPAN == 0 and m <= 4 * ROWS[-1] else []


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    if key[2] % SPAN or key[2] > MOST_K:
        return f"K a multiple of {SPAN}, at most {MOST_K}"
    spans = key[2] // SPAN
    return None if given["k_splits"] <= spans else f"k_splits of at most {spans}, the spans of {SPAN} of K"


SPAN_TILES = Kernel(
    "mxfp8_span_tiles",
    archs=("sm_90",),
    parameters=MappingProxyType({"rows": ROWS, "k_splits": range(1, MOST_SPLITS + 1)}),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
