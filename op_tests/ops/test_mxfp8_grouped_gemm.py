"""The grouped GEMM's wrappers: envelope, table, fallbacks, and operands as callers have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.mxfp8_cases import assert_bits
from helpers.mxfp8_grouped_cases import ODD_TILES, Moe, exact, oracle, random_owners, sort_slots, sparse_bytes

import hipforge
from hipforge.errors import GuardError
from hipforge.ops.grouped_gemm_mxfp8 import grouped_gemm_mxfp8, grouped_mxfp8_linear
from hipforge.ops.moe import moe_align_block_size
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8
from hipforge.ops.mxfp8_grouped_gemm.family import TABLE

HEADER = "gfx,cu_num,M,N,K,a_div,has_weight,block_n,min_experts,use_hip,us,stock_us,best_baseline_us,err,source"


def call(case: Moe, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor | None:
    return grouped_gemm_mxfp8(
        case.a, case.a_scale, case.w, case.w_scale, *case.sorted(), case.slots, 4, case.block_m, out_dtype,
        case.a_div, case.weights, None,
    )  # fmt: skip


def explained(case: Moe, out_dtype: torch.dtype = torch.bfloat16) -> hipforge.ops.core.dispatch.Explanation:
    return hipforge.explain(
        grouped_gemm_mxfp8, case.a, case.a_scale, case.w, case.w_scale, *case.sorted(), case.slots, 4, case.block_m,
        out_dtype, case.a_div, case.weights,
    )  # fmt: skip


def linear(case: Moe) -> torch.Tensor:
    return grouped_mxfp8_linear(
        case.a, case.a_scale, case.w, case.w_scale, *case.sorted(), case.slots, case.block_m, case.a_div, case.weights
    )


def sparse(experts: int, n: int, k: int, slots: int, a_div: int = 1, weighted: bool = False) -> Moe:
    """A problem for planning: nothing of it takes memory."""
    return Moe(
        sparse_bytes(-(-slots // a_div), k), sparse_bytes(-(-slots // a_div), k // 32), sparse_bytes(experts, n, k),
        sparse_bytes(experts, n, k // 32), (0,) * slots, a_div, 64, torch.ones(slots) if weighted else None,
    )  # fmt: skip


def test_rows_of_skipped_tiles_are_zero(path: str) -> None:
    owners = (0, 1, 2, 2, 1, 0)
    case = exact(owners, experts=3, n=16, k=96, block_m=4, weighted=True)
    ids, experts, padded = sort_slots(owners, 4, 3)
    experts[1] = -1
    case = case.but(index=(ids, experts, padded))
    want = oracle(case.but(owners=(0, -1, 2, 2, -1, 0)), elsewhere=0.0)
    if path == "kernel":
        assert_bits(call(case), want)
    else:
        assert call(case) is None
    assert_bits(linear(case), want)


@pytest.mark.parametrize("top_k", (1, 4, 5, 8))
@pytest.mark.parametrize("tokens", (1, 3))
def test_both_gemms_of_a_layer_are_exact_for_every_top_k(tokens: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(top_k)
    topk_ids = torch.stack([torch.randperm(9, generator=generator)[:top_k] for _ in range(tokens)])
    owners = topk_ids.flatten().tolist()
    for a_div, weighted in ((top_k, False), (1, True)):
        case = exact(owners, experts=9, n=24, k=384, a_div=a_div, weighted=weighted)
        got = linear(case.but(index=tuple(moe_align_block_size(topk_ids, 64, 9))))
        assert_bits(got, oracle(case))


def test_strided_operands_are_made_contiguous() -> None:
    case = exact(random_owners(6, 2), experts=2, n=16, k=96, weighted=True)

    def wide(tensor: torch.Tensor) -> torch.Tensor:  # every other element of a longer row
        return torch.stack((tensor, torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else 7)), -1)[..., 0]

    index = tuple(wide(tensor) for tensor in case.sorted())
    strided = Moe(
        wide(case.a),
        wide(case.a_scale),
        wide(case.w),
        wide(case.w_scale),
        case.owners,
        1,
        64,
        wide(case.weights),
        index,
    )
    assert not strided.w_scale.is_contiguous()
    assert_bits(call(strided), oracle(case))


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes one byte off a 16-byte boundary."""
    room = torch.zeros(tensor.numel() + 17, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + 1
    moved = room[start : start + tensor.numel()].view(tensor.shape)
    return moved.copy_(tensor.view(torch.uint8)).view(tensor.dtype)


@pytest.mark.parametrize("names", (("a",), ("w",), ("a", "w")))
def test_a_payload_off_a_16_byte_boundary_is_copied(names: tuple[str, ...]) -> None:
    case = exact(random_owners(6, 2), experts=2, n=64, k=96, weighted=True)
    moved = case.but(**{name: misaligned(getattr(case, name)) for name in names})
    assert_bits(call(moved), oracle(case))
    assert_bits(linear(moved), oracle(case))
    activated = [
        grouped_swiglu_mxfp8(one.a, one.a_scale, one.w, one.w_scale, *one.sorted(), one.slots, one.block_m, one.a_div)
        for one in (case, moved)
    ]
    for want, got in zip(*activated, strict=True):
        assert torch.equal(want.view(torch.uint8), got.view(torch.uint8))
    with pytest.raises(GuardError, match=r"mul_weight_by must.* float32"):  # another refusal is not hidden by the copy
        call(moved.but(weights=torch.ones(6, dtype=torch.float64)))


# (N, K, a_div, weighted, most slots for any E, most slots for E >= 128)
SHIPPED = (
    (1536, 6144, 4, False, 16, 64),
    (768, 6144, 4, False, 16, 64),
    (6144, 768, 1, True, 8, 64),
    (6144, 768, 1, False, 8, 64),
    (6144, 384, 1, True, 8, 64),
    (6144, 384, 1, False, 8, 64),
)


@pytest.mark.parametrize(("n", "k", "a_div", "weighted", "few", "many"), SHIPPED)
def test_the_shipped_table_has_the_measured_bounds(
    n: int, k: int, a_div: int, weighted: bool, few: int, many: int
) -> None:
    for experts in (16, 127, 128, 129, 256):
        most = many if experts >= 128 else few
        taken = {
            s
            for s in (1, 2, 8, 9, 16, 17, 64, 65)
            if explained(sparse(experts, n, k, s, a_div, weighted)).path == "kernel"
        }
        assert taken == {s for s in (1, 2, 8, 9, 16, 17, 64, 65) if s <= most}, experts
    shown = explained(sparse(256, n, k, 8, a_div, weighted))
    assert shown.file is not None and shown.file[0].name == "mxfp8_grouped_gemm_tuned.csv"
    assert shown.kernel == "mxfp8_grouped_split" and shown.configuration["rows"] == 16


def test_without_a_row_few_slots_per_expert_are_taken() -> None:
    for experts, slots, path in ((2, 16, "kernel"), (2, 17, "none"), (128, 64, "kernel"), (128, 65, "none")):
        assert explained(sparse(experts, 512, 256, slots)).path == path
    assert explained(sparse(2, 512, 256, 4)).configuration == {"rows": 16, "waves": 1, "columns": 16}


def test_what_lies_outside_the_envelope_gives_none_with_a_reason() -> None:
    good = exact((0, 1), experts=2, n=16, k=96)
    assert call(good, torch.float16) is None and "bfloat16" in explained(good, torch.float16).reason
    assert call(good.but(block_m=2)) is None and "block_m" in explained(good.but(block_m=2)).reason
    huge = sparse(1, 2049, 2**20, 1)
    assert call(huge) is None and "2^31 - 1" in explained(huge).reason
    assert call(exact(random_owners(20, 2), experts=2, n=16, k=96)) is None
    # More than 2 GB of weights in all is inside it.
    assert explained(sparse(256, 1536, 6144, 16, 4)).path == "kernel"


def test_malformed_operands_raise() -> None:
    good = exact((0, 1), experts=2, n=16, k=96)
    for changes, message in (
        ({"a": good.a.float()}, "a_q must be .*; got float32"),
        ({"w": good.w[0]}, r"w must be \[E, N, K\]"),
        ({"w": good.w[..., :64]}, "its K is that of a_q"),
        ({"w_scale": good.w_scale[:1]}, "w_scale must be .*; got "),
        ({"a": good.a[:1], "a_scale": good.a_scale[:1]}, "a_q must have a row for each 1 of the 2 slots"),
        ({"a_div": 0}, "a_div must be positive"),
        ({"weights": torch.ones(2, dtype=torch.float64)}, r"mul_weight_by must.* float32"),
        ({"index": tuple(t.long() for t in good.sorted())}, "sorted_token_ids must be contiguous int32"),
    ):
        with pytest.raises(GuardError, match=message):
            call(good.but(**changes))


def test_the_linear_refuses_on_every_path_what_the_kernel_refuses() -> None:
    good = exact(random_owners(20, 2), experts=2, n=16, k=96, block_m=ODD_TILES)
    ids, experts, padded = good.sorted()
    for changes, message in (
        ({"weights": torch.ones(20, dtype=torch.float16)}, r"mul_weight_by must.* float32"),
        ({"weights": torch.ones(19)}, "mul_weight_by must have one weight per slot, 20"),
        ({"index": (ids.long(), experts, padded)}, "sorted_token_ids must be int32"),
        ({"index": (ids[:-3], experts, padded)}, "whole tiles, a multiple of block_m = 6 entries"),
        ({"index": (ids, experts[:1], padded)}, f"expert_ids must have one entry per tile, {len(experts)}; got 1"),
        ({"index": (ids, experts, padded[:0])}, "num_tokens_post_padded must have 1 entry"),
        ({"index": (ids[None], experts, padded)}, "sorted_token_ids must have 1 dimension"),
    ):
        with pytest.raises(GuardError, match=message):
            linear(good.but(**changes))


@pytest.mark.parametrize("weighted", (False, True))
def test_the_torch_path_computes_the_same(weighted: bool) -> None:
    owners = random_owners(40, 4)
    case = exact(owners, experts=4, n=16, k=96, a_div=2, block_m=ODD_TILES, weighted=weighted)
    ids, experts, padded = sort_slots(owners, ODD_TILES, 4)
    experts[experts == 2] = -1
    padded -= ODD_TILES * int((experts == 3).sum())  # the last expert's tiles fall past the end
    case = case.but(index=(ids, experts, padded))
    assert (
        hipforge.explain(
            grouped_mxfp8_linear, case.a, case.a_scale, case.w, case.w_scale, *case.sorted(), 40, ODD_TILES, 2
        ).path
        == "torch"
    )
    want = oracle(case.but(owners=tuple(-1 if owner >= 2 else owner for owner in owners)), elsewhere=0.0)
    assert_bits(linear(case), want)


def test_an_override_routes_a_call_and_names_its_line(put_table: Callable[..., Path]) -> None:
    rows = ("gfx950,256,4,16,96,1,0,16,0,1,,,,,model:test", "gfx950,256,9,16,96,1,0,8,3,1,,,,,model:test")
    table = put_table(TABLE, *rows, header=HEADER)
    seen = {slots: explained(exact((0,) * slots, experts=2, n=16, k=96)) for slots in (4, 5, 10)}
    with_three = explained(exact((0,) * 5, experts=3, n=16, k=96))
    plain = {"rows": 16, "waves": 1, "columns": 16}  # what stands for the kernel of rows without a name, smallm
    assert seen[4].configuration == plain and seen[4].file == (table, 2)
    assert seen[5].path == "none" and "at least 3 experts; got E=2" in seen[5].reason
    assert seen[10].path == "none" and "end at M=9; got M=10" in seen[10].reason
    assert with_three.configuration == plain


@pytest.mark.parametrize("block_m", (4, 64, ODD_TILES))
@pytest.mark.parametrize("weighted", (False, True))
def test_a_bias_is_added_exactly_to_every_slot_of_its_expert(block_m: int, weighted: bool) -> None:
    owners = (0, 0, 0, 2, 1, 1, *(2,) * 35)
    case = exact(owners, experts=3, n=24, k=96, block_m=block_m, weighted=weighted)
    bias = torch.randint(-8, 9, (3, 24), generator=torch.Generator().manual_seed(2)).float()
    factors = torch.ones(len(owners)) if case.weights is None else case.weights
    want = oracle(case) + bias.double()[list(owners)] * factors.double()[:, None]
    got = grouped_mxfp8_linear(
        case.a, case.a_scale, case.w, case.w_scale, *case.sorted(), case.slots, case.block_m, case.a_div, case.weights,
        bias=bias,
    )  # fmt: skip
    assert_bits(got, want)
