"""The stubs of the MXFP4 GEMM's two modules, and their calls in an explicit configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.alignment import packed, realigned
from hipforge.ops.core.checks import require_choice, require_int
from hipforge.ops.core.tiles import split_workspace, tile_number
from hipforge.ops.mxfp4_gemm.family import PARAMETERS, Problem
from hipforge.ops.mxfp4_gemm.rule import K_SPLITS, SUB_TILES, TILED, WAVES


@compile_ops(
    "module_mxfp4_gemm",
    variant=lambda out, xq, xs, wq, ws, shuffled, m_sub, n_sub, k_splits: {"HF_M_SUB": m_sub, "HF_N_SUB": n_sub},
)
def mxfp4_gemm_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    shuffled: bool,
    m_sub: int,
    n_sub: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T into ``out`` [M, N] bf16."""


@compile_ops("module_mxfp4_gemm_tiles", variant=lambda *given: {"HF_TILE": given[-2]}, mutates=("out", "workspace"))
def mxfp4_gemm_tiles_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    workspace: torch.Tensor | None,
    shuffled: bool,
    tile: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T into ``out`` [M, N] bf16; ``workspace`` is what :func:`split_workspace` returns."""


def launch(
    kernel: str,
    configuration: Mapping[str, int],
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    shuffled: bool,
) -> torch.Tensor:
    """Run a kernel into ``out``; operands off a 16-byte boundary are copied once the kernel has refused them."""
    operands = packed(xq), packed(x_scale), packed(wq), packed(w_scale)
    try:
        if kernel == WAVES:
            m_sub, n_sub, k_splits = (configuration[name] for name in PARAMETERS)
            mxfp4_gemm_out(out, *operands, shuffled, m_sub, n_sub, k_splits)
        else:
            tile, k_splits = configuration["tile"], configuration["k_splits"]
            workspace = split_workspace(out.shape[0], out.shape[1], tile, k_splits, out.device)
            mxfp4_gemm_tiles_out(out, *operands, workspace, shuffled, tile, k_splits)
    except GuardError:
        copies = realigned(*operands)
        if copies is None:
            raise
        xq, x_scale, wq, w_scale = copies
        return launch(kernel, configuration, out, xq, x_scale, wq, w_scale, shuffled)
    return out


def _new_result(
    xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor, shuffled: bool
) -> torch.Tensor:
    m, n, _ = Problem.of(xq, x_scale, wq, w_scale, shuffled=shuffled).key
    return torch.empty((m, n), dtype=torch.bfloat16, device=xq.device)


def run_mxfp4(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    shuffled: bool = False,
    m_sub: int = 1,
    n_sub: int = 1,
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel whose waves split K, as configured; shapes and dtypes as in :mod:`hipforge.ops.mxfp4_gemm`.

    Args:
        xq: activations [M, K/2].
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K/2]; a payload has at most 2^31 - 1 bytes.
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        shuffled: the weight and its scales are in the shuffled order.
        m_sub: tiles of 16 rows per wave: 1, 2 or 4.
        n_sub: tiles of 16 columns per wave: 1, 2 or 4.
        k_splits: waves of a work-group, each with a part of K: 1, 2, 4 or 8, at most ceil(K / 128) and
            64 / (m_sub n_sub). Their sums are added in order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    require_choice("m_sub", m_sub, SUB_TILES)
    require_choice("n_sub", n_sub, SUB_TILES)
    require_choice("k_splits", k_splits, K_SPLITS)
    out = _new_result(xq, x_scale, wq, w_scale, shuffled)
    configuration = {"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}
    return launch(WAVES, configuration, out, xq, x_scale, wq, w_scale, shuffled)


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
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K/2] of any size.
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        shuffled: the weight and its scales are in the shuffled order.
        tile: rows of X times 1000 plus rows of W that a work-group multiplies: 256256, 192256, 192128, 128192,
            128128, 64128, 64064 or 32064.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 256); their sums are added in a fixed order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    TILED.require_tile(tile)
    require_int("k_splits", k_splits)
    out = _new_result(xq, x_scale, wq, w_scale, shuffled)
    return launch(TILED.name, {"tile": tile, "k_splits": k_splits}, out, xq, x_scale, wq, w_scale, shuffled)
