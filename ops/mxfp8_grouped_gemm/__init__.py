"""MoE grouped GEMM over MX-FP8: every routed slot's activation row times its expert's weight.

Shapes and dtypes: ``a_q`` [M_act, K] and ``w`` [E, N, K] hold e4m3fn elements (float8_e4m3fn, or uint8 with the same
bits; on gfx942 float8_e4m3fnuz), ``a_scale`` [M_act, K/32] and ``w_scale`` [E, N, K/32] hold e8m0 bytes (uint8 or
float8_e8m0fnu); K is a multiple of 32. The output [num_valid_tokens, N] is bfloat16, accumulated in float32 and rounded
once.

Slot t of T · top_k is entry t of the flattened ``topk_ids``; it reads activation row t // a_div and writes output row
t. The indices are those of :func:`hipforge.ops.moe.moe_align_block_size`: ``sorted_token_ids`` holds tiles of block_m
slots of one expert each, ``expert_ids`` the tiles' experts. An entry outside 0 … num_valid_tokens - 1 is padding,
wherever it stands; an expert outside 0 … E - 1 (one that lives on another rank) skips its tile; so does a tile that
starts at num_tokens_post_padded or later. What no tile covers is zero.

Dispatch of :func:`grouped_gemm_mxfp8`, in this order:

1. an output dtype other than bfloat16 → None;
2. a device other than gfx950, gfx942 and sm_90 → None;
3. nothing to compute (no slots, experts, rows or columns), block_m no multiple of 4, an expert's N·K or M_act·K
   beyond 2^31 - 1, or K beyond 2^22 → None. The number of experts does not count: each has a base address of its own;
4. rows of the tuned table for (N, K, a_div, has_weight): the one with the smallest M that is at least
   num_valid_tokens decides: fewer than its ``min_experts`` experts or ``use_hip=0`` → None, otherwise its kernel:
   :func:`mxfp8_grouped_split` (K over the waves of a work-group) or :func:`mxfp8_grouped_stream` (K up to 512) in the
   row's configuration. More slots than any of them has → None;
5. no such rows: up to 16 slots, or up to 64 with at least 128 experts → stream where K is short and many experts have
   slots, else wave_split, in their default configurations; otherwise None.

gfx942 has no table: wave_split computes every problem past 3 whose payloads are both float8_e4m3fnuz. Nor has sm_90: a
kernel that streams W takes few slots of an expert, in passes (:func:`mxfp8_grouped_pass_stream`) or, where those do not
take K or N, row by row (:func:`mxfp8_grouped_row_stream`); one that streams tiles of it takes more
(:func:`mxfp8_grouped_tile_stream`), and one in tiles the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipforge.ops.core.arguments import require_sound
from hipforge.ops.core.checks import require_choice
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.mxfp8_grouped_gemm.family import FAMILY, GROUPED
from hipforge.ops.mxfp8_grouped_gemm.kernels import launch, smallm_mxfp8_moe_grouped_gemm, smallm_mxfp8_moe_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.pass_stream import mxfp8_grouped_pass_stream, mxfp8_grouped_pass_stream_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import mxfp8_grouped_row_stream, mxfp8_grouped_row_stream_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.stream import mxfp8_grouped_stream, mxfp8_grouped_stream_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.tile_stream import mxfp8_grouped_tile_stream, mxfp8_grouped_tile_stream_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.tiles import mxfp8_grouped_tiles, mxfp8_grouped_tiles_out
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import mxfp8_grouped_split, mxfp8_grouped_split_out
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands, check_indices, grouped_mm

PUBLIC = ("grouped_gemm_mxfp8", "grouped_mxfp8_linear")

__all__ = [
    "FAMILY",
    "GROUPED",
    "grouped_gemm_mxfp8",
    "grouped_mxfp8_linear",
    "mxfp8_grouped_pass_stream",
    "mxfp8_grouped_pass_stream_out",
    "mxfp8_grouped_row_stream",
    "mxfp8_grouped_row_stream_out",
    "mxfp8_grouped_split",
    "mxfp8_grouped_split_out",
    "mxfp8_grouped_stream",
    "mxfp8_grouped_stream_out",
    "mxfp8_grouped_tile_stream",
    "mxfp8_grouped_tile_stream_out",
    "mxfp8_grouped_tiles",
    "mxfp8_grouped_tiles_out",
    "smallm_mxfp8_moe_grouped_gemm",
    "smallm_mxfp8_moe_out",
]


def new_result(a_q: torch.Tensor, w: torch.Tensor, num_valid_tokens: int) -> torch.Tensor:
    """Return memory for a row per slot, bfloat16 [num_valid_tokens, N]."""
    return torch.empty((num_valid_tokens, w.shape[1]), dtype=torch.bfloat16, device=a_q.device)


def run(
    taken: Accepted,
    parts: Operands,
    out: torch.Tensor | None,
    uncovered: str,
    mm: Callable[[Operands], torch.Tensor] = grouped_mm,
    start: Callable[[str, Configuration, torch.Tensor, Operands], None] = launch,
) -> torch.Tensor:
    """Write the product of operands; rows that no tile covers become zero or stay undefined.

    ``mm`` is the product in torch, and ``start`` launches a kernel.
    """
    require_choice("uncovered", uncovered, ("zero", "undefined"))
    shape = int(parts.num_valid_tokens), parts.w.shape[1]
    if taken.path != "kernel" or out is not None:  # torch fills it with zeros before the binding sees the others
        check_indices(parts)
    if out is not None:
        require_sound("the grouped GEMM", {**parts._asdict(), "out": out}, ("out",))
        if taken.path == "kernel":
            parts = parts.contiguous()  # copies that do not fit in memory are refused before anything is written
    out = new_or_given(out, shape, torch.bfloat16, parts.a_q.device)
    if taken.path == "torch":
        out.copy_(mm(parts))
        return out
    if uncovered == "zero":
        out.zero_()
    if taken.path == "kernel":
        start(taken.kernel, taken.configuration, out, parts)
        return out
    from hipforge.ops.triton import mxfp8_grouped as fallback

    fallback.mxfp8_grouped(
        out, *parts.tensors, parts.block_m, parts.a_div, parts.mul_weight_by, fallback.STOCK, parts.bias
    )
    return out


@operator(GROUPED.plan, fake=new_result, outs=("out",), unused=("top_k", "topk_ids"))
def grouped_gemm_mxfp8(
    taken: Accepted,
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
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    uncovered: str = "zero",
) -> torch.Tensor | None:
    """Multiply each slot's activation row with its expert's weight, or return None where the fallback must.

    Args:
        taken: the path that was decided; callers do not pass it.
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
        bias: float32 [E, N], the expert's row added in float32 before the weight is multiplied.
        out: contiguous bfloat16 [num_valid_tokens, N] to write into.
        uncovered: what rows that no tile covers hold: ``zero``, or ``undefined`` for a caller that does not read
            them, which saves the launch that fills the output.

    Returns:
        bfloat16 [num_valid_tokens, N], with rows that no tile covers as ``uncovered`` says; None outside the envelope
        or where the tuned table says so, in the order that the module's docstring gives.
        ``hipforge.explain(grouped_gemm_mxfp8, ...)`` says which.

    Raises:
        GuardError: operands or indices of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(2, 64))
        >>> w, w_scale = (part.view(2, 16, -1) for part in hipforge.mxfp8_quantize(torch.ones(32, 64)))
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
        >>> y = hipforge.grouped_gemm_mxfp8(x, x_scale, w, w_scale, *slots, 2, 1, 16, torch.bfloat16, 1)
        >>> None if y is None else y[:, 0].tolist()  # on gfx950
        [64.0, 64.0]
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w, w_scale, *indices, block_m, a_div, mul_weight_by, bias)
    return run(taken, parts, out, uncovered)


@operator(GROUPED.plan_total, fake=new_result, outs=("out",))
@documented_like(grouped_gemm_mxfp8)
def grouped_mxfp8_linear(
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
    mul_weight_by: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    uncovered: str = "zero",
) -> torch.Tensor:
    """Multiply each slot's activation row with its expert's weight, always: HIP, else Triton on a GPU, else torch.

    Returns:
        bfloat16 [num_valid_tokens, N], with rows that no tile covers as ``uncovered`` says.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(2, 64))
        >>> w, w_scale = (part.view(2, 16, -1) for part in hipforge.mxfp8_quantize(torch.ones(32, 64)))
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
        >>> hipforge.grouped_mxfp8_linear(x, x_scale, w, w_scale, *slots, 2, 16, 1)[:, 0].tolist()
        [64.0, 64.0]
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w, w_scale, *indices, block_m, a_div, mul_weight_by, bias)
    return run(taken, parts, out, uncovered)
