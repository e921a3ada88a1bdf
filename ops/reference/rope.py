"""Rotary position embedding of q and k, with a norm per head before it, and the write of k and v into a paged cache."""

from __future__ import annotations

import torch

from hipforge.ops.reference.attention import quantize_kv_fp8, quantize_kv_int4
from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.rmsnorm import rms_norm
from hipforge.ops.reference.rmsnorm import scaled_norm as scaled_norm

rms_norm_heads = rms_norm
"""The norm of a row, here of each head [..., D]."""


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` elements of each head in float32 and round once to x's dtype.

    Args:
        x: [T, heads, D].
        cos_sin: [max_pos, rotary_dim]: cosines in the first half of a row, sines in the second.
        positions: integer [T]; one outside 0 … max_pos - 1 makes the rotated elements NaN.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    """
    width = cos_sin.shape[1]
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    table = cos_sin if cos_sin.shape[0] else cos_sin.new_zeros((1, width))
    rows = table.to(torch.float32)[torch.where(known, positions, 0).to(torch.int64)]
    rows = torch.where(known[:, None], rows, torch.nan).unsqueeze(1)
    cos, sin = rows[..., : width // 2], rows[..., width // 2 :]
    turning, rest = x[..., :width].to(torch.float32), x[..., width:]
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning[..., : width // 2], turning[..., width // 2 :]
    one, other = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((one, other), dim=-1).flatten(-2) if interleaved else torch.cat((one, other), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write ``rows`` [T, ...] to ``cache`` [pages, page_size, ...] at their slots; slots outside the cache are dropped.

    Nothing depends on the data's values on the host: what is dropped repeats the write of a neighbour.
    """
    pages, page_size = cache.shape[:2]
    tokens = rows.shape[0]
    if tokens == 0 or pages * page_size == 0:
        return
    kept = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
    token = torch.arange(tokens, device=rows.device)
    source = torch.where(kept, token, -1).cummax(0).values
    source = torch.where(source < 0, kept.to(torch.int8).argmax(), source)
    slot = torch.where(kept[source], slot_mapping[source], 0)
    place = (slot // page_size, slot % page_size)
    held = kept[source].view(-1, *[1] * (rows.dim() - 1))
    cache[place] = torch.where(held, rows[source], cache[place])


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    epsilon: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_scale_shift: torch.Tensor | None = None,
    v_scale_shift: torch.Tensor | None = None,
    num_groups: int | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Return the rotated q; write k and v to the caches, and their words where rows have them.

    Args:
        q: float16 or bfloat16 [T, Hq, D].
        k: [T, Hkv, D].
        v: [T, Hkv, D].
        cos_sin: [max_pos, rotary_dim].
        positions: integer [T].
        k_cache: [pages, page_size, Hkv, D]; int32 [..., num_groups + D/8] with ``num_groups``.
        v_cache: like ``k_cache``.
        slot_mapping: int64 [T], page * page_size + slot.
        interleaved: the pairs of :func:`rotate`.
        q_weight: [D], or None for no norm.
        k_weight: [D], or None for no norm.
        weight_offset: that of :func:`rms_norm_heads`.
        epsilon: that of :func:`rms_norm_heads`.
        k_scale: float32 [1] or [Hkv], for an fp8 cache without words.
        v_scale: the same of V.
        k_scale_shift: int32 [pages, page_size, Hkv], for an fp8 cache with a word per row.
        v_scale_shift: the same of V.
        num_groups: groups of an int4 row.
        fp8_dtype: what an fp8 cache holds.
    """
    if q_weight is not None:
        q = rms_norm_heads(q, q_weight, epsilon, weight_offset)
    if k_weight is not None:
        k = rms_norm_heads(k, k_weight, epsilon, weight_offset)
    turned = rotate(q, cos_sin, positions, interleaved)
    stored = (
        (rotate(k, cos_sin, positions, interleaved), k_cache, k_scale, k_scale_shift),
        (v, v_cache, v_scale, v_scale_shift),
    )
    for x, cache, scale, words in stored:
        if num_groups is not None:
            write_rows(cache, quantize_kv_int4(x, num_groups), slot_mapping)
        elif cache.dtype == x.dtype:
            write_rows(cache, x, slot_mapping)
        elif words is not None:
            codes, own = quantize_kv_fp8(x, fp8_dtype)
            write_rows(cache.view(torch.uint8), codes.view(torch.uint8), slot_mapping)
            write_rows(words, own, slot_mapping)
        else:
            scales = torch.ones(1, dtype=torch.float32, device=x.device) if scale is None else scale
            per_head = scales.expand(x.shape[1]) if scales.numel() == 1 else scales
            codes = torch.stack(
                [to_fp8_static(x[:, h].to(torch.float32), per_head[h], fp8_dtype) for h in range(x.shape[1])], dim=1
            )
            write_rows(cache.view(torch.uint8), codes.view(torch.uint8), slot_mapping)
    return turned


def rope_and_index(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    index_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    epsilon: float = 1e-6,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Return the rotated index queries; write the index keys to their cache, to fp8 without a scale, saturated.

    Args:
        index_q: float16 or bfloat16 [T, groups, D].
        index_k: [T, 1, D].
        cos_sin: [max_pos, rotary_dim].
        positions: integer [T].
        index_cache: [pages, page_size, D] of fp8 or of index_q's dtype.
        slot_mapping: int64 [T].
        interleaved: the pairs of :func:`rotate`.
        q_weight: [D], or None for no norm.
        k_weight: [D], or None for no norm.
        weight_offset: that of :func:`rms_norm_heads`.
        epsilon: that of :func:`rms_norm_heads`.
        fp8_dtype: what an fp8 cache holds.
    """
    q, k = (
        x if weight is None else rms_norm_heads(x, weight, epsilon, weight_offset)
        for x, weight in ((index_q, q_weight), (index_k, k_weight))
    )
    turned = rotate(k, cos_sin, positions, interleaved)[:, 0]
    if index_cache.dtype == turned.dtype:
        write_rows(index_cache, turned, slot_mapping)
    else:
        one = torch.ones((), dtype=torch.float32, device=turned.device)
        codes = to_fp8_static(turned.to(torch.float32), one, fp8_dtype)
        write_rows(index_cache.view(torch.uint8), codes.view(torch.uint8), slot_mapping)
    return rotate(q, cos_sin, positions, interleaved)
