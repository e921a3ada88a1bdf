"""The MoE layer and its parts above the kernel: sorting, the wrappers' envelope and fallback, the whole layer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.moe_cases import Moe, exact, oracle, random_owners, sort_slots, sparse_bytes
from helpers.mxfp8_cases import assert_bits, dequantize, relf
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings

import hipforge
from hipforge import emulator
from hipforge.errors import GuardError
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.grouped_gemm_mxfp8 import grouped_gemm_mxfp8, grouped_mxfp8_linear
from hipforge.ops.moe import from_packed_sorting, fused_moe_mxfp8, moe_align_block_size
from hipforge.ops.reference import dequantize_mxfp8, quantize_mxfp8
from hipforge.ops.smallm_gemm_mxfp8 import reload_tables

ODD_TILES = 6  # entries of a tile, which only torch takes: the kernel's are multiples of 4
HEADER = "gfx,cu_num,M,N,K,a_div,has_weight,block_n,min_experts,use_hip,us,stock_us,best_baseline_us,err,source"


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
    with pytest.raises(GuardError, match=r"topk_ids must have dtype .*got torch.float32"):
        moe_align_block_size(ids.float(), 4, 2)
    with pytest.raises(GuardError, match=r"block_m must be at least 1; got 0"):
        moe_align_block_size(ids, 0, 2)
    with pytest.raises(GuardError, match=r"expert_map must have shape \(2,\)"):
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
    sorted_ids = torch.zeros(length, dtype=torch.int32)  # 0 is slot 0 of token 0: what must not be believed
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
    with pytest.raises(GuardError, match=r"sorted_ids must have dtype torch.int32"):
        from_packed_sorting(good[0].long(), good[1], good[2], 2, 1, 4)
    with pytest.raises(GuardError, match=r"sorted_expert_ids must have one entry per tile of 4, 3; got 1"):
        from_packed_sorting(good[0], good[1][:1], good[2], 2, 1, 4)
    with pytest.raises(GuardError, match=r"num_tokens below 2\^24.*got 4, 1, 16777216"):
        from_packed_sorting(*good, 1 << 24, 1, 4)


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


def test_rows_of_skipped_tiles_are_zero() -> None:
    owners = (0, 1, 2, 2, 1, 0)
    case = exact(owners, experts=3, n=16, k=96, block_m=4, weighted=True)
    ids, experts, padded = sort_slots(owners, 4, 3)
    experts[1] = -1
    case = case.but(index=(ids, experts, padded))
    want = oracle(case.but(owners=(0, -1, 2, 2, -1, 0)), elsewhere=0.0)
    assert_bits(call(case), want)
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
    assert shown.file is not None and shown.file[0].name == "smallm_mxfp8_moe_tuned.csv"
    assert shown.kernel == "mxfp8_grouped_split" and shown.configuration["rows"] == 16


def test_without_a_row_few_slots_per_expert_are_taken() -> None:
    for experts, slots, path in ((2, 16, "kernel"), (2, 17, "none"), (128, 64, "kernel"), (128, 65, "none")):
        assert explained(sparse(experts, 512, 256, slots)).path == path
    assert explained(sparse(2, 512, 256, 4)).configuration == {"rows": 16, "waves": 1}


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
        ({"a": good.a.float()}, "a_q must have dtype"),
        ({"w": good.w[0]}, r"w must be \[E, N, K\]"),
        ({"w": good.w[..., :64]}, "its K is that of a_q"),
        ({"w_scale": good.w_scale[:1]}, "w_scale must have shape"),
        ({"a": good.a[:1], "a_scale": good.a_scale[:1]}, "a_q must have a row for each 1 of the 2 slots"),
        ({"a_div": 0}, "a_div must be positive"),
        ({"weights": torch.ones(2, dtype=torch.float64)}, "mul_weight_by must be float32"),
        ({"index": tuple(t.long() for t in good.sorted())}, "sorted_token_ids must be int32"),
    ):
        with pytest.raises(GuardError, match=message):
            call(good.but(**changes))


def test_the_linear_refuses_on_every_path_what_the_kernel_refuses() -> None:
    good = exact(random_owners(20, 2), experts=2, n=16, k=96, block_m=ODD_TILES)
    ids, experts, padded = good.sorted()
    for changes, message in (
        ({"weights": torch.ones(20, dtype=torch.float16)}, "mul_weight_by must have dtype torch.float32"),
        ({"weights": torch.ones(19)}, "mul_weight_by must have one weight per slot, 20"),
        ({"index": (ids.long(), experts, padded)}, "sorted_token_ids must have dtype torch.int32"),
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


def test_an_override_routes_a_call_and_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mine.csv"
    rows = ("gfx950,256,4,16,96,1,0,16,0,1,,,,,model:test", "gfx950,256,9,16,96,1,0,8,3,1,,,,,model:test")
    table.write_text("\n".join((HEADER, *rows)) + "\n")
    monkeypatch.setenv("HIPFORGE_CONFIG_SMALLM_MXFP8_MOE", str(table))
    reload_tables()
    try:
        seen = {slots: explained(exact((0,) * slots, experts=2, n=16, k=96)) for slots in (4, 5, 10)}
        with_three = explained(exact((0,) * 5, experts=3, n=16, k=96))
    finally:
        monkeypatch.undo()
        reload_tables()
    assert seen[4].configuration == {"block_n": 16} and seen[4].file == (table, 2)
    assert seen[5].path == "none" and "at least 3 experts; got E=2" in seen[5].reason
    assert seen[10].path == "none" and "end at M=9; got M=10" in seen[10].reason
    assert with_three.configuration == {"block_n": 8}


def layer(tokens: int, top_k: int, experts: int, width: int, inner: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    w1, w1_scale = quantize_mxfp8(random(experts, 2 * inner, width) * width**-0.5)
    w2, w2_scale = quantize_mxfp8(random(experts, width, inner) * inner**-0.5)
    scores = random(tokens, experts).softmax(-1)
    topk_weights, topk_ids = scores.topk(top_k)
    return {
        "hidden": random(tokens, width).bfloat16(), "w1": w1, "w1_scale": w1_scale, "w2": w2, "w2_scale": w2_scale,
        "topk_weights": topk_weights, "topk_ids": topk_ids,
    }  # fmt: skip


def dense_layer(
    parts: dict[str, torch.Tensor],
    rounded: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = float("inf"),
    interleaved: bool = False,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """All experts for all tokens in float64, weighted by a dense [E, T] matrix.

    ``rounded``: with the layer's own quantisations and gate and up rounded to bf16; otherwise activations stay exact.
    """

    def quantized(x: torch.Tensor) -> torch.Tensor:
        if not rounded:
            return x
        q, scale = quantize_mxfp8(x.float().flatten(0, -2))
        return dequantize(q.view(torch.uint8), scale).view(x.shape)

    def weight(name: str) -> torch.Tensor:
        payload, scale = parts[name].view(torch.uint8), parts[f"{name}_scale"]
        return dequantize(payload.flatten(0, 1), scale.flatten(0, 1)).view(payload.shape)

    hidden = quantized(parts["hidden"].double())
    dense = torch.zeros(hidden.shape[0], parts["w1"].shape[0], dtype=torch.float64)
    dense.scatter_(1, parts["topk_ids"].long(), parts["topk_weights"].double())
    gate_up = torch.einsum("th,eoh->eto", hidden, weight("w1"))
    if w1_bias is not None:
        gate_up = gate_up + w1_bias.double()[:, None]
    if rounded:
        gate_up = gate_up.bfloat16().double()
    gate, up = (gate_up[..., 0::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + beta
    down = torch.einsum("eti,ehi->eth", quantized(gate * torch.sigmoid(alpha * gate) * up), weight("w2"))
    if w2_bias is not None:
        down = down + w2_bias.double()[:, None]
    return torch.einsum("te,eth->th", dense, down)


# With the same roundings on both sides there remain the two to bf16 at the end (each choice, and the sum), 1.7e-3 each
# or 2.4e-3 together; twice that leaves room for choices that cancel and for an fp8 code that tips over.
SAME_ROUNDINGS = 5e-3
# Against exact activations: an e4m3 code is off by 2.6e-2 in the root mean square (uniform within half a unit, a unit
# being an 8th to a 16th). Gate, up and their product each bring it in independently: sqrt(3) 2.6e-2 = 4.5e-2, more by
# what silu adds for negative gates. A wrong scale, expert or routing weight gives more than 0.3.
EXACT_ACTIVATIONS = 7e-2


@pytest.mark.parametrize(("tokens", "top_k", "experts"), ((1, 1, 3), (1, 8, 8), (3, 4, 8), (2, 5, 129), (5, 2, 4)))
def test_the_layer_is_that_of_all_experts_in_float64(tokens: int, top_k: int, experts: int) -> None:
    parts = layer(tokens, top_k, experts, width=128, inner=96)
    got = fused_moe_mxfp8(**parts)
    assert got.dtype == torch.bfloat16 and got.shape == (tokens, 128)
    assert relf(got, dense_layer(parts, rounded=True)) < SAME_ROUNDINGS
    assert relf(got, dense_layer(parts, rounded=False)) < EXACT_ACTIVATIONS


@pytest.mark.parametrize(
    "activation",
    (
        {"alpha": 1.702, "beta": 1.0, "limit": 0.7},
        {"alpha": 1.702, "beta": 1.0, "limit": 0.7, "interleaved": True},
        {"limit": 0.5},
    ),
    ids=("minimax", "gpt_oss", "limit"),
)
def test_the_activation_has_the_models_parameters(activation: dict[str, Any]) -> None:
    """Gates and ups are about normal here, so that a limit below 1 acts on a third of them."""
    parts = layer(4, 3, 8, width=128, inner=96)
    got = fused_moe_mxfp8(**parts, **activation)
    assert relf(got, dense_layer(parts, rounded=True, **activation)) < SAME_ROUNDINGS
    for name, value in activation.items():  # each parameter is seen: without it the result is far off
        without = {key: other for key, other in activation.items() if key != name}
        assert relf(got, dense_layer(parts, rounded=True, **without)) > 5 * SAME_ROUNDINGS, (name, value)


def biases(parts: dict[str, torch.Tensor], size: float = 1.0) -> dict[str, torch.Tensor]:
    """Biases as large as what they are added to, so that a missing or misplaced one shows."""
    generator = torch.Generator().manual_seed(7)
    experts, width, inner = parts["w2"].shape
    return {
        "w1_bias": size * torch.randn(experts, 2 * inner, generator=generator),
        "w2_bias": size * torch.randn(experts, width, generator=generator),
    }


@pytest.mark.parametrize("tokens", (1, 4, 40))
@pytest.mark.parametrize("block_m", (64, ODD_TILES))
def test_biases_are_added_before_activation_and_routing_weight(tokens: int, block_m: int) -> None:
    """One slot, several and more than a wave's tile of an expert, by the kernel and by torch."""
    parts = layer(tokens, 3, 4, width=128, inner=96)
    given = biases(parts)
    got = fused_moe_mxfp8(**parts, **given, block_m=block_m)
    assert relf(got, dense_layer(parts, rounded=True, **given)) < SAME_ROUNDINGS
    for name in given:
        without = {key: value for key, value in given.items() if key != name}
        assert relf(got, dense_layer(parts, rounded=True, **without)) > 5 * SAME_ROUNDINGS
        with pytest.raises(GuardError, match="bias must"):
            fused_moe_mxfp8(**parts, **{**given, name: given[name][:, :-1].contiguous()}, block_m=block_m)
        with pytest.raises(GuardError, match=r"bias must.*(float32|have dtype)"):
            fused_moe_mxfp8(**parts, **{**given, name: given[name].bfloat16()}, block_m=block_m)


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


def test_a_quantised_input_gives_the_same_and_saves_a_launch() -> None:
    parts = layer(4, 3, 8, width=128, inner=96)
    q, scale = hipforge.mxfp8_quantize(parts["hidden"])
    with emulator.counters() as counted:
        got = fused_moe_mxfp8(**{**parts, "hidden": q}, hidden_scale=scale)
    assert counted.launches == 4
    assert torch.equal(got, fused_moe_mxfp8(**parts))
    out = torch.full((4, 128), 9.0, dtype=torch.float32)
    assert fused_moe_mxfp8(**parts, out=out) is out and torch.equal(out.bfloat16(), got)


def test_rows_of_experts_elsewhere_are_left_out_of_the_sum_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no tile covers are undefined; NaN from one of them would reach the sum."""
    parts = layer(3, 2, 4, width=64, inner=64)
    parts["topk_ids"][1] = torch.tensor([-1, 4])
    clean = fused_moe_mxfp8(**parts)
    assert (clean[1] == 0).all()
    filled = torch.empty

    def full_of_nan(*shape: object, **named: object) -> torch.Tensor:
        made = filled(*shape, **named)
        return made.fill_(float("nan")) if made.dtype == torch.bfloat16 else made

    monkeypatch.setattr(torch, "empty", full_of_nan)
    assert torch.equal(fused_moe_mxfp8(**parts), clean)


def test_mxfp4_weights_are_refused_by_name() -> None:
    parts = layer(2, 2, 3, width=128, inner=64)
    packed = {**parts, "w1": torch.zeros(3, 128, 64, dtype=torch.uint8), "w1_scale": torch.full((3, 128, 4), 127)}
    with pytest.raises(GuardError, match=r"got MXFP4, two elements per byte.*has no MXFP4 kernel; dequantise"):
        fused_moe_mxfp8(**packed)
    with pytest.raises(GuardError, match="got MXFP4"):
        fused_moe_mxfp8(**{**packed, "w1": packed["w1"].view(torch.float4_e2m1fn_x2)})


def test_on_gfx942_the_whole_layer_runs_on_the_device(on_gfx942: Callable[..., str]) -> None:
    on_gfx942("-k", "each_step_has_its_launch or six_launches")


def test_each_step_has_its_launch() -> None:
    fnuz = fp8_dtypes("cpu")[0] == torch.float8_e4m3fnuz
    parts = layer(4, 3, 8, width=128, inner=96)
    quantizers = {name: hipforge.mxfp8_quantize(parts[name].float().flatten(0, 1)) for name in ("w1", "w2")}
    for name, (q, scale) in quantizers.items():  # the device's own format, fnuz on gfx942
        parts[name], parts[f"{name}_scale"] = q.view(parts[name].shape), scale.view(parts[f"{name}_scale"].shape)
    with emulator.counters() as counted:
        got = fused_moe_mxfp8(**parts)
    names = [kernel.name for kernel in counted.kernels]
    order = ("align", "quantize", "mxfp8_gate_up", "mxfp8_grouped_split", "combine")
    assert len(names) == counted.launches == 5, names
    assert all(part in name for part, name in zip(order, names, strict=True)), names
    decoded = {name: dequantize_mxfp8(parts[name], parts[f"{name}_scale"], torch.float64) for name in ("w1", "w2")}
    exact_layer = {**parts}
    for name, values in decoded.items():  # in e4m3fn, as the oracle reads; the same numbers
        exact_layer[name], exact_layer[f"{name}_scale"] = quantize_mxfp8(values.float())
        assert torch.equal(dequantize_mxfp8(exact_layer[name], exact_layer[f"{name}_scale"], torch.float64), values)
    # fnuz codes have the same spacing but other block scales where a block's maximum is between 240 and 448 units.
    bound = EXACT_ACTIVATIONS if fnuz else SAME_ROUNDINGS
    assert relf(got, dense_layer(exact_layer, rounded=not fnuz)) < bound


def test_a_layer_is_six_launches_from_router_logits_to_output() -> None:
    parts = layer(4, 3, 8, width=128, inner=96)
    own = fp8_dtypes("cpu")[0]
    if own != torch.float8_e4m3fn:  # any bytes of the device's format
        for name in ("w1", "w2"):
            payload = parts[name].view(torch.uint8)
            parts[name] = payload.masked_fill(payload == 0x80, 0).view(own)
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with emulator.counters() as counted:
        parts["topk_weights"], parts["topk_ids"] = hipforge.topk_gating(logits, 3)
        fused_moe_mxfp8(**parts)
    assert counted.launches == 6  # gating, slots, quantisation, gate and up with SwiGLU, down, sum over choices


def test_a_limit_must_be_one() -> None:
    parts = layer(4, 3, 8, width=128, inner=96)
    for limit in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(GuardError, match="limit must be positive and finite, or None"):
            fused_moe_mxfp8(**parts, limit=limit)


def test_ranks_add_up_to_the_whole_layer() -> None:
    parts = layer(4, 3, 8, width=64, inner=64)
    total = torch.zeros(4, 64, dtype=torch.float64)
    for rank in range(2):
        mine = slice(4 * rank, 4 * rank + 4)
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(4, dtype=torch.int32)
        local = {name: parts[name][mine] for name in ("w1", "w1_scale", "w2", "w2_scale")}
        total += fused_moe_mxfp8(**{**parts, **local}, expert_map=expert_map).double()
    # Each rank rounds its sum to bf16 once, 2^-9 of itself at most.
    whole = fused_moe_mxfp8(**parts).double()
    assert (total - whole).abs().max() <= 3 * 2.0**-9 * total.abs().max()


def test_the_layer_does_not_care_which_path_its_gemms_take() -> None:
    # The tables and the default rule leave 40 slots of 2 experts to Triton; where there is none, the kernel takes them,
    # 32 slots at a time, which leaves SwiGLU a launch of its own.
    parts = layer(20, 2, 2, width=64, inner=64)
    for block_m, launches in ((64, 6), (ODD_TILES, 4)):
        with emulator.counters() as counted:
            got = fused_moe_mxfp8(**parts, block_m=block_m)
        assert counted.launches == launches, block_m
        assert relf(got, dense_layer(parts, rounded=True)) < SAME_ROUNDINGS


def test_the_layer_checks_its_shapes() -> None:
    parts = layer(2, 2, 3, width=64, inner=64)
    for name, change, message in (
        ("hidden", parts["hidden"][0], r"hidden must be \[T, H\]"),
        ("w1", parts["w1"][:, :64], r"w1 must have shape \(3, 128, 64\)"),
        ("w2", parts["w2"][:, :32], r"w2 must have shape \(3, 64, 64\)"),
        ("topk_weights", parts["topk_weights"][:, :1], "one weight per choice"),
        ("topk_ids", parts["topk_ids"][:1], "one row per token"),
    ):
        with pytest.raises(GuardError, match=message):
            fused_moe_mxfp8(**{**parts, name: change})
    none = fused_moe_mxfp8(
        **{
            **parts,
            "hidden": parts["hidden"][:0],
            "topk_ids": parts["topk_ids"][:0],
            "topk_weights": parts["topk_weights"][:0],
        }
    )
    assert none.shape == (0, 64)


def test_without_kernels_the_low_level_op_gives_none_and_the_layer_still_runs() -> None:
    program = """
import sys
sys.path[:0] = sys.argv[1:]
from test_moe import *
case = exact((0, 1), experts=2, n=16, k=96)
assert call(case) is None
assert_bits(linear(case), oracle(case))
parts = layer(3, 2, 4, width=64, inner=64)
assert relf(fused_moe_mxfp8(**parts), dense_layer(parts, rounded=True)) < SAME_ROUNDINGS
"""
    environment = {**os.environ, "HIPFORGE_DEVICE": "reference"}
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", program, str(here), str(here.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_layer_traces_as_one_graph() -> None:
    generator = torch.Generator().manual_seed(3)
    w1, w2 = (torch.randn(4, 64, k, generator=generator) * 0.1 for k in (64, 32))
    weights = (*quantize_mxfp8(w1), *quantize_mxfp8(w2))
    topk_ids = torch.randint(0, 4, (3, 2), generator=generator)
    topk_weights = torch.rand(3, 2, generator=generator)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        return fused_moe_mxfp8(hidden, *weights, topk_weights, topk_ids, block_m=4)

    hidden = torch.randn(3, 64, generator=generator).bfloat16()
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(hidden), layer(hidden))
