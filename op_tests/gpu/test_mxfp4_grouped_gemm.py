"""The grouped MXFP4 kernels of sm_90 in every configuration, beside float64. Run by ``make gpu-test``."""

from __future__ import annotations

import pytest
import torch
from helpers.errors import relative

import hipforge
from gpu.test_mxfp8_gemm import BOUND
from gpu.test_mxfp8_grouped_gemm import (
    CASES,
    GATE_UPS,
    PASSES,
    STREAMS,
    Case,
    case,
    exact,
    hold_layers_in_a_graph_to_those_one_by_one,
    pytestmark,
    scales,
)
from hipforge.ops import mxfp4_grouped_gemm as mxfp4
from hipforge.ops.mxfp4_grouped_gemm import streams
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands

__all__ = ["pytestmark"]
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).to(torch.float8_e4m3fn)
# Two elements in a byte, the even one in the low nibble.
PAIRS = VALUES.view(torch.uint8)[torch.stack([torch.arange(256) % 16, torch.arange(256) // 16], 1)]


def case4(*shape: int, **given: int) -> Case:
    """As the MX-FP8 kernels', with codes in e2m1 for w."""
    of = case(*shape, **given)
    experts, n, k = of.w.shape
    return of._replace(w=torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda"))


def widened(of: Case) -> Case:
    """The same in MX-FP8."""
    return of._replace(w=PAIRS.cuda()[of.w.long()].flatten(2).view(torch.float8_e4m3fn))


def runs(of: Case, bias=None, weights=None):
    """Every configuration with its result, which starts as NaN."""
    sizes = of.slots, of.block_m, of.a_div
    parts = Operands(*of.operands, *sizes, weights, bias)
    n, packed = of.w.shape[1:]
    for given in (*PASSES, *STREAMS):
        kernel = streams.ROWS if "rows" in given else streams.PASSES
        if kernel.needs(given, (of.slots, n, 2 * packed, of.a_div, int(weights is not None)), "sm_90") is not None:
            continue
        out = torch.full((of.slots, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        kernel.run(given, (), out, *parts.tensors, weights, bias, *parts.sizes)
        yield given, out


def gate_ups(of: Case, bias, activation):
    """The same of the kernels with SwiGLU, with the configuration of the products that they equal."""
    alpha, beta, limit, interleaved = activation
    experts, n, packed = of.w.shape
    sizes = experts, n, 2 * packed, of.slots, of.a.shape[0], of.a_div, of.block_m
    given = *of.operands, bias, *sizes, alpha, beta, float("inf") if limit is None else limit, interleaved
    for chosen in (*PASSES, *STREAMS):
        name = streams.ROWS_KERNEL if "rows" in chosen else streams.PASSES_KERNEL
        kernel = streams.ROWS if "rows" in chosen else streams.PASSES
        if chosen["sharers"] < 4 or ("rows" in chosen and chosen["sharers"] != 4):
            continue
        if kernel.needs(chosen, (of.slots, n, 2 * packed, of.a_div, 0), "sm_90") is not None:
            continue
        q = torch.empty(of.slots, n // 2, dtype=torch.float8_e4m3fn, device="cuda")
        q_scales = torch.empty(of.slots, n // 64, dtype=torch.uint8, device="cuda")
        own = {key: value for key, value in chosen.items() if "rows" not in chosen or key != "sharers"}
        streams.FUSED[name].launch(q, q_scales, *given, **own)
        yield chosen, q, q_scales


@pytest.mark.parametrize("shape", [*CASES, (7, 2, 3, 40, 32)])
def test_every_configuration_is_within_the_bound_of_float64(shape) -> None:
    of = case4(*shape)
    bias = torch.randn(of.w.shape[:2], device="cuda")
    weights = torch.rand(of.slots, device="cuda")
    for extra in ((None, None), (bias, weights)):
        want = exact(widened(of), *extra)
        for given, got in runs(of, *extra):
            assert relative(got, want) < BOUND, given


# gpt-oss's (tokens, choices, experts, N, K, slots of an activation row); more slots than one launch lists; tiles of 16.
MODELS = [
    (1, 4, 32, 5760, 2880, 4), (1, 4, 32, 2880, 2880, 1), (8, 4, 128, 5760, 2880, 4), (64, 4, 32, 2880, 2880, 1),
    (1200, 4, 32, 192, 2880, 4), (20_000, 2, 4, 64, 128, 1, 16),
]  # fmt: skip


@pytest.mark.parametrize("shape", MODELS)
def test_the_public_op_takes_the_shapes_of_models_by_a_kernel(shape) -> None:
    of = case4(*shape)
    weights = torch.rand(of.slots, device="cuda") if of.a_div == 1 else None
    given = *of.operands, of.slots, of.block_m, of.a_div, weights
    expected = streams.PASSES_KERNEL if of.slots <= streams.MOST_GROUPS else streams.ROWS_KERNEL
    assert hipforge.explain(hipforge.grouped_mxfp4_linear, *given).kernel == expected
    assert relative(hipforge.grouped_mxfp4_linear(*given), exact(widened(of), weights=weights)) < BOUND


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [*GATE_UPS, (1, 4, 32, 5760, 2880), (9000, 2, 3, 64, 128)])
def test_gate_and_up_with_their_epilogue_are_those_of_two_launches(shape, interleaved) -> None:
    of = case4(*shape)
    parts = of._replace(
        w_scale=scales(*of.w_scale.shape, low=110, high=122), a_scale=scales(*of.a_scale.shape, low=118, high=124)
    )
    experts, n, _ = parts.w.shape
    for bias, alpha, beta, limit in ((None, 1.0, 0.0, None), (torch.randn(experts, n, device="cuda"), 1.702, 1.0, 7.0)):
        products = {tuple(given.items()): out for given, out in runs(parts, bias)}
        for given, q, q_scales in gate_ups(parts, bias, (alpha, beta, limit, interleaved)):
            want_q, want_scales = hipforge.swiglu_mxfp8(
                products[tuple(given.items())], alpha=alpha, beta=beta, limit=limit, interleaved=interleaved
            )
            assert torch.equal(q_scales, want_scales), given
            assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8)), given
    taken = hipforge.explain(mxfp4.grouped_swiglu_mxfp4, *parts.operands, parts.slots, parts.block_m, parts.a_div)
    assert taken.path == "kernel" and "gate_up" in taken.kernel


@pytest.mark.parametrize("k", [2880, 768])
def test_integers_are_exact(k: int) -> None:
    of = case4(9, 2, 4, 48, k, block_m=16)
    codes = torch.tensor([0x00, 0x02, 0x20, 0xA2, 0x4C], dtype=torch.uint8, device="cuda")  # 0, 1, 2, -1 and -2
    of.w.copy_(codes[torch.randint(0, 5, of.w.shape, device="cuda")])
    of.a.copy_(torch.randint(-1, 2, of.a.shape, device="cuda") * (torch.rand(of.a.shape, device="cuda") < 0.02))
    ones = of._replace(a_scale=torch.full_like(of.a_scale, 127), w_scale=torch.full_like(of.w_scale, 127))
    for given, got in runs(ones):
        assert torch.equal(got.double(), exact(widened(ones))), given


def test_every_code_has_its_value() -> None:
    n, k = 16, 32
    codes = torch.arange(16, dtype=torch.uint8, device="cuda")[:, None].expand(16, k // 2)
    for place in range(k):  # of the one element of a row of A that is not 0
        of = case4(1, 1, 1, n, k)
        of.w.copy_((codes << 4 | codes)[None])
        of.a.zero_()
        of.a[0, place] = 1.0
        of.w_scale.fill_(127), of.a_scale.fill_(127)
        for given, got in runs(of):
            assert torch.equal(got[0].float(), VALUES.cuda().float()), (given, place)


def test_every_scale_byte_counts_and_255_is_nan() -> None:
    of = case4(4, 1, 2, 256, 512)
    of.w_scale.copy_(torch.arange(256, dtype=torch.uint8, device="cuda")[None, :, None].expand(of.w_scale.shape))
    for x_byte in (0, 1, 63, 64, 127, 176, 177, 178, 190, 191, 192, 254, 255):
        of.a_scale.fill_(x_byte)
        want = exact(wide := widened(of))
        # Where the sum of the terms' sizes overflows, a partial sum may; below bf16's range results lose bits.
        size = exact(wide._replace(a=wide.a.float().abs().to(wide.a.dtype), w=wide.w.float().abs().to(wide.w.dtype)))
        known = want.isnan() | (size < 3e38)
        fits = (size < 3e38) & (want.abs() > 1e-36)
        for given, got in runs(of):
            assert torch.equal(got.isnan()[known], want.isnan()[known]), (given, x_byte)
            assert not bool(fits.any()) or relative(got[fits], want[fits]) < BOUND, (given, x_byte)


def test_nan_codes_of_activations_are_nan() -> None:
    of = case4(3, 1, 2, 32, 256)
    of.a.view(torch.uint8)[1, 77] = 0x7F
    for given, got in runs(of):
        assert got.isnan().all(1).tolist() == [False, True, False], given


def test_a_row_does_not_depend_on_the_batch_where_that_is_asked_for() -> None:
    of = case4(600, 4, 16, 192, 2880)
    with hipforge.batch_invariant():
        whole = hipforge.grouped_mxfp4_linear(*of.operands, of.slots, of.block_m, of.a_div)
        few = of.ids[: 3 * of.a_div].view(3, -1)
        indices = hipforge.moe_align_block_size(few, of.block_m, len(of.w))
        some = hipforge.grouped_mxfp4_linear(of.a[:3], of.a_scale[:3], of.w, of.w_scale, *indices, 12, of.block_m, 4)
    assert torch.equal(some, whole[:12])


def test_a_layer_in_a_graph_of_programmatic_launches() -> None:
    hold_layers_in_a_graph_to_those_one_by_one(hipforge.mxfp4_quantize, hipforge.fused_moe_mxfp4)
