"""MX-FP8: e4m3 elements in blocks of 32 along the last dimension, one e8m0 scale byte per block."""

from __future__ import annotations

import math

import torch

from hipforge.ops.core import checks
from hipforge.ops.core.formats import BLOCK, fp8_format
from hipforge.ops.reference.e8m0 import E8M0_NAN, ScaleMode, choose_scale, e8m0_to_f32, scaled


def quantize_mxfp8(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, mode: ScaleMode = "round_up"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MX-FP8; each element is x / scale, clamped to the format's range and rounded to nearest even.

    Args:
        x: float32, bfloat16 or float16, [..., K] with K a multiple of 32.
        dtype: ``torch.float8_e4m3fn`` (gfx950) or ``torch.float8_e4m3fnuz`` (gfx942).
        mode: how the scale is chosen, see :mod:`hipforge.ops.reference.e8m0`.

    Returns:
        (elements ``dtype`` [..., K], scales uint8 [..., K/32]). A block with a NaN or an infinity gets scale 255 and
        NaN elements, 0x7F (fnuz: 0x80); in mode ``triton`` it gets scale 254, and only NaN elements stay NaN.

    Raises:
        GuardError: a dtype, mode or last dimension that is not accepted.
    """
    checks.require_real("x", x)
    checks.require_last_multiple("x", x, BLOCK)
    fmt = fp8_format(dtype)
    blocks = x.to(torch.float32).unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    scale = choose_scale(blocks.abs().amax(dim=-1), fmt, mode)
    # 254 - byte is the byte of the reciprocal; 255 has none.
    inverse = e8m0_to_f32(254 - scale.clamp(max=254)).unsqueeze(-1)
    elements = (blocks * inverse).clamp(-fmt.max_value, fmt.max_value)
    # Devices differ in the sign of a NaN that went through arithmetic, so it gets one sign: 0x7F (fnuz: 0x80).
    elements = torch.where(blocks.isnan() | (scale == E8M0_NAN).unsqueeze(-1), math.nan, elements)
    return elements.to(dtype).flatten(-2), scale


def dequantize_mxfp8(
    q: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Return element * 2^(scale - 127), exact in float64; in float32 exact up to overflow past 2^128.

    Args:
        q: float8_e4m3fn, float8_e4m3fnuz, or uint8 holding ``fp8_dtype``'s bits; [..., K], K a multiple of 32.
        scale: uint8 or float8_e8m0fnu, [..., K/32].
        dtype: the result's dtype.
        fp8_dtype: what the bits mean when ``q`` is uint8.

    Returns:
        ``dtype`` [..., K]; NaN wherever the element is NaN or the block's scale byte is 255.

    Raises:
        GuardError: a dtype or shape that is not accepted.
    """
    checks.require_dtype("q", q, (torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz))
    checks.require_last_multiple("q", q, BLOCK)
    if q.dtype == torch.uint8:
        fp8_format(fp8_dtype)
        q = q.view(fp8_dtype)
    return scaled(q.to(torch.float32), scale, dtype)


def mxfp8_mm(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    compute_dtype: torch.dtype = torch.float32,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Return X @ W^T of two MX-FP8 matrices: dequantise both, multiply in ``compute_dtype``, round once.

    Args:
        xq: fp8 (or uint8 bits) [M, K], K a multiple of 32.
        x_scale: e8m0 bytes [M, K/32].
        wq: fp8 (or uint8 bits) [N, K].
        w_scale: e8m0 bytes [N, K/32].
        out_dtype: the result's dtype.
        compute_dtype: ``torch.float32``, or ``torch.float64`` for an exact comparison.
        fp8_dtype: what the bits mean when a payload is uint8.

    Returns:
        ``out_dtype`` [M, N].

    Raises:
        GuardError: a dtype or shape that is not accepted.
    """
    checks.require_tensor(x_scale=x_scale, w_scale=w_scale)
    checks.require_factors(xq, wq)
    checks.require_device("wq", wq, xq.device)
    x = dequantize_mxfp8(xq, x_scale, compute_dtype, fp8_dtype)
    w = dequantize_mxfp8(wq, w_scale, compute_dtype, fp8_dtype)
    return torch.nn.functional.linear(x, w).to(out_dtype)
