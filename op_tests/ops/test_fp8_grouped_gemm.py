"""The grouped scaled fp8 GEMM: scales of every spelling, what is for torch, refusals; see test_grouped_formats."""

from __future__ import annotations

import pytest
import torch
from helpers.grouped_formats import FORMATS, FP8, counts, operands
from helpers.mxfp8_cases import assert_bits
from helpers.mxfp8_grouped_cases import random_owners

import hipforge
from hipforge.errors import GuardError
from hipforge.ops.fp8_grouped_gemm import grouped_fp8_linear, grouped_gemm_fp8

pytestmark = pytest.mark.gfx942

ROWS = FORMATS["rows"]


def test_one_scale_stands_for_all_rows_or_an_expert() -> None:
    case = ROWS.case(random_owners(9, 3), 3, 40, 256)
    for a_scale, w_scale in (
        (torch.tensor(0.5), case.w_scale), (torch.full((9, 1), 2.0), torch.tensor([0.5, 2.0, 4.0])),
        (torch.tensor([4.0]), torch.tensor([[0.5], [2.0], [4.0]])), (torch.linspace(1, 3, 9), case.w_scale[:, :, None]),
    ):  # fmt: skip
        wide = {"a_scale": a_scale.reshape(-1).expand(9), "w_scale": w_scale.reshape(3, -1).expand(3, 40)}
        got = ROWS.linear(case.but(a_scale=a_scale, w_scale=w_scale))
        assert torch.equal(got, ROWS.oracle(case.but(**wide)).float().bfloat16())


def test_a_k_of_uneven_rows_is_for_torch() -> None:
    for of in (ROWS, FORMATS["blocks"]):
        case = of.case((0, 1, 2), 3, 20, 129)
        told = of.told(case)
        assert told.path == "torch" and "K must be a multiple of 16" in told.refused["kernel"]
        assert grouped_gemm_fp8(*operands(case), *counts(case)) is None
        assert_bits(of.linear(case), of.oracle(case))


def test_scales_of_no_kind_are_refused() -> None:
    case = ROWS.case((0, 1, 2), 3, 8, 64)
    a_scale, w_scale = case.a_scale, case.w_scale
    for op in (grouped_gemm_fp8, grouped_fp8_linear):
        for wrong in ((a_scale[:2], w_scale), (a_scale, w_scale[:2]), (a_scale.half(), w_scale), (a_scale, w_scale[0])):
            with pytest.raises(GuardError, match="for each of 3 experts of w; got"):
                op(*operands(case.but(a_scale=wrong[0], w_scale=wrong[1])), *counts(case))


def test_the_entry_refuses_what_the_kernel_does_not_take() -> None:
    good = ROWS.case((0, 1, 2), 3, 8, 64)
    with pytest.raises(GuardError, match=r"a_scale must be contiguous float32 \[3, 1\], one scale per row and block"):
        FORMATS["blocks"].split(good)
    with pytest.raises(GuardError, match="K must be a positive multiple of 16; got 40"):
        ROWS.split(ROWS.case((0, 1, 2), 3, 8, 40))
    with pytest.raises(GuardError, match="w_scale must have 24 scales, one per row, or 3; got"):
        ROWS.split(good.but(w_scale=good.w_scale[:, :7].contiguous()))


def test_one_row_with_one_byte_of_scale_is_multiplied_on_both_paths(path: str) -> None:
    ones, slots = torch.ones(1, 32).to(FP8), hipforge.moe_align_block_size(torch.zeros(1, 1, dtype=torch.int32), 16, 3)
    scale = torch.full((1, 1), 127, dtype=torch.uint8)
    y = hipforge.grouped_fp8_linear(
        ones, scale, ones.expand(3, 8, -1).contiguous(), scale.expand(3, -1, -1).contiguous(), *slots, 1, 16, 1
    )
    assert y.tolist() == [[32.0] * 8]


def test_scales_of_one_block_are_of_the_kind_that_the_other_weights_have(path: str) -> None:
    # [2, 1, 1] bytes of a weight [32, 32] are one of 32 x 32 and one of 128 x 128; w1's can be of 32 x 32 alone.
    w1, w2 = torch.ones(2, 64, 32).to(FP8), torch.ones(2, 32, 32).to(FP8)
    bytes_ = [torch.full((2, blocks, 1), 127, dtype=torch.uint8) for blocks in (2, 1)]
    routing = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    y = hipforge.fused_moe_fp8(torch.ones(3, 32).bfloat16(), w1, bytes_[0], w2, bytes_[1], *routing)
    assert y.unique().tolist() == [32.0 * 32 * 32]  # SwiGLU of 32 and 32 is 1,024 in float32
    with pytest.raises(GuardError, match="of one kind; got MX_SHARED and ONCE or BLOCKS"):
        hipforge.fused_moe_fp8(torch.ones(3, 32).bfloat16(), w1, bytes_[0], w2, torch.ones(2, 1, 1), *routing)
