"""Sparse attention of MiniMax-M3: which blocks of keys each token attends to, in two launches.

:func:`sparse_block_scores` gives every block of keys the largest product of an index query with an index key that the
token sees. :func:`sparse_topk_blocks` chooses the best blocks of each token and K/V group, and writes their pages
and the number of keys in them: a page table and lengths for each KV head, which :func:`hipforge.decode_attention_fp8`
takes.
"""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import reference
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.checks import require_choice, require_dtype, require_int, require_operand, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import HALVES
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.decode_attention.layout import check_pages
from hipforge.ops.reference.sparse_attention import INDEX_BLOCK, TOPK_BLOCKS

PUBLIC = ("sparse_block_scores", "sparse_topk_blocks")

INDEX_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
PAGE_MULTIPLE = 16  # keys of one matrix instruction
MAX_TOPK = 16
MAX_BLOCKS = 4096  # of the kernel that chooses: 524,288 keys in blocks of 128
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8)


@compile_ops(
    "module_sparse_block_scores",
    variant=lambda out, q, index_cache, *rest: {
        "HF_INPUT": HALVES[q.dtype], "HF_INDEX_DIM": q.shape[-1], "HF_FP8": int(index_cache.dtype not in HALVES),
    },
    mutates=("out",),
)  # fmt: skip
def sparse_block_scores_out(
    out: torch.Tensor,
    q: torch.Tensor,
    index_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    block_size: int,
) -> None:
    """Write ``out`` as :func:`sparse_block_scores` says; all but ``index_cache`` contiguous."""


@compile_ops("module_sparse_topk_blocks", mutates=("ids", "tables", "lengths"))
def sparse_topk_blocks_out(
    ids: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    page_size: int,
    topk: int,
    local_blocks: int,
    block_size: int,
) -> None:
    """Write the first three as :func:`sparse_topk_blocks` says; all contiguous."""


def _check_lists(
    name: str, first: torch.Tensor, block_tables: torch.Tensor, seqlens: torch.Tensor, block_size: int
) -> None:
    require_rank("block_tables", block_tables, 2, "[B, max_pages]")
    shape, device = (first.shape[0], block_tables.shape[1]), first.device
    why = f"one row per sequence of {name}"
    require_operand("block_tables", block_tables, (torch.int32,), shape, why, device)
    require_operand("seqlens", seqlens, (torch.int32,), shape[:1], why, device)
    require_choice("block_size", block_size, BLOCK_SIZES)


def _plan_scores(
    q: torch.Tensor, index_cache: torch.Tensor, block_tables: torch.Tensor, seqlens: torch.Tensor, block_size: int
) -> Decision:
    require_rank("q", q, 4, "[B, Mq, groups, D]")
    require_dtype("q", q, tuple(HALVES))
    require_rank("index_cache", index_cache, 3, "[pages, page_size, D]")
    require_dtype("index_cache", index_cache, (*_FP8, q.dtype))
    page_size = index_cache.shape[1]
    shape = (*index_cache.shape[:2], q.shape[3])
    require_operand("index_cache", index_cache, (index_cache.dtype,), shape, "D of q", q.device)
    _check_lists("q", q, block_tables, seqlens, block_size)
    if page_size < 1 or page_size % PAGE_MULTIPLE:
        raise GuardError(f"page_size must be a positive multiple of {PAGE_MULTIPLE}; got {page_size}")
    refusal = None if q.shape[3] in INDEX_DIMS else f"D must be one of {INDEX_DIMS}; got {q.shape[3]}"
    return plan_kernel("sparse_block_scores", q.device, refusal, module="module_sparse_block_scores")


def _blocks(block_tables: torch.Tensor, page_size: int, block_size: int) -> int:
    return (block_tables.shape[1] * page_size + block_size - 1) // block_size


def _new_scores(
    q: torch.Tensor, index_cache: torch.Tensor, block_tables: torch.Tensor, block_size: int = INDEX_BLOCK
) -> torch.Tensor:
    blocks = _blocks(block_tables, index_cache.shape[1], block_size)
    return q.new_empty((*q.shape[:3], blocks), dtype=torch.float32)


@operator(_plan_scores, fake=_new_scores, outs=("out",))
def sparse_block_scores(
    taken: Accepted,
    q: torch.Tensor,
    index_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    block_size: int = INDEX_BLOCK,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score each block of keys for each index query: the largest product with an index key that the token sees.

    Token t of Mq sees the keys up to seqlen - Mq + t. Products are exact in float32, sums are in float32, in the
    library's units: index keys as they are stored, no factor of 1/sqrt(D), which changes no choice.

    Example:
        >>> import torch, hipforge
        >>> q, keys = torch.ones(1, 1, 1, 64).half(), torch.ones(1, 32, 64).half()
        >>> tables, lengths = torch.tensor([[0]]).int(), torch.tensor([20]).int()
        >>> hipforge.sparse_block_scores(q, keys, tables, lengths, block_size=16).flatten().tolist()
        [64.0, 64.0]

    Args:
        taken: the path that was decided; callers do not pass it.
        q: bfloat16 or float16 [B, Mq, groups, D], the last tokens of each sequence; D 64 or 128 for the kernel.
        index_cache: [pages, page_size, D] of fp8 (the device's e4m3, or uint8 with its bits) or of q's dtype, page_size
            a multiple of 16; the last dimension contiguous, the other strides multiples of 16 bytes.
        block_tables: int32 [B, max_pages], the page of each page_size keys of a sequence; entries past its keys may
            hold anything. Another page that the cache does not have is refused where the tables are on the CPU, and
            undefined on a GPU.
        seqlens: int32 [B], keys of each sequence, the tokens of q included; those past what the tables hold do not
            exist.
        block_size: keys of a block: 16, 32, 64 or 128.
        out: contiguous float32 [B, Mq, groups, blocks] to write into.

    Returns:
        float32 [B, Mq, groups, ceil(max_pages * page_size / block_size)]; -inf for a block of which the token sees
        nothing, NaN where it sees a product that is NaN. A key that it does not see changes nothing, even NaN.

    Raises:
        GuardError: an argument is not of this form.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    shape = (*q.shape[:3], _blocks(block_tables, index_cache.shape[1], block_size))
    scores = new_or_given(out, shape, torch.float32, q.device)
    check_pages(block_tables, seqlens, index_cache, q.shape[1], None)
    if taken.path == "kernel":
        lists = packed(block_tables, scores), packed(seqlens, scores)
        sparse_block_scores_out(scores, packed(q, scores), index_cache, *lists, block_size)
        return scores
    fp8 = fp8_dtypes(q.device)[0] if index_cache.dtype == torch.uint8 else index_cache.dtype
    keys = index_cache.view(fp8).to(torch.float32)
    scores.copy_(reference.sparse_block_scores(q, keys, block_tables, seqlens, block_size=block_size))
    return scores


def _plan_choice(
    scores: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    page_size: int,
    topk: int,
    local_blocks: int,
    block_size: int,
) -> Decision:
    require_rank("scores", scores, 4, "[B, Mq, groups, blocks]")
    require_dtype("scores", scores, (torch.float32,))
    _check_lists("scores", scores, block_tables, seqlens, block_size)
    require_int("page_size", page_size, 1)
    if page_size % PAGE_MULTIPLE or block_size % page_size:
        raise GuardError(
            f"page_size must be a multiple of {PAGE_MULTIPLE} that divides block_size = {block_size}; got {page_size}"
        )
    blocks = _blocks(block_tables, page_size, block_size)
    if scores.shape[3] != blocks:
        raise GuardError(f"scores must have the {blocks} blocks of block_tables; got shape {tuple(scores.shape)}")
    require_int("topk", topk, 1)
    if topk > MAX_TOPK:
        raise GuardError(f"topk must be 1 to {MAX_TOPK}; got {topk}")
    require_int("local_blocks", local_blocks, 0)
    if local_blocks > topk:
        raise GuardError(f"local_blocks must be 0 to topk = {topk}: they are always chosen; got {local_blocks}")
    too_many = f"it takes up to {MAX_BLOCKS} blocks; block_tables has room for {blocks}"
    refusal = None if blocks <= MAX_BLOCKS else too_many
    return plan_kernel("sparse_topk_blocks", scores.device, refusal, module="module_sparse_topk_blocks")


def _new_choice(
    scores: torch.Tensor, page_size: int, topk: int = TOPK_BLOCKS, block_size: int = INDEX_BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, tokens, groups, _ = scores.shape
    shapes = (batch, tokens, groups, topk), (batch * tokens, groups, topk * block_size // page_size), (
        batch * tokens, groups,
    )  # fmt: skip
    ids, tables, lengths = (scores.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return ids, tables, lengths


@operator(_plan_choice, fake=_new_choice, outs=("ids_out", "tables_out", "lengths_out"))
def sparse_topk_blocks(
    taken: Accepted,
    scores: torch.Tensor,
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    page_size: int,
    topk: int = TOPK_BLOCKS,
    local_blocks: int = 1,
    block_size: int = INDEX_BLOCK,
    ids_out: torch.Tensor | None = None,
    tables_out: torch.Tensor | None = None,
    lengths_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the blocks that each token and group attends to, and write their page table and length.

    Of the blocks of which a token sees a key, its own and the ``local_blocks`` - 1 before it are forced; then come
    those with a NaN score, then the others by score, equal ones by index. A score of -inf is no choice unless it is
    forced.

    Only a token's own block is seen in part, and it is the last one that it sees, so that the chosen pages and the
    number of keys are those of a sequence: ``decode_attention_fp8(q.view(B * Mq, 1, Hq, D), k_cache, v_cache, tables,
    lengths)`` is the attention over the chosen blocks.

    Example:
        >>> import torch, hipforge
        >>> scores = torch.tensor([3.0, 1.0, 2.0, 0.0]).view(1, 1, 1, 4)
        >>> tables, lengths = torch.tensor([[7, 6, 5, 4]]).int(), torch.tensor([50]).int()
        >>> options = {"page_size": 16, "block_size": 16, "topk": 3}
        >>> ids, pages, keys = hipforge.sparse_topk_blocks(scores, tables, lengths, **options)
        >>> ids.flatten().tolist(), pages.flatten().tolist(), keys.tolist()
        ([0, 2, 3], [7, 5, 4], [[34]])

    Args:
        taken: the path that was decided; callers do not pass it.
        scores: float32 [B, Mq, groups, blocks], as :func:`sparse_block_scores` returns them; up to 4,096 blocks for the
            kernel.
        block_tables: int32 [B, max_pages].
        seqlens: int32 [B], the Mq tokens included.
        page_size: keys of a page: a multiple of 16 that divides ``block_size``.
        topk: blocks to choose, 1 to 16.
        local_blocks: how many are forced, 0 to ``topk``.
        block_size: keys of a block: 16, 32, 64 or 128.
        ids_out: contiguous int32 [B, Mq, groups, topk] to write the blocks into.
        tables_out: contiguous int32 [B * Mq, groups, topk * block_size / page_size] to write their pages into.
        lengths_out: contiguous int32 [B * Mq, groups] to write the number of keys into.

    Returns:
        (ids, tables, lengths) of these shapes: the blocks in ascending order, then -1; their pages, then 0; the keys
        that the token sees in them.

    Raises:
        GuardError: an argument is not of this form.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    batch, tokens, groups, _ = scores.shape
    device, int32 = scores.device, torch.int32
    ids = new_or_given(ids_out, (batch, tokens, groups, topk), int32, device, "ids_out")
    width = topk * block_size // page_size
    tables = new_or_given(tables_out, (batch * tokens, groups, width), int32, device, "tables_out")
    lengths = new_or_given(lengths_out, (batch * tokens, groups), int32, device, "lengths_out")
    if scores.shape[3] == 0:  # nothing to choose from, and tables without memory
        return ids.fill_(-1), tables.zero_(), lengths.zero_()
    if taken.path == "kernel":
        values, pages, keys = (packed(each, ids, tables, lengths) for each in (scores, block_tables, seqlens))
        numbers = page_size, topk, local_blocks, block_size
        sparse_topk_blocks_out(ids, tables, lengths, values, pages, keys, *numbers)
        return ids, tables, lengths
    found = reference.sparse_topk_blocks(
        scores, block_tables, seqlens, page_size=int(page_size), topk=int(topk), local_blocks=int(local_blocks),
        block_size=int(block_size),
    )  # fmt: skip
    for given, result in zip((ids, tables, lengths), found, strict=True):
        given.copy_(result)
    return ids, tables, lengths
