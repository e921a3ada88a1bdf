"""A peer of the grouped GEMM on a GPU: the tile kernel of a fused MoE layer in Triton, for bf16 and fp8 operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import hipforge
from helpers import bench

SLOTS = (16, 64)  # of a tile: few for few tokens
SHAPES = ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3))  # its columns and k, warps and stages


@triton.jit
def tile_product(
    a_ptr, w_ptr, out_ptr, sorted_ptr, expert_ptr, padded_ptr, weight_ptr, factor, slots, N, K,
    A_DIV: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M sorted slots times BLOCK_N columns of their expert; K a multiple of BLOCK_K."""
    tile = tl.program_id(1)
    if tile * BLOCK_M >= tl.load(padded_ptr):
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    slot = tl.load(sorted_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    row_ok = slot < slots
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + tl.where(row_ok, slot // A_DIV, 0).to(tl.int64)[:, None] * K + k[None, :]
    w_ptrs = w_ptr + expert * N * K + (columns % N)[None, :] * K + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        sums = tl.dot(tl.load(a_ptrs + start), tl.load(w_ptrs + start), sums)
    sums *= factor
    if HAS_WEIGHT:
        sums *= tl.load(weight_ptr + slot, mask=row_ok, other=0.0)[:, None]
    out_ptrs = out_ptr + slot.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (columns < N)[None, :])


def calls(
    a: torch.Tensor, w: torch.Tensor, copies: Sequence[Any], slots: int, a_div: int
) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """Yield the product of slots with their experts in each configuration, of bf16 and of fp8 with a scale a tensor.

    Args:
        a: bfloat16 [T, K].
        w: bfloat16 [E, N, K].
        copies: of operands, with their routing.
        slots: S.
        a_div: slots of a row of ``a``.
    """
    experts, n, k = w.shape
    binder = bench.triton_binder()
    launched = binder(tile_product, arch="gfx950") if binder else tile_product
    align = hipforge.moe_align_block_size
    routed = {each: [align(parts.topk_ids, each, experts) for parts in copies] for each in SLOTS}
    fp8 = torch.finfo(torch.float8_e4m3fn).max
    scales = [part.abs().amax().float() / fp8 for part in (a, w)]
    codes = [(part.float() / scale).to(torch.float8_e4m3fn) for part, scale in zip((a, w), scales, strict=True)]
    factor = float(scales[0] * scales[1])
    for name, (rows, weights), by in (("bf16", (a, w), 1.0), ("fp8", codes, factor)):
        for block_m, (block_n, block_k, num_warps, num_stages) in itertools.product(SLOTS, SHAPES):
            if k % block_k:
                continue
            constants = {"A_DIV": a_div, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
            how = {**constants, "num_warps": num_warps, "num_stages": num_stages}

            def call(i: int, operands: Any = (rows, weights), by: float = by, how: Any = how) -> torch.Tensor:
                parts, index = copies[i], routed[how["BLOCK_M"]][i]
                scaled = parts.weights is not None
                end = *index, parts.weights if scaled else parts.out, by, slots, n, k
                grid = triton.cdiv(n, how["BLOCK_N"]), index.expert_ids.numel()
                launched[grid](*operands, parts.out, *end, HAS_WEIGHT=scaled, **how)
                return parts.out

            yield f"triton {name} {block_m}x{block_n}x{block_k} warps={num_warps} stages={num_stages}", call
