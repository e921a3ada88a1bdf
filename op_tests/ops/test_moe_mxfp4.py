"""The MoE layer with MXFP4 weights and MX-FP8 activations; its grouped GEMM is in test_grouped_formats."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.grouped_formats import FORMATS, FP8, counts, operands
from helpers.mxfp8_cases import relf

import hipforge
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.mxfp4_grouped_gemm import grouped_gemm_mxfp4, grouped_mxfp4_linear

pytestmark = pytest.mark.gfx942

MXFP4 = FORMATS["mxfp4"]
PACKED = getattr(torch, "float4_e2m1fn_x2", torch.uint8)


def test_packed_elements_have_a_dtype_of_their_own_too() -> None:
    case = MXFP4.case((0, 1, 1), 2, 24, 96)
    assert torch.equal(MXFP4.linear(case.but(w=case.w.view(PACKED))), MXFP4.linear(case))


def layer(tokens: int = 4, top_k: int = 2, experts: int = 4, width: int = 160, inner: int = 96) -> Any:
    generator = torch.Generator().manual_seed(7)
    scores, ids = torch.randn(tokens, experts, generator=generator).softmax(-1).topk(top_k)
    w1 = reference.quantize_mxfp4(torch.randn(experts * 2 * inner, width, generator=generator) * width**-0.5)
    w2 = reference.quantize_mxfp4(torch.randn(experts * width, inner, generator=generator) * inner**-0.5)
    parts = [part.unflatten(0, (experts, -1)) for part in (*w1, *w2)]
    return torch.randn(tokens, width, generator=generator).bfloat16(), *parts, scores, ids


def test_the_layer_is_that_of_mxfp8_with_the_same_weights() -> None:
    """Elements of e2m1 are elements of e4m3, so that the MX-FP8 layer over them is the same in all its roundings."""
    hidden, w1, s1, w2, s2, scores, ids = layer()
    wide = [reference.mxfp4_to_f32(w).to(FP8) for w in (w1, w2)]
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {
        "alpha": 1.702, "beta": 1.0, "limit": 0.7, "interleaved": True,
        "w1_bias": torch.randn(4, 192, generator=generator), "w2_bias": torch.randn(4, 160, generator=generator),
    }  # fmt: skip
    for more in ({}, given):
        got = hipforge.fused_moe_mxfp4(hidden, w1, s1, w2, s2, scores, ids, **more)
        want = hipforge.fused_moe_mxfp8(hidden, wide[0], s1, wide[1], s2, scores, ids, **more)
        assert relf(got, want.double()) < 1e-3
    some = torch.tensor([-1, 0, 1, -1])
    of_rank = [part[1:3] for part in (w1, s1, w2, s2)]
    got = hipforge.fused_moe_mxfp4(hidden, *of_rank, scores, ids, some)
    zeroed = scores * ((ids == 1) | (ids == 2))
    assert relf(got, hipforge.fused_moe_mxfp4(hidden, w1, s1, w2, s2, zeroed, ids).double()) < 1e-3


def test_what_is_not_mxfp4_is_refused() -> None:
    hidden, w1, s1, w2, s2, *routing = layer()
    for op in (grouped_gemm_mxfp4, grouped_mxfp4_linear):
        case = MXFP4.case((0, 1), 2, 8, 64)
        a, a_scale, w, w_scale, *index = operands(case)
        with pytest.raises(GuardError, match="w must"):
            op(a, a_scale, w.view(FP8), w_scale, *index, *counts(case))
        with pytest.raises(GuardError, match="its K is that of a_q"):
            op(a, a_scale, w[..., :16], w_scale, *index, *counts(case))
        with pytest.raises(GuardError, match="w_scale must"):
            op(a, a_scale, w, w_scale[..., :1], *index, *counts(case))
    case = MXFP4.case((0, 1), 2, 8, 64)
    with pytest.raises(GuardError, match="K = 64 disagrees with the shape of w, which says 32"):
        MXFP4.split(case.but(w=case.w[..., :16].contiguous()))
    with pytest.raises(GuardError, match="two elements in a byte"):
        hipforge.fused_moe_mxfp4(hidden, w1[:, :, :40], s1, w2, s2, *routing)
    with pytest.raises(GuardError, match="w1_scale must"):
        hipforge.fused_moe_mxfp4(hidden, w1, s1[..., :2], w2, s2, *routing)
    with pytest.raises(GuardError, match="fused_moe_mxfp4 takes these"):
        hipforge.fused_moe_mxfp8(hidden, w1, s1, w2, s2, *routing)


def _traced(batch: int) -> dict[str, torch.Tensor]:
    x, scale = reference.quantize_mxfp8(torch.linspace(-1, 2, 64 * batch).view(batch, 64), FP8)
    return {"xq": x, "xs": scale, "ids": torch.arange(2 * batch, dtype=torch.int32).view(batch, 2) % 4}


def _run(op: str, xq: torch.Tensor, xs: torch.Tensor, ids: torch.Tensor) -> Any:
    w, scale = torch.full((4, 8, 32), 0x22, dtype=torch.uint8), torch.full((4, 8, 2), 127, dtype=torch.uint8)
    return getattr(hipforge, op)(xq, xs, w, scale, *hipforge.moe_align_block_size(ids, 16, 4), ids.numel(), 16, 2)


_EXPERTS = layer()[1:5]


def _layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return hipforge.fused_moe_mxfp4(x, *_EXPERTS, weights, ids)


TRACED = {
    "grouped_gemm_mxfp4": (_traced, partial(_run, "grouped_gemm_mxfp4"), True),
    "grouped_mxfp4_linear": (_traced, partial(_run, "grouped_mxfp4_linear")),
    "fused_moe_mxfp4": (
        lambda batch: dict(zip(("x", "weights", "ids"), (layer(batch)[i] for i in (0, 5, 6)), strict=True)), _layer,
    ),
}  # fmt: skip
