"""Pure-torch references: the exact semantics of every op, on any device, without a build."""

from hipforge.ops.reference.e8m0 import choose_scale, e8m0_to_f32, f32_to_e8m0
from hipforge.ops.reference.formats import BLOCK, E2M1, E4M3FN, E4M3FNUZ, ElementFormat
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8, mxfp8_mm, quantize_mxfp8

__all__ = [
    "BLOCK",
    "E2M1",
    "E4M3FN",
    "E4M3FNUZ",
    "ElementFormat",
    "choose_scale",
    "dequantize_mxfp8",
    "e8m0_to_f32",
    "f32_to_e8m0",
    "mxfp8_mm",
    "quantize_mxfp8",
]
