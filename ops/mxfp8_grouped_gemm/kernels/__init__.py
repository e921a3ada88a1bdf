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
from hipforge.ops.core.documented import documented_like
from hipforge.ops.mxfp8_grouped_gemm.kernels import pass_stream, row_stream, tile_stream, tiles, wave_split
from hipforge.ops.mxfp8_grouped_gemm.kernels.stream import STREAM
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import WAVE_SPLIT, mxfp8_grouped_split, mxfp8_grouped_split_out
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands

# Simplest first: a tuner's ties go to the earlier one.
KERNELS = (WAVE_SPLIT, STREAM, pass_stream.STREAM, row_stream.STREAM, tile_stream.STREAM, tiles.TILES)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
SMALLM_ARCH, SMALLM_BLOCK_N = "gfx950", (8, 16)  # of an earlier kernel


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
    if require_int("block_n", block_n) not in SMALLM_BLOCK_N:
        raise GuardError(f"block_n must be 8 or 16 (columns per work-group); got {block_n}")
    target = dispatch.target_of(w.device)
    if not isinstance(target, Refused) and target[0] != SMALLM_ARCH:
        raise ArchError(f"smallm_mxfp8_moe_out is for {SMALLM_ARCH}; w is on {target[0]}")
    rows, waves, columns = wave_split.of_smallm(num_valid_tokens, K).configuration.values()
    mxfp8_grouped_split_out(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias, E, N,
        K, num_valid_tokens, M_act, a_div, block_m, rows, waves, columns,
    )  # fmt: skip


@documented_like(mxfp8_grouped_split)
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
        E: experts, as ``w`` has them.
        N: columns, as ``w`` has them.
        K: depth, as ``w`` has it.
        M_act: rows of ``a_q``.
        block_n: 8 or 16; of an earlier kernel, without effect.

    Returns:
        ``out``.
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
        BY_NAME[kernel].run(configuration, (), out, *given.tensors, given.mul_weight_by, given.bias, *given.sizes)

    launch_aligned(stub, parts)
