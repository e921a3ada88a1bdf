"""e8m0 block scales: bytes to numbers and back, and the rules that choose a scale from a block's maximum.

Every rule works on the binary32 bit pattern of the block maximum, so no logarithm and no division can be one off.
E and F below are its exponent and mantissa fields, P the format's largest power-of-two exponent:

=============  ==========================================================  ============
mode           biased scale exponent, clamped to 0..254                    inf, NaN
=============  ==========================================================  ============
``round_down`` E - P: OCP's floor; the largest elements may saturate       255
``round_up``   E - P + (F > F of the format's maximum): RCEIL, never clips 255
``even``       exponent of amax rounded to the format's mantissa, - P      255 (see below)
``ceil``       E - P + (F != 0)                                            255
``triton``     exponent of bits(amax) + 0x200000, - P                      254
=============  ==========================================================  ============

``triton`` is the rule of aiter's Triton quantisers, where an infinite maximum is clamped to 2^127. MXFP4's default
is the same rule, so for e2m1 ``even`` follows it down to the 254.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from hipforge.ops.core.checks import require_choice, require_dtype, require_operand
from hipforge.ops.core.formats import BLOCK, E2M1, E8M0_DTYPE, ElementFormat

ScaleMode = Literal["round_down", "round_up", "even", "ceil", "triton"]
SCALE_MODES: tuple[str, ...] = get_args(ScaleMode)

E8M0_NAN = 255
_FRACTION = 0x7FFFFF
_INFINITY = 0x7F800000
_SUBNORMAL_SCALE = 0x00400000  # 2^-127, which binary32 holds as a subnormal
_NAN_SCALE = 0x7F800001
_TRITON_ROUNDING = 0x200000


def as_scale_bytes(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Return ``scale`` (uint8 or float8_e8m0fnu, any shape) as uint8 of the same shape, without a copy.

    Raises:
        GuardError: another dtype.
    """
    require_dtype(name, scale, (torch.uint8, E8M0_DTYPE))
    return scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)


def e8m0_to_f32(scale: torch.Tensor) -> torch.Tensor:
    """Return the value of e8m0 bytes, exactly: 2^(byte - 127) for 0..254 and NaN for 255.

    Args:
        scale: uint8 or float8_e8m0fnu, any shape.

    Returns:
        float32 of the same shape.

    Raises:
        GuardError: another dtype.
    """
    byte = as_scale_bytes("scale", scale).to(torch.int32)
    bits = byte << 23
    bits = torch.where(byte == 0, _SUBNORMAL_SCALE, bits)
    bits = torch.where(byte == E8M0_NAN, _NAN_SCALE, bits)
    return bits.view(torch.float32)


_LARGEST_IN_FLOAT32 = (
    246  # 448, the largest element, times 2^(246 - 127) is below 2^128; times the next scale it is not
)


def product_dtype(*scales: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a product of MX matrices can be computed from dequantised elements.

    An element times its scale can leave float32's range although the product does not: the other factor may be small.
    float64 holds every such element. On a GPU it is always used, because reading the scales would synchronise;
    Instinct multiplies matrices of float64 as fast as those of float32. Scale 255 (NaN) asks for nothing.

    Args:
        scales: e8m0 bytes of any shape, uint8 or float8_e8m0fnu.

    Returns:
        ``torch.float32`` where every element fits, else ``torch.float64``.

    Raises:
        GuardError: another dtype.
    """
    for scale in scales:
        byte = as_scale_bytes("scale", scale)
        if byte.device.type != "cpu" or bool(((byte > _LARGEST_IN_FLOAT32) & (byte != E8M0_NAN)).any()):
            return torch.float64
    return torch.float32


def f32_to_e8m0(value: torch.Tensor) -> torch.Tensor:
    """Return the e8m0 byte of the smallest power of two that is at least ``|value|``.

    Powers of two from 2^-127 to 2^127 map to their own byte, so this inverts :func:`e8m0_to_f32`. Smaller values,
    zero included, give 0; what lies above 2^127, inf and NaN give 255.

    Args:
        value: float32, any shape.

    Returns:
        uint8 of the same shape.

    Raises:
        GuardError: another dtype.
    """
    require_dtype("value", value, (torch.float32,))
    bits = value.view(torch.int32) & 0x7FFFFFFF
    rounded_up = (bits >> 23) + ((bits & _FRACTION) != 0).to(torch.int32)
    byte = torch.where(bits <= _SUBNORMAL_SCALE, 0, rounded_up.clamp(max=E8M0_NAN))
    return byte.to(torch.uint8)


def choose_scale(amax: torch.Tensor, fmt: ElementFormat, mode: ScaleMode) -> torch.Tensor:
    """Return the e8m0 scale bytes for blocks whose largest magnitudes are ``amax``.

    ``round_up`` equals ceil(log2(amax / max_value)) with the quotient taken in binary32: a maximum so small that the
    quotient is subnormal gets byte 1, and one whose quotient underflows to zero gets byte 0.

    Args:
        amax: float32, non-negative (inf and NaN allowed), any shape.
        fmt: the element format.
        mode: one of :data:`SCALE_MODES`.

    Returns:
        uint8 of the same shape. A zero maximum gives 0.

    Raises:
        GuardError: unknown mode, or ``amax`` is not float32.
    """
    require_choice("mode", mode, SCALE_MODES)
    require_dtype("amax", amax, (torch.float32,))
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    special = bits >= _INFINITY
    saturates = mode == "triton" or (mode == "even" and fmt is E2M1)
    # Kept out of the sums below, where a NaN's mantissa could carry into the sign.
    finite = torch.where(special, 0, bits)
    exponent, fraction = finite >> 23, finite & _FRACTION
    if mode == "round_down":
        biased = exponent - fmt.max_exponent
    elif mode == "ceil":
        biased = exponent - fmt.max_exponent + (fraction != 0).to(torch.int32)
    elif mode == "round_up":
        biased = exponent - fmt.max_exponent + (fraction > fmt.max_fraction).to(torch.int32)
        # max_value * 2^-150 is the tie between a quotient of zero and the smallest subnormal; ties go to zero.
        underflow = int(fmt.max_value) >> 1
        biased = torch.where(finite > underflow, biased.clamp(min=1), biased)
    else:
        rounding = _TRITON_ROUNDING if mode == "triton" else 1 << (22 - fmt.mantissa_bits)
        exponent = (finite + rounding) >> 23
        biased = exponent - fmt.max_exponent
        if saturates:  # a finite maximum that rounds to 2^128 is infinite from here on
            biased = torch.where(exponent == 255, 254, biased)
    byte = torch.where(special, 254 if saturates else E8M0_NAN, biased.clamp(0, 254))
    return byte.to(torch.uint8)


def scaled(elements: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 elements [..., K] times their blocks' scales, e8m0 bytes [..., K/32], as ``dtype``.

    Computed in float64 where that is the result's, else in float32.

    Raises:
        GuardError: ``scale`` of another shape or device, or a dtype other than uint8 and float8_e8m0fnu.
    """
    blocks = elements.shape[-1] // BLOCK
    shape, why = (*elements.shape[:-1], blocks), f"one byte per {BLOCK} elements"
    require_operand("scale", scale, (torch.uint8, E8M0_DTYPE), shape, why, elements.device)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    factors = e8m0_to_f32(scale).unsqueeze(-1).to(compute)
    return (elements.to(compute).unflatten(-1, (blocks, BLOCK)) * factors).flatten(-2).to(dtype)
