"""The Triton kernel of the MX-FP8 fallback; importing this module imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mxfp8_dot_scaled_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One BLOCK_M x BLOCK_N tile of X @ W^T per program; all operands row-major uint8, the output bf16.

    EVEN: BLOCK_N divides N and BLOCK_K divides K, and only rows of X need a mask.
    """
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    block = tl.arange(0, BLOCK_K // 32)
    blocks = K // 32
    row_ok = rows[:, None] < M
    column_ok = columns[:, None] < N
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
    x_scale_ptrs = x_scale_ptr + rows[:, None].to(tl.int64) * blocks + block[None, :]
    w_ptrs = w_ptr + columns[:, None].to(tl.int64) * K + k[None, :]
    w_scale_ptrs = w_scale_ptr + columns[:, None].to(tl.int64) * blocks + block[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        # What is masked off gets scale 127 (one): the 255 of a neighbour would turn 0 into NaN.
        if EVEN:
            x = tl.load(x_ptrs, mask=row_ok, other=0)
            x_scale = tl.load(x_scale_ptrs, mask=row_ok, other=127)
            w = tl.load(w_ptrs)
            w_scale = tl.load(w_scale_ptrs)
        else:
            k_ok = k[None, :] < K - start
            block_ok = block[None, :] < blocks - start // 32
            x = tl.load(x_ptrs, mask=row_ok & k_ok, other=0)
            x_scale = tl.load(x_scale_ptrs, mask=row_ok & block_ok, other=127)
            w = tl.load(w_ptrs, mask=column_ok & k_ok, other=0)
            w_scale = tl.load(w_scale_ptrs, mask=column_ok & block_ok, other=127)
        acc = tl.dot_scaled(x, x_scale, "e4m3", w.T, w_scale, "e4m3", acc)
        x_ptrs += BLOCK_K
        x_scale_ptrs += BLOCK_K // 32
        w_ptrs += BLOCK_K
        w_scale_ptrs += BLOCK_K // 32
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptrs, acc.to(tl.bfloat16), mask=row_ok & (columns[None, :] < N))
