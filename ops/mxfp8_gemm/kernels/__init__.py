"""The kernels of the dense MX-FP8 GEMM, simplest first: a tuner's ties go to the earlier one.

Raw ops take contiguous tensors and raise for anything that they do not take; they never return None. No default rule
names the GEMV and the MFMA kernel: by the model of time another one is always faster, but no GPU has yet said so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.alignment import packed, realigned
from hipforge.ops.core.checks import require_tensor
from hipforge.ops.core.dispatch import Accepted, Choice
from hipforge.ops.core.kernel import Kernel
from hipforge.ops.mxfp8_gemm.kernels.gemv import GEMV
from hipforge.ops.mxfp8_gemm.kernels.group_split import GROUP_SPLIT
from hipforge.ops.mxfp8_gemm.kernels.half_tiles import HALF_TILES
from hipforge.ops.mxfp8_gemm.kernels.k_packed import K_PACKED
from hipforge.ops.mxfp8_gemm.kernels.mfma import MFMA
from hipforge.ops.mxfp8_gemm.kernels.ring_tiles import RING_TILES
from hipforge.ops.mxfp8_gemm.kernels.row_copied import ROW_COPIED
from hipforge.ops.mxfp8_gemm.kernels.row_stream import ROW_STREAM
from hipforge.ops.mxfp8_gemm.kernels.span_tiles import SPAN_TILES
from hipforge.ops.mxfp8_gemm.kernels.tiles import TILES
from hipforge.ops.mxfp8_gemm.kernels.wave_split import WAVE_SPLIT

KERNELS = (
    WAVE_SPLIT, GROUP_SPLIT, K_PACKED, GEMV, MFMA, TILES, ROW_STREAM, ROW_COPIED, SPAN_TILES, HALF_TILES, RING_TILES
)  # fmt: skip
BY_NAME: Mapping[str, Kernel] = {kernel.name: kernel for kernel in KERNELS}


def launch(
    taken: Accepted | Choice,
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *more: int,
    kernels: Mapping[str, Kernel] = BY_NAME,
) -> torch.Tensor:
    """Run the kernel that was decided into ``out``; copies replace views that it cannot read.

    Those are operands that start off a 16-byte boundary, copied once the kernel has refused them. ``bias`` is added in
    float32 before the one rounding. ``more``: what ``kernels`` of another family take before their parameters.
    """
    bias = None if bias is None else packed(bias, out)
    kernel = kernels[taken.kernel]
    try:
        if not taken.contiguous:
            xq, x_scale, wq, w_scale = (packed(x, out) for x in (xq, x_scale, wq, w_scale))
        if kernel.workspace is None:
            kernel.launch(out, xq, x_scale, wq, w_scale, bias, *more, *taken.configuration.values())
        else:
            kernel.run(taken.configuration, (*out.shape, xq.shape[1]), out, xq, x_scale, wq, w_scale, bias, *more)
    except AttributeError:  # checked afterwards, so that a good call does not pay for it
        require_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
        raise
    except GuardError:
        copies = realigned(xq, x_scale, wq, w_scale, out=out)
        if copies is None:
            raise
        xq, x_scale, wq, w_scale = copies
        return launch(taken, out, xq, x_scale, wq, w_scale, bias, *more, kernels=kernels)
    return out
