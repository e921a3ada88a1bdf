"""The skinny fp8 GEMM in torch: D + scale (A B) with fp8 operands of any of torch's formats."""

from __future__ import annotations

import torch


def skinny_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """Return ``output + scale * (a @ b)``, computed in ``compute_dtype`` and rounded once; nothing is written in place.

    Args:
        a: a float8 dtype [m, k], any strides.
        b: a float8 dtype [k, n], any strides.
        scale: one float32, the product of the two operands' scales.
        output: what is added to, [m, n]; None for nothing.
        compute_dtype: float32, or float64 for an exact comparison.
        out_dtype: the result's dtype.

    Returns:
        ``out_dtype`` [m, n].
    """
    product = (a.to(compute_dtype) @ b.to(compute_dtype)) * scale.reshape(()).to(compute_dtype)
    return (product if output is None else output.to(compute_dtype) + product).to(out_dtype)
