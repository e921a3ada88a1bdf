"""MoE grouped GEMM over MX-FP8 for gfx950: every routed slot's activation row times its expert's weight.

Shapes and dtypes: ``a_q`` [M_act, K] and ``w`` [E, N, K] hold e4m3fn elements (float8_e4m3fn, or uint8 with the same
bits), ``a_scale`` [M_act, K/32] and ``w_scale`` [E, N, K/32] hold e8m0 bytes (uint8 or float8_e8m0fnu); K is a
multiple of 32. The output [num_valid_tokens, N] is bfloat16, accumulated in float32 and rounded once.

Slot t of T · top_k is entry t of the flattened ``topk_ids``; it reads activation row t // a_div and writes output row
t. The indices are those of :func:`hipforge.ops.moe.moe_align_block_size`: ``sorted_token_ids`` holds tiles of block_m
slots of one expert each, ``expert_ids`` the tiles' experts. An entry outside 0 … num_valid_tokens - 1 is padding,
wherever it stands; an expert outside 0 … E - 1 (one that lives on another rank) skips its tile; so does a tile that
starts at num_tokens_post_padded or later. What no tile covers is zero.

Dispatch of :func:`grouped_gemm_mxfp8`, in this order:

1. an output dtype other than bfloat16 → None;
2. a device other than gfx950 → None;
3. nothing to compute (no slots, experts, rows or columns), block_m no multiple of 4, or an expert's N·K or M_act·K
   beyond 2^31 - 1 → None. The number of experts does not count: each has a base address of its own;
4. rows of the tuned table for (N, K, a_div, has_weight): the one with the smallest M that is at least
   num_valid_tokens decides: fewer than its ``min_experts`` experts or ``use_hip=0`` → None, otherwise the kernel with
   its block_n. More slots than any of them has → None;
5. no such rows: up to 16 slots, or up to 64 with at least 128 experts → the kernel with block_n = 8; else None.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_dtype
from hipforge.ops.core.dispatch import Accepted, Decision, Refused, planned_by
from hipforge.ops.grouped_gemm_mxfp8_kernels import smallm_mxfp8_moe_grouped_gemm, smallm_mxfp8_moe_out
from hipforge.ops.grouped_gemm_mxfp8_plan import plan_grouped
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8

__all__ = [
    "grouped_gemm_mxfp8",
    "grouped_mxfp8_linear",
    "smallm_mxfp8_moe_grouped_gemm",
    "smallm_mxfp8_moe_out",
]


def _run_hip(
    taken: Accepted,
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
    mul_weight_by: torch.Tensor | None,
) -> torch.Tensor:
    experts, n, k = w.shape
    out = torch.zeros((num_valid_tokens, n), dtype=torch.bfloat16, device=a_q.device)
    smallm_mxfp8_moe_out(
        out,
        a_q.contiguous(),
        a_scale.contiguous(),
        w.contiguous(),
        w_scale.contiguous(),
        sorted_token_ids.contiguous(),
        expert_ids.contiguous(),
        num_tokens_post_padded.contiguous(),
        None if mul_weight_by is None else mul_weight_by.contiguous(),
        experts,
        n,
        k,
        num_valid_tokens,
        a_q.shape[0],
        a_div,
        block_m,
        taken.configuration["block_n"],
    )
    return out


@planned_by(plan_grouped)
def grouped_gemm_mxfp8(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    num_valid_tokens: int,
    top_k: int,
    block_m: int,
    out_dtype: torch.dtype,
    a_div: int,
    mul_weight_by: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Multiply each slot's activation row with its expert's weight, or return None where the fallback must.

    Args:
        a_q: activations [M_act, K], any strides; slot t reads row t // ``a_div``.
        a_scale: e8m0 bytes [M_act, K/32].
        w: weights [E, N, K].
        w_scale: e8m0 bytes [E, N, K/32].
        sorted_token_ids: int32, whole tiles of ``block_m`` slots.
        expert_ids: int32, at least one per tile.
        num_tokens_post_padded: int32 [1].
        num_valid_tokens: slots, T · top_k.
        top_k: not used; callers pass it.
        block_m: entries of a tile.
        out_dtype: ``torch.bfloat16`` (another dtype gives None).
        a_div: slots per activation row, any positive number: top_k for the first GEMM, 1 for the second.
        mul_weight_by: float32 [num_valid_tokens], multiplied in float32 before the result is rounded.
        topk_ids: not used; callers pass it.

    Returns:
        bfloat16 [num_valid_tokens, N], zero in rows that no tile covers; None outside the envelope or where the tuned
        table says so, in the order that the module's docstring gives. ``hipforge.explain(grouped_gemm_mxfp8, ...)``
        says which.

    Raises:
        GuardError: operands or indices of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    taken = plan_grouped(
        a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens, top_k,
        block_m, out_dtype, a_div, mul_weight_by, topk_ids,
    ).accepted  # fmt: skip
    if taken is None:
        return None
    return _run_hip(
        taken, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens,
        block_m, a_div, mul_weight_by,
    )  # fmt: skip


def _plan_linear(
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
) -> Decision:
    """Return :func:`grouped_mxfp8_linear`'s decision: the HIP kernel, else Triton on a GPU, else torch."""
    from hipforge.ops.triton import mxfp8_grouped as fallback

    hip = plan_grouped(
        a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens, 0, block_m,
        torch.bfloat16, a_div, mul_weight_by,
    )  # fmt: skip
    if hip.accepted is not None:
        unused = "the HIP kernel takes this call"
        return Decision(hip.accepted, (Refused("triton", unused), Refused("torch", unused)))
    why_not = fallback.unavailable(a_q.device, block_m)
    if why_not is None:
        triton = Accepted(
            "triton", "mxfp8_grouped", MappingProxyType(fallback.STOCK.as_dict()), "the HIP kernel refused"
        )
        return Decision(triton, (*hip.refused, Refused("torch", "Triton runs on this device")))
    torch_path = Accepted("torch", "grouped_mm", MappingProxyType({}), "neither HIP nor Triton applies")
    return Decision(torch_path, (*hip.refused, Refused("triton", why_not)))


@planned_by(_plan_linear)
def grouped_mxfp8_linear(
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
) -> torch.Tensor:
    """Multiply each slot's activation row with its expert's weight, always: HIP, else Triton on a GPU, else torch.

    Args:
        a_q: as for :func:`grouped_gemm_mxfp8`, like all others.
        a_scale: e8m0 bytes [M_act, K/32].
        w: weights [E, N, K].
        w_scale: e8m0 bytes [E, N, K/32].
        sorted_token_ids: int32, whole tiles of ``block_m`` slots.
        expert_ids: int32, at least one per tile.
        num_tokens_post_padded: int32 [1].
        num_valid_tokens: slots, T · top_k.
        block_m: entries of a tile.
        a_div: slots per activation row.
        mul_weight_by: float32 [num_valid_tokens].

    Returns:
        bfloat16 [num_valid_tokens, N], zero in rows that no tile covers.

    Raises:
        GuardError: operands or indices of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    taken = _plan_linear(
        a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens, block_m,
        a_div, mul_weight_by,
    ).accepted  # fmt: skip
    if taken is not None and taken.path == "kernel":
        return _run_hip(
            taken, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens,
            block_m, a_div, mul_weight_by,
        )  # fmt: skip
    _check_indices(
        sorted_token_ids, expert_ids, num_tokens_post_padded, block_m, num_valid_tokens, mul_weight_by, a_q.device
    )
    if taken is not None and taken.path == "triton":
        from hipforge.ops.triton import mxfp8_grouped as fallback

        out = torch.zeros((num_valid_tokens, w.shape[1]), dtype=torch.bfloat16, device=a_q.device)
        fallback.mxfp8_grouped(
            out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, block_m, a_div,
            mul_weight_by, fallback.STOCK,
        )  # fmt: skip
        return out
    return _grouped_mm(
        a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens, block_m,
        a_div, mul_weight_by,
    )  # fmt: skip


def _check_indices(
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_m: int,
    slots: int,
    mul_weight_by: torch.Tensor | None,
    device: torch.device,
) -> None:
    # The same demands, in the same words, as those of the HIP module.
    indices = {
        "sorted_token_ids": sorted_token_ids,
        "expert_ids": expert_ids,
        "num_tokens_post_padded": num_tokens_post_padded,
    }
    for name, tensor in indices.items():
        require_dtype(name, tensor, (torch.int32,))
        if tensor.dim() != 1 or tensor.device != device:
            raise GuardError(
                f"{name} must have 1 dimension and be on {device}; got shape {tuple(tensor.shape)} on {tensor.device}"
            )
    entries = sorted_token_ids.numel()
    if entries % block_m:
        raise GuardError(
            f"sorted_token_ids must hold whole tiles, a multiple of block_m = {block_m} entries; got {entries}"
        )
    if expert_ids.numel() < entries // block_m:
        raise GuardError(f"expert_ids must have one entry per tile, {entries // block_m}; got {expert_ids.numel()}")
    if num_tokens_post_padded.numel() < 1:
        raise GuardError("num_tokens_post_padded must have 1 entry; got none")
    if mul_weight_by is not None:
        require_dtype("mul_weight_by", mul_weight_by, (torch.float32,))
        if mul_weight_by.numel() < slots or mul_weight_by.device != device:
            raise GuardError(
                f"mul_weight_by must have one weight per slot, {slots}, on {device}; "
                f"got {mul_weight_by.numel()} on {mul_weight_by.device}"
            )


def _grouped_mm(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    slots: int,
    block_m: int,
    a_div: int,
    mul_weight_by: torch.Tensor | None,
) -> torch.Tensor:
    """The torch path: float32, one product per expert that has slots, so that memory holds one expert in float32."""
    experts, n, _ = w.shape
    used = max(0, min(sorted_token_ids.numel(), -(-int(num_tokens_post_padded[0]) // block_m) * block_m))
    slot = sorted_token_ids[:used].to(torch.int64)
    expert = expert_ids[: used // block_m].repeat_interleave(block_m).to(torch.int64)
    real = (slot >= 0) & (slot < slots) & (expert >= 0) & (expert < experts)
    slot, expert = slot[real], expert[real]
    activations = dequantize_mxfp8(a_q, a_scale, torch.float32)
    out = torch.zeros((slots, n), dtype=torch.float32, device=a_q.device)
    for e in expert.unique().tolist():
        mine = slot[expert == e]
        product = activations[mine // a_div] @ dequantize_mxfp8(w[e], w_scale[e], torch.float32).T
        out[mine] = product if mul_weight_by is None else product * mul_weight_by.flatten()[mine].unsqueeze(1)
    return out.to(torch.bfloat16)
