"""Routing of a mixture of experts: the choice of experts, the sum of their results, and the router's product."""

from __future__ import annotations

import torch

LEAST_SUM = 1e-20


def ranked(values: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
    """Return the indices of each row by descending value: equal values by index, then NaN, then those in ``last``.

    Args:
        values: float32 [..., N].
        last: bool [..., N], or None.
    """
    nan = values.isnan()
    order = values.masked_fill(nan, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = nan.to(torch.int8)
    if last is not None:
        rank = torch.where(last, 2, rank)
    return order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))


def gating_scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Return float32 scores [T, E]: sigmoid, or a softmax over all experts in which NaN logits take no part."""
    wide = logits.to(torch.float32)
    if scoring == "sigmoid":
        return torch.sigmoid(wide)
    nan = wide.isnan()
    largest = wide.masked_fill(nan, -torch.inf).amax(dim=-1, keepdim=True)
    powers = torch.where(wide == largest, 1.0, torch.exp(wide - largest))
    return powers / powers.masked_fill(nan, 0.0).sum(dim=-1, keepdim=True)


def topk_gating(
    logits: torch.Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    shared_experts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights float32, ids int32), both [T, k + shared_experts].

    Args:
        logits: [T, E].
        k: experts to choose.
        scoring: ``softmax`` or ``sigmoid``.
        bias: float32 [E], added to the scores for the choice only.
        renormalize: divide the weights by their sum + 1e-20.
        groups: parts of E / groups neighbouring experts.
        topk_groups: how many parts may be chosen from: those of the largest value, with ``bias`` of the largest sum of
            two.
        scale: multiplies the weights.
        shared_experts: ids from E on, with weight 1, after the chosen ones.
    """
    tokens, experts = logits.shape
    scores = gating_scores(logits, scoring)
    choice = logits.to(torch.float32) if bias is None else scores + bias
    dropped = None
    if groups > 1:
        parts = choice.unflatten(1, (groups, -1))
        best = parts.gather(-1, ranked(parts)[..., :2])
        value = best[..., 0] if bias is None or best.shape[-1] == 1 else best[..., 0] + best[..., 1]
        keep = torch.zeros_like(value, dtype=torch.bool).scatter_(1, ranked(value)[:, :topk_groups], True)
        dropped = ~keep.repeat_interleave(experts // groups, dim=1)
    ids = ranked(choice, dropped)[:, :k]
    weights = scores.gather(1, ids)
    if renormalize:
        total = torch.zeros(tokens, dtype=torch.float32, device=logits.device)
        for i in range(k):
            total = total + weights[:, i]
        weights = weights / (total + LEAST_SUM)[:, None]
    weights = weights * scale
    extra = torch.arange(experts, experts + shared_experts, device=logits.device).expand(tokens, -1)
    ids = torch.cat((ids, extra), dim=1).to(torch.int32)
    return torch.cat((weights, torch.ones_like(extra, dtype=torch.float32)), dim=1), ids


def moe_combine(
    rows: torch.Tensor,
    top_k: int,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    num_experts: int | None = None,
    out_dtype: torch.dtype | None = None,
    num_local_experts: int | None = None,
) -> torch.Tensor:
    """Return each token's sum over its slots, in float32 and in their order; slots without a local expert are left out.

    Args:
        rows: [T * top_k, N].
        top_k: slots of a token.
        weights: float32 [T, top_k], or None for 1.
        ids: integer [T, top_k], or None: every slot counts.
        expert_map: integer [E]: negative for an expert that is not here.
        num_experts: ids from here on are of no expert.
        out_dtype: the result's dtype; that of ``rows`` by default.
        num_local_experts: numbers in ``expert_map`` from here on are of no expert.
    """
    by_slot = rows.unflatten(0, (-1, top_k))
    used = torch.ones(by_slot.shape[:2], dtype=torch.bool, device=rows.device)
    if ids is not None:
        limit = num_experts if expert_map is None else expert_map.numel()
        ids = ids.to(torch.int64)  # a limit beyond int32 compares as none with int32
        used = ids >= 0 if limit is None else (ids >= 0) & (ids < limit)
        if expert_map is not None and expert_map.numel():
            own = expert_map[torch.where(used, ids, 0)].to(torch.int64)
            used = used & (own >= 0 if num_local_experts is None else (own >= 0) & (own < num_local_experts))
    total = torch.zeros(by_slot.shape[0], by_slot.shape[2], dtype=torch.float32, device=rows.device)
    for i in range(top_k if by_slot.numel() else 0):
        values = by_slot[:, i].to(torch.float32)
        if weights is not None:
            values = values * weights[:, i, None]
        total = torch.where(used[:, i, None], total + values, total)
    return total.to(rows.dtype if out_dtype is None else out_dtype)


def router_gemm(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, H] @ w [E, H]^T + bias [E] as float32, computed in float64."""
    product = x.to(torch.float64) @ w.to(torch.float64).T
    return (product if bias is None else product + bias.to(torch.float64)).to(torch.float32)
