"""Scaled fp8 GEMM: Y = X @ W^T in e4m3 with scales per tensor, per row, or per block in K.

``xq`` [M, K] and ``wq`` [N, K] hold e4m3 elements in the device's format: float8_e4m3fn (or uint8 with the same
bits), on gfx942 float8_e4m3fnuz. Shapes and dtypes of the scales say which kind they are:

================  ==============================  ===================================  ==============================
kind              ``x_scale``                     ``w_scale``                          dtype of both
================  ==============================  ===================================  ==============================
per tensor, row   one element, [M] or [M, 1]      one element, [N] or [N, 1]           float32
128 x 128 blocks  [M, ceil(K / 128)]              [ceil(N / 128), ceil(K / 128)]       float32, or e8m0
32 x 32 blocks    [M, K / 32]                     [ceil(N / 32), K / 32]               e8m0 (K a multiple of 32)
================  ==============================  ===================================  ==============================

e8m0 is uint8 or float8_e8m0fnu. One operand may have one scale and the other a scale per row. Products are exact in
float32 and summed in it: over all of K, then multiplied with both scales (per tensor or row); or over a block,
multiplied with the block's scales and added to the blocks before. The bias is added in float32, and the result is
rounded once, to nearest even. A NaN scale, e8m0 255, makes NaN the outputs that it takes part in.

The kernels read rows of a multiple of 16 bytes: for another K both payloads are copied with zeros behind each row.
"""

from __future__ import annotations

import torch

from hipforge.ops.core.alignment import require_copyable
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import product_result
from hipforge.ops.fp8_gemm.family import FAMILY
from hipforge.ops.fp8_gemm.kernels import BY_NAME, fp8_group_split_out, fp8_tiles_out, fp8_wave_split_out
from hipforge.ops.mxfp8_gemm.kernels import launch
from hipforge.ops.reference.e8m0 import product_dtype
from hipforge.ops.reference.fp8 import fp8_mm

PUBLIC = ("fp8_gemm", "fp8_linear")

__all__ = ["FAMILY", "fp8_gemm", "fp8_group_split_out", "fp8_linear", "fp8_tiles_out", "fp8_wave_split_out"]

_BF16 = torch.bfloat16
_ROW_BYTES = 16


def _new(xq: torch.Tensor, wq: torch.Tensor, out_dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.empty((xq.shape[0], wq.shape[0]), dtype=out_dtype, device=xq.device)


def _run(
    taken: Accepted,
    result: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    missing = -xq.shape[1] % _ROW_BYTES
    if missing:
        for q in (xq, wq):
            require_copyable(q, result)
        xq, wq = (torch.nn.functional.pad(q.view(torch.uint8), (0, missing)).view(q.dtype) for q in (xq, wq))
    return launch(taken, result, xq, x_scale, wq, w_scale, bias, int(taken.problem.scales), kernels=BY_NAME)


@operator(FAMILY.plan, fake=_new, outs=("out",), rows=("xq", "x_scale"))
def fp8_gemm(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype = _BF16,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return X @ W^T + bias from fp8 operands, or None where the caller must use its fallback.

    Args:
        taken: the path that was decided; callers do not pass it.
        xq: activations [M, K] in the device's e4m3, any strides; M up to 16384.
        x_scale: its scales, of a kind that :mod:`hipforge.ops.fp8_gemm` lists.
        wq: weights [N, K].
        w_scale: its scales, of the same kind.
        out_dtype: ``torch.bfloat16`` or ``torch.float16`` (another dtype gives None).
        bias: [N] of ``out_dtype``, added in float32 before the one rounding.
        out: contiguous [M, N] of ``out_dtype`` to write into.

    Returns:
        [M, N] of ``out_dtype``, ``out`` itself where it is given; None outside the envelope or where the tuned table
        says so. ``hipforge.explain(fp8_gemm, ...)`` says which.

    Raises:
        GuardError: operands, ``bias`` or ``out`` of the wrong dtype, shape or device, or scales of no kind.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> e4m3 = hipforge.ops.fp8_linear.fp8_dtypes("cpu")[0]
        >>> x, w = torch.ones(3, 48).to(e4m3), torch.ones(8, 48).to(e4m3)
        >>> y = hipforge.fp8_gemm(x, torch.tensor([1.0, 2.0, 3.0]), w, torch.full((8,), 0.5))
        >>> None if y is None else y[:, 0].tolist()
        [24.0, 48.0, 72.0]
    """
    return _run(taken, product_result(xq, wq, out_dtype, out, bias), xq, x_scale, wq, w_scale, bias)


@operator(FAMILY.plan_total, fake=_new, outs=("out",))
@documented_like(fp8_gemm)
def fp8_linear(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype = _BF16,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return X @ W^T + bias from fp8 operands, always: the kernel where it applies, else torch.

    Args:
        xq: activations [M, K] in the device's e4m3; any M.
        out_dtype: floating-point; the kernels write bfloat16 and float16.

    Returns:
        [M, N] of ``out_dtype``; ``out`` itself where it is given.

    Example:
        >>> import torch, hipforge
        >>> e4m3 = hipforge.ops.fp8_linear.fp8_dtypes("cpu")[0]
        >>> x, w = torch.ones(3, 48).to(e4m3), torch.ones(8, 48).to(e4m3)
        >>> one = torch.ones(())
        >>> hipforge.fp8_linear(x, one, w, one, bias=torch.ones(8).bfloat16())[0, 0].item()
        49.0
    """
    result = product_result(xq, wq, out_dtype, out, bias)
    if taken.path == "kernel":
        return _run(taken, result, xq, x_scale, wq, w_scale, bias)
    scales = [scale for scale in (x_scale, w_scale) if scale.dtype != torch.float32]
    product = fp8_mm(xq, x_scale, wq, w_scale, torch.float32, product_dtype(*scales))
    result.copy_(product if bias is None else product + bias)
    return result
