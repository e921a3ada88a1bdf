"""Triton kernels of decode attention over a packed fp8 cache; importing this module imports triton."""

# Triton gives annotations its own meaning, cannot unpack tuples, and must unroll loops in which a tuple grows.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(  # type: ignore[no-untyped-def]
    words_ptr, slots, valid, part: tl.constexpr, PART: tl.constexpr, D: tl.constexpr
):
    """Return the int32 words [BLOCK_N, PART / 4] of one part of each key's row."""
    column = part * (PART // 4) + tl.arange(0, PART // 4)
    return tl.load(words_ptr + slots[:, None] * (D // 4) + column[None, :], mask=valid[:, None], other=0)


@triton.jit
def dequantize(  # type: ignore[no-untyped-def]
    words, scale_shift, dtype: tl.constexpr, FNUZ: tl.constexpr
):
    """Return fp8 * scale + shift of int32 words [BLOCK_N, PART / 4] as ``dtype`` [BLOCK_N, PART]."""
    codes = (words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]).to(tl.uint8)
    codes = tl.reshape(codes, (words.shape[0], 4 * words.shape[1]))
    fp8 = codes.to(tl.float8e4b8 if FNUZ else tl.float8e4nv, bitcast=True)
    scale = (scale_shift & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    shift = (scale_shift >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (fp8.to(tl.float32) * scale[:, None] + shift[:, None]).to(dtype)


@triton.jit
def decode_split_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    k_rows_ptr,
    v_ptr,
    v_rows_ptr,
    seqlens_ptr,
    tables_ptr,
    partial_ptr,
    partial_lse_ptr,
    factor,
    kv_heads,
    group,
    mq,
    max_pages,
    page_size,
    FNUZ: tl.constexpr,
    PAGED: tl.constexpr,
    RESIDENT: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of BLOCK_M query rows, KV head, sequence and split per program.

    Grid (tiles, B * kv_heads, splits). With RESIDENT the K and V words, scales and dequantised elements of all parts
    of a block exist before its first product; without, each part is loaded, converted and multiplied in turn, and V
    only when the weights are known.
    """
    PART: tl.constexpr = D // PARTS
    dtype = q_ptr.dtype.element_ty
    batch = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    split = tl.program_id(2)
    rows = group * mq
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < rows
    token = row % mq
    q_row = ((batch * mq + token) * kv_heads + head) * group + row // mq
    q = ()
    acc = ()
    for part in tl.static_range(PARTS):
        column = part * PART + tl.arange(0, PART)
        q = q + (tl.load(q_ptr + q_row[:, None] * D + column[None, :], mask=row_ok[:, None], other=0.0),)
        acc = acc + (tl.zeros((BLOCK_M, PART), tl.float32),)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    length = tl.minimum(tl.load(seqlens_ptr + batch), max_pages * page_size)
    limit = length - (mq - 1 - token)
    each = tl.cdiv(tl.cdiv(length, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin = split * each
    end = tl.minimum(begin + each, length)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        valid = key < end
        page = batch.to(tl.int64)
        slot = key
        if PAGED:
            page = tl.load(tables_ptr + batch * max_pages + start // page_size).to(tl.int64)
            slot = start % page_size + tl.arange(0, BLOCK_N)
        slots = (page * page_size + slot) * kv_heads + head
        k_rows = tl.load(k_rows_ptr + slots, mask=valid, other=0)
        if RESIDENT:
            v_rows = tl.load(v_rows_ptr + slots, mask=valid, other=0)
            k = ()
            v = ()
            for part in tl.static_range(PARTS):
                k = k + (dequantize(load_words(k_ptr, slots, valid, part, PART, D), k_rows, dtype, FNUZ),)
                v = v + (dequantize(load_words(v_ptr, slots, valid, part, PART, D), v_rows, dtype, FNUZ),)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in tl.static_range(PARTS):
            if RESIDENT:
                scores = tl.dot(q[part], tl.trans(k[part]), scores)
            else:
                words = load_words(k_ptr, slots, valid, part, PART, D)
                scores = tl.dot(q[part], tl.trans(dequantize(words, k_rows, dtype, FNUZ)), scores)
        scores = tl.where(valid[None, :] & (key[None, :] < limit[:, None]), scores * factor, float("-inf"))
        following = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(following == float("-inf"), 0.0, following)
        keep = tl.exp2(maximum - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * keep + tl.sum(weights, 1)
        maximum = following
        weights = weights.to(dtype)
        if not RESIDENT:
            v_rows = tl.load(v_rows_ptr + slots, mask=valid, other=0)
        sums = ()
        for part in tl.static_range(PARTS):
            if RESIDENT:
                sums = sums + (tl.dot(weights, v[part], acc[part] * keep[:, None]),)
            else:
                words = load_words(v_ptr, slots, valid, part, PART, D)
                sums = sums + (tl.dot(weights, dequantize(words, v_rows, dtype, FNUZ), acc[part] * keep[:, None]),)
        acc = sums

    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    place = (split * tl.num_programs(1) + tl.program_id(1)) * rows + row
    tl.store(partial_lse_ptr + place, tl.where(total > 0, maximum + tl.log2(total), float("-inf")), mask=row_ok)
    for part in tl.static_range(PARTS):
        column = part * PART + tl.arange(0, PART)
        tl.store(partial_ptr + place[:, None] * D + column[None, :], acc[part] * inverse[:, None], mask=row_ok[:, None])


@triton.jit
def decode_merge_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    kv_heads,
    group,
    mq,
    splits,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEP: tl.constexpr,
):
    """One row of the output per program, grid (rows, B * kv_heads); BLOCK_S: a power of two of at least ``splits``."""
    row = tl.program_id(0)
    place = tl.program_id(1) * group * mq + row
    stride = tl.num_programs(1) * group * mq
    every = tl.arange(0, BLOCK_S)
    all_lse = tl.load(partial_lse_ptr + every * stride + place, mask=every < splits, other=float("-inf"))
    largest = tl.max(all_lse, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    column = tl.arange(0, D)
    sums = tl.zeros((D,), tl.float32)
    total = 0.0
    for start in range(0, splits, STEP):
        split = start + tl.arange(0, STEP)
        valid = split < splits
        slices = split * stride + place
        weights = tl.exp2(tl.load(partial_lse_ptr + slices, mask=valid, other=float("-inf")) - base)
        values = tl.load(partial_ptr + slices[:, None] * D + column[None, :], mask=valid[:, None], other=0.0)
        sums += tl.sum(values * weights[:, None], 0)
        total += tl.sum(weights, 0)
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    batch = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    q_row = ((batch * mq + row % mq) * kv_heads + head) * group + row // mq
    tl.store(out_ptr + q_row * D + column, (sums * inverse).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + place, tl.where(total > 0, (base + tl.log2(total)) * 0.6931471805599453, float("-inf")))
