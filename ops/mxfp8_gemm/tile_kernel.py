"""The MX-FP8 GEMM whose tiles pass through LDS, for any M: its stub, its raw op and which tile a shape gets."""

from __future__ import annotations

from types import MappingProxyType

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.tiles import TileKernel, split_workspace, tile_number
from hipforge.ops.mxfp8_gemm.raw import new_result

KERNEL = "mxfp8_gemm_tiles"
MAX_M = 16384
# Chosen to come near `hipforge time` at the 15 shapes of MiniMax-M3 with M = 96 to 256, and at (2048, 6144, 6144).
TILED = TileKernel(
    KERNEL,
    k_step=128,
    step_us=MappingProxyType(
        {(256, 256): 1.33, (192, 256): 1.15, (192, 128): 0.77, (128, 192): 0.78, (128, 128): 0.61, (128, 64): 0.46,
         (64, 64): 0.30}
    ),
    partial_us=1.3e-4,
)  # fmt: skip


@compile_ops("module_mxfp8_gemm_tiles", variant=lambda *given: {"HF_TILE": given[-2]}, mutates=("out", "workspace"))
def mxfp8_gemm_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None,
    workspace: torch.Tensor | None,
    tile: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T + bias into ``out`` [M, N] bf16; ``workspace`` is what :func:`split_workspace` returns."""


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
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        bias: bfloat16 [N], added in float32 before the only rounding.
        tile: rows of X times 1000 plus rows of W that a work-group multiplies: 256256, 192256, 192128, 128192,
            128128, 128064 or 64064.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 128); their sums are added in a fixed order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = new_result(Xq, Wq)
    TILED.require_tile(tile)
    workspace = split_workspace(out.shape[0], out.shape[1], tile, require_int("k_splits", k_splits), out.device)
    mxfp8_gemm_out(out, Xq, Xs, Wq, Ws, bias, workspace, tile, k_splits)
    return out
