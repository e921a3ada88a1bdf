"""The MXFP4 GEMM in torch, over operands as the kernel takes them."""

from __future__ import annotations

import torch

from hipforge.ops.core.formats import BLOCK
from hipforge.ops.reference import dequantize_mxfp4, mxfp4_mm_packed, unshuffle_scale, unshuffle_weight
from hipforge.ops.reference.e8m0 import product_dtype


def linear(
    xq: torch.Tensor, x_scale: torch.Tensor | None, wq: torch.Tensor, w_scale: torch.Tensor, shuffled: bool
) -> torch.Tensor:
    """Return X @ W^T in bfloat16, accumulated in float32, or float64 where scales leave float32's range."""
    wq = wq.view(torch.uint8)
    if shuffled:
        w_scale = unshuffle_scale(w_scale, wq.shape[0], 2 * wq.shape[1] // BLOCK)
        wq = unshuffle_weight(wq)
    if x_scale is None:
        compute = product_dtype(w_scale)
        return (xq.to(compute) @ dequantize_mxfp4(wq, w_scale, compute).T).to(torch.bfloat16)
    xq = xq.view(torch.uint8)
    return mxfp4_mm_packed(xq, x_scale, wq, w_scale, compute_dtype=product_dtype(x_scale, w_scale))
