"""What ``hipforge profile`` can call: per op, what makes operands of a shape and returns the call on them."""

from __future__ import annotations

from functools import partial
from typing import Any

from hipforge import shapes
from hipforge.cli.operands import Subject, e4m3, normal
from hipforge.cli.subjects_more import MORE
from hipforge.errors import ConfigError


def refusal(call: partial[Any]) -> str:
    """Return why the op of ``call`` answers None to its arguments."""
    from hipforge.ops.core.dispatch import explain

    return explain(call.func, *call.args, **call.keywords).reason


def _mxfp8_gemv(m: int, n: int, k: int) -> partial[Any]:
    from hipforge.ops.reference import quantize_mxfp8
    from hipforge.ops.smallm_gemm_mxfp8 import mxfp8_gemv

    x, w = normal(m, k, seed=0, scale=0.5), normal(n, k, seed=1, scale=0.1)
    operands = (*quantize_mxfp8(x), *quantize_mxfp8(w))
    return partial(mxfp8_gemv, *operands)


def _mxfp8_gemm(m: int, n: int, k: int) -> partial[Any]:
    from hipforge.ops.reference import quantize_mxfp8
    from hipforge.ops.smallm_gemm_mxfp8 import mxfp8_gemm

    x, w = normal(m, k, seed=0, scale=0.5), normal(n, k, seed=1, scale=0.1)
    operands = (*quantize_mxfp8(x), *quantize_mxfp8(w))
    return partial(mxfp8_gemm, *operands)


def _grouped_gemm_mxfp8(tokens: int, n: int, k: int, experts: int, top_k: int) -> partial[Any]:
    import torch

    from hipforge.ops.grouped_gemm_mxfp8 import grouped_gemm_mxfp8
    from hipforge.ops.moe import DEFAULT_BLOCK_M, moe_align_block_size
    from hipforge.ops.reference import quantize_mxfp8

    if top_k > experts:
        raise ConfigError(f"TOPK must be at most E ({experts}); got {top_k}")
    routing = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(2))
    topk_ids = routing.topk(top_k, dim=1).indices.to(torch.int32)
    slots = moe_align_block_size(topk_ids, DEFAULT_BLOCK_M, experts)
    x, w = normal(tokens, k, seed=0, scale=0.5), normal(experts * n, k, seed=1, scale=0.1)
    wq, ws = quantize_mxfp8(w)
    weights = (wq.view(experts, n, k), ws.view(experts, n, -1))
    operands = (*quantize_mxfp8(x), *weights, *slots)
    return partial(
        grouped_gemm_mxfp8,
        *operands,
        tokens * top_k,
        top_k,
        DEFAULT_BLOCK_M,
        torch.bfloat16,
        top_k,
        topk_ids=topk_ids,
    )


def _mxfp4_gemm(m: int, n: int, k: int) -> partial[Any]:
    from hipforge.ops.mxfp4_gemm import mxfp4_gemm
    from hipforge.ops.reference import quantize_mxfp4

    operands = (*quantize_mxfp4(normal(m, k, seed=0)), *quantize_mxfp4(normal(n, k, seed=1)))
    return partial(mxfp4_gemm, *operands)


def _fp8_quant(rows: int, columns: int) -> partial[Any]:
    from hipforge.ops.fp8_quant import fp8_quant_tensorwise

    x = normal(rows, columns, seed=0)
    return partial(fp8_quant_tensorwise, x, transpose=True)


def _residual_rms(rows: int, columns: int) -> partial[Any]:
    import torch

    from hipforge.ops.rmsnorm_fp8 import residual_rms

    x, residual = (normal(rows, columns, seed=seed) for seed in (0, 1))
    weight = normal(columns, seed=2)
    return partial(residual_rms, x, residual, weight, 1e-5, torch.tensor([0.02]))


def _swiglu_fp8(rows: int, columns: int) -> partial[Any]:
    import torch

    from hipforge.ops.swiglu_fp8 import swiglu_fp8

    gate_up = normal(rows, 2 * columns, seed=0)
    return partial(swiglu_fp8, gate_up, torch.tensor([0.02]))


def _skinny_gemm(m: int, n: int, k: int) -> partial[Any]:
    import torch

    from hipforge.ops.fp8_skinny_gemm import skinny_gemm

    a, b = e4m3(m, k, seed=0), e4m3(n, k, seed=1, scale=0.1)
    return partial(skinny_gemm, a, b.t(), torch.tensor([0.5]))


def _decode_attention_fp8(batch: int, keys: int, kv_heads: int, group: int, d: int) -> partial[Any]:
    import torch

    from hipforge.ops.decode_attention_fp8 import decode_attention_fp8

    page_size = 64
    pages = -(-keys // page_size)
    q = normal(batch, 1, kv_heads * group, d, seed=0)
    k_cache, v_cache = (e4m3(batch * pages, page_size, kv_heads, d, seed=seed) for seed in (1, 2))
    block_tables = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    seqlens, scale = torch.full((batch,), keys, dtype=torch.int32), torch.tensor([0.5])
    return partial(decode_attention_fp8, q, k_cache, v_cache, block_tables, seqlens, scale, scale)


SUBJECTS: dict[str, Subject] = {
    "mxfp8_gemm": Subject(("M", "N", "K"), (128, 512, 1024), _mxfp8_gemm),
    "mxfp8_gemv": Subject(("M", "N", "K"), (4, 768, 6144), _mxfp8_gemv),
    "grouped_gemm_mxfp8": Subject(("M", "N", "K", "E", "TOPK"), (4, 1536, 6144, 8, 2), _grouped_gemm_mxfp8),
    "mxfp4_gemm": Subject(("M", "N", "K"), (4, 2880, 512), _mxfp4_gemm),
    "fp8_quant_tensorwise": Subject(("R", "C"), (256, 512), _fp8_quant),
    "residual_rms": Subject(("R", "C"), (4, 16384), _residual_rms),
    "swiglu_fp8": Subject(("R", "D"), (4, 6656), _swiglu_fp8),
    "skinny_gemm": Subject(("M", "N", "K"), (8, 2304, 16384), _skinny_gemm),
    "decode_attention_fp8": Subject(("B", "MKV", "HKV", "G", "D"), (4, 2048, 1, 8, 128), _decode_attention_fp8),
    **MORE,
}

SHAPES_HELP = "\b\nSHAPE by OP, as numbers or by name (m=4,n=768,k=6144):\n" + "\n".join(
    f"  {op:<24}{','.join(subject.shape):<15} as in {','.join(map(str, subject.example))}"
    for op, subject in SUBJECTS.items()
)


def call_of(op: str, shape: str) -> partial[Any]:
    """Return the call of an op at a shape as :func:`hipforge.shapes.parse` takes it.

    Raises:
        ConfigError: the shape is not one of the op's.
    """
    subject = SUBJECTS[op]
    return subject.call(*shapes.parse(shape, subject.shape, subject.example))
