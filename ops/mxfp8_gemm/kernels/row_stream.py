"""The MX-FP8 GEMM for few rows on sm_90, which streams W once: its stub, its raw op and its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.raw import K_STEP, OPERANDS, k_steps, run_raw

ROWS = (8, 16, 32)  # of X that a block multiplies at once
TILES = (1, 2, 3, 4)  # of 8 rows of W, in a pass
SHARERS = (1, 2, 4, 8, 16)  # warps that share K
MOST_BLOCKS = 1 << 20
SHARED_BYTES = 227 * 1024  # that a block can have
X_PER_ROW = 0.045  # of a tile's time a row of X costs in each step, however many tiles share it
LONG_RUN_BYTES = 64 * 1024  # of scales that a block keeps, before there are several blocks for each multiprocessor
# Rough microseconds of a call on an H100: a start, and bytes of W over what the kernel reached with 8, 16 and 32 rows.
START_US = {8: 3.2, 16: 3.5, 32: 5.0}
BYTES_PER_US = {8: 2.9e6, 16: 2.5e6, 32: 2.1e6}


def _ceil(count: int, by: int) -> int:
    return -(-count // by)


def warps(rows: int, tiles: int) -> int:
    """Return the warps of a block: what registers allow."""
    return 16 if rows <= 16 and tiles <= 3 else 8


def shared_bytes(rows: int, tiles: int, block_rows: int, k: int) -> int:
    """Return the shared memory of a block that has ``block_rows`` rows of W: ring, sums, scales."""
    count = warps(rows, tiles)
    slots = {1: 4, 2: 3 if count == 16 else 4, 3: 2 if count == 16 else 3, 4: 3}[tiles]
    return count * slots * tiles * 8 * K_STEP + 2 * count * tiles * 8 * rows * 4 + block_rows * (k // 32) + 32


def fitting(m: int) -> int:
    """Return the rows of X that a block takes at once: all of them, up to 32."""
    return next((rows for rows in ROWS if m <= rows), ROWS[-1])


def blocks_for(n: int, k: int, units: int) -> int:
    """Return how many blocks share the rows of W: one a multiprocessor, or several where its scales are many."""
    rounds = 1
    while _ceil(n, units * rounds) * (k // 32) > LONG_RUN_BYTES:
        rounds += 1
    return min(n, units * rounds)


def _steps(n: int, k: int, *, rows: int, tiles: int, sharers: int, blocks: int) -> float:
    """Return how long a warp is busy, in tiles of steps: in each of its passes its steps and one meeting."""
    count = warps(rows, tiles)
    passes = _ceil(_ceil(_ceil(n, blocks), 8 * tiles), count // sharers)
    step = tiles + X_PER_ROW * rows
    return passes * (_ceil(k_steps(k), sharers) * step + tiles) * (count / 16 if count == 16 or rows == 32 else 0.55)


def _configurations(m: int, n: int, k: int, units: int) -> list[Configuration]:
    rows, blocks = fitting(m), blocks_for(n, k, units)
    needed = _ceil(_ceil(n, blocks), 8)
    # With fewer, warps without a pass of their own are idle at the end; a power of two, so that 3 steps have a number.
    least = min(2 if rows <= 16 else 4, 1 << (max(1, k_steps(k)).bit_length() - 1))
    allowed = [tiles for tiles in TILES if (tiles == 1 and needed == 1) or 2 <= tiles <= max(2, needed)]
    return [
        {"rows": rows, "tiles": tiles, "sharers": sharers, "blocks": blocks}
        for tiles in allowed
        if tiles != 3 or k % K_STEP == 0
        for sharers in SHARERS
        if least <= sharers <= min(warps(rows, tiles), max(1, k_steps(k)))
    ]


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    # Of equals the wider pass, which has fewer meetings.
    best = min(_configurations(m, n, k, cu_count), key=lambda given: (_steps(n, k, **given), -given["tiles"]))
    rows = best["rows"]
    yield _ceil(m, rows) * (START_US[rows] + n * k / BYTES_PER_US[rows]), best


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return _configurations(m, n, k, archs.get(arch).cu_count)


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    _, n, k = key
    rows, tiles, sharers, blocks = (given[name] for name in ("rows", "tiles", "sharers", "blocks"))
    if sharers > warps(rows, tiles):
        return f"sharers of at most {warps(rows, tiles)} with these rows and tiles"
    if tiles == 3 and k % K_STEP:
        return f"K of a multiple of {K_STEP} with tiles=3"
    if blocks > n:
        return "blocks of at most N"
    most = shared_bytes(rows, tiles, _ceil(n, blocks), k)
    return None if most <= SHARED_BYTES else f"more blocks: shared memory of {most} bytes exceeds {SHARED_BYTES}"


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
    parameters=MappingProxyType(
        {"rows": ROWS, "tiles": TILES, "sharers": SHARERS, "blocks": range(1, MOST_BLOCKS + 1)}
    ),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
