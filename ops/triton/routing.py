"""Gating, sorted slots, the sum over experts and the router's product in Triton, for other GPUs and for comparison.

Each function takes operands and outputs that its op has checked and allocated. ``bind`` runs the kernel on another
runtime than the GPU's. Triton is imported on first use, never with this module.
"""

from __future__ import annotations

from typing import Any

import torch

from hipforge.ops.triton.launch import Bind, Launch, power_of_two

LEAST_DOT = 16  # rows, columns and depth of a Triton dot


def topk_gating(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    choices: int,
    sigmoid: bool,
    renormalize: bool,
    groups: int,
    topk_groups: int,
    scale: float,
    shared: int,
    bind: Bind | None = None,
) -> Any:
    """Write ``weights`` and ``ids`` [T, choices + shared]; experts per group are a power of two where groups > 1."""
    from hipforge.ops.triton.routing_kernels import topk_gating_kernel

    tokens, experts = logits.shape
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    constants = {
        "CHOICES": choices, "SHARED": shared, "SIGMOID": sigmoid, "HAS_BIAS": bias is not None,
        "RENORMALIZE": renormalize, "GROUPS": groups, "TOPK_GROUPS": topk_groups,
        "BLOCK_GROUPS": power_of_two(groups), "GROUP_SIZE": power_of_two(experts // groups),
        "BLOCK_WIDTH": power_of_two(choices + shared), "num_warps": 1,
    }  # fmt: skip
    arguments = (weights, ids, rows, rows if bias is None else bias, rows.stride(0), experts, scale)
    return Launch(topk_gating_kernel, (tokens,), arguments, constants).run(bind)


def moe_align_block_size(
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    padded: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    block_m: int,
    experts: int,
    bind: Bind | None = None,
) -> Any:
    """Write the first three tensors; there is one program per expert, and each counts all slots."""
    from hipforge.ops.triton.routing_kernels import moe_align_kernel

    ids = topk_ids.contiguous()
    arguments = (
        sorted_ids, expert_ids, padded, ids, ids if expert_map is None else expert_map.contiguous(), ids.numel(),
        experts, block_m, sorted_ids.numel(), expert_ids.numel(),
    )  # fmt: skip
    constants = {
        "HAS_MAP": expert_map is not None, "BLOCK_EXPERTS": power_of_two(experts), "BLOCK_SLOTS": 64, "num_warps": 4,
    }  # fmt: skip
    return Launch(moe_align_kernel, (experts,), arguments, constants).run(bind)


def moe_combine(
    out: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    top_k: int,
    experts: int | None,
    local: int | None = None,
    bind: Bind | None = None,
) -> Any:
    """Write ``out`` [T, N]."""
    from hipforge.ops.triton.routing_kernels import moe_combine_kernel

    tokens, cols = out.shape
    block = min(1024, power_of_two(cols))
    rows = unread = rows.contiguous()
    arguments = (
        out, rows, *(unread if given is None else given.contiguous() for given in (weights, ids, expert_map)), cols,
        experts or 0, local or 0,
    )  # fmt: skip
    constants = {
        "TOP_K": top_k, "HAS_WEIGHTS": weights is not None, "HAS_IDS": ids is not None,
        "HAS_LIMIT": experts is not None, "HAS_MAP": expert_map is not None, "HAS_LOCAL": local is not None,
        "BLOCK": block, "num_warps": 4, "enable_fp_fusion": False,
    }  # fmt: skip
    return Launch(moe_combine_kernel, (tokens, -(-cols // block)), arguments, constants).run(bind)


def router_gemm(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, bind: Bind | None = None
) -> Any:
    """Write ``out`` [T, E]."""
    from hipforge.ops.triton.routing_kernels import router_gemm_kernel

    (tokens, hidden), experts = x.shape, w.shape[0]
    rows = x if x.stride(1) == 1 else x.contiguous()
    weight = w.contiguous()
    arguments = (out, rows, weight, out if bias is None else bias, tokens, experts, hidden, rows.stride(0))
    constants = {
        "HAS_BIAS": bias is not None, "BLOCK_T": LEAST_DOT, "BLOCK_E": LEAST_DOT, "BLOCK_H": 128, "num_warps": 4,
    }  # fmt: skip
    grid = (-(-tokens // LEAST_DOT), -(-experts // LEAST_DOT))
    return Launch(router_gemm_kernel, grid, arguments, constants).run(bind)
