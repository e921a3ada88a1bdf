"""Decode attention in torch over the caches that the kernels take, in float64."""

from __future__ import annotations

from typing import Any

import torch

from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.outputs import written
from hipforge.ops.decode_attention.layout import Call
from hipforge.ops.reference.attention import dequantize_kv_fp8, dequantize_kv_int4, paged_attention, ragged_attention
from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.mxfp8 import quantize_mxfp8


def attend(call: Call, scale_out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp of a call.

    With ``out_scale`` the attention is fp8 by that scale, with ``scale_out``, which is written, MX-FP8; both of the
    result in float32.
    """
    q, fp8 = call.q, fp8_dtypes(call.q.device)[0]

    def elements(cache: torch.Tensor, scale: torch.Tensor | None, words: torch.Tensor | None) -> torch.Tensor:
        if call.num_groups is not None:
            return dequantize_kv_int4(cache, call.num_groups)
        if words is not None:
            return dequantize_kv_fp8(cache.contiguous().view(torch.int32), words, fp8)
        values = (cache.view(fp8) if cache.dtype == torch.uint8 else cache).to(torch.float64)
        return values if scale is None else values * scale.to(torch.float64).view(-1, 1)

    k, v = elements(call.k, call.k_scale, call.k_scale_shift), elements(call.v, call.v_scale, call.v_scale_shift)
    dtype = q.dtype if call.out_scale is None and scale_out is None else torch.float32
    scale = None if call.scale is None else float(call.scale)
    given = k, v, call.block_tables, call.seqlens, scale, call.causal
    options: dict[str, Any] = {
        "sinks": call.sinks, "window": None if call.window is None else int(call.window), "softcap": call.softcap,
        "dtype": dtype,
    }  # fmt: skip
    if call.cu_seqlens_q is None or call.max_seqlen_q is None:
        out, lse = paged_attention(q, *given, **options)
    else:
        out, lse = ragged_attention(q, call.cu_seqlens_q, int(call.max_seqlen_q), *given, **options)
    if call.out_scale is not None:
        return to_fp8_static(out, call.out_scale, fp8), lse
    if scale_out is not None:
        quantised, blocks = quantize_mxfp8(out.reshape(-1, out.shape[-2] * out.shape[-1]), fp8)
        written(scale_out=(scale_out, blocks))
        return quantised.view(out.shape), lse
    return out, lse
