"""The reference of sparse attention beside the transformers library and beside float64 written out key by key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hipforge.ops.reference as reference
from hipforge.errors import GuardError
from hipforge.ops.reference.attention import paged_attention

HIDDEN, GROUPS, INDEX, BLOCK, TOPK, PAGE = 64, 2, 32, 16, 4, 8


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def paged(rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows [B, keys, ...] in shuffled pages, and their tables; pages and entries in no use are poisoned."""
    batch, keys = rows.shape[:2]
    per_sequence = -(-keys // PAGE)
    order = torch.randperm(batch * per_sequence + 3, generator=rng(seed))
    tables = order[: batch * per_sequence].view(batch, per_sequence)
    cache = torch.full((len(order), PAGE, *rows.shape[2:]), torch.nan, dtype=rows.dtype)
    whole = torch.full((batch, per_sequence * PAGE, *rows.shape[2:]), torch.nan, dtype=rows.dtype)
    whole[:, :keys] = rows
    cache[tables] = whole.unflatten(1, (per_sequence, PAGE))
    unused = torch.full((batch, 2), 1 << 30)
    return cache, torch.cat((tables, unused), dim=1).int()


def case(seed: int, keys: int, tokens: int) -> dict[str, Tensor]:
    g = rng(seed)
    index_q = torch.randn(2, tokens, GROUPS, INDEX, generator=g)
    index_k = torch.randn(2, keys, INDEX, generator=g)
    q = torch.randn(2, tokens, 2 * GROUPS, INDEX, generator=g)
    k, v = (torch.randn(2, keys, GROUPS, INDEX, generator=g) for _ in range(2))
    return {"index_q": index_q, "index_k": index_k, "q": q, "k": k, "v": v}


def by_reference(parts: dict[str, Tensor], lengths: Tensor, local_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the chosen ids and the attention over what each token sees of them, all through pages."""
    (index_k, tables), (k, _), (v, _) = (paged(parts[name], 5) for name in ("index_k", "k", "v"))
    scores = reference.sparse_block_scores(parts["index_q"], index_k, tables, lengths, block_size=BLOCK)
    ids, pages, seen = reference.sparse_topk_blocks(
        scores, tables, lengths, page_size=PAGE, topk=TOPK, local_blocks=local_blocks, block_size=BLOCK
    )
    q = parts["q"].flatten(0, 1).unsqueeze(1)
    out, _ = paged_attention(q, k, v, pages, seen, None, True)
    return ids, out.view(parts["q"].shape)


def by_key(
    parts: dict[str, Tensor], lengths: Tensor, local_blocks: int, causal_cut: int = 0, forced_shift: int = 0
) -> tuple[Tensor, Tensor]:
    """The same in float64, key by key. What the last two arguments shift is wrong unless they are 0."""
    wide = {name: part.double() for name, part in parts.items()}
    batch, tokens = wide["index_q"].shape[:2]
    ids = torch.full((batch, tokens, GROUPS, TOPK), -1)
    out = torch.zeros_like(wide["q"])
    for b in range(batch):
        for t in range(tokens):
            position = int(lengths[b]) - tokens + t + causal_cut
            if position < 0:
                continue
            for g in range(GROUPS):
                products = [float(wide["index_q"][b, t, g] @ wide["index_k"][b, key]) for key in range(position + 1)]
                best = [max(products[at : at + BLOCK]) for at in range(0, position + 1, BLOCK)]
                own = position // BLOCK + forced_shift
                best = [math.inf if own - local_blocks < i <= own else value for i, value in enumerate(best)]
                chosen = sorted(sorted(range(len(best)), key=lambda i: -best[i])[:TOPK])
                ids[b, t, g, : len(chosen)] = torch.tensor(chosen)
                keys = [key for key in range(position + 1) if key // BLOCK in chosen]
                for h in (2 * g, 2 * g + 1):
                    weights = torch.softmax(wide["k"][b, keys, g] @ wide["q"][b, t, h] / math.sqrt(INDEX), dim=0)
                    out[b, t, h] = weights @ wide["v"][b, keys, g]
    return ids, out


@pytest.mark.parametrize("local_blocks", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(70, 133), (16, 17), (128, 3), (0, 5), (129, 112)])
def test_blocks_and_attention_are_those_of_float64(lengths: tuple[int, int], local_blocks: int) -> None:
    parts, seqlens = case(1, 136, 4), torch.tensor(lengths).int()
    ids, out = by_reference(parts, seqlens, local_blocks)
    want_ids, want = by_key(parts, seqlens, local_blocks)
    assert torch.equal(ids.long(), want_ids)
    # The attention is computed in float64 and rounded to float32 once: 2^-24 of it, and 1e-12 for float64's own sums.
    torch.testing.assert_close(out.double(), want, rtol=2.0**-24, atol=1e-9)


def stale(parts: dict[str, Tensor], seqlens: Tensor) -> None:
    """The last index key of each sequence is still that of the token before."""
    for b, length in enumerate(seqlens.tolist()):
        parts["index_k"][b, length - 1] = parts["index_k"][b, length - 2]


FAULTS: dict[str, tuple[dict[str, int], Callable[..., None] | None]] = {
    "forced_block_before_the_own": ({"forced_shift": -1}, None),
    "forced_block_missing": ({"forced_shift": 1000}, None),
    "causal_cut_one_late": ({"causal_cut": 1}, None),
    "causal_cut_one_early": ({"causal_cut": -1}, None),
    "stale_index_key": ({}, stale),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(fault: str) -> None:
    """A wrong forced block, a stale index key and a causal cut off by one change what is chosen, or what it gives."""
    shifted, spoil = FAULTS[fault]
    seqlens = torch.tensor([122, 133]).int()
    good = case(3, 136, 1)
    if spoil is not None:  # the key of the token itself decides only where its block is not forced
        good["index_q"][:] = good["index_k"][torch.arange(2), seqlens.long() - 1][:, None, None]
        bad = {name: part.clone() for name, part in good.items()}
        spoil(bad, seqlens)
        assert not torch.equal(by_reference(good, seqlens, 0)[0].long(), by_key(bad, seqlens, 0)[0])
        assert torch.equal(by_reference(good, seqlens, 0)[0].long(), by_key(good, seqlens, 0)[0])
        return
    ids, out = by_reference(good, seqlens, 1)
    wrong_ids, wrong = by_key(good, seqlens, 1, **shifted)
    assert not torch.equal(ids.long(), wrong_ids) or (out.double() - wrong).abs().max() > 1e-3


def library(seed: int, topk: int = TOPK, local_blocks: int = 1) -> Any:
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLAttention

    config = MiniMaxM3VLTextConfig(
        hidden_size=HIDDEN, num_attention_heads=2 * GROUPS, num_key_value_heads=GROUPS, head_dim=INDEX,
        num_hidden_layers=1, layer_types=["minimax_m3_sparse"], index_n_heads=GROUPS, index_head_dim=INDEX,
        index_block_size=BLOCK, index_topk_blocks=topk, index_local_blocks=local_blocks,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    module = MiniMaxM3VLAttention(config, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 1.0 if parameter.dim() == 2 else 0.1)
            parameter *= HIDDEN**-0.5 if parameter.dim() == 2 else 1.0
    return module


@pytest.mark.parametrize("local_blocks", [0, 1, 3])
@torch.no_grad()
def test_blocks_and_attention_are_those_of_the_transformers_library(local_blocks: int) -> None:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
        MiniMaxM3VLRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    module, tokens = library(0, local_blocks=local_blocks), 150
    x = torch.randn(1, tokens, HIDDEN, generator=rng(2))
    angles = MiniMaxM3VLRotaryEmbedding(module.config)(x, torch.arange(tokens)[None])
    seen: dict[str, Tensor] = {}
    module.o_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
    module.indexer.register_forward_hook(lambda _, args, result: seen.update(ids=result))
    module(x, angles, None, position_ids=torch.arange(tokens)[None])

    def heads(projection: Any, norm: Any) -> Tensor:
        y = projection(x).unflatten(-1, (-1, INDEX))
        return y if norm is None else norm(y)

    def turned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(a, b, *angles, unsqueeze_dim=2)

    q, k = turned(heads(module.q_proj, module.q_norm), heads(module.k_proj, module.k_norm))
    index = module.indexer
    index_q, index_k = turned(heads(index.q_proj, index.q_norm), heads(index.k_proj, index.k_norm))
    parts = {"index_q": index_q, "index_k": index_k[:, :, 0], "q": q, "k": k, "v": heads(module.v_proj, None)}
    parts = {name: part.expand(2, *part.shape[1:]) for name, part in parts.items()}
    ids, out = by_reference(parts, torch.tensor([tokens, tokens]).int(), local_blocks)
    want = seen["ids"][0].transpose(0, 1).sort(dim=-1).values  # [tokens, groups, topk], -1 first
    assert torch.equal(ids[0].long().sort(dim=-1).values, want)
    assert torch.equal(ids[0], ids[1])
    # Their softmax and sums are float32: 2^-24 for each of up to 64 keys of each sum, on values of up to 4.
    torch.testing.assert_close(out[0].flatten(-2), seen["out"][0], rtol=0, atol=64 * 4 * 2.0**-24)


def test_up_to_topk_blocks_the_attention_is_dense() -> None:
    parts, seqlens = case(7, TOPK * BLOCK, 3), torch.tensor([TOPK * BLOCK, 37]).int()
    _, out = by_reference(parts, seqlens, 1)
    dense, _ = paged_attention(parts["q"], parts["k"], parts["v"], None, seqlens, None, True)
    torch.testing.assert_close(out, dense, rtol=2.0**-23, atol=1e-9)


def test_equal_scores_go_to_the_lower_block_and_nan_before_any_number() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, torch.nan, 2.0, -torch.inf, 0.0, 5.0, 9.0]).view(1, 1, 1, 9)
    tables, lengths = torch.arange(18).int()[None], torch.tensor([8 * BLOCK]).int()

    def chosen(topk: int, local_blocks: int) -> list[int]:
        found = reference.sparse_topk_blocks(
            scores, tables, lengths, page_size=PAGE, topk=topk, local_blocks=local_blocks, block_size=BLOCK
        )
        return found[0].flatten().tolist()

    assert chosen(4, 0) == [1, 2, 3, 7]
    assert chosen(3, 2) == [3, 6, 7]
    assert chosen(9, 0) == [0, 1, 2, 3, 4, 6, 7, -1, -1]  # -inf is no choice, and block 8 is not there yet
    assert chosen(9, 3) == [0, 1, 2, 3, 4, 5, 6, 7, -1]  # unless it is forced


def test_more_forced_blocks_than_choices_are_refused() -> None:
    with pytest.raises(GuardError, match=r"local_blocks must be 0 to topk = 2; got 3"):
        reference.sparse_topk_blocks(
            torch.zeros(1, 1, 1, 4), torch.zeros(1, 4).int(), torch.ones(1).int(), page_size=8, topk=2, local_blocks=3
        )
