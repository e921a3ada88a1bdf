"""nanochat's FP8 training on AMD Instinct: ``fp8_matmul(x, w)``, what its functional forward pass takes as ``matmul``.

The definition is that of nanochat's ``fp8`` module: one scale per tensor, ``finfo.max / max(amax, 1e-12)`` divided in
float64; x and w in e4m3 and the gradient of the output in e5m2; each of the three products with float32 accumulation.
Here the formats are those of the device (OCP on gfx950, FNUZ on gfx942, where ``float8_e4m3fn`` does not multiply),
any shape is accepted, and the gradient of w keeps w's dtype where nanochat rounds it to the compute dtype first.
"""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_choice, require_device, require_floating, require_rank
from hipforge.ops.fp8_linear import float8_product

__all__ = ["fp8_matmul"]

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_matmul(x: torch.Tensor, w: torch.Tensor, *, compute_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return x @ w^T computed in FP8, with gradients computed in FP8.

    Args:
        x: floating point [..., K]; cast to ``compute_dtype`` before it is quantised.
        w: floating point [N, K], quantised from its own dtype (float32 master weights stay as they are).
        compute_dtype: bfloat16, float16 or float32; nanochat's ``COMPUTE_DTYPE``.

    Returns:
        [..., N] of ``compute_dtype``. The gradient of x has x's dtype, that of w w's dtype. ``torch._scaled_mm``
        multiplies where the inner and the last dimension are multiples of 16; other products are taken of the same FP8
        values in bfloat16.

    Raises:
        GuardError: x or w is not a floating-point tensor, w is not [N, K] with x's K, the devices differ, or
            ``compute_dtype`` is not one of the three.

    Example:
        >>> import torch
        >>> from hipforge.integrations.nanochat import fp8_matmul
        >>> w = torch.nn.Parameter(torch.eye(32, 16))
        >>> y = fp8_matmul(torch.ones(2, 3, 16), w)
        >>> y.sum().backward()
        >>> tuple(y.shape), y.dtype, w.grad.dtype, round(w.grad[0, 0].item(), 3)
        ((2, 3, 32), torch.bfloat16, torch.float32, 6.0)
    """
    require_rank("w", w, 2, "[N, K]")
    require_choice("compute_dtype", compute_dtype, COMPUTE_DTYPES)
    require_floating(x=x, w=w)
    if x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise GuardError(f"x must have last dimension K={w.shape[1]}, that of w [N, K]; got shape {tuple(x.shape)}")
    require_device("w", w, x.device)
    rows = x.to(compute_dtype).reshape(-1, x.shape[-1])
    return float8_product(rows, w).reshape(*x.shape[:-1], w.shape[0])
