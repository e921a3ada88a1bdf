"""The grouped GEMM and MoE layer with MXFP4 weights and MX-FP8 activations, on gfx950 and on gfx942."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.mxfp4_grouped_cases import OWN, case_of, counts, operands, oracle
from helpers.mxfp8_cases import SCALE_NAN, assert_bits, embedded, nan_byte, relf
from helpers.mxfp8_grouped_cases import Moe, random_owners

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.moe_gate_up import split_workspace
from hipforge.ops.mxfp4_grouped_gemm import (
    grouped_gemm_mxfp4,
    grouped_mxfp4_linear,
    grouped_swiglu_mxfp4,
    mxfp4_gate_up_out,
    mxfp4_grouped_split_out,
)

pytestmark = pytest.mark.gfx942

FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)


def split(case: Moe, rows: int, waves: int, columns: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((case.slots, case.w.shape[1]), -123.0).bfloat16()
    sizes = *case.w.shape[:2], case.a.shape[1], case.slots, case.a.shape[0], case.a_div, case.block_m
    mxfp4_grouped_split_out(out, *operands(case), case.weights, bias, *sizes, rows, waves, columns)
    return out


# One block; partial steps; K that long runs and shorter ones take; scales that start between words or anywhere.
@pytest.mark.parametrize(("n", "k", "a_div"), ((40, 32, 1), (131, 352, 4), (24, 2880, 2), (8, 6528, 1), (13, 416, 1)))
def test_sums_are_exact_and_rounded_once(arch: str, n: int, k: int, a_div: int) -> None:
    case = case_of(random_owners(22, 3), 3, n, k, a_div)
    assert hipforge.explain(grouped_gemm_mxfp4, *operands(case), *counts(case)).kernel == "mxfp4_grouped_split"
    got = grouped_gemm_mxfp4(*operands(case), *counts(case))
    assert got is not None
    assert_bits(got, oracle(case, arch))
    packed = (*operands(case)[:2], case.w.view(FP4), *operands(case)[3:])
    assert torch.equal(grouped_mxfp4_linear(*packed, *counts(case)), got)
    by_torch = hipforge.ops.mxfp4_grouped_gemm.grouped_mm(
        hipforge.ops.mxfp4_grouped_gemm.Operands(*operands(case), *counts(case))
    )
    assert_bits(by_torch.bfloat16(), oracle(case, arch))


@pytest.mark.parametrize("rows", (16, 32))
@pytest.mark.parametrize("waves", (1, 2, 8))
@pytest.mark.parametrize("k", (1056, 2112))
def test_every_shape_of_work_group(arch: str, rows: int, waves: int, k: int) -> None:
    case = case_of((*(1,) * 35, 0, 2, 2), 3, 150, k, block_m=40, weighted=True)
    bias = torch.randint(-8, 9, (3, 150), generator=torch.Generator().manual_seed(2)) * 0.5
    for columns in (16, 64) if waves <= 2 else (16,):
        with emulator.options(checks="all", wave_order="random"), emulator.counters() as counted:
            got = split(case, rows, waves, columns, bias)
        assert_bits(got, oracle(case, arch, bias))
        assert counted.launches == 1 and not counted.scratch_bytes and not counted.lds_bank_conflicts
    assert counted.tensors["w"].loaded >= counted.tensors["w"].unique_loaded == 3 * 150 * k // 2


def test_a_nan_scale_reaches_exactly_its_outputs(arch: str) -> None:
    case = case_of((1, 1, 0), 2, 20, 1056)
    want = oracle(case, arch)
    case.a_scale[0, 32], case.w_scale[1, 17, 5] = SCALE_NAN, SCALE_NAN
    case.w[1, 17, 80:96] = 0  # even where its block is zero
    want[0] = want[:2, 17] = torch.nan
    for waves in (1, 4):
        assert_bits(split(case, 16, waves, 16), want)


@pytest.mark.parametrize("k", (96, 800, 1024))
def test_bytes_that_do_not_belong_to_a_row_never_take_part(arch: str, k: int) -> None:
    case = case_of((1,) * 5, 3, 10, k)
    want, nan = oracle(case, arch), nan_byte(arch)
    case.w_scale[0], case.w_scale[2] = SCALE_NAN, SCALE_NAN
    surrounded = case.but(
        a=embedded(case.a, nan | 0x80), a_scale=embedded(case.a_scale, SCALE_NAN), w=embedded(case.w, 0xFF),
        w_scale=embedded(case.w_scale, SCALE_NAN, margin=63),
    )  # fmt: skip
    for waves in (1, 2):
        assert_bits(split(surrounded, 16, waves, 16), want)


def test_slots_of_experts_elsewhere_are_zero(arch: str) -> None:
    case = case_of((0, -1, 2, 2, -1, 0), 3, 16, 96)
    assert_bits(grouped_mxfp4_linear(*operands(case), *counts(case)), oracle(case, arch))


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize(("k", "inner"), ((96, 64), (1056, 96), (2880, 32)))
def test_gate_and_up_in_one_launch_have_the_bits_of_two(k: int, inner: int, interleaved: bool) -> None:
    case = case_of((*(1,) * 19, 3, *(4,) * 3, 0, 0), 6, 2 * inner, k, a_div=2)
    bias = torch.randn(case.w.shape[:2], generator=torch.Generator().manual_seed(3))
    activation: dict[str, Any] = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "interleaved": interleaved}
    want = hipforge.swiglu_mxfp8(grouped_mxfp4_linear(*operands(case), *counts(case), bias=bias), **activation)
    with emulator.options(checks="all", wave_order="random"), emulator.counters() as counted:
        got = grouped_swiglu_mxfp4(*operands(case), *counts(case), bias=bias, **activation)
    assert [launch.name for launch in counted.kernels if "mxfp4_gate_up" in launch.name] and counted.launches == 1
    assert torch.equal(got[1], want[1]) and torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    sizes = *case.w.shape[:2], k, case.slots, case.a.shape[0], case.a_div, case.block_m
    for rows, parts, groups in ((16, 2, 4), (32, 1, 1)):
        workspace = split_workspace(case.slots, 2 * inner, groups, torch.device("cpu"))
        q, scales = torch.empty_like(want[0]), torch.empty_like(want[1])
        mxfp4_gate_up_out(
            q, scales, *operands(case), bias, *sizes, *activation.values(), workspace, rows, parts, groups
        )
        assert torch.equal(scales, want[1]) and torch.equal(q.view(torch.uint8), want[0].view(torch.uint8))


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
    wide = [reference.mxfp4_to_f32(w).to(OWN) for w in (w1, w2)]
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
        case = case_of((0, 1), 2, 8, 64)
        a, a_scale, w, w_scale, *index = operands(case)
        with pytest.raises(GuardError, match="w must"):
            op(a, a_scale, w.view(OWN), w_scale, *index, *counts(case))
        with pytest.raises(GuardError, match="its K is that of a_q"):
            op(a, a_scale, w[..., :16], w_scale, *index, *counts(case))
        with pytest.raises(GuardError, match="w_scale must"):
            op(a, a_scale, w, w_scale[..., :1], *index, *counts(case))
    case = case_of((0, 1), 2, 8, 64)
    with pytest.raises(GuardError, match="K = 64 disagrees with the shape of w, which says 32"):
        split(case.but(w=case.w[..., :16].contiguous()), 16, 1, 16)
    with pytest.raises(GuardError, match="two elements in a byte"):
        hipforge.fused_moe_mxfp4(hidden, w1[:, :, :40], s1, w2, s2, *routing)
    with pytest.raises(GuardError, match="w1_scale must"):
        hipforge.fused_moe_mxfp4(hidden, w1, s1[..., :2], w2, s2, *routing)
    with pytest.raises(GuardError, match="fused_moe_mxfp4 takes these"):
        hipforge.fused_moe_mxfp8(hidden, w1, s1, w2, s2, *routing)


def _traced(batch: int) -> dict[str, torch.Tensor]:
    x, scale = reference.quantize_mxfp8(torch.linspace(-1, 2, 64 * batch).view(batch, 64), OWN)
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
