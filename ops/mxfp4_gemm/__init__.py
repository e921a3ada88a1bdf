"""MXFP4 GEMM: Y = X @ W^T with e2m1 weights; X in e2m1 through scaled MFMA on gfx950, in e2m1 or bfloat16 on sm_90.

Shapes and dtypes everywhere in this package: ``xq`` [M, K/2] and ``wq`` [N, K/2] hold two e2m1 codes per byte, the even
element in the low nibble (uint8 or float4_e2m1fn_x2); ``x_scale`` [M, K/32] and ``w_scale`` [N, K/32] hold e8m0 bytes
(uint8 or float8_e8m0fnu); the output [M, N] is bfloat16; K is a multiple of 32. Products are accumulated in float32
and rounded once, to nearest even. A scale byte of 255 makes the outputs that it takes part in NaN. ``xq`` may also be
bfloat16 [M, K], with None as ``x_scale``: only the weight is quantised then, as gpt-oss is served on Hopper GPUs.

With ``shuffled=True`` the weight is in the order of :func:`hipforge.ops.reference.shuffle_weight` and its scales in
that of :func:`hipforge.ops.reference.shuffle_scale` (activations stay plain); then N % 16 == 0 and K % 64 == 0.

gfx950 has two kernels. ``mxfp4_gemm`` splits K over the waves of a work-group, for few rows and columns;
``mxfp4_gemm_tiles`` multiplies tiles that pass through LDS, for any M and for tensors of any size. The tuned row of a
shape names one of them; without a row a rough model of both times decides. A third, ``mxfp4_made``, quantises its X in
the launch, for :func:`hipforge.ops.fused_linear.quantize_mxfp4_linear`. On sm_90 ``mxfp4_row_stream`` reads plain
weights once for each 16 rows of X, which is meant for few rows. ``mxfp4_code_stream`` makes both operands float16, X
times a power of two for each row. It is faster, unless X is bfloat16 and a multiprocessor has few rows of W. MXFP4
activations stay exact; bfloat16 ones keep values down to 2^-21 of the row's first eight, and multiples of 2^-28 of them
below.
"""

from __future__ import annotations

import torch

from hipforge.ops.core.arguments import require_sound
from hipforge.ops.core.checks import require_bias
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.mxfp4_gemm import reference
from hipforge.ops.mxfp4_gemm.family import FAMILY
from hipforge.ops.mxfp4_gemm.kernels import BY_NAME
from hipforge.ops.mxfp4_gemm.kernels.code_stream import mxfp4_code_stream_out, run_mxfp4_code_stream
from hipforge.ops.mxfp4_gemm.kernels.made import mxfp4_made_out, run_mxfp4_made
from hipforge.ops.mxfp4_gemm.kernels.row_stream import mxfp4_row_stream_out, run_mxfp4_row_stream
from hipforge.ops.mxfp4_gemm.kernels.tiles import mxfp4_gemm_tiles_out, run_mxfp4_tiles
from hipforge.ops.mxfp4_gemm.kernels.waves import SUB_TILES, mxfp4_gemm_out, run_mxfp4
from hipforge.ops.mxfp4_gemm.raw import launch

PUBLIC = ("mxfp4_gemm", "mxfp4_linear")

__all__ = [
    "FAMILY",
    "SUB_TILES",
    "mxfp4_code_stream_out",
    "mxfp4_gemm",
    "mxfp4_gemm_out",
    "mxfp4_gemm_tiles_out",
    "mxfp4_linear",
    "mxfp4_made_out",
    "mxfp4_row_stream_out",
    "run_mxfp4",
    "run_mxfp4_code_stream",
    "run_mxfp4_made",
    "run_mxfp4_row_stream",
    "run_mxfp4_tiles",
]


def _new(xq: torch.Tensor, wq: torch.Tensor) -> torch.Tensor:
    return torch.empty((xq.shape[0], wq.shape[0]), dtype=torch.bfloat16, device=xq.device)


@operator(FAMILY.plan, fake=_new, rows=("xq", "x_scale"))
def mxfp4_gemm(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor | None,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    shuffled: bool = False,
) -> torch.Tensor | None:
    """Return X @ W^T from MXFP4 operands, or None where the caller must use its fallback.

    Args:
        taken: the path that was decided; callers do not pass it.
        xq: activations [M, K/2], any strides; or bfloat16 [M, K] (on sm_90).
        x_scale: e8m0 bytes [M, K/32]; None with bfloat16 activations.
        wq: weights [N, K/2].
        w_scale: e8m0 bytes [N, K/32].
        out_dtype: ``torch.bfloat16`` (another dtype gives None).
        shuffled: the weight and its scales are in the shuffled order.

    Returns:
        bfloat16 [M, N]; None on a device other than gfx950 and sm_90, for bfloat16 activations on gfx950 and shuffled
        weights on sm_90, or where the tuned table says so.

    Raises:
        GuardError: dtypes or shapes that are not valid MXFP4 operands.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp4_quantize(torch.ones(1, 128))
        >>> w, w_scale = hipforge.mxfp4_quantize(torch.ones(16, 128))
        >>> y = hipforge.mxfp4_gemm(x, x_scale, w, w_scale)
        >>> None if y is None else y[0, 0].item()  # on gfx950
        128.0
    """
    kernel, out = BY_NAME[taken.kernel], _new(xq, wq)
    return launch(kernel, taken.configuration, out, xq, x_scale, wq, w_scale, shuffled, taken.contiguous)


@operator(FAMILY.plan_total, fake=_new, outs=("out",))
@documented_like(mxfp4_gemm)
def mxfp4_linear(
    taken: Accepted,
    xq: torch.Tensor,
    x_scale: torch.Tensor | None,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    shuffled: bool = False,
) -> torch.Tensor:
    """Return X @ W^T + bias from MXFP4 operands, always: the kernel where it applies, else torch.

    Args:
        xq: activations [M, K/2], or bfloat16 [M, K].
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        bias: bfloat16 [N], added to the rounded product.
        out: contiguous bfloat16 [M, N] to write into.

    Returns:
        bfloat16 [M, N]; ``out`` itself where it is given.

    Raises:
        GuardError: operands, ``bias`` or ``out`` of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp4_quantize(torch.ones(1, 128))
        >>> w, w_scale = hipforge.mxfp4_quantize(torch.ones(16, 128))
        >>> hipforge.mxfp4_linear(x, x_scale, w, w_scale)[0, 0].item()
        128.0
    """
    m, n = xq.shape[0], wq.shape[0]
    result = new_or_given(out, (m, n), torch.bfloat16, xq.device)
    if bias is not None:
        require_bias(bias, n, torch.bfloat16, xq.device)
        require_sound("mxfp4_linear", {"bias": bias, "out": result}, ("out",))  # no kernel's binding sees the bias
    if taken.path == "kernel":
        kernel = BY_NAME[taken.kernel]
        launch(kernel, taken.configuration, result, xq, x_scale, wq, w_scale, shuffled, taken.contiguous)
    else:
        result.copy_(reference.linear(xq, x_scale, wq, w_scale, shuffled))
    if bias is not None:
        result.add_(bias)
    return result
