"""Grouped MX-FP8 GEMM through Triton's ``dot_scaled``: the fallback on a GPU, and the baseline of the HIP kernel.

Triton is imported on first use, never with this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge.errors import GuardError
from hipforge.ops.triton import launch

LEAST_BLOCK_M = 16  # dot_scaled takes no fewer rows


@dataclass(frozen=True)
class GroupedConfig:
    """Columns and K of a tile (its rows are block_m), and launch parameters of one compiled kernel."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 2

    def constants(self, block_m: int, a_div: int, has_weight: bool, has_bias: bool = False) -> dict[str, int | bool]:
        """Return the kernel's compile-time arguments."""
        return {
            "A_DIV": a_div,
            "HAS_WEIGHT": has_weight,
            "HAS_BIAS": has_bias,
            "BLOCK_M": block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
        }

    def grid(self, tiles: int, n: int) -> tuple[int, int, int]:
        """Return the grid, in programs."""
        return (-(-n // self.block_n), tiles, 1)


STOCK = GroupedConfig(block_n=64, block_k=128, num_warps=4)
# The tuner also tries these when it looks for Triton's best.
TUNED = (GroupedConfig(block_n=32, block_k=256, num_warps=2), GroupedConfig(block_n=128, block_k=128, num_warps=8))


def unavailable(device: torch.device, block_m: int) -> str | None:
    """Return why the fallback cannot run for tensors on ``device`` and tiles of ``block_m``, or None where it can."""
    if block_m < LEAST_BLOCK_M or block_m & (block_m - 1):
        return f"Triton tiles are a power of two of at least {LEAST_BLOCK_M} rows; block_m is {block_m}"
    return launch.unavailable(device)


def mxfp8_grouped(
    out: torch.Tensor,
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    block_m: int,
    a_div: int,
    mul_weight_by: torch.Tensor | None,
    config: GroupedConfig,
    bias: torch.Tensor | None = None,
) -> None:
    """Write the rows of ``out`` [num_valid_tokens, N] bf16 that tiles in use cover, on a GPU.

    Args:
        out: contiguous bfloat16 [num_valid_tokens, N].
        a_q: e4m3fn elements (or uint8) [M_act, K].
        a_scale: e8m0 bytes [M_act, K/32].
        w: e4m3fn elements (or uint8) [E, N, K].
        w_scale: e8m0 bytes [E, N, K/32].
        sorted_token_ids: int32, whole tiles of ``block_m``.
        expert_ids: int32, one per tile.
        num_tokens_post_padded: int32 [1].
        block_m: entries of a tile, a power of two of at least 16.
        a_div: slots per activation row.
        mul_weight_by: float32 [num_valid_tokens], or None.
        config: the rest of the tile.
        bias: float32 [E, N], or None.

    Raises:
        GuardError: the tensors are not on a GPU, triton is not installed, or ``block_m`` does not suit it.
    """
    reason = unavailable(a_q.device, block_m)
    if reason is not None:
        raise GuardError(reason)
    from hipforge.ops.triton.mxfp8_grouped_kernels import mxfp8_grouped_kernel

    (slots, n), k = out.shape, a_q.shape[1]
    if slots == 0 or n == 0:
        return
    operands = (tensor.contiguous().view(torch.uint8) for tensor in (a_q, a_scale, w, w_scale))
    indices = (tensor.contiguous() for tensor in (sorted_token_ids, expert_ids, num_tokens_post_padded))
    weights = out if mul_weight_by is None else mul_weight_by.contiguous()  # not read without HAS_WEIGHT
    mxfp8_grouped_kernel[config.grid(sorted_token_ids.numel() // block_m, n)](
        *operands, *indices, weights, out if bias is None else bias.contiguous(), out, slots, w.shape[0], n, k,
        **config.constants(block_m, a_div, mul_weight_by is not None, bias is not None),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
