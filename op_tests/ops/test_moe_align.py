"""Sorted slots on the emulated architecture: integers, so everything bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp8_grouped_cases import sort_slots
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.jit import registry
from hipforge.ops import reference
from hipforge.ops.moe import from_packed_sorting
from hipforge.ops.moe_align import SortedSlots, moe_align_block_size

pytestmark = pytest.mark.gfx942


def random_ids(tokens, top_k, low, high, seed=0, dtype=torch.int32):
    return torch.randint(low, high, (tokens, top_k), generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(ids, block_m, experts, **options):
    got = moe_align_block_size(ids, block_m, experts, **options)
    want = reference.moe_align_block_size(ids, block_m, experts)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.int32 and torch.equal(one, other)
    return got


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    tokens=strategies.integers(0, 40), top_k=strategies.integers(1, 9), experts=strategies.integers(1, 70),
    block_m=strategies.sampled_from((1, 2, 3, 16, 20, 64)), seed=strategies.integers(0, 2**31),
    wide=strategies.booleans(),
)  # fmt: skip
def test_slots_are_those_written_out_one_by_one(tokens, top_k, experts, block_m, seed, wide):
    ids = random_ids(tokens, top_k, -2, experts + 2, seed, torch.int64 if wide else torch.int32)
    got_ids, got_experts, padded = check(ids, block_m, experts)
    want_ids, want_experts, want_padded = sort_slots(ids.flatten().tolist(), block_m, experts)
    used = int(want_padded)
    assert padded.tolist() == [used]
    assert got_ids[:used].tolist() == want_ids.tolist() and bool((got_ids[used:] == ids.numel()).all())
    assert got_experts[: used // block_m].tolist() == want_experts.tolist()
    assert bool((got_experts[used // block_m :] == -1).all())
    # The buffers depend on no data: slots + E (block_m - 1), in whole tiles.
    assert got_experts.numel() == -(-(ids.numel() + experts * (block_m - 1)) // block_m)
    assert got_ids.numel() == block_m * got_experts.numel()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block_m", "kernel"),
    [
        (1, 8, 256, 64, "moe_align_few"),
        (16, 9, 257, 64, "moe_align_few"),
        (256, 1, 1024, 1024, "moe_align_few"),
        (32, 8, 513, 4, "moe_align_few"),
        (32, 8, 3, 12, "moe_align_few"),
        (257, 1, 3, 64, "moe_align_block_size"),
        (16, 9, 257, 6, "moe_align_block_size"),
        (16, 9, 257, 1028, "moe_align_block_size"),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_the_slots_of_a_decode_step_have_a_kernel_of_their_own(tokens, top_k, experts, block_m, kernel, wide):
    ids = random_ids(tokens, top_k, 0, experts, dtype=torch.int64 if wide else torch.int32)
    if hipforge.devices.current().arch_of() not in registry.module("module_moe_align_few").archs:
        kernel = "moe_align_block_size"
    assert hipforge.explain("moe_align_block_size", ids, block_m, experts).kernel == kernel
    check(ids, block_m, experts)
    expert_map = torch.arange(experts, 0, -1, dtype=ids.dtype)
    plain, mapped = (moe_align_block_size(ids, block_m, experts, given) for given in (None, expert_map))
    named = torch.where(plain.expert_ids < 0, -1, experts - plain.expert_ids)
    assert torch.equal(mapped.expert_ids, named) and torch.equal(mapped[0], plain[0])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block_m"),
    [
        (64, 8, 256, 64),
        (600, 9, 257, 64),
        (1100, 8, 128, 16),
        (2048, 8, 1024, 4),
        (5000, 1, 1, 64),
        (700, 6, 7, 128),
    ],
)
def test_many_slots_over_several_work_groups(tokens, top_k, experts, block_m):
    check(random_ids(tokens, top_k, 0, experts), block_m, experts)


def test_one_expert_may_have_all_slots_and_none():
    for chosen in (0, 99, -1, 100):
        check(torch.full((1500, 4), chosen, dtype=torch.int32), 64, 100)


def test_ids_far_out_of_range_are_dropped():
    ids = torch.tensor([[2**40, -(2**40), 3], [2**32, 1, -1]])
    check(ids, 4, 4)
    extreme = torch.tensor([[2**31 - 1, -(2**31), 2]], dtype=torch.int32)
    check(extreme, 4, 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_expert_map_names_tiles_and_keeps_the_slots(dtype, path):
    ids = random_ids(50, 4, -1, 13)
    expert_map = torch.tensor([0, -1, 1, -1, 2, 3, -1, -1, 4, 5, 6, 7], dtype=dtype)
    plain = moe_align_block_size(ids, 8, 12)
    mapped = moe_align_block_size(ids, 8, 12, expert_map)
    assert torch.equal(mapped[0], plain[0]) and torch.equal(mapped[2], plain[2])
    used = plain.expert_ids >= 0
    assert torch.equal(mapped.expert_ids[used].long(), expert_map[plain.expert_ids[used].long()].long())
    assert bool((mapped.expert_ids[~used] == -1).all())


def test_results_are_written_where_asked():
    ids = random_ids(5, 3, 0, 4)
    out = SortedSlots(*(torch.full((n,), 77, dtype=torch.int32) for n in (44, 11, 1)))
    got = check(ids, 4, 9, out=out)
    assert all(one is other for one, other in zip(got, out, strict=True))


def test_strided_ids_and_more_experts_than_the_kernel_counts():
    wide = random_ids(6, 8, 0, 5)
    check(wide[:, ::2], 4, 5)
    assert hipforge.explain("moe_align_block_size", wide, 4, 1025).path == "torch"
    check(wide, 4, 1025)
    check(wide[:0], 4, 0)


@pytest.mark.parametrize("tokens", [4, 32, 64])
def test_one_launch_whose_bytes_are_the_ids_and_each_entry_once(tokens):
    ids = random_ids(tokens, 8, 0, 128)
    with emulator.counters() as counted:
        got = moe_align_block_size(ids, 64, 128)
    assert counted.launches == 1 and counted.scratch_bytes == 0
    for name, tensor in (("sorted_ids", got[0]), ("expert_ids", got[1]), ("padded", got[2])):
        assert counted.tensors[name].stored == tensor.nbytes


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_the_order_of_slots_depends_on_no_wave(order):
    with emulator.options(checks="all", wave_order=order, check_global_races=True):
        check(random_ids(1500, 4, -1, 30), 16, 29)
        check(random_ids(50, 4, -1, 30), 16, 29)


@pytest.mark.parametrize("memory", [(), 3, torch.empty(3)], ids=["empty", "number", "tensor"])
def test_memory_that_is_not_three_tensors_is_refused_as_that(memory):
    with pytest.raises(GuardError, match="out must be three tensors: sorted_token_ids, expert_ids, num_tokens_post_pa"):
        hipforge.moe_align_block_size(torch.zeros(2, 2, dtype=torch.int32), 4, 4, out=memory)


def test_refusals_name_argument_value_and_rule():
    ids = random_ids(2, 2, 0, 2)
    out = SortedSlots(*(torch.zeros(n, dtype=torch.int32) for n in (12, 3, 1)))
    for arguments, options, message in (
        ((ids.flatten(), 4, 2), {}, r"topk_ids must be \[T, top_k\]"),
        ((ids.float(), 4, 2), {}, r"topk_ids must be .*got float32"),
        ((ids, 0, 2), {}, "block_m must be at least 1; got 0"),
        ((ids, 4, -1), {}, "num_experts must be at least 0; got -1"),
        ((ids, 2**31, 2), {}, r"must be at most 2\^31 - 1"),
        ((ids, 2**31 - 4, 1), {}, "as indices are int32"),
        ((ids, 4, 2, torch.zeros(3, dtype=torch.int32)), {}, r"expert_map must be .*\[2\]"),
        ((ids, 4, 2, torch.zeros(2)), {}, "expert_map must be int32 or int64.*; got float32"),
        ((ids, 4, 2), {"out": (out[0].long(), *out[1:])}, "out must be int32"),
        ((ids, 4, 2), {"out": (out[0][:8], *out[1:])}, r"out must be .*\[12\]"),
        (
            (ids, 4, 2),
            {"out": (out[0], out[0][:3], out[2])},
            "out.0 is written and must not share memory with out.1",
        ),
        ((out[0][:4].view(2, 2), 4, 2), {"out": out}, "out.sorted_token_ids is written .* with topk_ids"),
        ((ids, 4, 2, out[1][:2]), {"out": out}, "out.expert_ids is written and must not share .* expert_map"),
    ):
        with pytest.raises(GuardError, match=message):
            moe_align_block_size(*arguments, **options)


def test_a_decision_made_in_a_capture_is_the_one_of_an_eager_call():
    ids = random_ids(8, 2, 0, 7)
    moe_align_block_size(ids, 4, 7)  # loads the kernel
    with emulator.capture() as graph:
        slots = moe_align_block_size(ids[:5], 4, 7)  # a shape that nothing was decided for
    assert any("moe_align_few" in node for node in graph.nodes)
    graph.replay()
    assert torch.equal(slots[0], reference.moe_align_block_size(ids[:5], 4, 7)[0])
    with emulator.counters() as counted:
        moe_align_block_size(ids[:5], 4, 7)
    assert ["moe_align_few" in launch.name for launch in counted.result.kernels] == [True]


def test_torch_compile_gives_the_same():
    torch._dynamo.reset()
    traced = torch.compile(
        lambda x: tuple(moe_align_block_size(x, 4, 6)), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for tokens in (4, 128, 129, 300):  # one graph, of two kernels on AMD's GPUs
        ids = random_ids(tokens, 2, 0, 6)
        with torch._dynamo.config.patch(error_on_recompile=tokens > 4):
            got = traced(ids)
        for one, other in zip(got, reference.moe_align_block_size(ids, 4, 6), strict=True):
            assert torch.equal(one, other)


# ---- the conversion of a packed sorting ------------------------------------------------------------------------------


def packed_sorting(topk_ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The packed layout, written slot by slot: (choice << 24) | token, length numel + E block - top_k, rest garbage."""
    tokens, top_k = topk_ids.shape
    pad = (top_k << 24) | tokens
    entries: list[int] = []
    tiles: list[int] = []
    for expert in range(experts):
        mine = [(choice << 24) | token for token in range(tokens) for choice in range(top_k)
                if int(topk_ids[token, choice]) == expert]  # fmt: skip
        mine += [pad] * (-len(mine) % block)
        entries += mine
        tiles += [expert] * (len(mine) // block)
    length = topk_ids.numel() + experts * block - top_k
    sorted_ids = torch.zeros(length, dtype=torch.int32)  # 0 reads as slot 0 of token 0, a real one
    sorted_ids[: len(entries)] = torch.tensor(entries, dtype=torch.int32)
    sorted_experts = torch.full((-(-length // block),), -1, dtype=torch.int32)
    sorted_experts[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
    return sorted_ids, sorted_experts, torch.tensor([len(entries), tokens], dtype=torch.int32)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block"), ((1, 1, 1, 4), (5, 2, 4, 4), (9, 5, 7, 8), (3, 8, 9, 32))
)
def test_packed_sorting_converts_to_the_same_tiles(tokens: int, top_k: int, experts: int, block: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    topk_ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    ids, tile_experts, padded = from_packed_sorting(*packed_sorting(topk_ids, block, experts), tokens, top_k, block)
    want = moe_align_block_size(topk_ids, block, experts)
    used = int(want.num_tokens_post_padded)
    assert padded.tolist() == [used] and ids.numel() % block == 0 and tile_experts.numel() == ids.numel() // block
    assert torch.equal(ids[:used], want.sorted_token_ids[:used]) and (ids[used:] == tokens * top_k).all()
    assert torch.equal(tile_experts[: used // block], want.expert_ids[: used // block])


def test_packed_sorting_refuses_what_it_cannot_read() -> None:
    good = packed_sorting(torch.tensor([[0], [1]]), 4, 2)
    with pytest.raises(GuardError, match=r"sorted_ids must be int32"):
        from_packed_sorting(good[0].long(), good[1], good[2], 2, 1, 4)
    with pytest.raises(GuardError, match=r"sorted_expert_ids must have one entry per tile of 4, 3; got 1"):
        from_packed_sorting(good[0], good[1][:1], good[2], 2, 1, 4)
    with pytest.raises(GuardError, match=r"num_tokens below 2\^24.*got 4, 1, 16777216"):
        from_packed_sorting(*good, 1 << 24, 1, 4)
