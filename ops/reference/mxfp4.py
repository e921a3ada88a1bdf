"""MXFP4: e2m1 elements, two to a byte, in blocks of 32 along the last dimension with one e8m0 scale byte each.

Element 2i sits in the low nibble of byte i, element 2i + 1 in the high one. Codes 0..7 are 0, 0.5, 1, 1.5, 2,
3, 4, 6; bit 3 is the sign.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from hipforge.ops.core import checks
from hipforge.ops.core.formats import BLOCK, E2M1
from hipforge.ops.reference.e8m0 import ScaleMode, choose_scale, e8m0_to_f32, scaled

Rounding = Literal["rne", "half_up"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbouring values. Under "rne" a tie goes to the even code: up where the code above is even.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def f32_to_e2m1(x: torch.Tensor, rounding: Rounding = "rne") -> torch.Tensor:
    """Return the e2m1 code of each value, saturating at ±6; the sign bit is kept, also that of a zero.

    Args:
        x: float32, any shape.
        rounding: ties to the even code (``rne``) or away from zero (``half_up``, what older quantisers did).

    Returns:
        uint8 of the same shape, 0..15. NaN gives 7, the code of 6.

    Raises:
        GuardError: another dtype or rounding.
    """
    checks.require_dtype("x", x, (torch.float32,))
    checks.require_choice("rounding", rounding, ROUNDINGS)
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for below, midpoint in enumerate(_MIDPOINTS):
        up_on_tie = rounding == "half_up" or below % 2 == 1
        code += (magnitude >= midpoint if up_on_tie else magnitude > midpoint).to(torch.uint8)
    is_nan = magnitude.isnan()
    code = torch.where(is_nan, 7, code)
    # Not the sign of a NaN: devices differ in it.
    return code | ((torch.signbit(x) & ~is_nan).to(torch.uint8) << 3)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return codes 0..15, uint8 [..., K], two to a byte: uint8 [..., K/2].

    Raises:
        GuardError: another dtype, or K is odd.
    """
    checks.require_dtype("codes", codes, (torch.uint8,))
    checks.require_last_multiple("codes", codes, 2)
    pairs = codes.unflatten(-1, (codes.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes 0..15, uint8 [..., K], of packed bytes uint8 [..., K/2].

    Raises:
        GuardError: another dtype.
    """
    checks.require_dtype("packed", packed, (torch.uint8,))
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def mxfp4_to_f32(packed: torch.Tensor) -> torch.Tensor:
    """Return the unscaled values, float32 [..., K], of packed bytes uint8 [..., K/2].

    Raises:
        GuardError: another dtype.
    """
    table = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=torch.float32, device=packed.device)
    return table[unpack_e2m1(packed).to(torch.int32)]


def quantize_mxfp4(
    x: torch.Tensor, mode: ScaleMode = "even", rounding: Rounding = "rne"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP4: each element is x / scale, rounded to e2m1 and saturated at ±6.

    Args:
        x: float32, bfloat16 or float16, [..., K] with K a multiple of 32.
        mode: how the scale is chosen, see :mod:`hipforge.ops.reference.e8m0`.
        rounding: ``rne`` (as the gfx950 convert instructions) or ``half_up``.

    Returns:
        (packed uint8 [..., K/2], scales uint8 [..., K/32]). A block with a NaN or an infinity gets scale 254 in modes
        ``even`` and ``triton``, where that element becomes ±6, and 255 (all NaN) in the others.

    Raises:
        GuardError: a dtype, mode, rounding or last dimension that is not accepted.
    """
    checks.require_real("x", x)
    checks.require_last_multiple("x", x, BLOCK)
    blocks = x.to(torch.float32).unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    scale = choose_scale(blocks.abs().amax(dim=-1), E2M1, mode)
    inverse = e8m0_to_f32(254 - scale.clamp(max=254)).unsqueeze(-1)
    return pack_e2m1(f32_to_e2m1(blocks * inverse, rounding).flatten(-2)), scale


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return element * 2^(scale - 127), exact in float64; in float32 exact up to overflow past 2^128.

    Args:
        packed: uint8 [..., K/2], K a multiple of 32.
        scale: uint8 or float8_e8m0fnu [..., K/32].
        dtype: the result's dtype.

    Returns:
        ``dtype`` [..., K]; NaN throughout a block whose scale byte is 255.

    Raises:
        GuardError: a dtype or shape that is not accepted.
    """
    checks.require_dtype("packed", packed, (torch.uint8,))
    checks.require_last_multiple("packed", packed, BLOCK // 2)
    return scaled(mxfp4_to_f32(packed), scale, dtype)


def mxfp4_mm_packed(
    aq: torch.Tensor,
    a_scale: torch.Tensor,
    bq: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return A @ B^T of two MXFP4 matrices: dequantise both, multiply in ``compute_dtype``, round once.

    Args:
        aq: packed uint8 [M, K/2].
        a_scale: e8m0 bytes [M, K/32].
        bq: packed uint8 [N, K/2].
        b_scale: e8m0 bytes [N, K/32].
        out_dtype: the result's dtype.
        compute_dtype: ``torch.float32``, or ``torch.float64`` for an exact comparison.

    Returns:
        ``out_dtype`` [M, N].

    Raises:
        GuardError: a dtype or shape that is not accepted.
    """
    checks.require_tensor(a_scale=a_scale, b_scale=b_scale)
    checks.require_rank("aq", aq, 2, "[M, K/2]")
    checks.require_rank("bq", bq, 2, "[N, K/2]")
    checks.require_shape("bq", bq, (bq.shape[0], aq.shape[1]), "its K is that of aq")
    checks.require_device("bq", bq, aq.device)
    a = dequantize_mxfp4(aq, a_scale, compute_dtype)
    b = dequantize_mxfp4(bq, b_scale, compute_dtype)
    return torch.nn.functional.linear(a, b).to(out_dtype)


def mxfp4_mm(a: torch.Tensor, b: torch.Tensor, mode: ScaleMode = "even", rounding: Rounding = "rne") -> torch.Tensor:
    """Quantise A and B to MXFP4 and return A @ B^T, accumulated in float32.

    Args:
        a: float32, bfloat16 or float16 [M, K], K a multiple of 32.
        b: the same [N, K].
        mode: how scales are chosen.
        rounding: how elements are rounded.

    Returns:
        [M, N] in ``a``'s dtype.

    Raises:
        GuardError: a dtype, shape, mode or rounding that is not accepted.
    """
    checks.require_rank("a", a, 2, "[M, K]")
    checks.require_rank("b", b, 2, "[N, K]")
    return mxfp4_mm_packed(*quantize_mxfp4(a, mode, rounding), *quantize_mxfp4(b, mode, rounding), out_dtype=a.dtype)
