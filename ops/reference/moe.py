"""The MoE grouped GEMM over MX-FP8, in float64, with the sorted-token indices that it takes."""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_dtype, require_int, require_rank, require_shape
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8

MAX_ENTRIES = 2**31 - 1
MAX_EXPERTS = 2**20  # whose counters are made in memory; no model has a thousandth of them


def aligned_sizes(slots: int, block_m: int, num_experts: int) -> tuple[int, int]:
    """Return the entries of the sorted slots, whole tiles of the worst case, and the number of tiles.

    Raises:
        GuardError: more than 2^31 - 1 entries, or more than 2^20 experts.
    """
    if num_experts > MAX_EXPERTS:
        raise GuardError(f"num_experts must be at most {MAX_EXPERTS}; got {num_experts}")
    worst = slots + num_experts * (block_m - 1)
    if worst > MAX_ENTRIES:
        raise GuardError(
            f"T * top_k + E * (block_m - 1) must be at most 2^31 - 1, as indices are int32; got {worst} with "
            f"{slots} slots, E={num_experts} and block_m={block_m}"
        )
    tiles = -(-worst // block_m)
    return tiles * block_m, tiles


def moe_align_block_size(
    topk_ids: torch.Tensor, block_m: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort routed slots by expert and pad each expert's slots to a multiple of ``block_m``.

    Slot t is entry t of the flattened ``topk_ids``. Experts come in ascending order, an expert's slots too. The pad
    value is the number of slots. Buffers have the length of the worst case, so nothing depends on the data.

    Args:
        topk_ids: integer [T, top_k]; ids outside 0 … ``num_experts`` - 1 belong to experts elsewhere and are left out.
        block_m: rows of one tile.
        num_experts: E.

    Returns:
        (sorted_token_ids int32 [T·top_k + E·(block_m - 1)] rounded up to ``block_m``, expert_ids int32, one per tile
        and -1 past the last used one, num_tokens_post_padded int32 [1]).

    Raises:
        GuardError: ``topk_ids`` is not [T, top_k] of an integer dtype, ``block_m`` < 1, ``num_experts`` < 0, more
            than 2^20 of them, or buffers of more than 2^31 - 1 entries.
    """
    require_rank("topk_ids", topk_ids, 2, "[T, top_k]")
    require_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    block_m = require_int("block_m", block_m, minimum=1)
    num_experts = require_int("num_experts", num_experts, minimum=0)
    expert = topk_ids.flatten().to(torch.int64)
    slots, device = expert.numel(), expert.device
    tiles = aligned_sizes(slots, block_m, num_experts)[1]
    local = (expert >= 0) & (expert < num_experts)
    bucket = torch.where(local, expert, num_experts)  # one bucket more, for slots that are left out
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, bucket, torch.ones_like(bucket)
    )
    padded = (counts[:num_experts] + block_m - 1) // block_m * block_m
    ends = padded.cumsum(0)
    order = torch.argsort(bucket, stable=True)
    rank = torch.arange(slots, device=device) - (counts.cumsum(0) - counts)[bucket[order]]
    starts = torch.cat((ends - padded, torch.full((1,), tiles * block_m, device=device)))
    position = torch.where(local[order], starts[bucket[order]] + rank, tiles * block_m)
    sorted_ids = torch.full((tiles * block_m + 1,), slots, dtype=torch.int32, device=device)
    sorted_ids.scatter_(0, position, order.to(torch.int32))
    sorted_ids[-1] = slots  # the spare entry caught what is left out
    first = torch.arange(tiles, device=device) * block_m
    owner = torch.searchsorted(ends, first, right=True)
    expert_ids = torch.where(owner < num_experts, owner, -1).to(torch.int32)
    total = ends[-1:].to(torch.int32) if num_experts else torch.zeros(1, dtype=torch.int32, device=device)
    return sorted_ids[:-1], expert_ids, total


def grouped_gemm_mxfp8(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    num_valid_tokens: int,
    block_m: int,
    a_div: int,
    mul_weight_by: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Multiply each slot's activation row with its expert's weight, in float64.

    Args:
        a_q: e4m3fn elements (or uint8) [M_act, K]; slot t reads row t // ``a_div``.
        a_scale: e8m0 bytes [M_act, K/32].
        w: e4m3fn elements (or uint8) [E, N, K].
        w_scale: e8m0 bytes [E, N, K/32].
        sorted_token_ids: int32, a multiple of ``block_m`` entries; an id outside 0 … ``num_valid_tokens`` - 1 is
            padding.
        expert_ids: int32, one per tile of ``block_m`` entries; an id outside 0 … E - 1 skips the tile.
        num_tokens_post_padded: int32 [1]; tiles that start there or later are skipped.
        num_valid_tokens: rows of the result.
        block_m: entries of one tile.
        a_div: slots per activation row.
        mul_weight_by: float32 [num_valid_tokens], multiplies each row before it is rounded.
        out_dtype: the result's dtype.

    Returns:
        ``out_dtype`` [num_valid_tokens, N]; rows that no tile covers are zero.

    Raises:
        GuardError: a dtype or shape that is not accepted.
    """
    require_rank("a_q", a_q, 2, "[M_act, K]")
    require_rank("w", w, 3, "[E, N, K]")
    require_shape("w", w, (*w.shape[:2], a_q.shape[1]), "its K is that of a_q")
    entries = sorted_token_ids.numel()
    if block_m < 1 or entries % block_m or expert_ids.numel() < entries // block_m:
        raise GuardError(
            f"sorted_token_ids must hold whole tiles of block_m={block_m} and expert_ids one entry per tile; "
            f"got {entries} and {expert_ids.numel()} entries"
        )
    experts, n, _ = w.shape
    activations = dequantize_mxfp8(a_q, a_scale, torch.float64)
    slot = sorted_token_ids.to(torch.int64)
    position = torch.arange(entries, device=slot.device)
    expert = expert_ids[: entries // block_m].repeat_interleave(block_m).to(torch.int64)
    in_use = position // block_m * block_m < num_tokens_post_padded.to(torch.int64)
    used = (slot >= 0) & (slot < num_valid_tokens) & (expert >= 0) & (expert < experts) & in_use
    # One extra row catches the entries that are not used.
    owner = torch.full((num_valid_tokens + 1,), -1, dtype=torch.int64, device=slot.device)
    owner.scatter_(0, torch.where(used, slot, num_valid_tokens), torch.where(used, expert, -1))
    owner = owner[:num_valid_tokens]
    rows = activations[torch.arange(num_valid_tokens, device=slot.device) // a_div]
    out = torch.zeros((num_valid_tokens, n), dtype=torch.float64, device=a_q.device)
    for e in range(experts):
        product = rows @ dequantize_mxfp8(w[e], w_scale[e], torch.float64).T
        out = torch.where((owner == e).unsqueeze(1), product, out)
    if mul_weight_by is not None:
        require_dtype("mul_weight_by", mul_weight_by, (torch.float32,))
        out = out * mul_weight_by[:num_valid_tokens].to(torch.float64).unsqueeze(1)
    return out.to(out_dtype)
