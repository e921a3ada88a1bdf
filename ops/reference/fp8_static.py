"""fp8 by one static scale: what the fused kernels of a quantised decode layer do last."""

from __future__ import annotations

import torch

from hipforge.ops.core.checks import require_one


def inverse_scale(scale: torch.Tensor) -> torch.Tensor:
    """Return ``1 / scale`` in float32, and 1 where the scale is 0."""
    return torch.where(scale == 0, 1.0, scale.reciprocal())


def to_fp8_static(
    y: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype, fp8_max: float | None = None
) -> torch.Tensor:
    """Return ``y / scale`` as fp8, so that ``y ≈ q.float() * scale``; a NaN stays one.

    Args:
        y: float32, any shape.
        scale: one float32; 0 is taken as 1.
        fp8_dtype: a float8 dtype.
        fp8_max: where q saturates; default: the format's largest value. 224 is the limit of users who reinterpret
            e4m3fn weights of at most 448 as e4m3fnuz with twice the scale.

    Raises:
        GuardError: ``scale`` is not one float32.
    """
    require_one("scale", scale)
    limit = torch.finfo(fp8_dtype).max if fp8_max is None else fp8_max
    return (y * inverse_scale(scale).reshape(())).clamp(-limit, limit).to(fp8_dtype)
