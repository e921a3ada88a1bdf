"""The sum over a token's experts on the emulated architecture: a fixed order of roundings, so bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.fused_fp8_cases import assert_same, normal

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.moe_combine import moe_combine

pytestmark = pytest.mark.gfx942

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def same(got, want):
    assert got.dtype == want.dtype
    if got.dtype == torch.float32:
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.view(torch.int32)[~want.isnan()], want.view(torch.int32)[~want.isnan()])
    else:
        assert_same(got, want)


def parts(tokens, k, n, dtype=torch.bfloat16, seed=0):
    rows, weights = normal((tokens * k, n), dtype, seed), normal((tokens, k), torch.float32, seed + 1).abs()
    ids = torch.randint(0, 10, (tokens, k), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    return rows, weights, ids


def check(rows, weights, ids, expert_map=None, **options):
    out_dtype = options.pop("out_dtype", None)
    k = options.get("top_k") or (weights if weights is not None else ids).shape[1]
    if out_dtype is not None:
        options["out"] = torch.empty(rows.shape[0] // k, rows.shape[1], dtype=out_dtype)
    got = moe_combine(rows, weights, ids, expert_map, **options)
    want = reference.moe_combine(rows, k, weights, ids, expert_map, options.get("num_experts"), out_dtype)
    same(got, want)
    return got


@pytest.mark.parametrize(("one", "other"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_every_pair_of_dtypes_is_bit_for_bit(one, other):
    rows, weights, ids = parts(3, 5, 136, one)
    check(rows, weights, ids, num_experts=10, out_dtype=other)
    check(rows, None, None, top_k=5, out_dtype=other)


@pytest.mark.parametrize("n", [1, 7, 8, 64, 511, 520, 6144])
@pytest.mark.parametrize("k", [1, 2, 4, 5, 8, 17])
def test_widths_and_numbers_of_choices(n, k):
    rows, weights, ids = parts(2, k, n)
    check(rows, weights, ids, num_experts=7)


def test_integers_sum_exactly_in_any_order():
    rows = torch.randint(-8, 9, (4 * 6, 96), generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = torch.randint(0, 4, (4, 6), generator=torch.Generator().manual_seed(1)).float()
    got = moe_combine(rows, weights)
    want = (rows.double().view(4, 6, 96) * weights.double()[..., None]).sum(1)
    assert torch.equal(got.double(), want)


def test_the_order_of_additions_is_that_of_the_slots():
    """1 is lost beside 2^30 and not after it is gone: any other order gives another result."""
    rows = torch.tensor([[2.0**30], [1.0], [-(2.0**30)], [1.0]]).expand(4, 8).contiguous()
    assert torch.equal(moe_combine(rows, top_k=4), torch.ones(1, 8))
    assert torch.equal(moe_combine(rows[[0, 2, 1, 3]].contiguous(), top_k=4), torch.full((1, 8), 2.0))


@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_slots_without_a_local_expert_are_left_out_and_not_read(wide, path):
    rows, weights, _ = parts(3, 4, 64)
    ids = torch.tensor([[0, -1, 7, 2], [-1, -1, 9, 7], [1, 2, 3, 4]], dtype=wide)
    expert_map = torch.tensor([0, 1, -1, 2, -1, 3, 3], dtype=wide)
    skipped = (ids < 0) | (ids >= 7)
    skipped[~skipped] |= expert_map[ids[~skipped].long()] < 0
    rows[skipped.flatten()] = float("nan")
    with emulator.counters() as counted:
        got = check(rows, weights, ids, expert_map)
    assert not bool(got.isnan().any()) and not bool(got[1].any())
    assert path == "torch" or counted.tensors["rows"].loaded == int((~skipped).sum()) * 64 * 2
    rows, weights, _ = parts(3, 4, 64)
    check(rows, weights, ids, num_experts=3)
    check(rows, weights, ids)
    check(rows, None, ids, num_experts=3)


def test_a_weight_of_zero_is_no_skipped_slot():
    rows = torch.full((2, 8), float("inf")).bfloat16()
    assert bool(moe_combine(rows, torch.zeros(1, 2)).isnan().all())


def test_unaligned_rows_take_the_narrow_path():
    storage = normal((4 * 64 + 1,), torch.bfloat16)
    check(storage[1:].view(4, 64), torch.ones(2, 2), None)


def test_nothing_to_sum():
    assert moe_combine(torch.zeros(0, 8), torch.zeros(0, 3)).shape == (0, 8)
    assert moe_combine(torch.zeros(6, 0), torch.zeros(2, 3)).shape == (2, 0)


def test_rows_are_read_once_in_one_launch():
    rows, weights, ids = parts(8, 4, 1024)
    with emulator.counters() as counted:
        got = moe_combine(rows, weights, ids, num_experts=10)
    assert counted.launches == 1 and counted.scratch_bytes == 0
    assert counted.tensors["rows"].loaded == rows.nbytes and counted.tensors["out"].stored == got.nbytes


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_wave_order_changes_nothing(order):
    with emulator.options(checks="all", wave_order=order, check_global_races=True):
        check(*parts(5, 4, 520), num_experts=8)


def test_refusals_name_argument_value_and_rule():
    rows, weights, ids = parts(2, 3, 16)
    for arguments, options, message in (
        ((rows[0],), {"top_k": 1}, r"rows must be \[T \* k, N\]"),
        ((rows.double(), weights), {}, r"rows must be .*got float64"),
        ((rows[:5], weights), {}, "rows must have k = 3 for each token; got 5"),
        ((rows[:3], weights), {}, r"weights must be .*\[1, 3\]"),
        ((rows,), {}, "top_k must be given where there are neither weights nor ids"),
        ((rows, weights), {"top_k": 2}, "weights, ids and top_k must agree on k; got 3, 2"),
        ((rows,), {"top_k": 0}, "top_k must be at least 1; got 0"),
        ((rows, weights.half()), {}, r"weights must be float32"),
        ((rows, weights, ids.float()), {}, "ids must be int32 or int64.*; got float32"),
        ((rows, weights, None, torch.zeros(4, dtype=torch.int32)), {}, "expert_map needs ids"),
        ((rows, weights, ids, torch.zeros(4)), {}, "expert_map must be int32 or int64.*; got float32"),
        ((rows, weights, ids, torch.zeros(4, dtype=torch.int32)), {"num_experts": 5}, r"expert_map must be .*\[5\]"),
        ((rows, weights, ids), {"num_experts": -1}, "num_experts must be at least 0; got -1"),
        ((rows, weights), {"out": torch.zeros(2, 15)}, r"out must be .*\[2, 16\]"),
        ((rows, weights), {"out": torch.zeros(2, 16).double()}, "out must be .*; got float64"),
        ((rows, weights), {"out": torch.zeros(2, 32)[:, ::2]}, "out must be contiguous"),
        ((rows.repeat(1, 2)[:, ::2], weights), {}, "rows must be contiguous"),
        ((rows.float(), weights), {"out": weights.flatten()[:2].expand(2, -1)}, "out must not be expanded"),
    ):
        with pytest.raises(GuardError, match=message):
            moe_combine(*arguments, **options)


def test_explain_names_the_kernel_and_the_other_paths():
    rows, weights, ids = parts(2, 3, 16)
    shown = hipforge.explain("moe_combine", rows, weights, ids)
    assert (shown.path, shown.kernel, set(shown.refused)) == ("kernel", "moe_combine", {"triton", "torch"})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_local_number_past_the_local_experts_is_left_out_and_its_row_not_read(dtype, path):
    rows = torch.tensor([[1.0], [NAN], [NAN], [8.0], [NAN], [NAN]]).expand(-1, 8).contiguous()
    ids = torch.tensor([[0, 1, 2], [3, 4, 1]], dtype=torch.int32)
    most = torch.iinfo(dtype).max
    expert_map = torch.tensor([0, 2, most, 1, -1], dtype=dtype)
    got = moe_combine(rows, ids=ids, expert_map=expert_map, num_local_experts=2)
    assert got[:, 0].tolist() == [1.0, 8.0]
    assert moe_combine(rows, ids=ids, expert_map=expert_map)[:, 0].isnan().all()
    with pytest.raises(GuardError, match="num_local_experts must be at least 0; got -1"):
        moe_combine(rows, ids=ids, expert_map=expert_map, num_local_experts=-1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_reference_compares_with_limits_that_ids_do_not_hold(dtype):
    rows, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 1]], dtype=dtype)
    assert reference.moe_combine(rows, 2, None, ids, num_experts=2**31).item() == 3.0
    here = torch.tensor([0, 1], dtype=dtype)
    assert reference.moe_combine(rows, 2, None, ids, here, num_local_experts=2**31).item() == 3.0


def test_the_reference_of_no_tokens_takes_any_number_of_choices():
    assert reference.moe_combine(torch.zeros(0, 8), 2**31 - 1).shape == (0, 8)
