"""The Triton kernel of RoPE and the cache write; importing this module imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_and_cache_kernel(  # type: ignore[no-untyped-def]
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_words_ptr,
    v_words_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_token,  # strides, in elements
    q_head,
    out_token,
    out_head,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    k_slot,
    k_row,
    v_page,
    v_slot,
    v_row,
    k_words_page,
    k_words_slot,
    k_words_row,
    v_words_page,
    v_words_slot,
    v_words_row,
    k_scale_stride,
    v_scale_stride,
    q_heads,
    kv_heads,
    max_positions,
    cache_slots,
    page_size,
    epsilon,
    weight_offset,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    OFFSET: tl.constexpr,
    STORAGE: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token per program, of one warp, which reads the whole head before it writes: in place works."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner = tl.where(d < ROTARY, d ^ 1, d)
        first = (d % 2) == 0
        angle = d // 2
    else:
        partner = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
        first = d < half
        angle = tl.where(d < half, d, d - half)
    is_q = row < q_heads
    is_k = (row >= q_heads) & (row < q_heads + kv_heads)
    head = tl.where(is_q, row, tl.where(is_k, row - q_heads, row - q_heads - kv_heads))
    source = q_ptr + token * q_token + head * q_head
    if is_k:
        source = k_ptr + token * k_token + head * k_head
    if row >= q_heads + kv_heads:
        source = v_ptr + token * v_token + head * v_head
    x = tl.load(source + d, mask=d < D, other=0.0)
    y = x.to(tl.float32)
    if row < q_heads + kv_heads:
        other = tl.load(source + partner, mask=d < D, other=0.0).to(tl.float32)
        if (is_q & NORM_Q) | (is_k & NORM_K):
            weight_ptr = q_weight_ptr
            if is_k:
                weight_ptr = k_weight_ptr
            factor = tl.rsqrt(tl.sum(y * y, 0) / D + epsilon)
            own_weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
            other_weight = tl.load(weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
            if OFFSET:
                y = (y * factor * (own_weight + weight_offset)).to(x.dtype).to(tl.float32)
                other = (other * factor * (other_weight + weight_offset)).to(x.dtype).to(tl.float32)
            else:
                y = ((y * factor).to(x.dtype).to(tl.float32) * own_weight).to(x.dtype).to(tl.float32)
                other = ((other * factor).to(x.dtype).to(tl.float32) * other_weight).to(x.dtype).to(tl.float32)
        position = tl.load(positions_ptr + token).to(tl.int64)
        known = (position >= 0) & (position < max_positions)
        table = cos_sin_ptr + tl.where(known, position, 0) * ROTARY
        turns = d < ROTARY
        cos = tl.load(table + angle, mask=turns & known, other=float("nan")).to(tl.float32)
        sin = tl.load(table + half + angle, mask=turns & known, other=float("nan")).to(tl.float32)
        turned = other * sin
        y = tl.where(turns, y * cos + tl.where(first, -turned, turned), y)
    result = y.to(x.dtype)
    if is_q:
        tl.store(q_out_ptr + token * out_token + head * out_head + d, result, mask=d < D)
        return
    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= cache_slots):
        return
    page, in_page = slot // page_size, slot % page_size
    cache = k_cache_ptr + page * k_page + in_page * k_slot + head * k_row
    words = k_words_ptr + page * k_words_page + in_page * k_words_slot + head * k_words_row
    scale_ptr = k_scale_ptr + head * k_scale_stride
    if row >= q_heads + kv_heads:
        cache = v_cache_ptr + page * v_page + in_page * v_slot + head * v_row
        words = v_words_ptr + page * v_words_page + in_page * v_words_slot + head * v_words_row
        scale_ptr = v_scale_ptr + head * v_scale_stride
    if STORAGE == 0:
        tl.store(cache + d, result, mask=d < D)
    else:
        values = result.to(tl.float32)
        if STORAGE == 1:
            scale = tl.load(scale_ptr)
            values = values * tl.where(scale == 0.0, 1.0, 1.0 / scale)
        else:
            mean = tl.sum(tl.where(d < D, values, 0.0), 0) / D
            mean = tl.where(mean > 65504.0, 65504.0, tl.where(mean < -65504.0, -65504.0, mean))  # keeps a NaN
            shift = mean.to(tl.float16)
            centred = tl.where(d < D, values - shift.to(tl.float32), 0.0)
            number = tl.sum((centred != centred).to(tl.int32), 0) == 0
            row_scale = (tl.max(tl.abs(centred), 0) / FP8_MAX).to(tl.float16)
            wide = row_scale.to(tl.float32)
            row_scale = tl.where(number & (wide > 0.0) & (wide < float("inf")), wide, 1.0).to(tl.float16)
            values = centred / row_scale.to(tl.float32)
            low = row_scale.to(tl.uint16, bitcast=True).to(tl.uint32)
            word = (shift.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | low
            tl.store(words, word.to(tl.int32, bitcast=True))
        limited = tl.minimum(tl.maximum(values, -FP8_MAX), FP8_MAX)
        codes = tl.where(values == values, limited, values).to(FP8)
        tl.store(cache + d, codes.to(tl.uint8, bitcast=True), mask=d < D)
