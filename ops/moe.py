"""A mixture-of-experts layer over MX-FP8, or fp8 with other scales: its sorted indices, and the whole layer.

Slot t of T · top_k is entry t of the flattened ``topk_ids``: token t // top_k and its choice t % top_k. Grouped GEMMs
(:mod:`hipforge.ops.grouped_gemm_mxfp8`) take slots sorted by expert and padded to whole tiles, in the layout that
:func:`moe_align_block_size` makes. Another layout in use packs token and choice into one number;
:func:`from_packed_sorting` converts it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.jit.call import tensors
from hipforge.ops.core import checks
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.arguments import has_memory, is_same_view, is_traced, naming_arguments, require_readable
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_grouped_gemm import grouped_fp8_linear, grouped_swiglu_fp8
from hipforge.ops.fp8_quant import QUANTISERS
from hipforge.ops.moe_align import SortedSlots, moe_align_block_size
from hipforge.ops.moe_combine import moe_combine
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8
from hipforge.ops.mx_quantize import mxfp8_quantize
from hipforge.ops.mxfp4_gemm.raw import PAYLOADS
from hipforge.ops.mxfp4_grouped_gemm import grouped_mxfp4_linear, grouped_swiglu_mxfp4
from hipforge.ops.mxfp8_gemm.family import SCALES, has_fnuz
from hipforge.ops.mxfp8_grouped_gemm import grouped_mxfp8_linear
from hipforge.ops.reference import quantize_mxfp4
from hipforge.ops.reference.fp8 import Scales, quantize_fp8_rows, weight_kinds_of
from hipforge.ops.swiglu_fp8 import check_activation

PUBLIC = ("fused_moe_fp8", "fused_moe_mxfp4", "fused_moe_mxfp8")
EXAMPLES = {
    "fused_moe_fp8": "M=4,N=384,K=1024,E=8,TOPK=2",
    "fused_moe_mxfp4": "M=4,N=384,K=1024,E=8,TOPK=2",
}

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
            place beyond them is refused if the map is on the CPU, and is -1 on a GPU.
        block_m: entries of a tile, a multiple of 4.
        alpha: of SwiGLU, as the next two; MiniMax-M3 and gpt-oss use 1.702, 1 and 7.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        interleaved: even rows of ``w1`` are the gate's, odd ones up's, as in gpt-oss.
        hidden_scale: e8m0 bytes [T, H/32] of ``hidden``.
        w1_bias: float32 [E, 2·I], in the order of ``w1``'s rows.
        w2_bias: float32 [E, H].
        out: contiguous [T, H], bfloat16, float16 or float32, to write into; ``hidden`` itself, or memory of its own.

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
    _check_ranks(hidden, w1, w2, topk_ids)
    _refuse_mxfp4(w1, w1_scale, hidden.shape[1])
    for name, weight in (("w1", w1), ("w2", w2)):
        has_fnuz(**{name: weight})  # refuses fp8 that the device does not read
    return _mx_layer(
        grouped_swiglu_mxfp8, grouped_mxfp8_linear, 1, hidden, hidden_scale, w1, w1_scale, w2, w2_scale, topk_weights,
        topk_ids, expert_map, block_m, w1_bias, w2_bias, out,
        {"alpha": alpha, "beta": beta, "limit": limit, "interleaved": interleaved},
    )  # fmt: skip


@naming_arguments
@documented_like(fused_moe_mxfp8)
def fused_moe_mxfp4(
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
    """Run a mixture-of-experts layer with MXFP4 weights and MX-FP8 activations: gpt-oss, DeepSeek-V4, Kimi K2.5.

    All but the weights' elements is as in :func:`fused_moe_mxfp8`: activations are e4m3 with one e8m0 scale per 32
    elements, SwiGLU and their quantisation are in the first GEMM's launch where a kernel runs it, and sums are float32.

    Args:
        w1: two e2m1 elements per byte (uint8 or float4_e2m1fn_x2) [E, 2·I, H/2], the even one in the low nibble: rows
            of the gate, then rows of up, or interleaved with ``interleaved``; I a multiple of 32.
        w2: two e2m1 elements per byte [E, H, I/2].

    Raises:
        GuardError: a shape, dtype or device that is not accepted.
        BuildError, LaunchError: a kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> tokens, experts, width, inner = 2, 4, 64, 32
        >>> w1 = hipforge.mxfp4_quantize(torch.randn(experts * 2 * inner, width))
        >>> w2 = hipforge.mxfp4_quantize(torch.randn(experts * width, inner))
        >>> weights, ids = hipforge.topk_gating(torch.randn(tokens, experts), 2)
        >>> parts = [part.unflatten(0, (experts, -1)) for part in (*w1, *w2)]
        >>> hipforge.fused_moe_mxfp4(torch.randn(tokens, width), *parts, weights, ids).shape
        torch.Size([2, 64])
    """
    _check_ranks(hidden, w1, w2, topk_ids)
    for name, weight in (("w1", w1), ("w2", w2)):
        checks.require_dtype(name, weight, PAYLOADS)
    return _mx_layer(
        grouped_swiglu_mxfp4, grouped_mxfp4_linear, 2, hidden, hidden_scale, w1.view(torch.uint8), w1_scale,
        w2.view(torch.uint8), w2_scale, topk_weights, topk_ids, expert_map, block_m, w1_bias, w2_bias, out,
        {"alpha": alpha, "beta": beta, "limit": limit, "interleaved": interleaved},
    )  # fmt: skip


def _mx_layer(
    gate_and_up: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    product: Callable[..., torch.Tensor],
    packing: int,
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    block_m: int,
    w1_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    out: torch.Tensor | None,
    activation: dict[str, Any],
) -> torch.Tensor:
    """Run a layer over MX weights with ``packing`` elements in a byte."""
    _check_layer(hidden, w1, w2, topk_weights, topk_ids, packing)
    for name, weight, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        checks.require_device(name, weight, hidden.device)
        blocks = (*weight.shape[:2], weight.shape[2] * packing // BLOCK)
        checks.require_tensor(**{f"{name}_scale": scale})
        checks.require_operand(f"{name}_scale", scale, SCALES, blocks, f"one byte per {BLOCK} elements", hidden.device)
    check_activation(activation["alpha"], activation["beta"], activation["limit"])
    _check_elements(hidden, hidden_scale)
    out = _result(
        hidden, hidden_scale, out, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights,
        topk_ids=topk_ids, expert_map=expert_map, w1_bias=w1_bias, w2_bias=w2_bias,
    )  # fmt: skip
    routing = _route(topk_weights, topk_ids, expert_map, block_m, w2.shape[0])
    if hidden_scale is None:
        hidden, hidden_scale = mxfp8_quantize(packed(hidden))
    inner_q, inner_scale = gate_and_up(
        hidden, hidden_scale, w1, w1_scale, *routing.aligned, routing.slots, block_m, routing.top_k, bias=w1_bias,
        **activation,
    )  # fmt: skip
    down = product(
        inner_q, inner_scale, w2, w2_scale, *routing.aligned, routing.slots, block_m, 1, routing.weights, bias=w2_bias,
        uncovered="undefined",
    )  # fmt: skip
    return routing.combined(down, out)


@naming_arguments
@documented_like(fused_moe_mxfp8)
def fused_moe_fp8(
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
    """Run a mixture-of-experts layer over fp8 with scales per row or block, as :func:`fused_moe_mxfp8` does over MX.

    Both weights have scales of one kind of :mod:`hipforge.ops.fp8_grouped_gemm`, and activations get scales of the
    same kind: per row where a weight has one scale per row or expert (:func:`hipforge.fp8_quant_rows`), per 128 or 32
    elements where it has blocks. Each GEMM accumulates in float32, adds its bias there and rounds once to bfloat16;
    SwiGLU and the quantisation of its result are :func:`hipforge.grouped_swiglu_fp8`'s, in the first GEMM's launch or
    in one of their own. The sum and the routing weights are those of :func:`hipforge.fused_moe_mxfp8`.

    Args:
        hidden: bfloat16, float16 or float32 [T, H]; with ``hidden_scale`` e4m3 elements, as
            :func:`hipforge.rms_norm_fp8_dynamic` makes them, so that nothing is quantised twice.
        w1: e4m3 elements (or uint8) [E, 2·I, H]: rows of the gate, then rows of up, or interleaved with
            ``interleaved``.
        w1_scale: its scales; blocks of 128 or 32 rows are counted over all 2·I.
        w2: e4m3 elements (or uint8) [E, H, I].
        w2_scale: its scales, of the same kind.
        hidden_scale: scales of ``hidden``, of the same kind.

    Returns:
        [T, H] of ``hidden``'s dtype, bfloat16 where that is fp8; ``out`` itself where it is given.

    Raises:
        GuardError: a shape, dtype or device that is not accepted, or scales of no kind, or of two.
        BuildError, LaunchError: a kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> tokens, experts, width, inner = 2, 4, 64, 32
        >>> w1, s1 = hipforge.fp8_quant_rows(torch.randn(experts * 2 * inner, width))
        >>> w2, s2 = hipforge.fp8_quant_rows(torch.randn(experts * width, inner))
        >>> weights, ids = hipforge.topk_gating(torch.randn(tokens, experts), 2)
        >>> parts = [part.unflatten(0, (experts, -1)) for part in (w1, s1, w2, s2)]
        >>> hipforge.fused_moe_fp8(torch.randn(tokens, width), *parts, weights, ids).shape
        torch.Size([2, 64])
    """
    _check_ranks(hidden, w1, w2, topk_ids)
    _check_layer(hidden, w1, w2, topk_weights, topk_ids)
    kinds = []
    for name, weight, scale in (("w1", w1, w1_scale), ("w2", w2, w2_scale)):
        has_fnuz(**{name: weight})
        checks.require_device(name, weight, hidden.device)
        kinds.append(weight_kinds_of(f"{name}_scale", scale, *weight.shape))
        checks.require_device(f"{name}_scale", scale, hidden.device)
    kind = next((each for each in kinds[0] if each in kinds[1]), None)
    if kind is None:
        got = " and ".join(" or ".join(each.name for each in of) for of in kinds)
        raise GuardError(f"w1_scale and w2_scale must be of one kind; got {got}")
    check_activation(alpha, beta, limit)
    _check_elements(hidden, hidden_scale)
    out = _result(
        hidden, hidden_scale, out, w1=w1, w1_scale=w1_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights,
        topk_ids=topk_ids, expert_map=expert_map, w1_bias=w1_bias, w2_bias=w2_bias,
    )  # fmt: skip
    routing = _route(topk_weights, topk_ids, expert_map, block_m, w2.shape[0])
    activation: dict[str, Any] = {"alpha": alpha, "beta": beta, "limit": limit, "interleaved": interleaved}
    if hidden_scale is None:
        hidden, hidden_scale = QUANTISERS[kind](packed(hidden))
    inner_q, inner_scale = grouped_swiglu_fp8(
        hidden, hidden_scale, w1, w1_scale, *routing.aligned, routing.slots, block_m, routing.top_k, bias=w1_bias,
        out_format=_FORMATS[kind], **activation,
    )  # fmt: skip
    down = grouped_fp8_linear(
        inner_q, inner_scale, w2, w2_scale, *routing.aligned, routing.slots, block_m, 1, routing.weights, bias=w2_bias,
        uncovered="undefined",
    )  # fmt: skip
    return routing.combined(down, out)


# What grouped_swiglu_fp8 makes for weights of each kind of scales.
_FORMATS = {Scales.ONCE: "rows", Scales.BLOCKS: "blocks", Scales.BLOCKS_E8M0: "blocks", Scales.MX_SHARED: "mx"}


@dataclass(frozen=True)
class _Routing:
    """Where the slots of a layer are: sorted, their weights, and what their sum needs."""

    aligned: SortedSlots
    slots: int
    weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    everywhere: int  # experts of all ranks
    experts: int  # here

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    def combined(self, down: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Sum each token's slots without those of experts elsewhere, so that no output of a GEMM is filled first."""
        return moe_combine(
            down, ids=packed(self.topk_ids), expert_map=self.expert_map, num_experts=self.everywhere,
            num_local_experts=self.experts, out=out,
        )  # fmt: skip


def _check_ranks(hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor) -> None:
    checks.require_rank("hidden", hidden, 2, "[T, H]")
    checks.require_rank("w1", w1, 3, "[E, 2*I, H]")
    checks.require_rank("w2", w2, 3, "[E, H, I]")
    checks.require_rank("topk_ids", topk_ids, 2, "[T, top_k]")


def _check_layer(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    packing: int = 1,
) -> None:
    tokens, width = hidden.shape
    experts, inner = w2.shape[0], w2.shape[2]
    of = "[E, 2*I, H]" if packing == 1 else "[E, 2*I, H/2], two elements in a byte,"
    shape = experts, 2 * inner * packing, width // packing
    checks.require_shape("w1", w1, shape, f"{of} with w2's E and I and hidden's H")
    checks.require_shape("w2", w2, (experts, width, inner), "[E, H, I] with hidden's H")
    per_token, integers = (tokens, topk_ids.shape[1]), (torch.int32, torch.int64)
    checks.require_operand("topk_ids", topk_ids, integers, per_token, "one row per token", hidden.device)
    checks.require_shape("topk_weights", topk_weights, per_token, "one weight per choice")
    checks.require_floating(topk_weights=topk_weights)
    checks.require_device("topk_weights", topk_weights, hidden.device)


def _check_elements(hidden: torch.Tensor, hidden_scale: torch.Tensor | None) -> None:
    if hidden_scale is None:
        checks.require_real("hidden", hidden)
    else:
        has_fnuz(hidden=hidden)


def _result(
    hidden: torch.Tensor, hidden_scale: torch.Tensor | None, out: torch.Tensor | None, **read: torch.Tensor | None
) -> torch.Tensor:
    """Return memory for the result: ``out``, which no launch compares with all that the layer reads.

    It may be ``hidden``, of which nothing is read after the sum begins.
    """
    if out is None:
        dtype = hidden.dtype if hidden_scale is None else torch.bfloat16
        return torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    if is_traced("fused_moe") or not has_memory(out):
        return out
    for name, value in {"hidden": hidden, "hidden_scale": hidden_scale, **read}.items():
        if value is None or not has_memory(value) or not tensors.may_share(value, out):
            continue
        if name == "hidden" and is_same_view(value, out) and value.dtype == out.dtype:
            continue
        raise GuardError(f"out is written and must not share memory with {name}, unless it is hidden itself")
    return out


def _route(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, block_m: int, experts: int
) -> _Routing:
    if topk_ids.shape[1] < 1:
        raise GuardError(f"topk_ids must have at least one choice per token; got shape {tuple(topk_ids.shape)}")
    if expert_map is not None:
        checks.require_rank("expert_map", expert_map, 1, "[experts of all ranks]")
        _check_places(expert_map, experts)
    everywhere = experts if expert_map is None else expert_map.numel()
    aligned = moe_align_block_size(topk_ids, block_m, everywhere, expert_map)
    slots = topk_ids.shape[0] * topk_ids.shape[1]
    if topk_weights.dtype != torch.float32 or not topk_weights.is_contiguous():  # torch reads them, no binding before
        require_readable(topk_weights=topk_weights)
    weights = topk_weights.to(torch.float32).flatten()
    return _Routing(aligned, slots, weights, topk_ids, expert_map, everywhere, experts)


def example(op: str, tokens: int, n: int, k: int, experts: int, top_k: int) -> functools.partial[torch.Tensor]:
    """Return a call of a layer, ``fused_moe_fp8`` with a scale per row, for ``hipforge profile``."""
    own = fp8_dtypes("cpu")[0]
    quantised: list[torch.Tensor] = []
    for rows, columns in ((2 * n, k), (k, n)):
        w = torch.randn(experts * rows, columns) * 0.1
        quantised += quantize_fp8_rows(w, own) if op == "fused_moe_fp8" else quantize_mxfp4(w)
    parts = [part.unflatten(0, (experts, -1)) for part in quantised]
    ids = torch.rand(tokens, experts).topk(top_k, dim=1).indices.int()
    function: Callable[..., torch.Tensor] = {"fused_moe_fp8": fused_moe_fp8, "fused_moe_mxfp4": fused_moe_mxfp4}[op]
    return functools.partial(function, torch.randn(tokens, k).bfloat16(), *parts, torch.ones(ids.shape), ids)


def _check_places(expert_map: torch.Tensor, experts: int) -> None:
    """Refuse a place that the weights do not have, where the map is on the CPU; on a GPU it would be waited for."""
    checks.require_dtype("expert_map", expert_map, (torch.int32, torch.int64))
    if is_traced("fused_moe") or not has_memory(expert_map) or expert_map.device.type != "cpu":
        return
    if devices.current().is_capturing():
        return
    require_readable(expert_map=expert_map)
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
            f"{tuple(w1.shape)} of {w1.dtype} with scales {tuple(w1_scale.shape)}: fused_moe_mxfp4 takes these"
        )
