"""RoPE and the cache write in Triton, for other GPUs and for comparison with the HIP kernel.

Triton is imported on first use, never with this module.
"""

from __future__ import annotations

from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.triton.launch import Bind, Launch, power_of_two

_HALF, _FP8, _ROWS = range(3)


def rope_and_cache(
    q_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    weight_offset: float,
    epsilon: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    bind: Bind | None = None,
) -> Any:
    """Write ``q_out``, the caches and their words, for operands that the op has checked; no int4 rows."""
    import triton.language as tl

    from hipforge.ops.triton.rope_and_cache_kernels import rope_and_cache_kernel

    written = (q_out, k_cache, v_cache)
    if any(tensor.stride(-1) != 1 for tensor in written):
        strides = ", ".join(str(tensor.stride(-1)) for tensor in written)
        raise GuardError(f"q and the caches must have their last dimension contiguous; got strides {strides}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    storage = _HALF if k_cache.dtype == q.dtype else _FP8 if k_scale_shift is None else _ROWS
    caches = (k_cache, v_cache) if storage == _HALF else (k_cache.view(torch.uint8), v_cache.view(torch.uint8))
    words = (k_scale_shift, v_scale_shift) if k_scale_shift is not None else caches
    no_stride = (0, 0, 0)
    words_strides = [no_stride if rows is None else rows.stride() for rows in (k_scale_shift, v_scale_shift)]
    scales = [positions if scale is None else scale for scale in (k_scale, v_scale)]
    fnuz = fp8_dtype == torch.float8_e4m3fnuz
    arguments = (
        q_out, *caches, *words, q, k, v, cos_sin.contiguous(), positions.contiguous(), slot_mapping.contiguous(),
        q if q_weight is None else q_weight, q if k_weight is None else k_weight, *scales,
        *q.stride()[:2], *q_out.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *caches[0].stride()[:3], *caches[1].stride()[:3],
        *words_strides[0], *words_strides[1],
        *(0 if scale.numel() == 1 else 1 for scale in scales),
        q_heads, kv_heads, cos_sin.shape[0], k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1], epsilon,
        weight_offset,
    )  # fmt: skip
    constants = {
        "D": dim, "ROTARY": cos_sin.shape[1], "INTERLEAVED": interleaved, "NORM_Q": q_weight is not None,
        "NORM_K": k_weight is not None, "OFFSET": weight_offset != 0.0, "STORAGE": storage,
        "FP8": tl.float8e4b8 if fnuz else tl.float8e4nv, "FP8_MAX": torch.finfo(fp8_dtype).max,
        "BLOCK": power_of_two(dim), "num_warps": 1, "enable_fp_fusion": False,
    }  # fmt: skip
    return Launch(rope_and_cache_kernel, (tokens, q_heads + 2 * kv_heads), arguments, constants).run(bind)
