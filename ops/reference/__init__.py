"""Pure-torch references: the exact semantics of every op, on any device, without a build."""

from hipforge.ops.core.formats import BLOCK, E2M1, E4M3FN, E4M3FNUZ, ElementFormat
from hipforge.ops.reference.attention import (
    decode_attention,
    dequantize_kv_fp8,
    dequantize_kv_int4,
    gather_pages,
    quantize_kv_fp8,
    quantize_kv_int4,
)
from hipforge.ops.reference.e8m0 import choose_scale, e8m0_to_f32, f32_to_e8m0
from hipforge.ops.reference.fnuz import fn_to_fnuz, fnuz_to_fn
from hipforge.ops.reference.layout import shuffle_scale, shuffle_weight, unshuffle_scale, unshuffle_weight
from hipforge.ops.reference.moe import grouped_gemm_mxfp8, moe_align_block_size
from hipforge.ops.reference.mxfp4 import (
    dequantize_mxfp4,
    f32_to_e2m1,
    mxfp4_mm,
    mxfp4_mm_packed,
    mxfp4_to_f32,
    pack_e2m1,
    quantize_mxfp4,
    unpack_e2m1,
)
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8, mxfp8_mm, quantize_mxfp8
from hipforge.ops.reference.rmsnorm import (
    residual_rms,
    residual_rms_mxfp8,
    rms_norm,
    rms_norm_fp8,
    rms_norm_mxfp8,
)
from hipforge.ops.reference.rope import rms_norm_heads, rope_and_cache, rotate
from hipforge.ops.reference.routing import moe_combine, router_gemm, topk_gating
from hipforge.ops.reference.swiglu import swiglu_fp8, swiglu_mxfp8

__all__ = [
    "BLOCK",
    "E2M1",
    "E4M3FN",
    "E4M3FNUZ",
    "ElementFormat",
    "choose_scale",
    "decode_attention",
    "dequantize_kv_fp8",
    "dequantize_kv_int4",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "e8m0_to_f32",
    "f32_to_e2m1",
    "f32_to_e8m0",
    "fn_to_fnuz",
    "fnuz_to_fn",
    "gather_pages",
    "grouped_gemm_mxfp8",
    "moe_align_block_size",
    "moe_combine",
    "mxfp4_mm",
    "mxfp4_mm_packed",
    "mxfp4_to_f32",
    "mxfp8_mm",
    "pack_e2m1",
    "quantize_kv_fp8",
    "quantize_kv_int4",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "residual_rms",
    "residual_rms_mxfp8",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_heads",
    "rms_norm_mxfp8",
    "rope_and_cache",
    "rotate",
    "router_gemm",
    "shuffle_scale",
    "shuffle_weight",
    "swiglu_fp8",
    "swiglu_mxfp8",
    "topk_gating",
    "unpack_e2m1",
    "unshuffle_scale",
    "unshuffle_weight",
]
