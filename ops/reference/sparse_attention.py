"""The choice of key blocks in MiniMax-M3's attention, as the transformers library's ``minimax_m3_vl`` makes it.

Each K/V group has an index query per token, and all share one index key per token. A block of keys scores the largest
product of the query with a key that the token sees; the best blocks are chosen, the token's own and those just before
it always. Attention is then exact over what the token sees of them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.reference.attention import gather_pages

INDEX_BLOCK = 128
TOPK_BLOCKS = 16


def visible_keys(seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return how many keys each token sees, int64 [B, tokens]: a sequence's last token all, one before it one less.

    Example:
        >>> visible_keys(torch.tensor([5, 1]), 2).tolist()
        [[4, 5], [0, 1]]
    """
    behind = torch.arange(tokens - 1, -1, -1, device=seqlens.device)
    return (seqlens.to(torch.int64)[:, None] - behind).clamp(min=0)


def sparse_block_scores(
    q: torch.Tensor,
    index_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_size: int = INDEX_BLOCK,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the score of each block of keys for each index query: the largest product with a key that the token sees.

    Args:
        q: [B, Mq, groups, D], the last tokens of each sequence.
        index_cache: [pages, page_size, D].
        block_tables: int32 [B, max_pages]; entries past a sequence's keys may hold anything.
        seqlens: int32 [B], the tokens of q included.
        block_size: keys of a block.
        dtype: of products, sums and result.

    Returns:
        ``dtype`` [B, Mq, groups, ceil(max_pages * page_size / block_size)]; -inf for a block of which the token sees no
        key, NaN where a product that it sees is NaN.

    Example:
        >>> q, keys = torch.ones(1, 1, 1, 2), torch.tensor([[[1.0, 1.0], [2.0, 2.0], [5.0, 5.0], [0.0, 0.0]]])
        >>> tables, lengths = torch.tensor([[0]]).int(), torch.tensor([2]).int()
        >>> sparse_block_scores(q, keys, tables, lengths, block_size=2)[0, 0, 0].tolist()
        [4.0, -inf]
    """
    checks.require_rank("q", q, 4, "[B, Mq, groups, D]")
    checks.require_rank("index_cache", index_cache, 3, "[pages, page_size, D]")
    page_size = index_cache.shape[1]
    held = block_tables.shape[1] * page_size
    limit = visible_keys(seqlens.clamp(max=held), q.shape[1])
    used = torch.arange(block_tables.shape[1], device=q.device) * page_size < limit.amax(dim=1, keepdim=True)
    keys = gather_pages(index_cache.flatten(0, 1), torch.where(used, block_tables, 0), page_size)
    scores = torch.einsum("bmgd,bkd->bmgk", q.to(dtype), keys.to(dtype))
    hidden = torch.arange(held, device=q.device) >= limit[:, :, None, None]
    scores = functional.pad(scores.masked_fill(hidden, -torch.inf), (0, -held % block_size), value=-torch.inf)
    return scores.unflatten(-1, (-1, block_size)).amax(dim=-1)


def sparse_topk_blocks(
    scores: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    page_size: int,
    topk: int = TOPK_BLOCKS,
    local_blocks: int = 1,
    block_size: int = INDEX_BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the blocks of each token and group, and write the page table and length of what it sees of them.

    Of the blocks that a token sees a key of, the forced ones come first: its own and the ``local_blocks`` - 1 before
    it; then those with a NaN score, then by score, equal ones by index. A block whose score is -inf is not chosen
    unless it is forced.

    Args:
        scores: [B, Mq, groups, blocks] of :func:`sparse_block_scores`.
        block_tables: int32 [B, max_pages].
        seqlens: int32 [B].
        page_size: keys of a page, a divisor of ``block_size``.
        topk: blocks to choose.
        local_blocks: forced ones, at most ``topk``.
        block_size: keys of a block.

    Returns:
        (ids int32 [B, Mq, groups, topk], ascending and then -1; tables int32 [B * Mq, groups, topk * block_size /
        page_size], the pages of these blocks and then 0; lengths int32 [B * Mq, groups], the keys that the token sees
        in them). Only the last block of a row can be seen in part, so that a table and its length are those of a
        sequence.

    Example:
        >>> scores = torch.tensor([3.0, 1.0, 2.0, 0.0]).view(1, 1, 1, 4)
        >>> tables, lengths = torch.tensor([[7, 6, 5, 4]]).int(), torch.tensor([14]).int()
        >>> ids, pages, keys = sparse_topk_blocks(scores, tables, lengths, page_size=4, topk=3, block_size=4)
        >>> ids.flatten().tolist(), pages.flatten().tolist(), keys.tolist()
        ([0, 2, 3], [7, 5, 4], [[10]])
    """
    checks.require_rank("scores", scores, 4, "[B, Mq, groups, blocks]")
    if not 0 <= local_blocks <= topk:
        raise GuardError(f"local_blocks must be 0 to topk = {topk}; got {local_blocks}")
    batch, tokens, groups, blocks = scores.shape
    held = block_tables.shape[1] * page_size
    seen = visible_keys(seqlens.clamp(max=held), tokens)[:, :, None, None]
    block = torch.arange(blocks, device=scores.device)
    own = (seen - 1).div(block_size, rounding_mode="floor")
    here = block * block_size < seen
    forced = here & (block > own - local_blocks)
    # Order: forced, NaN, by score, and what is not chosen last. A stable sort leaves equal ones in order.
    rank = torch.where(forced, 3, torch.where(scores.isnan(), 2, torch.where(here & (scores > -torch.inf), 1, 0)))
    rank = torch.where(here, rank, 0)
    by_score = torch.where(rank == 1, scores.to(torch.float64), 0.0).argsort(dim=-1, descending=True, stable=True)
    order = by_score.gather(-1, rank.gather(-1, by_score).argsort(dim=-1, descending=True, stable=True))[..., :topk]
    order = functional.pad(order, (0, topk - order.shape[-1]))
    chosen = rank.gather(-1, order) > 0
    chosen &= torch.arange(topk, device=scores.device) < blocks
    ids = torch.where(chosen, order, blocks).sort(dim=-1).values
    ids = torch.where(ids < blocks, ids, -1)
    per_block = block_size // page_size
    entry = ids[..., None] * per_block + torch.arange(per_block, device=scores.device)
    there = (ids[..., None] >= 0) & (entry * page_size < seen[..., None])
    lines = block_tables[:, None, None, None].expand(batch, tokens, groups, topk, -1)
    pages = torch.where(there, lines.gather(-1, torch.where(there, entry, 0)), 0)
    keys = torch.where(ids >= 0, (seen - ids * block_size).clamp(0, block_size), 0).sum(dim=-1)
    return (
        ids.to(torch.int32),
        pages.reshape(batch * tokens, groups, topk * per_block).to(torch.int32),
        keys.reshape(batch * tokens, groups).to(torch.int32),
    )
