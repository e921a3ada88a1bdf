"""Residual addition and RMS norm, with an fp8 or MX-FP8 result on request: the exact order of roundings, in torch."""

from __future__ import annotations

import torch

from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.mxfp8 import quantize_mxfp8


def residual_rms(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scale_tensor: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    fp8_max: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(q, r)``; nothing is written in place.

    With H the inputs' own 16-bit type: ``r = H(input + residual)``; ``v = mean(float(r)^2)`` over the columns in fp32;
    ``y = H(float(r) * rsqrt(v + epsilon))``; ``y = H(y * weight)``; ``q = y`` without a scale, otherwise
    ``float(y) * (1 / scale)`` clamped to ``fp8_max`` and rounded to nearest even. A scale of 0 stands for 1.

    Args:
        input: float16 or bfloat16 [rows, cols].
        residual: like input.
        weight: [cols], of the same dtype.
        epsilon: added to the mean.
        scale_tensor: one float32, or None for a 16-bit result.
        fp8_dtype: dtype of q with a scale.
        fp8_max: where q saturates; default: the format's largest value.
    """
    r = input + residual
    r32 = r.float()
    factor = torch.rsqrt(r32.square().mean(dim=-1, keepdim=True) + epsilon)
    y = normalised(r, factor, weight)
    if scale_tensor is None:
        return y, r
    return to_fp8_static(y.float(), scale_tensor, fp8_dtype, fp8_max), r


def residual_rms_mxfp8(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(q, scales, r)``: the 16-bit result of :func:`residual_rms` in MX-FP8, and the sum.

    Args:
        input: float16 or bfloat16 [rows, cols], cols a multiple of 32.
        residual: like input.
        weight: [cols], of the same dtype.
        epsilon: added to the mean.
        fp8_dtype: dtype of q.
    """
    y, r = residual_rms(input, residual, weight, epsilon)
    return (*quantize_mxfp8(y, fp8_dtype), r)


def normalised(r: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``r * factor`` rounded to r's 16-bit dtype, then times ``weight``, rounded again; factor is float32."""
    return (r.float() * factor).to(r.dtype) * weight
