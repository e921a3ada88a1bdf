"""The Triton kernel of the grouped MX-FP8 fallback; importing this module imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mxfp8_grouped_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    a_scale_ptr,
    w_ptr,
    w_scale_ptr,
    sorted_ptr,
    expert_ptr,
    padded_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    slots,
    experts,
    N,
    K,
    A_DIV: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One tile of BLOCK_M sorted entries times BLOCK_N columns of its expert per program; all operands uint8."""
    tile = tl.program_id(1)
    if tile * BLOCK_M >= tl.load(padded_ptr):
        return
    expert = tl.load(expert_ptr + tile)
    if (expert < 0) | (expert >= experts):
        return
    slot = tl.load(sorted_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    row_ok = (slot >= 0) & (slot < slots)
    rows = tl.where(row_ok, slot // A_DIV, 0).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = columns < N
    w_rows = expert.to(tl.int64) * N + columns
    k = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK_K // 32)
    blocks = K // 32
    a_ptrs = a_ptr + rows[:, None] * K + k[None, :]
    a_scale_ptrs = a_scale_ptr + rows[:, None] * blocks + block[None, :]
    w_ptrs = w_ptr + w_rows[:, None] * K + k[None, :]
    w_scale_ptrs = w_scale_ptr + w_rows[:, None] * blocks + block[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        # What is masked off gets scale 127 (one): the 255 of a neighbour would turn 0 into NaN.
        k_ok = k[None, :] < K - start
        block_ok = block[None, :] < blocks - start // 32
        a = tl.load(a_ptrs, mask=row_ok[:, None] & k_ok, other=0)
        a_scale = tl.load(a_scale_ptrs, mask=row_ok[:, None] & block_ok, other=127)
        w = tl.load(w_ptrs, mask=column_ok[:, None] & k_ok, other=0)
        w_scale = tl.load(w_scale_ptrs, mask=column_ok[:, None] & block_ok, other=127)
        acc = tl.dot_scaled(a, a_scale, "e4m3", w.T, w_scale, "e4m3", acc)
        a_ptrs += BLOCK_K
        a_scale_ptrs += BLOCK_K // 32
        w_ptrs += BLOCK_K
        w_scale_ptrs += BLOCK_K // 32
    if HAS_BIAS:
        acc += tl.load(bias_ptr + w_rows, mask=column_ok, other=0.0)[None, :]
    if HAS_WEIGHT:
        acc *= tl.load(weight_ptr + slot, mask=row_ok, other=0.0)[:, None]
    out_ptrs = out_ptr + slot[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptrs, acc.to(tl.bfloat16), mask=row_ok[:, None] & column_ok[None, :])
