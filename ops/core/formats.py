"""The element formats of the OCP Microscaling (MX) family, as the constants that quantisers need.

Bit patterns are those of IEEE binary32 unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge.errors import GuardError

BLOCK = 32  # elements that share one e8m0 scale
FP8_BLOCK = 128  # elements that share a scale of fp8 in blocks

HALVES = {torch.float16: "f16", torch.bfloat16: "bf16"}  # dtype -> its name among the variants of modules
FLOATS = {torch.float32: "f32", **HALVES}

E8M0_DTYPE: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)


@dataclass(frozen=True)
class ElementFormat:
    """What scale selection has to know about an element format.

    Attributes:
        name: short name, as in error messages.
        max_value: largest finite magnitude.
        max_exponent: exponent of the largest power of two that the format holds (P in the scale formulas).
        mantissa_bits: explicit mantissa bits.
        max_fraction: binary32 mantissa field of ``max_value``; a block maximum with a larger field needs the next
            scale up.
    """

    name: str
    max_value: float
    max_exponent: int
    mantissa_bits: int
    max_fraction: int


E2M1 = ElementFormat("e2m1", 6.0, 2, 1, 0x400000)
E4M3FN = ElementFormat("e4m3fn", 448.0, 8, 3, 0x600000)
E4M3FNUZ = ElementFormat("e4m3fnuz", 240.0, 7, 3, 0x700000)

_FP8_FORMATS: dict[torch.dtype, ElementFormat] = {torch.float8_e4m3fn: E4M3FN, torch.float8_e4m3fnuz: E4M3FNUZ}


def fp8_format(dtype: torch.dtype) -> ElementFormat:
    """Return the element format of a torch fp8 dtype.

    Raises:
        GuardError: ``dtype`` is not an MX fp8 element type that hipforge supports.
    """
    try:
        return _FP8_FORMATS[dtype]
    except KeyError:
        accepted = ", ".join(str(known) for known in _FP8_FORMATS)
        raise GuardError(f"dtype must be one of {accepted}; got {dtype}") from None
