"""The Triton kernels of routing: gating, sorted slots, the sum over experts, the router's product.

Importing this module imports triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _key_of(value):  # type: ignore[no-untyped-def]
    """Map floats to int64 keys in the same order: 2 and above for numbers, 1 for NaN."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
    return tl.where(value != value, 1, ordered)


@triton.jit
def topk_gating_kernel(  # type: ignore[no-untyped-def]
    weights_ptr,
    ids_ptr,
    logits_ptr,
    bias_ptr,
    row_stride,
    experts,
    scale,
    CHOICES: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """One token per program; a row is [BLOCK_GROUPS, GROUP_SIZE], one group of all experts where there are none."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    expert = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    here = expert < experts
    logit = tl.load(logits_ptr + token * row_stride + expert, mask=here, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        number = logit == logit
        largest = tl.max(tl.max(tl.where(number, logit, float("-inf")), 1), 0)
        score = tl.where(logit == largest, 1.0, tl.exp(logit - largest))
        score = score / tl.sum(tl.sum(tl.where(here & number, score, 0.0), 1), 0)
    choice = logit
    if HAS_BIAS:
        choice = score + tl.load(bias_ptr + expert, mask=here, other=0.0)
    # Key 0: experts that are already chosen, in a dropped group, or past the last one.
    key = tl.where(here, _key_of(choice), 0)
    if GROUPS > 1:
        best = tl.max(key, 1)
        worth = best
        if HAS_BIAS and GROUP_SIZE > 1:
            first = tl.min(tl.where(key == best[:, None], expert, 2147483647), 1)
            value = tl.max(
                tl.where(expert == first[:, None], tl.where(choice == choice, choice, float("-inf")), float("-inf")), 1
            )
            rest = tl.where(expert == first[:, None], 0, key)
            second = tl.max(rest, 1)
            other = tl.max(tl.where(rest == second[:, None], choice, float("-inf")), 1)
            worth = tl.where((best == 1) | (second == 1), 1, _key_of(value + other))
        worth = tl.where(group < GROUPS, worth, 0)
        kept = tl.zeros((BLOCK_GROUPS,), dtype=tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            winner = tl.min(tl.where(worth == tl.max(worth, 0), group, 2147483647), 0)
            kept = tl.where(group == winner, 1, kept)
            worth = tl.where(group == winner, 0, worth)
        key = tl.where(kept[:, None] > 0, key, 0)
    at = tl.arange(0, BLOCK_WIDTH)
    weights = tl.where(at < CHOICES, 0.0, 1.0)
    ids = experts + at - CHOICES
    total = 0.0
    for i in tl.static_range(CHOICES):
        top = tl.max(tl.max(key, 1), 0)
        winner = tl.min(tl.min(tl.where(key == top, expert, 2147483647), 1), 0)
        weight = tl.sum(tl.sum(tl.where(expert == winner, score, 0.0), 1), 0)
        key = tl.where(expert == winner, 0, key)
        total += weight
        weights = tl.where(at == i, weight, weights)
        ids = tl.where(at == i, winner, ids)
    if RENORMALIZE:
        weights = tl.where(at < CHOICES, weights / (total + 1e-20), weights)
    weights = tl.where(at < CHOICES, weights * scale, weights)
    out = token * (CHOICES + SHARED) + at
    tl.store(weights_ptr + out, weights, mask=at < CHOICES + SHARED)
    tl.store(ids_ptr + out, ids.to(tl.int32), mask=at < CHOICES + SHARED)


@triton.jit
def moe_align_kernel(  # type: ignore[no-untyped-def]
    sorted_ptr,
    tiles_ptr,
    padded_ptr,
    ids_ptr,
    map_ptr,
    slots,
    experts,
    block_m,
    entries,
    tiles,
    HAS_MAP: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """One expert per program: counts all slots to find where its own start, and writes them; the last pads the rest."""
    expert = tl.program_id(0)
    column = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.zeros((BLOCK_EXPERTS,), dtype=tl.int32)
    for base in range(0, slots, BLOCK_SLOTS):
        slot = base + tl.arange(0, BLOCK_SLOTS)
        id = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
        known = (id >= 0) & (id < experts)
        counts += tl.sum((known[:, None] & (id[:, None] == column[None, :])).to(tl.int32), 0)
    padded = (counts + block_m - 1) // block_m * block_m
    start = tl.sum(tl.where(column < expert, padded, 0), 0)
    count = tl.sum(tl.where(column == expert, counts, 0), 0)
    end = start + tl.sum(tl.where(column == expert, padded, 0), 0)
    at = start
    for base in range(0, slots, BLOCK_SLOTS):
        slot = base + tl.arange(0, BLOCK_SLOTS)
        mine = tl.load(ids_ptr + slot, mask=slot < slots, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(sorted_ptr + at + rank, slot, mask=mine)
        at += tl.sum(mine.to(tl.int32), 0)
    name = expert
    if HAS_MAP:
        name = tl.load(map_ptr + expert).to(tl.int32)
    for base in range(start + count, end, BLOCK_SLOTS):
        entry = base + tl.arange(0, BLOCK_SLOTS)
        tl.store(sorted_ptr + entry, slots, mask=entry < end)
    for base in range(start // block_m, end // block_m, BLOCK_SLOTS):
        tile = base + tl.arange(0, BLOCK_SLOTS)
        tl.store(tiles_ptr + tile, name, mask=tile < end // block_m)
    if expert == experts - 1:
        tl.store(padded_ptr, end)
        for base in range(end, entries, BLOCK_SLOTS):
            entry = base + tl.arange(0, BLOCK_SLOTS)
            tl.store(sorted_ptr + entry, slots, mask=entry < entries)
        for base in range(end // block_m, tiles, BLOCK_SLOTS):
            tile = base + tl.arange(0, BLOCK_SLOTS)
            tl.store(tiles_ptr + tile, -1, mask=tile < tiles)


@triton.jit
def moe_combine_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    rows_ptr,
    weights_ptr,
    ids_ptr,
    map_ptr,
    cols,
    experts,
    local,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(TOP_K):
        slot = token * TOP_K + i
        used = True
        if HAS_IDS:
            id = tl.load(ids_ptr + slot).to(tl.int64)
            used = id >= 0
            if HAS_LIMIT:
                used = used & (id < experts)
            if HAS_MAP:
                own = tl.load(map_ptr + tl.where(used, id, 0)).to(tl.int64)
                used = used & (own >= 0)
                if HAS_LOCAL:
                    used = used & (own < local)
        values = tl.load(rows_ptr + slot * cols + column, mask=(column < cols) & used, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            values = values * tl.load(weights_ptr + slot)
        total = tl.where(used, total + values, total)
    tl.store(out_ptr + token * cols + column, total.to(out_ptr.dtype.element_ty), mask=column < cols)


@triton.jit
def router_gemm_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    tokens,
    experts,
    hidden,
    row_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A tile of tokens by experts per program, products and sums in IEEE fp32."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    for start in range(0, hidden, BLOCK_H):
        inside = start + h < hidden
        x = tl.load(
            x_ptr + token[:, None].to(tl.int64) * row_stride + start + h[None, :],
            mask=(token < tokens)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        w = tl.load(
            w_ptr + expert[:, None].to(tl.int64) * hidden + start + h[None, :],
            mask=(expert < experts)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0)[None, :]
    tl.store(
        out_ptr + token[:, None].to(tl.int64) * experts + expert[None, :],
        acc,
        mask=(token < tokens)[:, None] & (expert < experts)[None, :],
    )
