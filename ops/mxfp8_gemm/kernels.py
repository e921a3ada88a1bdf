"""The raw small-M MX-FP8 ops: stubs of the two modules, and the functions that allocate what they write.

Shapes and dtypes are those of :mod:`hipforge.ops.mxfp8_gemm`, whose dispatch chooses between them. Raw ops take
contiguous tensors and raise for anything that they do not take; they never return None.
"""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.alignment import packed, realigned
from hipforge.ops.core.checks import require_int, require_tensor
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.tiles import split_workspace
from hipforge.ops.mxfp8_gemm import group_split, k_packed, tile_kernel, wave_split
from hipforge.ops.mxfp8_gemm.family import DEFAULT_BLOCK_N, GEMV_MAX_M, MFMA_K_SPLITS, MFMA_N_SUB
from hipforge.ops.mxfp8_gemm.raw import new_result

# Past 16 rows any variant does: its guard refuses M.
_ROWS = (1, 1, 2, 4, 4, 8, 8, 8, 8, *(16,) * 8)


def gemv_rows(m: int) -> int:
    """Return how many rows the GEMV variant that serves M = ``m`` accumulates."""
    return _ROWS[m] if m <= GEMV_MAX_M else GEMV_MAX_M


@compile_ops("module_mxfp8_gemm_gemv", variant=lambda out, x, *given: {"HF_ROWS": gemv_rows(x.shape[0])})
def smallm_mxfp8_gemv_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    block_n: int,
    bias: torch.Tensor | None = None,
) -> None:
    """Write Xq @ Wq^T + ``bias`` into ``out`` [M, N] bf16; ``block_n`` columns per work-group."""


@compile_ops(
    "module_mxfp8_gemm_mfma",
    # The module's guard refuses any other n_sub.
    variant=lambda *given: {"HF_N_SUB": given[6] if given[6] in MFMA_N_SUB else 1},
    mutates=("out", "workspace"),
)
def smallm_mxfp8_mfma_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    workspace: torch.Tensor | None,
    n_sub: int,
    k_splits: int,
    bias: torch.Tensor | None = None,
) -> None:
    """Write Xq @ Wq^T + ``bias`` into ``out`` [M, N] bf16; ``workspace`` float32 [k_splits, M, N] takes partials."""


def _new_result(xq: torch.Tensor, wq: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if out_dtype != torch.bfloat16:
        raise GuardError(f"out_dtype must be torch.bfloat16; got {out_dtype}")
    return new_result(xq, wq)


def smallm_mxfp8_gemv(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    out_dtype: torch.dtype,
    block_n: int = DEFAULT_BLOCK_N,
) -> torch.Tensor:
    """Run the GEMV kernel on contiguous tensors; shapes and dtypes as in the module's docstring, M from 1 to 16.

    Args:
        Xq: activations [M, K].
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        out_dtype: ``torch.bfloat16``.
        block_n: columns per work-group: 4, 8, 16, 32 or 64.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = _new_result(Xq, Wq, out_dtype)
    smallm_mxfp8_gemv_out(out, Xq, Xs, Wq, Ws, block_n)
    return out


def split_k_workspace(m: int, n: int, k_splits: int, device: torch.device) -> torch.Tensor | None:
    """Return the float32 [k_splits, m, n] that partial sums need; None where K is not split."""
    return torch.empty((k_splits, m, n), dtype=torch.float32, device=device) if k_splits > 1 else None


def smallm_mxfp8_mfma(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    out_dtype: torch.dtype,
    n_sub: int = 1,
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the scaled-MFMA kernel on contiguous tensors; shapes and dtypes as in the module's docstring, M to 64.

    With ``k_splits`` > 1 float32 partial sums are added in a fixed order, so that results do not vary from run to
    run.

    Args:
        Xq: activations [M, K].
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        out_dtype: ``torch.bfloat16``.
        n_sub: 16-column tiles per wave: 1, 2 or 4.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 128).

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = _new_result(Xq, Wq, out_dtype)
    parts = min(require_int("k_splits", k_splits), MFMA_K_SPLITS[-1])
    workspace = split_k_workspace(out.shape[0], out.shape[1], parts, out.device)
    smallm_mxfp8_mfma_out(out, Xq, Xs, Wq, Ws, workspace, n_sub, k_splits)
    return out


def _run_gemv(
    xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, block_n: int
) -> None:
    if xq.size(0) > GEMV_MAX_M:
        raise GuardError(f"the GEMV kernel needs M<={GEMV_MAX_M}; got M={xq.shape[0]}")
    smallm_mxfp8_gemv_out(out, packed(xq), packed(x_scale), packed(wq), packed(w_scale), block_n)


def launch(
    taken: Accepted,
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel that was decided into ``out``; copies replace views that it cannot read.

    Those are operands that start off a 16-byte boundary, copied once the kernel has refused them. ``bias`` is added in
    float32 before the one rounding.
    """
    kernel, configuration = taken.kernel, taken.configuration
    bias = None if bias is None else packed(bias)
    added = () if bias is None else (bias,)
    try:
        operands = xq, x_scale, wq, w_scale
        if not (xq.is_contiguous() and x_scale.is_contiguous() and wq.is_contiguous() and w_scale.is_contiguous()):
            operands = packed(xq), packed(x_scale), packed(wq), packed(w_scale)
        if kernel == "smallm_mxfp8_gemv":
            smallm_mxfp8_gemv_out(out, *operands, configuration["block_n"], *added)
        elif kernel == wave_split.KERNEL:
            rows, columns, waves = configuration["rows"], configuration["columns"], configuration["waves"]
            wave_split.mxfp8_wave_split_out(out, *operands, bias, rows, columns, waves)
        elif kernel == group_split.KERNEL:
            rows, columns, k_splits = configuration["rows"], configuration["columns"], configuration["k_splits"]
            (m, n), device = out.shape, out.device
            parts = group_split.split_workspace(m, n, rows, columns, k_splits, device)
            group_split.mxfp8_group_split_out(out, *operands, bias, parts, rows, columns, k_splits)
        elif kernel == k_packed.KERNEL:
            columns, groups, waves = configuration["columns"], configuration["groups"], configuration["waves"]
            k_packed.mxfp8_k_packed_out(out, *operands, bias, columns, groups, waves)
        else:
            k_splits = configuration["k_splits"]
            (m, n), device = out.shape, out.device
            if kernel == tile_kernel.KERNEL:
                tile = configuration["tile"]
                workspace = split_workspace(m, n, tile, k_splits, device)
                tile_kernel.mxfp8_gemm_out(out, *operands, bias, workspace, tile, k_splits)
            else:
                workspace = split_k_workspace(m, n, k_splits, device)
                smallm_mxfp8_mfma_out(out, *operands, workspace, configuration["n_sub"], k_splits, *added)
    except AttributeError:  # checked afterwards, so that a good call does not pay for it
        require_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
        raise
    except GuardError:
        copies = realigned(xq, x_scale, wq, w_scale)
        if copies is None:
            raise
        xq, x_scale, wq, w_scale = copies
        return launch(taken, out, xq, x_scale, wq, w_scale, bias)
    return out
