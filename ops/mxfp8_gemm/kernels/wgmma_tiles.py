"""The MX-FP8 GEMM in tiles on sm_90, for any M: its stub, its raw op and its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core import programmatic
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tiles import tile_number
from hipforge.ops.mxfp8_gemm.raw import OPERANDS, k_steps, run_raw

# Tile -> rough microseconds of a step of 128 k on an H100, and how many blocks a multiprocessor holds.
STEP_US = MappingProxyType({(64, 32): (0.86, 3), (64, 256): (2.7, 1), (128, 128): (2.45, 1)})
START_US = 2.0
INVARIANT_TILE = tile_number((64, 32))  # for every M where results must not depend on it
MOST_K = 1 << 24


mxfp8_wgmma_tiles_out = stub(
    "mxfp8_wgmma_tiles_out",
    "module_mxfp8_gemm_wgmma_tiles",
    f"{OPERANDS}; tile: int; programmatic: bool",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_TILE": "tile"},
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_wgmma_tiles_out(out, *(*given, programmatic.active()))


@documented_like(run_raw)
def mxfp8_wgmma_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: int = tile_number((128, 128)),
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        tile: rows of X times 1000 plus rows of W that a block multiplies: 64032, 64256 or 128128.
    """
    return run_raw(WGMMA_TILES, Xq, Wq, Xq, Xs, Wq, Ws, bias, tile=tile)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    for (rows, columns), (step_us, held) in STEP_US.items():
        blocks = -(-m // rows) * -(-n // columns)
        each = -(-blocks // cu_count)  # blocks that the busiest multiprocessor has; those beside each other share it
        rounds = max(1.0, each / held) if held > 1 else each
        beside = 1.0 if held == 1 else 1.0 + 0.3 * (min(each, held) - 1)
        yield START_US + rounds * beside * step_us * k_steps(k), {"tile": tile_number((rows, columns))}


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    return [{"tile": tile_number(tile)} for tile in STEP_US]


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    return None if key[2] <= MOST_K else f"K of at most {MOST_K}"


WGMMA_TILES = Kernel(
    "mxfp8_wgmma_tiles",
    archs=("sm_90",),
    parameters=MappingProxyType({"tile": tuple(map(tile_number, STEP_US))}),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
