"""The Triton kernels of the decode ops, run on the emulator: the same results as the references on every GPU's path."""

from __future__ import annotations

import pytest
import torch
from helpers.gating_cases import assert_weights, well_apart
from helpers.rope_cases import FP8, case, expected, integers

from hipforge.emulator import triton as emulated
from hipforge.ops import reference
from hipforge.ops.triton import rope_and_cache as rope
from hipforge.ops.triton import routing

pytestmark = pytest.mark.gfx942

GATINGS = [
    {"k": 8, "shape": (3, 256), "scoring": "sigmoid", "biased": True, "groups": 8, "topk_groups": 4, "scale": 2.5},
    {"k": 4, "shape": (3, 60), "scoring": "softmax", "renormalize": False, "shared_experts": 2},
    {"k": 6, "shape": (2, 64), "scoring": "softmax", "groups": 4, "topk_groups": 2},
    {"k": 16, "shape": (2, 512), "scoring": "sigmoid", "biased": True},
    {"k": 3, "shape": (2, 12), "scoring": "sigmoid", "biased": True, "groups": 3, "topk_groups": 2},
]


@pytest.mark.parametrize("options", GATINGS, ids=str)
def test_gating(options):
    options = dict(options)
    k, shape = options.pop("k"), options.pop("shape")
    bias = torch.randperm(shape[1]).float() / shape[1] if options.pop("biased", False) else None
    logits = well_apart(shape, 1)
    logits[0, 3] = float("nan")
    want, want_ids = reference.topk_gating(logits, k, bias=bias, **options)
    weights, ids = torch.empty_like(want), torch.empty_like(want_ids)
    routing.topk_gating(
        weights, ids, logits, bias, k, options["scoring"] == "sigmoid", options.get("renormalize", True),
        options.get("groups", 1), options.get("topk_groups", 1), options.get("scale", 1.0),
        options.get("shared_experts", 0), bind=emulated.jit,
    )  # fmt: skip
    assert torch.equal(ids, want_ids)
    assert_weights(weights, want)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_m"), [(7, 3, 5, 4), (40, 4, 20, 64), (3, 1, 1, 1)])
def test_sorted_slots(tokens, top_k, experts, block_m):
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    want = reference.moe_align_block_size(ids, block_m, experts)
    got = [torch.full_like(x, 77) for x in want]
    routing.moe_align_block_size(*got, ids, None, block_m, experts, bind=emulated.jit)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    expert_map = torch.arange(experts, dtype=torch.int64).flip(0) - 1
    routing.moe_align_block_size(*got, ids, expert_map, block_m, experts, bind=emulated.jit)
    named = torch.where(want[1] < 0, -1, expert_map[want[1].clamp(min=0).long()].int())
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], named)


@pytest.mark.parametrize("limited", [False, True])
def test_the_sum_over_experts(limited):
    rows, weights = integers((6 * 3, 200), torch.bfloat16, 0), torch.rand(6, 3)
    ids = torch.randint(-1, 8, (6, 3), generator=torch.Generator().manual_seed(0))
    expert_map = torch.tensor([0, -1, 1, 2, -1, 3]) if limited else None
    out = torch.empty(6, 200)
    routing.moe_combine(out, rows, weights, ids, expert_map, 3, 6, bind=emulated.jit)
    assert torch.equal(out, reference.moe_combine(rows, 3, weights, ids, expert_map, 6, torch.float32))
    if expert_map is not None:
        routing.moe_combine(out, rows, weights, ids, expert_map, 3, 6, 2, bind=emulated.jit)
        assert torch.equal(out, reference.moe_combine(rows, 3, weights, ids, expert_map, 6, torch.float32, 2))


def test_the_routers_product():
    x, w, bias = integers((5, 200), torch.bfloat16, 0), integers((19, 200), torch.float32, 1), torch.arange(19.0)
    out = torch.empty(5, 19)
    routing.router_gemm(out, x, w, bias, bind=emulated.jit)
    assert torch.equal(out.double(), x.double() @ w.double().T + bias)


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("storage", ["half", "fp8", "rows"])
def test_rope_and_the_cache(storage, style):
    given = case(storage, exact=True, tokens=4, dim=96, rotary_dim=64, style=style)
    given.slots[1], given.positions[2] = -1, 0
    dim = given.q.shape[-1]
    for x in (given.q, given.k):
        x.copy_(torch.where(x > 0, 2.0, -2.0))
    weight = torch.exp2(torch.arange(dim) % 5 - 2.0).bfloat16()
    given.options.update(q_weight=weight, k_weight=weight, epsilon=0.0, weight_offset=1.0)
    want_q, want = expected(given)
    copy = given.copy()
    options = {name: copy.options.get(name) for name in ("k_scale", "v_scale", "k_scale_shift", "v_scale_shift")}
    for name in ("k_scale", "v_scale"):
        if options[name] is not None:
            options[name] = torch.as_tensor(options[name]).reshape(-1)
    rope.rope_and_cache(
        copy.q, copy.q, *copy.tensors()[1:], interleaved=style == "interleaved", q_weight=weight, k_weight=weight,
        weight_offset=1.0, epsilon=0.0, fp8_dtype=FP8, bind=emulated.jit, **options,
    )  # fmt: skip
    # The mean of 96 fours is exact and so is its root, but Triton divides by multiplying and takes the instruction's
    # rsqrt: what a unit in the last place of fp32 decides may fall either way.
    assert (copy.q != want_q).float().mean() < 0.01
    for got, exact in zip(copy.written(), want, strict=True):
        assert (got.view(torch.uint8) != exact.view(torch.uint8)).float().mean() < 0.01
