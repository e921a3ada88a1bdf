"""The MX-FP8 GEMM in tiles on sm_90 whose ring a producer warp fills: its stub, its raw op and its value.

The default for 17 to some 500 rows where it is the fastest by rough times; ``docs/measured.md`` has those of an H100.
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
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tiles import NEAR, Tile, tile_number
from hipforge.ops.mxfp8_gemm.raw import OPERANDS, k_steps, run_raw

MOST_K = 1 << 24
MOST_SPLITS = 8  # blocks of a cluster, which share K
INVARIANT_TILE = (64, 128)
MULTIPROCESSORS = 132  # that the invariant plan reckons with, whatever the card


@dataclass(frozen=True)
class Rate:
    """Rough microseconds on an H100: of a tile's block, of a step of 128 k, and of one with another block beside it."""

    start_us: float
    step_us: float
    beside_us: float | None = None  # None where a multiprocessor holds one block


RATES = MappingProxyType({
    (32, 128): Rate(4.0, 0.7, 1.05), (64, 128): Rate(4.0, 1.0), (128, 128): Rate(5.0, 2.1), (128, 256): Rate(8.0, 2.9)
})  # fmt: skip
SPLIT_US = 2.6  # of each block more that shares K, in each round
BYTES_PER_US = 2.3e6  # of W


def _ceil(count: int, by: int) -> int:
    return -(-count // by)


mxfp8_ring_tiles_out = stub(
    "mxfp8_ring_tiles_out",
    "module_mxfp8_gemm_ring_tiles",
    f"{OPERANDS}; tile, k_splits: int; programmatic: bool",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_TILE": "tile"},
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_ring_tiles_out(out, *(*given, programmatic.active()))


@documented_like(run_raw)
def mxfp8_ring_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: int = tile_number((128, 128)),
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        tile: rows of X times 1000 plus rows of W that a block multiplies: 32128, 64128, 128128 or 128256.
        k_splits: blocks that share K, 1 to 8, each with at least one step of 128.
    """
    return run_raw(RING_TILES, Xq, Wq, Xq, Xs, Wq, Ws, bias, tile=tile, k_splits=k_splits)


def _rough_us(m: int, n: int, k: int, tile: Tile, k_splits: int, units: int) -> float:
    rate = RATES[tile]
    blocks = _ceil(m, tile[0]) * _ceil(n, tile[1]) * k_splits
    if rate.beside_us is None or blocks <= units:
        rounds, step_us = _ceil(blocks, units), rate.step_us
    else:
        rounds, step_us = _ceil(blocks, 2 * units), rate.beside_us
    busy = rounds * _ceil(k_steps(k), k_splits) * step_us
    return rate.start_us + rounds * SPLIT_US * (k_splits - 1) + max(busy, n * k / BYTES_PER_US)


def _splits(k: int) -> range:
    return range(1, min(MOST_SPLITS, k_steps(k)) + 1)


def _timed(m: int, n: int, k: int, units: int) -> list[Timed]:
    return [
        (_rough_us(m, n, k, tile, k_splits, units), {"tile": tile_number(tile), "k_splits": k_splits})
        for tile in RATES
        for k_splits in _splits(k)
    ]


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    yield min(_timed(m, n, k, cu_count), key=lambda one: one[0])


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    timed = sorted(_timed(m, n, k, archs.get(arch).cu_count), key=lambda one: one[0])
    return [given for us, given in timed if us <= NEAR * timed[0][0]]


def invariant(problem: Any) -> Configuration:
    """Return the configuration that every M gets where results must not depend on it, nor on the card."""
    _, n, k = problem.key
    k_splits = max(1, min(MULTIPROCESSORS // _ceil(n, INVARIANT_TILE[1]), _splits(k)[-1]))
    return {"tile": tile_number(INVARIANT_TILE), "k_splits": k_splits}


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    if key[2] > MOST_K:
        return f"K of at most {MOST_K}"
    steps = k_steps(key[2])
    return None if given["k_splits"] <= steps else f"k_splits of at most {steps}, the steps of 128 of K"


RING_TILES = Kernel(
    "mxfp8_ring_tiles",
    archs=("sm_90",),
    parameters=MappingProxyType({"tile": tuple(map(tile_number, RATES)), "k_splits": range(1, MOST_SPLITS + 1)}),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
