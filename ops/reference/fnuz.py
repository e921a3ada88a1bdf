"""e4m3fn checkpoints on gfx942, whose fp8 is e4m3fnuz, and back.

The same byte means half as much in e4m3fnuz, so bytes stay and the scale doubles, except for three: 0x80 is -0 in
e4m3fn but the NaN of e4m3fnuz, and 0x7F and 0xFF are NaN in e4m3fn but ±240 in e4m3fnuz.
"""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_dtype

_FNUZ_NAN = 0x80
_FN_NAN = 0x7F
_FN_MAX = 0x7E


def fn_to_fnuz(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same numbers as e4m3fnuz elements and their dequantisation scale, exactly; NaN stays NaN.

    Args:
        weight: float8_e4m3fn, any shape.
        scale: floating point, any shape; value = element * scale.

    Returns:
        (float8_e4m3fnuz of ``weight``'s shape, 2 * ``scale``).

    Raises:
        GuardError: another dtype.
    """
    require_dtype("weight", weight, (torch.float8_e4m3fn,))
    require_dtype("scale", scale, (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    byte = weight.view(torch.uint8)
    is_nan = (byte & 0x7F) == _FN_NAN
    converted = torch.where(is_nan, _FNUZ_NAN, torch.where(byte == 0x80, 0, byte)).to(torch.uint8)
    return converted.view(torch.float8_e4m3fnuz), scale * 2


def mx_fn_to_fnuz(
    elements: torch.Tensor, scale: torch.Tensor, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same MX-FP8 numbers as e4m3fnuz elements with e8m0 bytes one larger, exactly; NaN stays NaN.

    Args:
        elements: float8_e4m3fn, any shape.
        scale: uint8 e8m0 bytes, one per 32 elements; 255 stays.
        name: what errors call the tensor.

    Returns:
        (float8_e4m3fnuz of the elements' shape, uint8 of the scales').

    Raises:
        GuardError: another dtype, or a scale byte of 254: 2^128 is not an e8m0 scale.
    """
    require_dtype("scale", scale, (torch.uint8,))
    if bool((scale == 254).any()):
        raise GuardError(
            f"{name} cannot be converted to e4m3fnuz: its scales hold the byte 254, and one more is NaN; halve the "
            "weights of that block, or run on gfx950"
        )
    unscaled = torch.zeros((), dtype=torch.float32)
    return fn_to_fnuz(elements, unscaled)[0], torch.where(scale == 255, scale, scale + 1)


def scaled_fn_to_fnuz(
    elements: torch.Tensor, scales: torch.Tensor, name: str = "weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same numbers in e4m3fnuz: scales twice as large, float32 or e8m0 bytes.

    Raises:
        GuardError: a scale has no double.
    """
    if scales.dtype == torch.uint8:
        return mx_fn_to_fnuz(elements, scales, name)
    converted, doubled = fn_to_fnuz(elements, scales)
    if bool((doubled.isinf() & scales.isfinite()).any()):
        raise GuardError(
            f"{name} cannot be converted to e4m3fnuz: twice a scale of {scales[doubled.isinf()].max().item():.3g} is "
            "infinite in float32; halve the weights under that scale, or run on gfx950"
        )
    return converted, doubled


def fnuz_to_fn(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert :func:`fn_to_fnuz`: e4m3fn elements and half the scale.

    Exact but for ±240 (0x7F, 0xFF), which e4m3fn would need ±480 for: they saturate at ±448, 6.7 % less. What came
    from :func:`fn_to_fnuz` holds none of them.

    Args:
        weight: float8_e4m3fnuz, any shape.
        scale: floating point, any shape.

    Returns:
        (float8_e4m3fn of ``weight``'s shape, ``scale`` / 2).

    Raises:
        GuardError: another dtype.
    """
    require_dtype("weight", weight, (torch.float8_e4m3fnuz,))
    require_dtype("scale", scale, (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    byte = weight.view(torch.uint8)
    saturated = torch.where((byte & 0x7F) == 0x7F, (byte & 0x80) | _FN_MAX, byte)
    converted = torch.where(byte == _FNUZ_NAN, _FN_NAN, saturated).to(torch.uint8)
    return converted.view(torch.float8_e4m3fn), scale / 2
