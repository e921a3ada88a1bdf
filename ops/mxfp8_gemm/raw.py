"""What the kernels of the dense MX-FP8 GEMM share: limits, the raw op, and how many rows suit a tile."""

from __future__ import annotations

from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_rank
from hipforge.ops.core.kernel import Kernel

MAX_M = 16384
# The parameters that the kernels' entries share, as stubs declare them.
OPERANDS = "out, Xq, Xs, Wq, Ws: Tensor; bias: Tensor?"
FEW_ROWS = 64  # up to here a work-group may take all rows of X
MAX_K = 1 << 22
MAX_ELEMENTS = 2**31 - 1
ROWS = (16, 32, 64)  # of X in a work-group whose waves share K
K_STEP = 128
MOST_ROWS_PER_W = 32  # up to here a candidate loads W once, so up to 64 rows at most twice
STEP_BYTES = 2048  # of 16 weight rows, per wave and step


def new_result(Xq: torch.Tensor, Wq: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return memory for Xq @ Wq^T, bfloat16 [M, N]; raises GuardError for operands that are not [M, K] and [N, K]."""
    if out_dtype != torch.bfloat16:
        raise GuardError(f"out_dtype must be torch.bfloat16; got {out_dtype}")
    require_rank("Xq", Xq, 2, "[M, K]")
    require_rank("Wq", Wq, 2, "[N, K]")
    return torch.empty((Xq.shape[0], Wq.shape[0]), dtype=torch.bfloat16, device=Xq.device)


def run_raw(kernel: Kernel, Xq: torch.Tensor, Wq: torch.Tensor, *operands: Any, **configuration: int) -> torch.Tensor:
    """Check a raw op's parameters, allocate what it writes and launch it on ``operands``.

    Args:
        kernel: to launch.
        Xq: activations [M, K]; K a multiple of 32.
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        bias: bfloat16 [N], added in float32 before the only rounding.
        operands: those before, in the order in which the entry takes them.
        configuration: the kernel's parameters.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = new_result(Xq, Wq)
    key = *out.shape, Xq.shape[1]
    kernel.run(kernel.require(**configuration), key, out, *operands)
    return out


def k_steps(k: int) -> int:
    """Return how many steps of 128 K takes; the last may be partial."""
    return -(-k // K_STEP)


def rows_to_try(m: int) -> list[int]:
    """Return the numbers of rows in a work-group that suit M, where the waves share K."""
    return [rows for rows in ROWS if min(m, MOST_ROWS_PER_W) <= rows < 2 * max(m, ROWS[0])]
