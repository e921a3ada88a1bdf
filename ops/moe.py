"""A mixture-of-experts layer over MX-FP8: the sorted indices of its grouped GEMMs, and the whole layer.

Slot t of T · top_k is entry t of the flattened ``topk_ids``: token t // top_k and its choice t % top_k. Grouped GEMMs
(:mod:`hipforge.ops.grouped_gemm_mxfp8`) take slots sorted by expert and padded to whole tiles, in the layout that
:func:`moe_align_block_size` makes. Another layout in use packs token and choice into one number;
:func:`from_packed_sorting` converts it.
"""

from __future__ import annotations

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.arguments import has_memory, naming_arguments
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.moe_align import SortedSlots, moe_align_block_size
from hipforge.ops.moe_combine import moe_combine
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8
from hipforge.ops.mx_quantize import mxfp8_quantize
from hipforge.ops.mxfp8_gemm.family import SCALES, has_fnuz
from hipforge.ops.mxfp8_grouped_gemm import grouped_mxfp8_linear
from hipforge.ops.swiglu_fp8 import check_activation

PUBLIC = ("fused_moe_mxfp8",)

PACKED_TOKEN_BITS = 24
_MXFP4_DTYPE = getattr(torch, "float4_e2m1fn_x2", None)
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
        checks.require_dtype(name, tensor, (torch.int32,))
        checks.require_rank(name, tensor, 1, "1-D")
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


@naming_arguments
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
    hidden_scale: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a mixture-of-experts layer: quantise, gate and up, SwiGLU, quantise, down, weighted sum over the choices.

    Activations are quantised to the device's e4m3 with one e8m0 scale per 32 elements (round_up: nothing clips). Each
    GEMM accumulates in float32, adds its bias there and rounds once to bfloat16; SwiGLU is that of
    :func:`hipforge.swiglu_mxfp8`, in the first GEMM's launch where a kernel runs it, else in one of its own; both
    quantise too, with the same result. The sum is float32. Routing weights are multiplied into
    the second GEMM after its bias, before it rounds. Both GEMMs run wherever
    :func:`hipforge.ops.grouped_gemm_mxfp8.grouped_mxfp8_linear` does; all else is one launch each.

    Args:
        hidden: bfloat16, float16 or float32 [T, H], H a multiple of 32; with ``hidden_scale`` MX-FP8 elements, as
            :func:`hipforge.rms_norm_mxfp8` makes them, so that nothing is quantised twice.
        w1: e4m3 elements (or uint8) [E, 2·I, H]: rows of the gate, then rows of up, or interleaved with
            ``interleaved``; I a multiple of 32.
        w1_scale: e8m0 bytes [E, 2·I, H/32].
        w2: e4m3 elements (or uint8) [E, H, I].
        w2_scale: e8m0 bytes [E, H, I/32].
        topk_weights: [T, top_k], floating point.
        topk_ids: int32 or int64 [T, top_k]; choices of experts that are not here contribute zero.
        expert_map: integer, one entry per expert of all ranks: its place in ``w1`` and ``w2``, -1 if it is not here. A
            place that they do not have is refused where the map is on the CPU, and stands for -1 on a GPU.
        block_m: entries of a tile, a multiple of 4.
        alpha: of SwiGLU, as the next two; MiniMax-M3 and gpt-oss use 1.702, 1 and 7.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        interleaved: even rows of ``w1`` are the gate's, odd ones up's, as in gpt-oss.
        hidden_scale: e8m0 bytes [T, H/32] of ``hidden``.
        w1_bias: float32 [E, 2·I], in the order of ``w1``'s rows.
        w2_bias: float32 [E, H].
        out: contiguous [T, H], bfloat16, float16 or float32, to write into.

    Returns:
        [T, H] of ``hidden``'s dtype, bfloat16 where that is MX-FP8; ``out`` itself where it is given.

    Raises:
        GuardError: a shape, dtype or device that is not accepted; MXFP4 weights (packed, two elements in a byte).
        BuildError, LaunchError: a kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> tokens, experts, width, inner = 2, 4, 64, 32
        >>> w1 = hipforge.mxfp8_quantize(torch.randn(experts * 2 * inner, width))
        >>> w2 = hipforge.mxfp8_quantize(torch.randn(experts * width, inner))
        >>> weights, ids = hipforge.topk_gating(torch.randn(tokens, experts), 2)
        >>> parts = [part.view(experts, -1, part.shape[1]) for part in (*w1, *w2)]
        >>> hipforge.fused_moe_mxfp8(torch.randn(tokens, width), *parts, weights, ids).shape
        torch.Size([2, 64])
    """
    checks.require_tensor(w1_scale=w1_scale, w2_scale=w2_scale)
    checks.require_rank("hidden", hidden, 2, "[T, H]")
    checks.require_rank("w1", w1, 3, "[E, 2*I, H]")
    checks.require_rank("w2", w2, 3, "[E, H, I]")
    checks.require_rank("topk_ids", topk_ids, 2, "[T, top_k]")
    tokens, width = hidden.shape
    experts, inner = w2.shape[0], w2.shape[2]
    _refuse_mxfp4(w1, w1_scale, width)
    checks.require_shape("w1", w1, (experts, 2 * inner, width), "[E, 2*I, H] with w2's E and I and hidden's H")
    checks.require_shape("w2", w2, (experts, width, inner), "[E, H, I] with hidden's H")
    per_token, integers = (tokens, topk_ids.shape[1]), (torch.int32, torch.int64)
    checks.require_operand("topk_ids", topk_ids, integers, per_token, "one row per token", hidden.device)
    checks.require_shape("topk_weights", topk_weights, per_token, "one weight per choice")
    if not topk_weights.is_floating_point():
        raise GuardError(f"topk_weights must be floating point; got {topk_weights.dtype}")
    checks.require_device("topk_weights", topk_weights, hidden.device)
    for name, weight, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        has_fnuz(**{name: weight})  # refuses fp8 that the device does not read
        checks.require_device(name, weight, hidden.device)
        blocks = (*weight.shape[:2], weight.shape[2] // BLOCK)
        checks.require_operand(f"{name}_scale", scale, SCALES, blocks, f"one byte per {BLOCK} elements", hidden.device)
    check_activation(alpha, beta, limit)
    if out is None:
        dtype = hidden.dtype if hidden_scale is None else torch.bfloat16
        out = torch.empty((tokens, width), dtype=dtype, device=hidden.device)
    top_k = topk_ids.shape[1]
    if top_k < 1:
        raise GuardError(f"topk_ids must have at least one choice per token; got shape {tuple(topk_ids.shape)}")
    slots = tokens * top_k
    if expert_map is not None:
        checks.require_rank("expert_map", expert_map, 1, "[experts of all ranks]")
        _check_places(expert_map, experts)
    everywhere = experts if expert_map is None else expert_map.numel()
    aligned = moe_align_block_size(topk_ids, block_m, everywhere, expert_map)
    if hidden_scale is None:
        hidden, hidden_scale = mxfp8_quantize(packed(hidden))
    # The sum leaves out slots without an expert here, so that neither GEMM's output needs to be filled first.
    inner_q, inner_scale = grouped_swiglu_mxfp8(
        hidden, hidden_scale, w1, w1_scale, *aligned, slots, block_m, top_k, bias=w1_bias, alpha=alpha, beta=beta,
        limit=limit, interleaved=interleaved,
    )  # fmt: skip
    weights = topk_weights.to(torch.float32).flatten()
    down = grouped_mxfp8_linear(
        inner_q, inner_scale, w2, w2_scale, *aligned, slots, block_m, 1, weights, bias=w2_bias, uncovered="undefined"
    )
    return moe_combine(
        down, ids=packed(topk_ids), expert_map=expert_map, num_experts=everywhere, num_local_experts=experts, out=out
    )


def _check_places(expert_map: torch.Tensor, experts: int) -> None:
    """Refuse a place that the weights do not have, where the map is on the CPU; on a GPU it would be waited for."""
    checks.require_dtype("expert_map", expert_map, (torch.int32, torch.int64))
    tracing = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    if tracing or not has_memory(expert_map) or expert_map.device.type != "cpu" or devices.current().is_capturing():
        return
    most = max(expert_map.tolist(), default=-1)
    if most >= experts:
        raise GuardError(
            f"expert_map must hold places in w1 and w2, below their {experts} experts, or -1; got {most} for expert "
            f"{expert_map.tolist().index(most)}"
        )


def _refuse_mxfp4(w1: torch.Tensor, w1_scale: torch.Tensor, width: int) -> None:
    if w1.dtype == _MXFP4_DTYPE or (w1_scale.dim() == 3 and 16 * w1_scale.shape[2] == w1.shape[2] == width // 2):
        raise GuardError(
            f"w1 must be MX-FP8, one e4m3 element per byte and a scale per 32; got MXFP4, two elements per byte: shape "
            f"{tuple(w1.shape)} of {w1.dtype} with scales {tuple(w1_scale.shape)}. fused_moe_mxfp8 has no MXFP4 "
            "kernel; dequantise these weights and quantise them with mxfp8_quantize"
        )
