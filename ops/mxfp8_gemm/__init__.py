"""MX-FP8 GEMM: Y = X @ W^T, as a GEMV or through scaled MFMA for decode batches, in tiles for any M.

Shapes and dtypes everywhere in this package: ``xq`` [M, K] and ``wq`` [N, K] hold e4m3fn elements (float8_e4m3fn, or
uint8 with the same bits), ``x_scale`` [M, K/32] and ``w_scale`` [N, K/32] hold e8m0 bytes (uint8 or
float8_e8m0fnu), the output [M, N] is bfloat16; K is a multiple of 32. Products are accumulated in float32 and
rounded once, to nearest even. A scale byte of 255 makes the outputs that it takes part in NaN.

Dispatch of :func:`mxfp8_gemv`, in this order:

1. an output dtype other than bfloat16 → None;
2. a device other than gfx950 and sm_90 → None;
3. a row of the tuned table for (K, N, M): ``use_hip=0`` → None, otherwise its kernel (:mod:`.kernels` lists them) in
   its configuration, which are a raw op of this package and its arguments;
4. no row and M up to 16 → of all kernels the configuration with the least rough time;
5. no row and 16 < M < 64, M other than 32: the row of the next larger tuned M decides as in 3;
6. anything else → None.

The envelope is every K that is a multiple of 32 and every M up to 16, without padding: wider than that of the kernels
with this interface elsewhere. A matrix of more than 2^31 - 1 elements → None, because the offset of a raw buffer load
is a signed 32-bit number; the raw ops raise there.

:func:`mxfp8_gemm` and :func:`mxfp8_linear` take tuned rows too. Without one, the rule of step 4 holds
for every M up to 16384: up to 64 rough times are those of :mod:`hipforge.ops.mxfp8_gemm.few_rows`, beyond those of
:mod:`hipforge.ops.core.tiles`. On gfx942 payloads are float8_e4m3fnuz,
and every M is computed by splitting K over waves.
"""

from __future__ import annotations

import torch

from hipforge.ops.core import dispatch
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import product_result
from hipforge.ops.core.tuned import clear_tables
from hipforge.ops.mxfp8_gemm.family import FAMILY, GEMM
from hipforge.ops.mxfp8_gemm.kernels import launch
from hipforge.ops.mxfp8_gemm.kernels.gemv import _run_gemv, smallm_mxfp8_gemv, smallm_mxfp8_gemv_out
from hipforge.ops.mxfp8_gemm.kernels.group_split import mxfp8_group_split, mxfp8_group_split_out
from hipforge.ops.mxfp8_gemm.kernels.half_tiles import mxfp8_half_tiles, mxfp8_half_tiles_out
from hipforge.ops.mxfp8_gemm.kernels.k_packed import mxfp8_k_packed, mxfp8_k_packed_out
from hipforge.ops.mxfp8_gemm.kernels.mfma import smallm_mxfp8_mfma, smallm_mxfp8_mfma_out
from hipforge.ops.mxfp8_gemm.kernels.ring_tiles import mxfp8_ring_tiles, mxfp8_ring_tiles_out
from hipforge.ops.mxfp8_gemm.kernels.row_copied import mxfp8_row_copied
from hipforge.ops.mxfp8_gemm.kernels.row_stream import mxfp8_row_stream, mxfp8_row_stream_out
from hipforge.ops.mxfp8_gemm.kernels.row_stream_made import mxfp8_row_copied_out
from hipforge.ops.mxfp8_gemm.kernels.span_tiles import mxfp8_span_tiles, mxfp8_span_tiles_out
from hipforge.ops.mxfp8_gemm.kernels.tiles import mxfp8_gemm_out, mxfp8_gemm_tiles
from hipforge.ops.mxfp8_gemm.kernels.wave_split import mxfp8_wave_split, mxfp8_wave_split_out
from hipforge.ops.reference.e8m0 import product_dtype
from hipforge.ops.reference.mxfp8 import mxfp8_mm

PUBLIC = ("mxfp8_gemm", "mxfp8_gemv", "mxfp8_linear")

__all__ = [
    "FAMILY",
    "GEMM",
    "_run_gemv",
    "mxfp8_gemm",
    "mxfp8_gemm_out",
    "mxfp8_gemm_tiles",
    "mxfp8_gemv",
    "mxfp8_group_split",
    "mxfp8_group_split_out",
    "mxfp8_half_tiles",
    "mxfp8_half_tiles_out",
    "mxfp8_k_packed",
    "mxfp8_k_packed_out",
    "mxfp8_linear",
    "mxfp8_ring_tiles",
    "mxfp8_ring_tiles_out",
    "mxfp8_row_copied",
    "mxfp8_row_copied_out",
    "mxfp8_row_stream",
    "mxfp8_row_stream_out",
    "mxfp8_span_tiles",
    "mxfp8_span_tiles_out",
    "mxfp8_wave_split",
    "mxfp8_wave_split_out",
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


def _new(xq: torch.Tensor, wq: torch.Tensor) -> torch.Tensor:
    return torch.empty((xq.size(0), wq.size(0)), dtype=_BF16, device=xq.device)


@operator(FAMILY.plan, fake=_new, rows=("xq", "x_scale"))
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
        while tracing, for the whole range of M that has the same answer: a graph's guard is that range.

    Raises:
        GuardError: dtypes or shapes that are not valid MX-FP8 operands, or tensors on the wrong device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(1, 64))
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.full((8, 64), 0.5))
        >>> y = hipforge.mxfp8_gemv(x, x_scale, w, w_scale)
        >>> None if y is None else y[0, 0].item()  # on gfx950
        32.0
    """
    problem = taken.problem
    out = torch.empty(problem.m, problem.n, dtype=_BF16, device=problem.device)
    return launch(taken, out, xq, x_scale, wq, w_scale)


@operator(GEMM.plan, fake=_new, outs=("out",), rows=("xq", "x_scale"))
@documented_like(mxfp8_gemv)
def mxfp8_gemm(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return X @ W^T + bias from MX-FP8 operands for M up to 16384, or None where the caller must use its fallback.

    Args:
        out: contiguous bfloat16 [M, N] to write into.
        bias: bfloat16 [N], added in float32 before the one rounding.

    Returns:
        bfloat16 [M, N], ``out`` itself where it is given; None outside the envelope or where the tuned table says so.

    Raises:
        GuardError: operands, ``bias`` or ``out`` of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(100, 64))
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.full((8, 64), 0.5))
        >>> y = hipforge.mxfp8_gemm(x, x_scale, w, w_scale)
        >>> None if y is None else y[0, 0].item()
        32.0
    """
    result = product_result(xq, wq, _BF16, out, bias)
    return launch(taken, result, xq, x_scale, wq, w_scale, bias)


@operator(GEMM.plan_total, fake=_new, outs=("out",))
@documented_like(mxfp8_gemm)
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
        xq: activations [M, K], float8_e4m3fn or uint8; any M.

    Returns:
        bfloat16 [M, N]; ``out`` itself where it is given.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(1, 64))
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.full((8, 64), 0.5))
        >>> hipforge.mxfp8_linear(x, x_scale, w, w_scale, torch.ones(8).bfloat16())[0, 0].item()
        33.0
    """
    result = product_result(xq, wq, _BF16, out, bias)
    if taken.path == "kernel":
        return launch(taken, result, xq, x_scale, wq, w_scale, bias)
    if taken.path == "triton":
        from hipforge.ops.triton import mxfp8_dot_scaled as fallback

        fallback.mxfp8_dot_scaled(result, xq, x_scale, wq, w_scale, fallback.configuration(xq.shape[0]))
        if bias is not None:
            result.add_(bias)
        return result
    compute = product_dtype(x_scale, w_scale)
    product = mxfp8_mm(xq, x_scale, wq, w_scale, out_dtype=torch.float32, compute_dtype=compute)
    result.copy_(product if bias is None else product + bias)
    return result
