"""Calls of the ops around the GEMMs at a shape: quantisers, norms, gating, routing, RoPE, and the total functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import hipforge
from hipforge.cli.operands import Subject, e4m3, mxfp8, normal

if TYPE_CHECKING:
    import torch

Call = partial[Any]
EPSILON = 1e-5
PAGE = 64
ROWS = ("R", "C")


def _quantise(op: str) -> Callable[..., Call]:
    return lambda rows, columns: partial(getattr(hipforge, op), normal(rows, columns, seed=0))


def _norm(op: str, *, residual: bool = False, static: bool = False) -> Callable[..., Call]:
    def call(rows: int, columns: int) -> Call:
        import torch

        inputs = [normal(rows, columns, seed=seed) for seed in range(1 + residual)]
        scale = [torch.tensor([0.02])] if static else []
        return partial(getattr(hipforge, op), *inputs, normal(columns, seed=2), EPSILON, *scale)

    return call


def _swiglu_fp8(rows: int, columns: int) -> Call:
    import torch

    return partial(hipforge.swiglu_fp8, normal(rows, 2 * columns, seed=0), torch.tensor([0.02]))


def _swiglu_mxfp8(rows: int, columns: int) -> Call:
    return partial(hipforge.swiglu_mxfp8, normal(rows, 2 * columns, seed=0))


def _mxfp4(op: str) -> Callable[..., Call]:
    def call(m: int, n: int, k: int) -> Call:
        from hipforge.ops.reference import quantize_mxfp4

        operands = (*quantize_mxfp4(normal(m, k, seed=0, scale=0.5)), *quantize_mxfp4(normal(n, k, seed=1, scale=0.1)))
        return partial(getattr(hipforge, op), *operands)

    return call


def _quantize_mxfp4_linear(m: int, n: int, k: int) -> Call:
    from hipforge.ops.fused_linear import quantize_mxfp4_linear
    from hipforge.ops.reference import quantize_mxfp4

    w = quantize_mxfp4(normal(n, k, seed=1, scale=0.1))
    return partial(quantize_mxfp4_linear, normal(m, k, seed=0, scale=0.5), *w)


def _router_gemm(m: int, n: int, k: int) -> Call:
    return partial(hipforge.router_gemm, normal(m, k, seed=0), normal(n, k, seed=1))


def _scores(tokens: int, experts: int) -> torch.Tensor:
    return normal(tokens, experts, seed=2).float()


def _topk_gating(tokens: int, experts: int, top_k: int) -> Call:
    return partial(hipforge.topk_gating, _scores(tokens, experts), top_k)


def _moe_align(tokens: int, experts: int, top_k: int) -> Call:
    ids = _scores(tokens, experts).topk(top_k, dim=1).indices.int()
    return partial(hipforge.moe_align_block_size, ids, 64, experts)


def _moe_combine(tokens: int, columns: int, top_k: int) -> Call:
    import torch

    return partial(hipforge.moe_combine, normal(tokens * top_k, columns, seed=0), torch.rand(tokens, top_k))


def _rope_and_cache(tokens: int, q_heads: int, kv_heads: int, d: int) -> Call:
    import torch

    page_size, one = 64, torch.ones(1)
    pages = -(-tokens // page_size)
    q, k, v = (normal(tokens, heads, d, seed=seed) for seed, heads in enumerate((q_heads, kv_heads, kv_heads)))
    angle = torch.arange(tokens)[:, None] * torch.logspace(0, -4, d // 2)
    k_cache, v_cache = (e4m3(pages, page_size, kv_heads, d, seed=seed) for seed in (3, 4))
    where = torch.arange(tokens)
    table = torch.cat((angle.cos(), angle.sin()), dim=-1)
    return partial(
        hipforge.rope_and_cache, q, k, v, table, where, k_cache, v_cache, where, k_scale=one, v_scale=one
    )


def _paged(batch: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables of pages of 64 in order, and lengths."""
    import torch

    pages = -(-keys // PAGE)
    return torch.arange(batch * pages).int().view(batch, pages), torch.full((batch,), keys, dtype=torch.int32)


def _sparse_block_scores(batch: int, keys: int, groups: int, d: int) -> Call:
    tables, lengths = _paged(batch, keys)
    index_cache = e4m3(tables.numel(), PAGE, d, seed=1)
    return partial(hipforge.sparse_block_scores, normal(batch, 1, groups, d, seed=0), index_cache, tables, lengths)


def _sparse_topk_blocks(batch: int, keys: int, groups: int) -> Call:
    tables, lengths = _paged(batch, keys)
    blocks = -(-tables.shape[1] * PAGE // 128)
    scores = normal(batch, 1, groups, blocks, seed=0).float()
    return partial(hipforge.sparse_topk_blocks, scores, tables, lengths, page_size=PAGE)


def _decode_attention_splitk(batch: int, keys: int, kv_heads: int, group: int, d: int) -> Call:
    import torch

    q = normal(1, batch, kv_heads, group, d, seed=0)
    words = [e4m3(1, batch * keys, kv_heads, 1, d, seed=seed).view(torch.int32) for seed in (1, 2)]
    k, v = (item.expand(1, batch * keys, kv_heads, group, d // 4) for item in words)
    half_scale = torch.tensor(0.5, dtype=torch.float16).view(torch.int16).int()  # scale 0.5 and shift 0
    scales = half_scale.expand(1, batch * keys, kv_heads, 1).contiguous().expand(1, batch * keys, kv_heads, group)
    return partial(
        hipforge.decode_attention_splitk, q, k, v, scales, scales, torch.full((batch,), keys, dtype=torch.int32)
    )


def _fused_moe(tokens: int, n: int, k: int, experts: int, top_k: int) -> Call:
    import torch

    w1, s1 = mxfp8(experts * 2 * n, k, seed=3, scale=0.1)
    w2, s2 = mxfp8(experts * k, n, seed=4, scale=0.1)
    ids = _scores(tokens, experts).topk(top_k, dim=1).indices.int()
    return partial(
        hipforge.fused_moe_mxfp8,
        normal(tokens, k, seed=0),
        w1.view(experts, 2 * n, k), s1.view(experts, 2 * n, -1), w2.view(experts, k, n), s2.view(experts, k, -1),
        torch.full((tokens, top_k), 1 / top_k), ids,
    )  # fmt: skip


MORE: dict[str, Subject] = {
    "mxfp4_gemm": Subject(("M", "N", "K"), (4, 2880, 512), _mxfp4("mxfp4_gemm")),
    "mxfp4_linear": Subject(("M", "N", "K"), (4, 2880, 512), _mxfp4("mxfp4_linear")),
    "quantize_mxfp4_linear": Subject(("M", "N", "K"), (4, 2880, 512), _quantize_mxfp4_linear),
    "fused_moe_mxfp8": Subject(("M", "N", "K", "E", "TOPK"), (4, 384, 1024, 8, 2), _fused_moe),
    "fp8_quant_rows": Subject(ROWS, (16, 6144), _quantise("fp8_quant_rows")),
    "fp8_quant_blocks": Subject(ROWS, (16, 6144), _quantise("fp8_quant_blocks")),
    "mxfp8_quantize": Subject(ROWS, (32, 6144), _quantise("mxfp8_quantize")),
    "mxfp4_quantize": Subject(ROWS, (32, 6144), _quantise("mxfp4_quantize")),
    "rms_norm": Subject(ROWS, (4, 6144), _norm("rms_norm")),
    "rms_norm_fp8": Subject(ROWS, (4, 6144), _norm("rms_norm_fp8", static=True)),
    "rms_norm_mxfp8": Subject(ROWS, (4, 6144), _norm("rms_norm_mxfp8")),
    "residual_rms": Subject(ROWS, (4, 16384), _norm("residual_rms", residual=True, static=True)),
    "residual_rms_mxfp8": Subject(ROWS, (4, 6144), _norm("residual_rms_mxfp8", residual=True)),
    "swiglu_fp8": Subject(("R", "D"), (4, 6656), _swiglu_fp8),
    "swiglu_mxfp8": Subject(("R", "D"), (4, 6656), _swiglu_mxfp8),
    "router_gemm": Subject(("M", "N", "K"), (4, 128, 6144), _router_gemm),
    "topk_gating": Subject(("M", "E", "TOPK"), (4, 128, 8), _topk_gating),
    "moe_align_block_size": Subject(("M", "E", "TOPK"), (32, 128, 8), _moe_align),
    "moe_combine": Subject(("M", "C", "TOPK"), (32, 6144, 4), _moe_combine),
    "rope_and_cache": Subject(("T", "HQ", "HKV", "D"), (32, 8, 1, 128), _rope_and_cache),
    "sparse_block_scores": Subject(("B", "MKV", "HKV", "D"), (4, 8192, 4, 128), _sparse_block_scores),
    "sparse_topk_blocks": Subject(("B", "MKV", "HKV"), (4, 8192, 4), _sparse_topk_blocks),
    "decode_attention_splitk": Subject(("B", "MKV", "HKV", "G", "D"), (4, 2048, 1, 8, 128), _decode_attention_splitk),
}
