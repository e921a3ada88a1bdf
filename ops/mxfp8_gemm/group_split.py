"""The MX-FP8 GEMM whose K is split over work-groups and their waves: its stub, its raw op and its configurations."""

from __future__ import annotations

from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.mxfp8_gemm.raw import new_result

KERNEL = "mxfp8_group_split"
K_STEP = 128
ROWS = (16, 32, 64)
COLUMNS = (16, 24, 32, 48)
K_SPLITS = (2, 4)
WAVES = 4  # of a work-group
TILE = 16
FEWEST_GROUPS, MOST_GROUPS = 32, 600  # worth trying: fewer leave an MI355X idle, more make several rounds


def choice(rows: int, columns: int, k_splits: int) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType({"rows": rows, "columns": columns, "k_splits": k_splits}))


def splits_to_try(m: int, n: int, k: int, rows: int, fewest: int = FEWEST_GROUPS) -> list[tuple[int, int]]:
    """Return the pairs of columns and parts of K to try: enough work-groups, each with a step of K for its waves."""
    row_groups, steps = -(-m // rows), -(-k // K_STEP)
    return [
        (columns, k_splits)
        for columns in COLUMNS
        for k_splits in K_SPLITS
        if fewest <= -(-n // columns) * row_groups * k_splits <= MOST_GROUPS and WAVES * k_splits <= steps
    ]


def refusal(k: int, columns: int, rows: int, k_splits: int) -> str | None:
    """Return why the kernel does not take a row of the table; None if it does."""
    if columns not in COLUMNS or rows not in ROWS:
        return "block_n (columns) in (16, 24, 32, 48), n_sub (tiles of 16 rows) in (1, 2, 4)"
    if k_splits not in K_SPLITS or k_splits * K_STEP > k + K_STEP - 1:
        return "k_splits of 2 or 4, no more than K steps of 128"
    return None


def split_workspace(m: int, n: int, rows: int, columns: int, k_splits: int, device: torch.device) -> torch.Tensor:
    """Return where work-groups that share K leave their sums and meet.

    Its contents mean nothing before and after a launch, and no other launch may use it at the same time.
    """
    results, tiles = -(-m // rows) * -(-n // columns), rows // TILE * -(-columns // TILE)
    meetings = 2 * (k_splits - 1)  # float32 of 64-bit words
    return torch.empty(results * (k_splits * tiles * TILE * TILE + meetings), dtype=torch.float32, device=device)


@compile_ops(
    "module_mxfp8_gemm_group_split", variant=lambda *given: {"HF_ROWS": given[-3]}, mutates=("out", "workspace")
)
def mxfp8_group_split_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None,
    workspace: torch.Tensor | None,
    rows: int,
    columns: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T + bias into ``out`` [M, N] bf16; ``workspace`` is what :func:`split_workspace` returns."""


def mxfp8_group_split(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    rows: int = ROWS[1],
    columns: int = COLUMNS[-1],
    k_splits: int = K_SPLITS[0],
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        Xq: activations [M, K]; K a multiple of 32, at most 2^22.
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        bias: bfloat16 [N], added in float32 before the only rounding.
        rows: rows of X that a work-group multiplies with its rows of W: 16, 32 or 64.
        columns: rows of W of a work-group: 16, 24, 32 or 48.
        k_splits: work-groups that share K: 2 or 4, at most ceil(K / 128). Their sums are added in a fixed order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = new_result(Xq, Wq)
    for name, given, accepted in (
        ("rows", rows, ROWS),
        ("columns", columns, COLUMNS),
        ("k_splits", k_splits, K_SPLITS),
    ):
        if require_int(name, given) not in accepted:
            raise GuardError(f"{name} must be one of {', '.join(map(str, accepted))}; got {given}")
    workspace = split_workspace(out.shape[0], out.shape[1], rows, columns, k_splits, out.device)
    mxfp8_group_split_out(out, Xq, Xs, Wq, Ws, bias, workspace, rows, columns, k_splits)
    return out
