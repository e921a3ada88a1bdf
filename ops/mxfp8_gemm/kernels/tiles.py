"""The MX-FP8 GEMM whose tiles pass through LDS, for any M: its stub, its raw op and its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tiles import K_SPLITS, TileKernel, split_workspace, tile_number
from hipforge.ops.mxfp8_gemm.raw import MAX_K, MAX_M, OPERANDS, run_raw

ABOVE_M = 16  # up to there a tile's rows are mostly empty
BYTES_AHEAD = 3 * 2048  # of 64 x 64: three stages of four, and of each a wave's part of W
# Chosen to come near `hipforge time` at the 15 shapes of MiniMax-M3 with M = 96 to 256, and at (2048, 6144, 6144).
TILED = TileKernel(
    "mxfp8_gemm_tiles",
    k_step=128,
    step_us=MappingProxyType(
        {(256, 256): 1.33, (192, 256): 1.15, (192, 128): 0.77, (128, 192): 0.78, (128, 128): 0.61, (128, 64): 0.46,
         (64, 64): 0.30}
    ),
    partial_us=1.3e-4,
)  # fmt: skip


mxfp8_gemm_out = stub(
    "mxfp8_gemm_out",
    "module_mxfp8_gemm_tiles",
    f"{OPERANDS}; workspace: Tensor?; tile, k_splits: int",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16; ``workspace`` is what :func:`split_workspace` returns.",
    variant={"HF_TILE": "tile"},
    mutates=("out", "workspace"),
)


@documented_like(run_raw)
def mxfp8_gemm_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: int = tile_number((128, 128)),
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the tile kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        Xq: activations [M, K]; K a multiple of 32, at most 2^22.
        tile: rows of X times 1000 plus rows of W that a work-group multiplies: 256256, 192256, 192128, 128192,
            128128, 128064 or 64064.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 128); their sums are added in a fixed order.
    """
    return run_raw(TILES, Xq, Wq, Xq, Xs, Wq, Ws, bias, tile=tile, k_splits=k_splits)


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key[:3]
    found = TILED.candidates(m, n, k, archs.get(arch).cu_count) if m > ABOVE_M else []
    return [choice.configuration for choice in found]


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key[:3]
    if m > ABOVE_M:
        for us, tile, k_splits in TILED.timed(m, n, k, cu_count):
            yield us, {"tile": tile_number(tile), "k_splits": k_splits}


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    takes = key[0] <= MAX_M and key[2] <= MAX_K and given["k_splits"] <= TILED.steps(key[2])
    return None if takes else f"M of at most {MAX_M}, K of at most {MAX_K}, no more k_splits than steps of 128"


def _workspace(given: Configuration, key: Sequence[int], device: torch.device) -> torch.Tensor | None:
    return split_workspace(key[0], key[1], given["tile"], given["k_splits"], device)


TILES = Kernel(
    TILED.name,
    archs=("gfx950",),
    parameters=MappingProxyType({"tile": tuple(map(tile_number, TILED.step_us)), "k_splits": K_SPLITS}),
    launch=mxfp8_gemm_out,
    candidates=_candidates,
    pipeline=lambda given, cell, arch: Pipeline(BYTES_AHEAD),
    refusal=_refusal,
    default=_default,
    workspace=_workspace,
)
