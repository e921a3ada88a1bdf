"""MX-FP8 GEMM through Triton's ``dot_scaled``: the fallback on a GPU, and the baseline of the HIP kernels.

Triton is imported on first use, never with this module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge.errors import GuardError
from hipforge.ops.triton.launch import unavailable as unavailable


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes (output rows, output columns, K) and launch parameters of one compiled kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 2

    def constants(self, n: int, k: int) -> dict[str, int | bool]:
        """Return the kernel's compile-time arguments for a weight [n, k]."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "EVEN": n % self.block_n == 0 and k % self.block_k == 0,
        }

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Return the grid, in programs, for an output [m, n]."""
        return (-(-n // self.block_n), -(-m // self.block_m), 1)


STOCK = TileConfig(block_m=64, block_n=128, block_k=128, num_warps=8)
# dot_scaled takes at least 16 rows. Few columns per tile give more work-groups; below 32 Triton emits no scaled MFMAs.
SMALL_M = TileConfig(block_m=16, block_n=32, block_k=256, num_warps=2)
# What the tuners try beside the stock configuration when they look for Triton's best.
TUNED = (
    SMALL_M,
    TileConfig(block_m=16, block_n=64, block_k=256, num_warps=4),
    TileConfig(block_m=16, block_n=128, block_k=128, num_warps=4),
    TileConfig(block_m=32, block_n=64, block_k=256, num_warps=4),
    TileConfig(block_m=64, block_n=64, block_k=128, num_warps=4),
)


def configuration(m: int) -> TileConfig:
    """Return the configuration for M = ``m`` rows: the small-M one up to 32, else the stock one."""
    return SMALL_M if m <= 32 else STOCK


def mxfp8_dot_scaled(
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    config: TileConfig,
) -> None:
    """Write X @ W^T into ``out``, on a GPU.

    Args:
        out: contiguous bfloat16 [M, N].
        xq: e4m3fn elements (or uint8) [M, K].
        x_scale: e8m0 bytes [M, K/32].
        wq: e4m3fn elements (or uint8) [N, K].
        w_scale: e8m0 bytes [N, K/32].
        config: tile sizes.

    Raises:
        GuardError: the tensors are not on a GPU, or triton is not installed.
    """
    reason = unavailable(xq.device)
    if reason is not None:
        raise GuardError(reason)
    from hipforge.ops.triton.mxfp8_kernels import mxfp8_dot_scaled_kernel

    (m, k), n = xq.shape, wq.shape[0]
    if m == 0 or n == 0:
        return
    operands = (tensor.contiguous().view(torch.uint8) for tensor in (xq, x_scale, wq, w_scale))
    mxfp8_dot_scaled_kernel[config.grid(m, n)](
        *operands, out, m, n, k, **config.constants(n, k), num_warps=config.num_warps, num_stages=config.num_stages
    )
