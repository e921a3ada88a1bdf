"""Small-M MX-FP8 GEMM for gfx950: Y = X @ W^T for decode batches, as a GEMV or through scaled MFMA.

Shapes and dtypes everywhere in this package: ``xq`` [M, K] and ``wq`` [N, K] hold e4m3fn elements (float8_e4m3fn, or
uint8 with the same bits), ``x_scale`` [M, K/32] and ``w_scale`` [N, K/32] hold e8m0 bytes (uint8 or
float8_e8m0fnu), the output [M, N] is bfloat16; K is a multiple of 32. Products are accumulated in float32 and
rounded once, to nearest even. A scale byte of 255 makes the outputs that it takes part in NaN.

Dispatch of :func:`mxfp8_gemv`, in this order:

1. an output dtype other than bfloat16 → None;
2. a device other than gfx950 → None;
3. a row of the tuned table for (K, N, M): ``use_hip=0`` → None, otherwise its kernel and parameters;
4. no row and M = 8 or 16 → MFMA with n_sub = 1 and k_splits the largest of 4 and 2 that divides K/128, else 1;
5. no row and any other M up to 16 → GEMV with block_n = 8;
6. no row and 16 < M < 64, M other than 32: the row of the next larger tuned M decides as in 3;
7. anything else → None.

The envelope is wider than that of the kernels whose interface this is: every K that is a multiple of 32 and every M
up to 16, none of it padded. A matrix of more than 2^31 - 1 elements → None, because the offset of a raw buffer load
is a signed 32-bit number; the raw ops raise there.
"""

from __future__ import annotations

import torch

from hipforge.ops.core import dispatch
from hipforge.ops.core.checks import require_bias, require_out
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.operator import operator
from hipforge.ops.core.tuned import clear_tables
from hipforge.ops.mxfp8_dense.family import FAMILY
from hipforge.ops.mxfp8_dense.kernels import (
    _run_gemv,
    launch,
    smallm_mxfp8_gemv,
    smallm_mxfp8_gemv_out,
    smallm_mxfp8_mfma,
    smallm_mxfp8_mfma_out,
)
from hipforge.ops.reference.mxfp8 import mxfp8_mm

__all__ = [
    "FAMILY",
    "_run_gemv",
    "mxfp8_gemv",
    "mxfp8_linear",
    "reload_tables",
    "smallm_mxfp8_gemv",
    "smallm_mxfp8_gemv_out",
    "smallm_mxfp8_mfma",
    "smallm_mxfp8_mfma_out",
]

_BF16 = torch.bfloat16


def reload_tables() -> None:
    """Read the tuned tables and the override variables again at the next call."""
    clear_tables()
    dispatch.clear_decisions()


def _new(xq: torch.Tensor, x_scale: torch.Tensor, wq: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return torch.empty((xq.size(0), wq.size(0)), dtype=_BF16, device=xq.device)


def _gemv_key(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = _BF16,
) -> tuple[object, ...]:
    """Leave out dtypes and scales, whose descriptions cost a microsecond: the module's guards check them anyway."""
    return xq.shape, wq.shape, xq.device, out_dtype


@operator(FAMILY.plan, key=_gemv_key, fake=_new)
def mxfp8_gemv(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = _BF16,
) -> torch.Tensor | None:
    """Return X @ W^T from MX-FP8 operands, or None where the caller must use its fallback.

    Args:
        taken: the path that was decided; callers do not pass it.
        xq: activations [M, K], float8_e4m3fn or uint8, any strides.
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K].
        w_scale: e8m0 bytes [N, K/32].
        out_dtype: ``torch.bfloat16`` (another dtype gives None).

    Returns:
        bfloat16 [M, N]; None outside the envelope or where the tuned table says so, in the order that the package's
        docstring gives. ``hipforge.explain(mxfp8_gemv, ...)`` says which. Under torch.compile the decision is made
        while tracing, so a graph is for one M; :func:`mxfp8_linear` takes a dynamic M.

    Raises:
        GuardError: dtypes or shapes that are not valid MX-FP8 operands, or tensors on the wrong device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    return launch(taken, _new(xq, x_scale, wq), xq, x_scale, wq, w_scale)


def _linear_key(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[object, ...]:
    # The fallbacks have no guards of a module behind them.
    return xq.shape, x_scale.shape, wq.shape, w_scale.shape, xq.dtype, x_scale.dtype, wq.dtype, w_scale.dtype, xq.device


@operator(FAMILY.plan_total, key=_linear_key, fake=_new, outs=("out",))
def mxfp8_linear(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return X @ W^T + bias from MX-FP8 operands, always: HIP kernel, else Triton on a GPU, else torch.

    Args:
        taken: the path that was decided; callers do not pass it.
        xq: activations [M, K], float8_e4m3fn or uint8; any M.
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K].
        w_scale: e8m0 bytes [N, K/32].
        bias: bfloat16 [N], added to the rounded product.
        out: contiguous bfloat16 [M, N] to write into.

    Returns:
        bfloat16 [M, N]; ``out`` itself where it is given.

    Raises:
        GuardError: operands, ``bias`` or ``out`` of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    m, n = xq.shape[0], wq.shape[0]
    if out is not None:
        require_out(out, (m, n), _BF16, xq.device)
    if bias is not None:
        require_bias(bias, n, _BF16, xq.device)
    result = _new(xq, x_scale, wq) if out is None else out
    if taken.path == "kernel":
        launch(taken, result, xq, x_scale, wq, w_scale)
    elif taken.path == "triton":
        from hipforge.ops.triton import mxfp8_dot_scaled as fallback

        fallback.mxfp8_dot_scaled(result, xq, x_scale, wq, w_scale, fallback.configuration(m))
    else:
        result.copy_(mxfp8_mm(xq, x_scale, wq, w_scale))
    return result if bias is None else result.add_(bias)
