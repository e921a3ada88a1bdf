"""A call of every public op for any batch size: what tests of tracing, export and capture run through.

Each entry gives the tensors whose first dimension is the batch, by name, and the function that calls the op on them;
weights and tables are constants of that function. The test of an op may hold its own, in a line ``TRACED = {...}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import hipforge
from helpers.declared import declared
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import quantize_kv_fp8, quantize_mxfp4, quantize_mxfp8

K, N, EXPERTS, TOP_K, HEADS, D, PAGE = 256, 64, 4, 2, 2, 64, 16


class Call(NamedTuple):
    """``make(batch)`` gives the tensors by name; ``run(**tensors)`` calls the op on fresh copies of them.

    ``guarded``: the op may return None, so that a traced graph depends on the batch.
    """

    make: Callable[[int], dict[str, torch.Tensor]]
    run: Callable[..., Any]
    guarded: bool = False


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed, scale=0.2).to(fp8_dtypes("cpu")[0])


def _experts() -> tuple[torch.Tensor, ...]:
    inner = 64
    w1, w2 = normal(EXPERTS * 2 * inner, K, seed=2, scale=0.1), normal(EXPERTS * K, inner, seed=3, scale=0.1)
    (q1, s1), (q2, s2) = quantize_mxfp8(w1), quantize_mxfp8(w2)
    return (
        q1.view(EXPERTS, 2 * inner, K), s1.view(EXPERTS, 2 * inner, -1),
        q2.view(EXPERTS, K, inner), s2.view(EXPERTS, K, -1),
    )  # fmt: skip


DENSE8 = quantize_mxfp8(normal(N, K, seed=1, scale=0.1))
DENSE4 = quantize_mxfp4(normal(N, K, seed=1, scale=0.1))
EXPERT_WEIGHTS = _experts()
ONE = torch.ones(1)
WEIGHT = normal(K, seed=11)
SKINNY = e4m3(N, K, seed=12)
N_SCALES = torch.linspace(0.25, 0.75, N)
ROUTER = normal(EXPERTS, K, seed=13)


def mx8(batch: int) -> dict[str, torch.Tensor]:
    return dict(zip(("xq", "xs"), quantize_mxfp8(normal(batch, K)), strict=True))


def fp8_rows(batch: int) -> dict[str, torch.Tensor]:
    return {"xq": e4m3(batch, K), "xs": torch.linspace(0.5, 1.5, batch)}


def mx4(batch: int) -> dict[str, torch.Tensor]:
    return dict(zip(("xq", "xs"), quantize_mxfp4(normal(batch, K)), strict=True))


def rows(batch: int) -> dict[str, torch.Tensor]:
    return {"x": normal(batch, K)}


def two_rows(batch: int) -> dict[str, torch.Tensor]:
    return {"x": normal(batch, K), "residual": normal(batch, K, seed=4)}


def routed(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.rand(batch, EXPERTS, generator=torch.Generator().manual_seed(5)).topk(TOP_K, dim=1).indices
    weights = torch.rand(batch, TOP_K, generator=torch.Generator().manual_seed(6))
    return {"x": normal(batch, K), "weights": weights, "ids": ids.int()}


def sorted_slots(batch: int) -> dict[str, torch.Tensor]:
    given = routed(batch)
    return {**mx8(batch), "ids": given["ids"]}


def grouped(op: Callable[..., Any], xq: torch.Tensor, xs: torch.Tensor, ids: torch.Tensor, *more: Any) -> Any:
    w, ws, _, _ = EXPERT_WEIGHTS
    slots = hipforge.moe_align_block_size(ids, 16, EXPERTS)
    return op(xq, xs, w, ws, *slots, ids.shape[0] * TOP_K, *more)


def attended(batch: int) -> dict[str, torch.Tensor]:
    keys = 40
    return {
        "q": normal(batch, 1, 4 * HEADS, D),
        "k": e4m3(batch, keys, HEADS, D, seed=7),
        "v": e4m3(batch, keys, HEADS, D, seed=8),
        "seqlens": (torch.arange(batch) % 5 + 30).int(),
    }


def packed(batch: int) -> dict[str, torch.Tensor]:
    """The layout with a word of scale and shift per row, shared by the four heads of a group."""
    keys, given = 40, {"q": normal(1, batch, HEADS, 4, D), "seqlens": (torch.arange(batch) % 5 + 30).int()}
    for number, name in enumerate("kv"):
        data, words = quantize_kv_fp8(normal(batch, keys, HEADS, D, seed=7 + number).float(), fp8_dtypes("cpu")[0])
        given[name] = data.view(torch.int32).flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, 4, -1)
        given[f"{name}_words"] = words.flatten(0, 1)[None, :, :, None].expand(-1, -1, -1, 4)
    return given


def rotated(batch: int) -> dict[str, torch.Tensor]:
    return {
        "q": normal(batch, 4 * HEADS, D),
        "k": normal(batch, HEADS, D, seed=9),
        "v": normal(batch, HEADS, D, seed=10),
        "positions": torch.arange(batch) % 7,
        "slots": torch.arange(batch),
    }


def rope(q: Any, k: Any, v: Any, positions: Any, slots: Any) -> tuple[torch.Tensor, ...]:
    caches = [torch.zeros(8, PAGE, HEADS, D, dtype=fp8_dtypes("cpu")[0]) for _ in range(2)]
    table = torch.linspace(-1, 1, 8 * D).view(8, D)
    out = torch.empty_like(q)
    hipforge.rope_and_cache(q, k, v, table, positions, *caches, slots, k_scale=ONE, v_scale=ONE, q_out=out)
    return out, *caches


def add_and_norm(op: Callable[..., Any], x: torch.Tensor, residual: torch.Tensor, *more: Any) -> Any:
    return op(x, residual.clone(), WEIGHT, 1e-5, *more)


CALLS: dict[str, Call] = {
    "fp8_gemm": Call(fp8_rows, lambda xq, xs: hipforge.fp8_gemm(xq, xs, SKINNY, N_SCALES), guarded=True),
    "fp8_linear": Call(fp8_rows, lambda xq, xs: hipforge.fp8_linear(xq, xs, SKINNY, N_SCALES)),
    "mxfp8_gemv": Call(mx8, lambda xq, xs: hipforge.mxfp8_gemv(xq, xs, *DENSE8), guarded=True),
    "mxfp8_gemm": Call(mx8, lambda xq, xs: hipforge.mxfp8_gemm(xq, xs, *DENSE8), guarded=True),
    "mxfp8_linear": Call(mx8, lambda xq, xs: hipforge.mxfp8_linear(xq, xs, *DENSE8)),
    "mxfp4_gemm": Call(mx4, lambda xq, xs: hipforge.mxfp4_gemm(xq, xs, *DENSE4), guarded=True),
    "mxfp4_linear": Call(mx4, lambda xq, xs: hipforge.mxfp4_linear(xq, xs, *DENSE4)),
    "grouped_gemm_mxfp8": Call(
        sorted_slots,
        lambda xq, xs, ids: grouped(
            hipforge.grouped_gemm_mxfp8, xq, xs, ids, TOP_K, 16, torch.bfloat16, TOP_K, None, ids
        ),
        guarded=True,
    ),
    "grouped_mxfp8_linear": Call(
        sorted_slots, lambda xq, xs, ids: grouped(hipforge.grouped_mxfp8_linear, xq, xs, ids, 16, TOP_K)
    ),
    "fused_moe_mxfp8": Call(routed, lambda x, weights, ids: hipforge.fused_moe_mxfp8(x, *EXPERT_WEIGHTS, weights, ids)),
    "moe_align_block_size": Call(
        routed, lambda x, weights, ids: tuple(hipforge.moe_align_block_size(ids, 16, EXPERTS))
    ),
    "moe_combine": Call(
        lambda batch: {"parts": normal(batch, TOP_K, K), **routed(batch)},
        lambda parts, x, weights, ids: hipforge.moe_combine(
            parts.flatten(0, 1), weights, ids, top_k=TOP_K, num_experts=EXPERTS
        ),
    ),
    "router_gemm": Call(rows, lambda x: hipforge.router_gemm(x, ROUTER)),
    "topk_gating": Call(
        lambda batch: {"logits": normal(batch, 8).float()}, lambda logits: hipforge.topk_gating(logits, TOP_K)
    ),
    "mxfp8_quantize": Call(rows, lambda x: hipforge.mxfp8_quantize(x)),
    "mxfp4_quantize": Call(rows, lambda x: hipforge.mxfp4_quantize(x)),
    "fp8_quant_rows": Call(rows, lambda x: hipforge.fp8_quant_rows(x)),
    "fp8_quant_blocks": Call(rows, lambda x: hipforge.fp8_quant_blocks(x)),
    "fp8_quant_tensorwise": Call(rows, lambda x: hipforge.fp8_quant_tensorwise(x)[:2]),
    "rms_norm": Call(rows, lambda x: hipforge.rms_norm(x, WEIGHT, 1e-5)),
    "rms_norm_fp8": Call(rows, lambda x: hipforge.rms_norm_fp8(x, WEIGHT, 1e-5, ONE)),
    "rms_norm_mxfp8": Call(rows, lambda x: hipforge.rms_norm_mxfp8(x, WEIGHT, 1e-5)),
    "residual_rms": Call(two_rows, lambda x, residual: add_and_norm(hipforge.residual_rms, x, residual, ONE)),
    "residual_rms_mxfp8": Call(two_rows, lambda x, residual: add_and_norm(hipforge.residual_rms_mxfp8, x, residual)),
    "swiglu_fp8": Call(rows, lambda x: hipforge.swiglu_fp8(x, ONE)),
    "swiglu_mxfp8": Call(rows, lambda x: hipforge.swiglu_mxfp8(x)),
    "skinny_gemm": Call(lambda batch: {"a": e4m3(batch, K)}, lambda a: hipforge.skinny_gemm(a, SKINNY.t(), ONE)),
    "decode_attention_fp8": Call(
        attended, lambda q, k, v, seqlens: hipforge.decode_attention_fp8(q, k, v, None, seqlens, ONE, ONE)
    ),
    "decode_attention_splitk": Call(
        packed,
        lambda q, seqlens, k, k_words, v, v_words: hipforge.decode_attention_splitk(q, k, v, k_words, v_words, seqlens),
    ),
    "rope_and_cache": Call(rotated, rope),
    "scaled_mm": Call(
        lambda batch: {"a": e4m3(batch, K)},
        lambda a: hipforge.scaled_mm(a, SKINNY.t(), ONE, ONE),
    ),
}
CALLS.update({op: Call(*given) for found in declared("TRACED") for op, given in found.items()})
