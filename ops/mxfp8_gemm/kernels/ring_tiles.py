"""The MX-FP8 GEMM in tiles on sm_90 whose ring a producer warp fills: its stub, its raw op and its value.

The default from 17 rows on where it is the fastest by rough times; ``docs/measured.md`` has those of an H100.
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
    """Rough microseconds on an H100, fitted to measured times.

    Attributes:
        start_us: of a call.
        step_us: of a block's step of 128 k.
        round_us: of the ends of a round of blocks.
        share_us: where blocks share K, and a third of it more for each block more.
        bytes_per_us: of W.
        blocks: of a multiprocessor.
        beside_us: of a step, where two blocks are on a multiprocessor.
    """

    start_us: float
    step_us: float
    round_us: float
    share_us: float
    bytes_per_us: float
    blocks: int = 1
    beside_us: float = 0.0


# By the tile, and whether the scales of W are shared too.
RATES = MappingProxyType({
    ((32, 128), 0): Rate(3.2, 0.50, 1.3, 2.8, 2.5e6, 2, 0.80),
    ((64, 128), 0): Rate(3.0, 0.88, 2.7, 3.3, 2.4e6, 2, 0.94),
    ((64, 256), 0): Rate(2.0, 0.82, 5.7, 3.6, 2.2e6),
    ((128, 128), 0): Rate(4.5, 0.84, 2.9, 3.1, 1.85e6),
    ((128, 128), 1): Rate(3.7, 0.52, 3.1, 3.8, 1.53e6),
})  # fmt: skip
TILES = tuple(dict.fromkeys(tile for tile, _ in RATES))
# Multiprocessors, of 132, that clusters of so many blocks can have: a cluster stays in a part of the GPU.
CLUSTERED = MappingProxyType({1: 132, 2: 132, 3: 120, 4: 120, 8: 112})
MOST_SHARED = 1 << 30  # bytes of W that a call makes again
SHARED_BYTES_PER_US = 2.3e6  # of codes read and written again with shared scales
COPIED_US = 2.0  # where K is no multiple of 512: scales of W are copied to whole lines


def _ceil(count: int, by: int) -> int:
    return -(-count // by)


mxfp8_ring_tiles_out = stub(
    "mxfp8_ring_tiles_out",
    "module_mxfp8_gemm_ring_tiles",
    f"{OPERANDS}; workspace: Tensor; tile, k_splits, shared: int; programmatic: bool",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16; ``workspace`` is uint8 of :func:`workspace_bytes`.",
    variant={"HF_TILE": "tile"},
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_ring_tiles_out(out, *given, programmatic.active())


def workspace_bytes(m: int, n: int, k: int, tile: int, shared: int) -> int:
    """Return the bytes of a launch's workspace: X, its scales, scales of W in whole lines, and W where it is shared."""
    padded, steps = _ceil(m, tile // 1000) * (tile // 1000), k_steps(k)
    scales = n * 16 * _ceil(k, 512)  # always, since W's scales may start anywhere
    return sum(256 * _ceil(part, 256) for part in (m * k, 4 * steps * padded, scales, n * k * shared))


def _workspace(given: Configuration, key: Sequence[int], device: torch.device) -> torch.Tensor:
    m, n, k = key
    return torch.empty(workspace_bytes(m, n, k, given["tile"], given["shared"]), dtype=torch.uint8, device=device)


@documented_like(run_raw)
def mxfp8_ring_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: int = tile_number((128, 128)),
    k_splits: int = 1,
    shared: int = 0,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    X is multiplied in a form in which as much of a row as possible has one scale; a code that this rounds is off by at
    most 2^-11 of the largest of its block (``csrc/mxfp8_gemm/nvidia/share_scales.h``).

    Args:
        tile: rows of X times 1000 plus rows of W that a block multiplies: 32128, 64128, 64256 or 128128.
        k_splits: blocks that share K, 1 to 8, each with at least one step of 128.
        shared: 1 for W in that form too, which the call makes: for many rows of X.
    """
    return run_raw(RING_TILES, Xq, Wq, Xq, Xs, Wq, Ws, bias, tile=tile, k_splits=k_splits, shared=shared)


def _slots(k_splits: int, units: int) -> int:
    return max(1, units * CLUSTERED[k_splits] // CLUSTERED[1])


def _rough_us(m: int, n: int, k: int, tile: Tile, k_splits: int, shared: int, units: int) -> float:
    rate = RATES[tile, shared]
    blocks = _ceil(m, tile[0]) * _ceil(n, tile[1]) * k_splits
    slots = _slots(k_splits, units)
    beside = rate.blocks > 1 and blocks > slots
    rounds = _ceil(blocks, slots * (rate.blocks if beside else 1))
    steps = _ceil(k_steps(k), k_splits)
    busy = rounds * (steps * (rate.beside_us if beside else rate.step_us) + rate.round_us)
    if k_splits > 1:
        busy += rate.share_us * (1 + 0.35 * (k_splits - 1))
    made = 2 * k * (m + n * shared) / SHARED_BYTES_PER_US + (COPIED_US if k % 512 else 0)
    return rate.start_us + made + max(busy, n * k / rate.bytes_per_us)


def _timed(m: int, n: int, k: int, units: int) -> list[Timed]:
    return [
        (
            _rough_us(m, n, k, tile, k_splits, shared, units),
            {"tile": tile_number(tile), "k_splits": k_splits, "shared": shared},
        )
        for tile, shared in RATES
        if n * k * shared <= MOST_SHARED
        for k_splits in CLUSTERED
        if k_splits <= k_steps(k)
        if k_splits == 1 or _ceil(m, tile[0]) * _ceil(n, tile[1]) * k_splits <= _slots(k_splits, units)
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
    k_splits = max(1, min(MULTIPROCESSORS // _ceil(n, INVARIANT_TILE[1]), MOST_SPLITS, k_steps(k)))
    return {"tile": tile_number(INVARIANT_TILE), "k_splits": k_splits, "shared": 0}


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    if key[2] > MOST_K:
        return f"K of at most {MOST_K}"
    steps = k_steps(key[2])
    return None if given["k_splits"] <= steps else f"k_splits of at most {steps}, the steps of 128 of K"


RING_TILES = Kernel(
    "mxfp8_ring_tiles",
    archs=("sm_90",),
    parameters=MappingProxyType({
        "tile": tuple(map(tile_number, TILES)), "k_splits": range(1, MOST_SPLITS + 1), "shared": (0, 1)
    }),
    workspace=_workspace,
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
