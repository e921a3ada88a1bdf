"""The MoE layer over fp8 with scales per row or block beside all experts in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.mxfp8_cases import relf

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.moe import fused_moe_fp8
from hipforge.ops.reference.fp8 import fp8_mm, quantize_fp8
from hipforge.ops.reference.swiglu import swiglu

pytestmark = pytest.mark.gfx942

FP8 = fp8_dtypes("cpu")[0]
KINDS = ("rows", "expert", "blocks", "blocks_e8m0", "mx")
# As in test_moe.py: two roundings to bf16 at the end, and an fp8 code that tips over.
SAME_ROUNDINGS = 5e-3


def quantised(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [rows, K]."""
    if kind == "mx":
        return reference.quantize_mxfp8(x, FP8)
    return quantize_fp8(x, FP8, "blocks" if kind.startswith("blocks") else "rows", kind.endswith("e8m0"))


def weights(kind: str, experts: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of some kind, such that the product's columns have about the size of its rows."""
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(experts, n, k, generator=generator) * 8).clamp(-200, 200).to(FP8)
    size = {"mx": 32, "blocks": 128, "blocks_e8m0": 128}.get(kind)
    shape = (experts, -(-n // size), -(-k // size)) if size else (experts, n) if kind == "rows" else (experts,)
    power = torch.randint(-1, 2, shape, generator=generator) - 3 - (k.bit_length() - 1) // 2
    scale = (power + 127).to(torch.uint8) if kind in ("mx", "blocks_e8m0") else torch.exp2(power.float())
    return q, scale


def layer(kind: str, tokens: int = 3, top_k: int = 2, experts: int = 4, width: int = 160, inner: int = 96) -> Any:
    generator = torch.Generator().manual_seed(7)
    scores, ids = torch.randn(tokens, experts, generator=generator).softmax(-1).topk(top_k)
    w1, w2 = weights(kind, experts, 2 * inner, width, 1), weights(kind, experts, width, inner, 2)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    return hidden, *w1, *w2, scores, ids


def mm(x: torch.Tensor, kind: str, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return fp8_mm(*quantised(x, kind), w, scale, torch.float64, torch.float64)


def dense(kind: str, parts: Any, b1: Any = None, b2: Any = None, **activation: Any) -> torch.Tensor:
    hidden, w1, s1, w2, s2, scores, ids = parts
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for e in range(w1.shape[0]):
        gate_up = mm(hidden, kind, w1[e], s1[e]) + (0 if b1 is None else b1[e].double())
        y = mm(swiglu(gate_up.bfloat16(), **activation), kind, w2[e], s2[e]) + (0 if b2 is None else b2[e])
        total += y * (scores * (ids == e)).sum(1, keepdim=True)
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpt_oss", (False, True))
def test_the_layer_is_that_of_all_experts_in_float64(kind: str, gpt_oss: bool) -> None:
    parts = layer(kind)
    generator = torch.Generator().manual_seed(3)
    biases = [torch.randn(4, width, generator=generator) for width in (192, 160)] if gpt_oss else [None, None]
    activation = {"alpha": 1.702, "beta": 1.0, "limit": 0.7, "interleaved": True} if gpt_oss else {}
    got = fused_moe_fp8(*parts, w1_bias=biases[0], w2_bias=biases[1], **activation)
    assert got.dtype == torch.bfloat16
    assert relf(got, dense(kind, parts, *biases, **activation)) < SAME_ROUNDINGS
    for changed in ((biases[0], None), (None, biases[1])) if gpt_oss else ():
        assert relf(got, dense(kind, parts, *changed, **activation)) > 5 * SAME_ROUNDINGS


def test_ranks_with_an_expert_map_add_up_to_the_whole() -> None:
    for kind in ("rows", "blocks"):
        hidden, w1, s1, w2, s2, scores, ids = layer(kind)
        whole, parts = fused_moe_fp8(hidden, w1, s1, w2, s2, scores, ids), []
        for mine in (slice(0, 3), slice(3, 4)):
            places = torch.full((4,), -1)
            places[mine] = torch.arange(len(places[mine]))
            of_rank = (part[mine] for part in (w1, s1, w2, s2))
            parts.append(fused_moe_fp8(hidden.float(), *of_rank, scores, ids, places))
        assert relf(sum(parts), whole.double()) < SAME_ROUNDINGS


def test_quantised_hidden_states_are_not_quantised_again() -> None:
    for kind in KINDS:
        hidden, *rest = layer(kind)
        q, scale = quantised(hidden.float(), kind)
        with emulator.counters() as counted:
            got = fused_moe_fp8(q, *rest, hidden_scale=scale)
        assert torch.equal(got, fused_moe_fp8(hidden, *rest))
        # Sorting, two products, the sum; with a scale per row SwiGLU and its quantisation are a launch of their own.
        launches = 5 if kind in ("rows", "expert") else 4
        assert counted.launches == launches, [launch.name for launch in counted.kernels]


def test_scales_of_no_kind_or_of_two_are_refused() -> None:
    hidden, w1, s1, w2, s2, *routing = layer("rows")
    for wrong in (s1[:3], s1.half(), s1[:, :5]):
        with pytest.raises(GuardError, match="w1_scale must have for each of 4 experts one float32 or 192; or"):
            fused_moe_fp8(hidden, w1, wrong, w2, s2, *routing)
    with pytest.raises(GuardError, match="must be of one kind; got ONCE and BLOCKS"):
        fused_moe_fp8(hidden, w1, s1, w2, torch.ones(4, 2, 1), *routing)


def traced(batch: int) -> dict[str, torch.Tensor]:
    hidden, *_, scores, ids = layer("rows", tokens=batch)
    return {"x": hidden, "weights": scores, "ids": ids.int()}


EXPERTS = layer("rows")[1:5]
TRACED = {"fused_moe_fp8": (traced, lambda x, weights, ids: hipforge.fused_moe_fp8(x, *EXPERTS, weights, ids))}
