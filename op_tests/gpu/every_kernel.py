"""Calls every op with kernels of sm_90 at small shapes, for each dtype and form: what ``sanitize.py`` runs."""

from __future__ import annotations

import torch

import hipforge
from hipforge.ops.reference import quantize_kv_int4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.float16, torch.bfloat16)


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def norms(dtype: torch.dtype) -> None:
    scale = torch.full((), 0.5, device=DEVICE)
    for columns in (64, 96, 4096 + 8, 17):
        x, weight = rows(dtype, 5, columns), rows(dtype, columns)
        hipforge.rms_norm(x, weight, 1e-6)
        hipforge.rms_norm_fp8(x, weight, 1e-6, scale, also_out=torch.empty_like(x))
        hipforge.residual_rms(x, x.clone(), weight, 1e-6, scale)
        if columns % 32 == 0:
            hipforge.rms_norm_mxfp8(x, weight, 1e-6)
            hipforge.residual_rms_mxfp8(x, x.clone(), weight, 1e-6)
        for interleaved in (False, True):
            gate_up = rows(dtype, 5, 2 * columns)
            hipforge.swiglu_fp8(gate_up, scale, interleaved=interleaved)
            if columns % 32 == 0:
                hipforge.swiglu_mxfp8(gate_up, interleaved=interleaved, alpha=1.7, beta=1.0, limit=7.0)


def quantisers(dtype: torch.dtype) -> None:
    for transpose in (False, True):
        hipforge.fp8_quant_tensorwise(rows(dtype, 70, 130), torch.float8_e4m3fn, transpose=transpose)
    x = rows(dtype, 16, 192)
    hipforge.mxfp8_quantize(x)
    hipforge.mxfp4_quantize(x)
    hipforge.mxfp4_quantize(x, shuffled=True)


def routing(dtype: torch.dtype) -> None:
    for experts in (8, 64, 200, 512):
        logits = rows(dtype, 9, experts)
        weights, ids = hipforge.topk_gating(logits, 4)
        bias = torch.randn(experts, device=DEVICE)
        hipforge.topk_gating(logits, 4, scoring="sigmoid", bias=bias, groups=4, topk_groups=2)
        hipforge.moe_align_block_size(ids, 16, experts)
        hipforge.moe_combine(rows(dtype, 9 * 4, 264), weights, ids, top_k=4)
    for tokens in (1, 7, 40):
        for weight in (torch.float32, torch.bfloat16):
            hipforge.router_gemm(rows(dtype, tokens, 520), rows(weight, 30, 520))


def rotation(dtype: torch.dtype) -> None:
    for dim in (64, 128, 256):
        q, k, v = rows(dtype, 6, 4, dim), rows(dtype, 6, 2, dim), rows(dtype, 6, 2, dim)
        angles = torch.randn(32, dim, device=DEVICE)
        positions = torch.arange(6, device=DEVICE)
        slots = torch.tensor([0, 5, -1, 17, 30, 31], device=DEVICE)
        for style in ("neox", "interleaved"):
            caches = [torch.zeros(2, 16, 2, dim, device=DEVICE, dtype=dtype) for _ in range(2)]
            hipforge.rope_and_cache(q, k, v, angles, positions, *caches, slots, style=style, q_weight=rows(dtype, dim))
            codes = [cache.to(torch.float8_e4m3fn) for cache in caches]
            hipforge.rope_and_cache(q, k, v, angles, positions, *codes, slots, style=style, k_scale=0.5, v_scale=0.5)


def products() -> None:
    for n, k in ((200, 640), (77, 288)):
        w = hipforge.mxfp8_quantize(rows(torch.bfloat16, n, k))
        for m in (1, 3, 8, 13, 20, 33, 70, 200):
            hipforge.mxfp8_linear(*hipforge.mxfp8_quantize(rows(torch.bfloat16, m, k)), *w)
    hidden, inner, experts = 256, 128, 8
    first, second = rows(torch.bfloat16, experts * 2 * inner, hidden), rows(torch.bfloat16, experts * hidden, inner)
    w1, w2 = hipforge.mxfp8_quantize(first), hipforge.mxfp8_quantize(second)
    weights = [part.view(experts, -1, part.shape[1]) for part in (*w1, *w2)]
    for tokens in (1, 5, 40, 300):
        chosen = hipforge.topk_gating(rows(torch.float32, tokens, experts), 2)
        hipforge.fused_moe_mxfp8(rows(torch.bfloat16, tokens, hidden), *weights, *chosen)


def attention(dtype: torch.dtype) -> None:
    for dim, page, group in ((64, 16, 4), (128, 64, 8), (256, 16, 1)):
        caches = [torch.randn(12, page, 2, dim, device=DEVICE).to(dtype) for _ in range(2)]
        tables = torch.randperm(12, device=DEVICE).int().view(3, 4)
        lengths = torch.tensor([1, page + 3, 4 * page - 1], device=DEVICE, dtype=torch.int32)
        q = rows(torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype, 3, 1, 2 * group, dim)
        for split in (None, 3):
            hipforge.decode_attention_fp8(q, *caches, tables, lengths, split_k=split, return_lse=True)
        sinks = torch.randn(2 * group, device=DEVICE)
        hipforge.decode_attention_fp8(q, *caches, tables, lengths, sinks=sinks, window=20, softcap=30.0)


def int4_attention() -> None:
    for groups in (1, 4):
        packed = quantize_kv_int4(torch.randn(1, 96, 2, 1, 128), groups).to(DEVICE).expand(-1, -1, -1, 4, -1)
        lengths = torch.tensor([1, 17, 32], device=DEVICE, dtype=torch.int32)
        q = rows(torch.bfloat16, 1, 3, 2, 4, 128)
        hipforge.decode_attention_splitk(q, packed, packed, None, None, lengths, num_groups=groups)


def main() -> None:
    """Call everything, then wait."""
    torch.manual_seed(0)
    for dtype in (*HALVES, torch.float32):
        if dtype != torch.float32:
            norms(dtype)
            rotation(dtype)
            attention(dtype)
        quantisers(dtype)
        routing(dtype)
    attention(torch.float8_e4m3fn)
    int4_attention()
    products()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
