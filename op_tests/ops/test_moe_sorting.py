"""The sorted slots of a MoE layer: those of whole tiles, and the conversion of a packed sorting."""

from __future__ import annotations

import pytest
import torch
from helpers.mxfp8_grouped_cases import sort_slots
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

from hipforge.errors import GuardError
from hipforge.ops.moe import from_packed_sorting, moe_align_block_size


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    tokens=strategies.integers(0, 9),
    top_k=strategies.integers(1, 8),
    experts=strategies.integers(1, 12),
    block_m=strategies.integers(1, 20),
    seed=strategies.integers(0, 2**31),
)
def test_aligned_slots_are_those_written_out_one_by_one(
    tokens: int, top_k: int, experts: int, block_m: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
    ids, tile_experts, padded = moe_align_block_size(topk_ids, block_m, experts)
    want_ids, want_experts, want_padded = sort_slots(topk_ids.flatten().tolist(), block_m, experts)
    slots = tokens * top_k
    assert ids.dtype == tile_experts.dtype == padded.dtype == torch.int32
    # The buffers depend on no data: slots + E (block_m - 1), in whole tiles.
    assert ids.numel() == -(-(slots + experts * (block_m - 1)) // block_m) * block_m
    assert tile_experts.numel() == ids.numel() // block_m
    used = int(want_padded)
    assert padded.tolist() == [used]
    assert ids[:used].tolist() == want_ids.tolist() and (ids[used:] == slots).all()
    assert tile_experts[: used // block_m].tolist() == want_experts.tolist()
    assert (tile_experts[used // block_m :] == -1).all()


def test_an_expert_map_renames_tiles_and_marks_those_of_other_ranks() -> None:
    topk_ids = torch.tensor([[0, 3], [2, 3], [1, 0]], dtype=torch.int32)
    expert_map = torch.tensor([-1, 0, 1, -1], dtype=torch.int32)
    ids, experts, padded = moe_align_block_size(topk_ids, 4, 4, expert_map)
    assert experts[:4].tolist() == [-1, 0, 1, -1]
    assert ids[:16].tolist() == [0, 5, 6, 6, 4, 6, 6, 6, 2, 6, 6, 6, 1, 3, 6, 6]
    assert padded.tolist() == [16] and (experts[4:] == -1).all()


def test_aligning_refuses_what_it_cannot_read() -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(GuardError, match=r"topk_ids must be \[T, top_k\]"):
        moe_align_block_size(ids.flatten(), 4, 2)
    with pytest.raises(GuardError, match=r"topk_ids must be .*got float32"):
        moe_align_block_size(ids.float(), 4, 2)
    with pytest.raises(GuardError, match=r"block_m must be at least 1; got 0"):
        moe_align_block_size(ids, 0, 2)
    with pytest.raises(GuardError, match=r"expert_map must be .*\[2\]"):
        moe_align_block_size(ids, 4, 2, torch.zeros(3, dtype=torch.int32))


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
