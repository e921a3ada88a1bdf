"""The MX-FP8 GEMM for many rows on sm_90 in one launch, multiplied as f16: its stub, its raw op and its value.

For K a multiple of 512, the default from 65 to 1,024 rows where it is the fastest by rough times; ``docs/measured.md``
has those of an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed, ceil_div
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tiles import NEAR, Tile, tile_number
from hipforge.ops.mxfp8_gemm.kernels.ring_tiles import slots
from hipforge.ops.mxfp8_gemm.raw import FEW_ROWS, OPERANDS, k_steps, run_raw

SPAN = 512  # k whose scales are copied at once
MOST_K = 1 << 24
MOST_SPLITS = 8  # blocks of a cluster, which share K


@dataclass(frozen=True)
class Rate:
    """Rough microseconds on an H200, fitted to measured times.

    Attributes:
        start_us: of a call.
        step_us: of a block's step of 128 k.
        round_us: of the ends of each round of blocks after the first.
        share_us: where a cluster shares K.
        sharer_us: for each block of it after the second.
    """

    start_us: float
    step_us: float
    round_us: float
    share_us: float
    sharer_us: float


RATES = MappingProxyType({
    (64, 128): Rate(4.5, 0.66, 2.5, 1.9, 0.22),
    (64, 256): Rate(6.4, 0.95, 4.0, 2.7, 0.3),
    (128, 128): Rate(5.2, 0.90, 3.0, 3.1, 0.35),
    (128, 256): Rate(6.2, 1.45, 8.0, 4.6, 0.4),
})  # fmt: skip
TILES = tuple(RATES)
BYTES_PER_US = 2.9e6  # of W
MOST_ROWS = 1024  # for which they were measured beside the other kernels
LIKELY_SPLITS = 5  # larger clusters leave too many multiprocessors idle

mxfp8_half_tiles_out = stub(
    "mxfp8_half_tiles_out",
    "module_mxfp8_gemm_half_tiles",
    f"{OPERANDS}; tile, k_splits: int; programmatic: bool",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_TILE": "tile"},
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_half_tiles_out(out, *given, programmatic.active())


@documented_like(run_raw)
def mxfp8_half_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: int = tile_number((128, 128)),
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, K a multiple of 512; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        tile: rows of X times 1000 plus rows of W that a block multiplies: 64128, 64256, 128128 or 128256.
        k_splits: blocks that share K, 1 to 8, each with at least one step of 128.
    """
    return run_raw(HALF_TILES, Xq, Wq, Xq, Xs, Wq, Ws, bias, tile=tile, k_splits=k_splits)


def _blocks(m: int, n: int, tile: Tile, k_splits: int) -> int:
    return ceil_div(m, tile[0]) * ceil_div(n, tile[1]) * k_splits


def _rough_us(m: int, n: int, k: int, tile: Tile, k_splits: int, units: int) -> float:
    rate = RATES[tile]
    rounds = ceil_div(_blocks(m, n, tile, k_splits), slots(k_splits, units))
    busy = rounds * ceil_div(k_steps(k), k_splits) * rate.step_us + (rounds - 1) * rate.round_us
    shared = rate.share_us + (k_splits - 2) * rate.sharer_us if k_splits > 1 else 0
    return rate.start_us + max(busy, n * k / BYTES_PER_US) + shared


def _timed(m: int, n: int, k: int, units: int) -> list[Timed]:
    return [
        (_rough_us(m, n, k, tile, k_splits, units), {"tile": tile_number(tile), "k_splits": k_splits})
        for tile in TILES
        for k_splits in range(1, min(LIKELY_SPLITS, k_steps(k)) + 1)
        if k_splits == 1 or _blocks(m, n, tile, k_splits) <= slots(k_splits, units)
    ]


def _takes(k: int) -> bool:
    return k % SPAN == 0 and k <= MOST_K


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    if FEW_ROWS < m <= MOST_ROWS and _takes(k):
        yield min(_timed(m, n, k, cu_count), key=lambda one: one[0])


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    timed = sorted(_timed(m, n, k, archs.get(arch).cu_count), key=lambda one: one[0]) if _takes(k) else []
    return [given for us, given in timed if us <= NEAR * timed[0][0]]


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    if not _takes(key[2]):
        return f"K a multiple of {SPAN}, at most {MOST_K}"
    steps = k_steps(key[2])
    return None if given["k_splits"] <= steps else f"k_splits of at most {steps}, the steps of 128 of K"


HALF_TILES = Kernel(
    "mxfp8_half_tiles",
    archs=("sm_90",),
    parameters=MappingProxyType({"tile": tuple(map(tile_number, TILES)), "k_splits": range(1, MOST_SPLITS + 1)}),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
