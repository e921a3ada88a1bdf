"""Residual addition and RMS norm, with an fp8 or MX-FP8 result on request: the exact order of roundings, in torch."""

from __future__ import annotations

import torch

from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.mxfp8 import quantize_mxfp8


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, weight_offset: float = 0.0) -> torch.Tensor:
    """Return y, the RMS norm of each row times the weight, in x's 16-bit type H.

    ``v = mean(float(x)^2)`` over the columns in fp32 and ``n = float(x) * rsqrt(v + epsilon)``. Without an offset
    ``y = H(H(n) * weight)``; with one ``y = H(n * (weight_offset + float(weight)))``, rounded once.

    Args:
        x: float16 or bfloat16 [rows, cols].
        weight: [cols], of the same dtype.
        epsilon: added to the mean.
        weight_offset: added to the weight; 1 where a model stores weights as differences from 1.
    """
    factor = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + epsilon)
    return normalised(x, factor, weight, weight_offset)


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scale_tensor: torch.Tensor,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    fp8_max: float | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """Return :func:`rms_norm` times ``1 / scale``, clamped to ``fp8_max`` and rounded to nearest even.

    Args:
        x: as there.
        weight: as there.
        epsilon: as there.
        scale_tensor: one float32; 0 is taken as 1.
        fp8_dtype: dtype of the result.
        fp8_max: where the result saturates; default: the format's largest value.
        weight_offset: as there.
    """
    return to_fp8_static(rms_norm(x, weight, epsilon, weight_offset).float(), scale_tensor, fp8_dtype, fp8_max)


def rms_norm_mxfp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`rms_norm` in MX-FP8: ``(q, scales)``.

    Args:
        x: as there, cols a multiple of 32.
        weight: as there.
        epsilon: as there.
        fp8_dtype: dtype of q.
        weight_offset: as there.
    """
    return quantize_mxfp8(rms_norm(x, weight, epsilon, weight_offset), fp8_dtype)


def residual_rms(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scale_tensor: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    fp8_max: float | None = None,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(q, r)``: the 16-bit sum ``r = input + residual``, and its norm; nothing is written in place.

    q is :func:`rms_norm` of r without a scale, otherwise :func:`rms_norm_fp8`.

    Args:
        input: float16 or bfloat16 [rows, cols].
        residual: like input.
        weight: [cols], of the same dtype.
        epsilon: added to the mean.
        scale_tensor: one float32, or None for a 16-bit result.
        fp8_dtype: dtype of q with a scale.
        fp8_max: where q saturates; default: the format's largest value.
        weight_offset: as in :func:`rms_norm`.
    """
    r = input + residual
    if scale_tensor is None:
        return rms_norm(r, weight, epsilon, weight_offset), r
    return rms_norm_fp8(r, weight, epsilon, scale_tensor, fp8_dtype, fp8_max, weight_offset), r


def residual_rms_mxfp8(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(q, scales, r)``: :func:`rms_norm_mxfp8` of the 16-bit sum r, and the sum.

    Args:
        input: float16 or bfloat16 [rows, cols], cols a multiple of 32.
        residual: like input.
        weight: [cols], of the same dtype.
        epsilon: added to the mean.
        fp8_dtype: dtype of q.
        weight_offset: as in :func:`rms_norm`.
    """
    r = input + residual
    return (*rms_norm_mxfp8(r, weight, epsilon, fp8_dtype, weight_offset), r)


def normalised(r: torch.Tensor, factor: torch.Tensor, weight: torch.Tensor, weight_offset: float = 0.0) -> torch.Tensor:
    """Return y of :func:`rms_norm` from the rows and their float32 factors ``rsqrt(v + epsilon)``."""
    return scaled_norm(r.float() * factor, weight, weight_offset)


def scaled_norm(n: torch.Tensor, weight: torch.Tensor, weight_offset: float) -> torch.Tensor:
    """Return the normalised float32 ``n`` times the weight, with the roundings of :func:`rms_norm`."""
    if weight_offset:
        return (n * (weight_offset + weight.float())).to(weight.dtype)
    return n.to(weight.dtype) * weight
