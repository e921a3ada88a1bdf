"""The MXFP4 GEMM in tiles that pass through LDS, for any M and tensors of any size: its stub, raw op and value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tiles import K_SPLITS, MAX_K, TileKernel, split_workspace, tile_number
from hipforge.ops.mxfp4_gemm.raw import OPERANDS, run_raw

BYTES_AHEAD = 3 * 2048  # of 64 x 64: three stages of four, and of each a wave's part of W
TILED = TileKernel(
    "mxfp4_gemm_tiles",
    k_step=256,
    step_us=MappingProxyType(
        {(256, 256): 1.55, (192, 256): 1.27, (192, 128): 0.82, (128, 192): 0.9, (128, 128): 0.675, (64, 128): 0.57,
         (64, 64): 0.365, (32, 64): 0.325}
    ),
    partial_us=2e-4,
)  # fmt: skip


mxfp4_gemm_tiles_out = stub(
    "mxfp4_gemm_tiles_out",
    "module_mxfp4_gemm_tiles",
    f"{OPERANDS}; workspace: Tensor?; shuffled: bool; tile, k_splits: int",
    "Write Xq @ Wq^T into ``out`` [M, N] bf16; ``workspace`` is what :func:`split_workspace` returns.",
    variant={"HF_TILE": "tile"},
    mutates=("out", "workspace"),
)


@documented_like(run_raw)
def run_mxfp4_tiles(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    shuffled: bool = False,
    tile: int = tile_number((128, 128)),
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel in tiles, as configured; shapes and dtypes as in :mod:`hipforge.ops.mxfp4_gemm`.

    Args:
        xq: activations [M, K/2] of any size; K at most 2^22.
        wq: weights [N, K/2] of any size.
        tile: rows of X times 1000 plus rows of W that a work-group multiplies: 256256, 192256, 192128, 128192,
            128128, 64128, 64064 or 32064.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 256); their sums are added in a fixed order.
    """
    return run_raw(TILES, {"tile": tile, "k_splits": k_splits}, xq, x_scale, wq, w_scale, shuffled)


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return [choice.configuration for choice in TILED.candidates(m, n, k, archs.get(arch).cu_count)]


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    for us, tile, k_splits in TILED.timed(m, n, k, cu_count) if k <= MAX_K else ():
        yield us, {"tile": tile_number(tile), "k_splits": k_splits}


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    takes = key[2] <= MAX_K and given["k_splits"] <= TILED.steps(key[2])
    return None if takes else f"K of at most {MAX_K}, no more k_splits than steps of {TILED.k_step}"


def _launch(
    out: torch.Tensor,
    xq: torch.Tensor,
    xs: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    shuffled: bool,
    workspace: torch.Tensor | None,
    tile: int,
    k_splits: int,
) -> None:
    mxfp4_gemm_tiles_out(out, xq, xs, wq, ws, workspace, shuffled, tile, k_splits)


TILES = Kernel(
    TILED.name,
    archs=("gfx950",),
    parameters=MappingProxyType({"tile": tuple(map(tile_number, TILED.step_us)), "k_splits": K_SPLITS}),
    launch=_launch,
    candidates=_candidates,
    pipeline=lambda given, cell, arch: Pipeline(BYTES_AHEAD),
    refusal=_refusal,
    default=_default,
    workspace=lambda given, key, device: split_workspace(key[0], key[1], given["tile"], given["k_splits"], device),
)
