"""Decode attention in torch over the caches that the kernels take, in float64."""

from __future__ import annotations

import torch

from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference.attention import dequantize_kv_fp8, dequantize_kv_int4, paged_attention


def attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    scale_shifts: tuple[torch.Tensor | None, torch.Tensor | None],
    num_groups: int | None,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    scale: float,
    causal: bool,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp; ``caches`` are of K and of V, with scales, scale_shifts or num_groups."""
    fp8 = fp8_dtypes(q.device)[0]
    k, v = (
        _elements(cache, one, words, num_groups, fp8)
        for cache, one, words in zip(caches, scales, scale_shifts, strict=True)
    )
    return paged_attention(q, k, v, block_tables, seqlens, scale, causal, sinks, window, softcap)


def _elements(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    words: torch.Tensor | None,
    num_groups: int | None,
    fp8: torch.dtype,
) -> torch.Tensor:
    if num_groups is not None:
        return dequantize_kv_int4(cache, num_groups)
    if words is not None:
        return dequantize_kv_fp8(cache.contiguous().view(torch.int32), words, fp8)
    values = (cache.view(fp8) if cache.dtype == torch.uint8 else cache).to(torch.float64)
    return values if scale is None else values * scale.to(torch.float64).view(-1, 1)
