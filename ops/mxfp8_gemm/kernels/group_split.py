"""The MX-FP8 GEMM whose K is split over work-groups and their waves: its stub, its raw op and its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.few_rows import modelled_us, rows_by_default
from hipforge.ops.mxfp8_gemm.kernels.wave_split import steps_ahead
from hipforge.ops.mxfp8_gemm.raw import FEW_ROWS, MAX_K, OPERANDS, ROWS, STEP_BYTES, k_steps, rows_to_try, run_raw

COLUMNS = (16, 24, 32, 48)
K_SPLITS = (2, 4)
WAVES = 4  # of a work-group
TILE = 16
FEWEST_GROUPS, MOST_GROUPS = 32, 600  # worth trying: fewer leave an MI355X idle, more make several rounds


def _splits(cell: Any, rows_tried: list[int], fewest: int) -> Iterator[Configuration]:
    """Yield rows, columns and parts of K: enough work-groups, each with a step of K for its waves."""
    m, n, k = cell.key[:3]
    for rows in rows_tried:
        for columns in COLUMNS:
            for k_splits in K_SPLITS:
                groups = -(-n // columns) * -(-m // rows) * k_splits
                if fewest <= groups <= MOST_GROUPS and WAVES * k_splits <= k_steps(k):
                    yield {"rows": rows, "columns": columns, "k_splits": k_splits}


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key[:3]
    if m <= FEW_ROWS:
        for given in _splits(problem, rows_by_default(m), fewest=1):
            rows, columns, k_splits = given.values()
            yield modelled_us(m, n, k, rows, columns, k_splits, cu_count), given


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    takes = key[2] <= MAX_K and given["k_splits"] <= k_steps(key[2])
    return None if takes else f"K of at most {MAX_K} and no more k_splits than steps of 128"


def _pipeline(given: Configuration, cell: Any, arch: str) -> Pipeline:
    columns = given["columns"]
    return Pipeline(steps_ahead(given["rows"], columns) * STEP_BYTES * columns // TILE)


def _workspace(given: Configuration, key: Sequence[int], device: torch.device) -> torch.Tensor:
    return split_workspace(key[0], key[1], given["rows"], given["columns"], given["k_splits"], device)


def split_workspace(m: int, n: int, rows: int, columns: int, k_splits: int, device: torch.device) -> torch.Tensor:
    """Return where work-groups that share K leave their sums and meet.

    Its contents mean nothing before and after a launch, and no other launch may use it at the same time.
    """
    results, tiles = -(-m // rows) * -(-n // columns), rows // TILE * -(-columns // TILE)
    meetings = 2 * (k_splits - 1)  # float32 of 64-bit words
    return torch.empty(results * (k_splits * tiles * TILE * TILE + meetings), dtype=torch.float32, device=device)


mxfp8_group_split_out = stub(
    "mxfp8_group_split_out",
    "module_mxfp8_gemm_group_split",
    f"{OPERANDS}; workspace: Tensor?; rows, columns, k_splits: int",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16; ``workspace`` is what :func:`split_workspace` returns.",
    variant={"HF_ROWS": "rows"},
    mutates=("out", "workspace"),
)


@documented_like(run_raw)
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
        rows: rows of X that a work-group multiplies with its rows of W: 16, 32 or 64.
        columns: rows of W of a work-group: 16, 24, 32 or 48.
        k_splits: work-groups that share K: 2 or 4, at most ceil(K / 128). Their sums are added in a fixed order.
    """
    return run_raw(GROUP_SPLIT, Xq, Wq, Xq, Xs, Wq, Ws, bias, rows=rows, columns=columns, k_splits=k_splits)


GROUP_SPLIT = Kernel(
    "mxfp8_group_split",
    archs=("gfx950",),
    parameters=MappingProxyType({"rows": ROWS, "columns": COLUMNS, "k_splits": K_SPLITS}),
    launch=mxfp8_group_split_out,
    candidates=lambda cell, arch: _splits(cell, rows_to_try(cell.m), FEWEST_GROUPS),
    pipeline=_pipeline,
    refusal=_refusal,
    default=_default,
    workspace=_workspace,
    loop="wave_split_kernel.h",
)
