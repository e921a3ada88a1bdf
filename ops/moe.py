"""A mixture-of-experts layer over MX-FP8: the sorted indices of its grouped GEMMs, and the whole layer.

Slot t of T · top_k is entry t of the flattened ``topk_ids``: token t // top_k and its choice t % top_k. Grouped GEMMs
(:mod:`hipforge.ops.grouped_gemm_mxfp8`) take slots sorted by expert and padded to whole tiles, in the layout that
:func:`moe_align_block_size` makes. Another layout in use packs token and choice into one number;
:func:`from_packed_sorting` converts it.
"""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.core.checks import require_device, require_dtype, require_rank, require_shape, require_tensor
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.moe_align import SortedSlots, moe_align_block_size
from hipforge.ops.moe_combine import moe_combine
from hipforge.ops.mx_quantize import mxfp8_quantize
from hipforge.ops.mxfp8_grouped import grouped_mxfp8_linear
from hipforge.ops.swiglu_fp8 import check_activation, swiglu_mxfp8

PACKED_TOKEN_BITS = 24
DEFAULT_BLOCK_M = 64  # an expert's weight is read once for so many slots


def from_packed_sorting(
    sorted_ids: torch.Tensor,
    sorted_expert_ids: torch.Tensor,
    num_valid_ids: torch.Tensor,
    num_tokens: int,
    top_k: int,
    block_m: int,
) -> SortedSlots:
    """Convert a sorting that packs each slot as (choice << 24) | token, as aiter's ``moe_sorting`` makes it.

    Args:
        sorted_ids: int32; padding is (top_k << 24) | num_tokens; what lies past ``num_valid_ids[0]`` is not looked at.
        sorted_expert_ids: int32, one per tile of ``block_m`` entries; -1 skips it.
        num_valid_ids: int32, entries in use first.
        num_tokens: T, below 2^24.
        top_k: choices per token.
        block_m: entries of a tile.

    Returns:
        The sorted slots, lengthened to whole tiles.

    Raises:
        GuardError: a dtype or shape that is not accepted, or too few experts for the tiles.
    """
    named = {"sorted_ids": sorted_ids, "sorted_expert_ids": sorted_expert_ids, "num_valid_ids": num_valid_ids}
    for name, tensor in named.items():
        require_dtype(name, tensor, (torch.int32,))
        require_rank(name, tensor, 1, "1-D")
    if block_m < 1 or top_k < 1 or not 0 <= num_tokens < 1 << PACKED_TOKEN_BITS or num_valid_ids.numel() < 1:
        raise GuardError(
            f"block_m and top_k must be positive, num_tokens below 2^24 and num_valid_ids not empty; "
            f"got {block_m}, {top_k}, {num_tokens} and {num_valid_ids.numel()} entries"
        )
    entries = sorted_ids.numel()
    tiles = -(-entries // block_m)
    if sorted_expert_ids.numel() < tiles:
        raise GuardError(
            f"sorted_expert_ids must have one entry per tile of {block_m}, {tiles}; got {sorted_expert_ids.numel()}"
        )
    slots = num_tokens * top_k
    token = sorted_ids & ((1 << PACKED_TOKEN_BITS) - 1)
    choice = sorted_ids >> PACKED_TOKEN_BITS
    position = torch.arange(entries, device=sorted_ids.device)
    real = (token < num_tokens) & (choice >= 0) & (choice < top_k) & (position < num_valid_ids[:1])
    padded = torch.full((tiles * block_m,), slots, dtype=torch.int32, device=sorted_ids.device)
    padded[:entries] = torch.where(real, token * top_k + choice, slots).to(torch.int32)
    return SortedSlots(padded, sorted_expert_ids[:tiles], num_valid_ids[:1])


def fused_moe_mxfp8(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    block_m: int = DEFAULT_BLOCK_M,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Run a mixture-of-experts layer: quantise, gate and up, SwiGLU, quantise, down, weighted sum over the choices.

    Activations are quantised to e4m3fn with one e8m0 scale per 32 elements (round_up: nothing clips). Each GEMM
    accumulates in float32 and rounds once to bfloat16; SwiGLU is that of :func:`hipforge.swiglu_mxfp8`, whose launch
    quantises too; the sum is float32. Routing weights are multiplied into the second GEMM before it rounds. Both GEMMs
    run wherever :func:`hipforge.ops.grouped_gemm_mxfp8.grouped_mxfp8_linear` does.

    Args:
        hidden: bfloat16, float16 or float32 [T, H], H a multiple of 32.
        w1: e4m3fn elements (or uint8) [E, 2·I, H]: rows of the gate, then rows of up, or by turns with
            ``interleaved``; I a multiple of 32.
        w1_scale: e8m0 bytes [E, 2·I, H/32].
        w2: e4m3fn elements (or uint8) [E, H, I].
        w2_scale: e8m0 bytes [E, H, I/32].
        topk_weights: [T, top_k], floating point.
        topk_ids: int32 or int64 [T, top_k]; choices of experts that are not here contribute zero.
        expert_map: integer, one entry per expert of all ranks: its place in ``w1`` and ``w2``, -1 if it is not here.
        block_m: entries of a tile, a multiple of 4.
        alpha: of SwiGLU, as the next two; MiniMax-M3 and gpt-oss use 1.702, 1 and 7.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        interleaved: even rows of ``w1`` are the gate's, odd ones up's, as in gpt-oss.

    Returns:
        [T, H] of ``hidden``'s dtype.

    Raises:
        GuardError: a shape, dtype or device that is not accepted.
        BuildError, LaunchError: a kernel could not be built or run.
    """
    require_tensor(w1_scale=w1_scale, w2_scale=w2_scale)
    require_rank("hidden", hidden, 2, "[T, H]")
    require_rank("w1", w1, 3, "[E, 2*I, H]")
    require_rank("w2", w2, 3, "[E, H, I]")
    require_rank("topk_ids", topk_ids, 2, "[T, top_k]")
    tokens, width = hidden.shape
    experts, inner = w2.shape[0], w2.shape[2]
    require_shape("w1", w1, (experts, 2 * inner, width), "[E, 2*I, H] with w2's E and I and hidden's H")
    require_shape("w2", w2, (experts, width, inner), "[E, H, I] with hidden's H")
    require_shape("topk_ids", topk_ids, (tokens, topk_ids.shape[1]), "one row per token")
    require_shape("topk_weights", topk_weights, topk_ids.shape, "one weight per choice")
    if not topk_weights.is_floating_point():
        raise GuardError(f"topk_weights must be floating point; got {topk_weights.dtype}")
    for name, tensor in {"topk_weights": topk_weights, "topk_ids": topk_ids}.items():
        require_device(name, tensor, hidden.device)
    check_activation(alpha, beta, limit)
    top_k = topk_ids.shape[1]
    slots = tokens * top_k
    if slots == 0:
        return torch.zeros_like(hidden)

    if expert_map is not None:
        require_rank("expert_map", expert_map, 1, "[experts of all ranks]")
    aligned = moe_align_block_size(topk_ids, block_m, experts if expert_map is None else expert_map.numel(), expert_map)
    a_q, a_scale = _quantized(hidden.contiguous())
    gate_up = grouped_mxfp8_linear(a_q, a_scale, w1, w1_scale, *aligned, slots, block_m, top_k)
    inner_q, inner_scale = _activated(gate_up, alpha, beta, limit, interleaved)
    weights = topk_weights.to(torch.float32).flatten()
    down = grouped_mxfp8_linear(inner_q, inner_scale, w2, w2_scale, *aligned, slots, block_m, 1, weights)
    if down.dtype == hidden.dtype:
        return moe_combine(down, top_k=top_k)
    return moe_combine(down, top_k=top_k, out=torch.empty_like(hidden, memory_format=torch.contiguous_format))


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Weights are e4m3fn everywhere; gfx942's kernels would write activations in its own format.
    if fp8_dtypes(x.device)[0] is torch.float8_e4m3fn:
        return mxfp8_quantize(x)
    return reference.quantize_mxfp8(x)


def _activated(
    gate_up: torch.Tensor, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if fp8_dtypes(gate_up.device)[0] is torch.float8_e4m3fn:
        return swiglu_mxfp8(gate_up, alpha=alpha, beta=beta, limit=limit, interleaved=interleaved)
    return reference.swiglu_mxfp8(gate_up, alpha=alpha, beta=beta, limit=limit, interleaved=interleaved)
