"""The MX-FP8 GEMM for few rows, with parts of K in the matrix instruction's empty rows: stub, raw op, choices."""

from __future__ import annotations

from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.mxfp8_gemm.raw import new_result

KERNEL = "mxfp8_k_packed"
COLUMNS = (4, 8)  # per group of waves; also the largest M
WAVES = (1, 2, 4, 8, 16)
MAX_WAVES = 16  # of a work-group
MOST_GROUPS = 4
STEPS_AHEAD = 4  # in flight
WORK_GROUPS = 512  # two per compute unit of an MI355X: more take longer to start than they save


def k_step(columns: int) -> int:
    """Return how much of K one matrix instruction takes: 128 in each of the parts beside each other."""
    return 128 * 16 // columns


def choice(columns: int, groups: int, waves: int) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType({"columns": columns, "groups": groups, "waves": waves}))


def candidates(m: int, n: int, k: int) -> list[Choice]:
    """Return the configurations worth trying: the fewest groups that leave at most WORK_GROUPS work-groups."""
    found = []
    for columns in COLUMNS:
        groups = min(MOST_GROUPS, max(1, -(-n // (columns * WORK_GROUPS))))
        steps, rest = divmod(k, k_step(columns))
        if m <= columns and not rest:
            found += [choice(columns, groups, waves) for waves in WAVES if waves <= min(steps, MAX_WAVES // groups)]
    return found


def default_choices(m: int, n: int, k: int) -> list[Choice]:
    """Return the candidates with one wave in each of several groups, or with half as many waves as columns in one."""
    return [
        one
        for one in candidates(m, n, k)
        if one.configuration["waves"] == (1 if one.configuration["groups"] > 1 else one.configuration["columns"] // 2)
    ]


def refusal(m: int, k: int, columns: int, groups: int, waves: int) -> str | None:
    """Return why the kernel does not take a row of the table; None if it does."""
    if columns not in COLUMNS or m > columns or k % k_step(columns):
        return "block_n (columns) of 4 or 8, at least M, and K a multiple of 2048 / block_n"
    if groups < 1 or waves not in WAVES or groups * waves > MAX_WAVES or waves * k_step(columns) > k:
        return "k_splits (waves) in 1 to 16, n_sub (groups) times k_splits of at most 16, no more waves than K steps"
    return None


@compile_ops("module_mxfp8_gemm_k_packed", variant=lambda *given: {"HF_COLUMNS": given[-3]})
def mxfp8_k_packed_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None,
    columns: int,
    groups: int,
    waves: int,
) -> None:
    """Write Xq @ Wq^T + bias into ``out`` [M, N] bf16."""


def mxfp8_k_packed(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    columns: int = COLUMNS[-1],
    groups: int = 1,
    waves: int = 4,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        Xq: activations [M, K] in the architecture's e4m3; M at most ``columns``, K a multiple of 2048 / ``columns``.
        Xs: their scales [M, K/32], aligned to 4 bytes.
        Wq: weights [N, K].
        Ws: their scales [N, K/32], aligned to 4 bytes.
        bias: bfloat16 [N], added in float32 before the only rounding.
        columns: of the output, per group of waves: 4 or 8.
        groups: of a work-group; groups times waves is at most 16.
        waves: of a group, each with a part of K: 1, 2, 4, 8 or 16. Their sums are added in a fixed order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = new_result(Xq, Wq)
    if require_int("columns", columns) not in COLUMNS:
        raise GuardError(f"columns must be 4 or 8; got {columns}")
    mxfp8_k_packed_out(out, Xq, Xs, Wq, Ws, bias, columns, groups, waves)
    return out
