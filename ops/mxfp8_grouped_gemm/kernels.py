"""Launches of the MoE grouped GEMM over MX-FP8, and its first raw op, which runs the kernel that splits K.

Shapes, dtypes and the meaning of the indices are those of :mod:`hipforge.ops.mxfp8_grouped_gemm`. The raw op takes
contiguous tensors and raises for anything that it does not take; it never returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hipforge.errors import ArchError, GuardError
from hipforge.ops.core import dispatch
from hipforge.ops.core.alignment import realigned
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.dispatch import Refused
from hipforge.ops.mxfp8_grouped_gemm import stream, wave_split
from hipforge.ops.mxfp8_grouped_gemm.family import MOE_BLOCK_N, TABLE_ARCH
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands
from hipforge.ops.mxfp8_grouped_gemm.wave_split import mxfp8_grouped_split_out


def smallm_mxfp8_moe_out(
    out: torch.Tensor,
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_weight_by: torch.Tensor | None,
    bias: torch.Tensor | None,
    E: int,
    N: int,
    K: int,
    num_valid_tokens: int,
    M_act: int,
    a_div: int,
    block_m: int,
    block_n: int,
) -> None:
    """Write the rows of ``out`` that tiles in use cover, on gfx950; ``block_n`` is 8 or 16, and both do the same."""
    if require_int("block_n", block_n) not in MOE_BLOCK_N:
        raise GuardError(f"block_n must be 8 or 16 (columns per work-group); got {block_n}")
    target = dispatch.target_of(w.device)
    if not isinstance(target, Refused) and target[0] != TABLE_ARCH:
        raise ArchError(f"smallm_mxfp8_moe_out is for {TABLE_ARCH}; w is on {target[0]}")
    rows, waves, columns = wave_split.of_smallm(num_valid_tokens, K).configuration.values()
    mxfp8_grouped_split_out(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias, E, N,
        K, num_valid_tokens, M_act, a_div, block_m, rows, waves, columns,
    )  # fmt: skip


def smallm_mxfp8_moe_grouped_gemm(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    out: torch.Tensor,
    E: int,
    N: int,
    K: int,
    num_valid_tokens: int,
    M_act: int,
    a_div: int,
    block_m: int,
    mul_weight_by: torch.Tensor | None = None,
    block_n: int = 8,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run :func:`mxfp8_grouped_split` on contiguous tensors on gfx950, into ``out``, in a plain configuration.

    Args:
        a_q: activations [M_act, K]; slot t reads row t // ``a_div``.
        a_scale: their scales [M_act, K/32].
        w: weights [E, N, K]; N·K at most 2^31 - 1, any E.
        w_scale: their scales [E, N, K/32].
        sorted_token_ids: int32, whole tiles of ``block_m`` slots; an entry outside 0 … ``num_valid_tokens`` - 1,
            negative ones included, is padding, wherever it stands in its tile.
        expert_ids: int32, one per tile; one outside 0 … E - 1 skips the tile.
        num_tokens_post_padded: int32 [1]; tiles that start there or later are skipped.
        out: contiguous bfloat16 with at least ``num_valid_tokens`` · N elements; row t is slot t. Rows of slots that
            no tile holds, and of skipped tiles, stay as they are.
        E: experts, as ``w`` has them.
        N: columns, as ``w`` has them.
        K: depth, as ``w`` has it; a multiple of 32, at most 2^22.
        num_valid_tokens: slots, T · top_k.
        M_act: rows of ``a_q``; at least ceil(``num_valid_tokens`` / ``a_div``).
        a_div: slots per activation row: top_k where activations are per token, 1 where they are per slot.
        block_m: entries of a tile, a multiple of 4.
        mul_weight_by: float32 with one weight per slot, multiplied in float32 before the result is rounded.
        block_n: 8 or 16; of an earlier kernel, without effect.
        bias: float32 [E, N], added in float32 before the weight.

    Returns:
        ``out``.

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    smallm_mxfp8_moe_out(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by,
        bias, E, N, K, num_valid_tokens, M_act, a_div, block_m, block_n,
    )  # fmt: skip
    return out


def launch_aligned(stub: Callable[[Operands], None], parts: Operands) -> None:
    """Call a stub with contiguous operands; those off a 16-byte boundary are copied once it has refused them."""
    parts = parts.contiguous()
    try:
        stub(parts)
    except GuardError:  # checked afterwards, so that a good call does not pay for it
        copies = realigned(parts.a_q, parts.w, parts.a_scale, parts.w_scale)
        if copies is None:
            raise
        stub(parts._replace(a_q=copies[0], w=copies[1], a_scale=copies[2], w_scale=copies[3]))


def launch(kernel: str, configuration: Mapping[str, int], out: torch.Tensor, parts: Operands) -> None:
    """Run a kernel on operands of any strides, writing the rows of ``out`` that tiles in use cover."""

    def stub(given: Operands) -> None:
        arguments = *given.tensors, given.mul_weight_by, given.bias, *given.sizes
        if kernel == stream.KERNEL:
            stream.mxfp8_grouped_stream_out(out, *arguments, configuration["columns"])
        else:
            rows, waves, columns = (configuration[name] for name in ("rows", "waves", "columns"))
            mxfp8_grouped_split_out(out, *arguments, rows, waves, columns)

    launch_aligned(stub, parts)
