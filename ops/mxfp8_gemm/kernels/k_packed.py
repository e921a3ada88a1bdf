"""The MX-FP8 GEMM for few rows, with parts of K in the matrix instruction's empty rows: its stub, raw op and value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.few_rows import modelled_us
from hipforge.ops.mxfp8_gemm.raw import OPERANDS, STEP_BYTES, run_raw

COLUMNS = (4, 8)  # per group of waves; also the largest M
WAVES = (1, 2, 4, 8, 16)
MAX_WAVES = 16  # of a work-group
MOST_GROUPS = 4  # worth trying
STEPS_AHEAD = 4  # in flight
WORK_GROUPS = 512  # two per compute unit of an MI355X: more take longer to start than they save


def k_step(columns: int) -> int:
    """Return how much of K one matrix instruction takes: 128 in each of the parts beside each other."""
    return 128 * 16 // columns


def _candidates(cell: Any, arch: str) -> Iterator[Configuration]:
    """Yield the configurations worth trying: the fewest groups that leave at most WORK_GROUPS work-groups."""
    for columns in COLUMNS:
        groups = min(MOST_GROUPS, max(1, -(-cell.key[1] // (columns * WORK_GROUPS))))
        for waves in WAVES:
            given = {"columns": columns, "groups": groups, "waves": waves}
            if _refusal(given, cell.key, arch) is None:
                yield given


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    """Yield the candidates with one wave in each of several groups, or with half as many waves as columns in one."""
    m, n, k = problem.key
    for given in _candidates(problem, arch) if arch == "gfx950" else ():
        columns, groups, waves = given.values()
        if waves == (1 if groups > 1 else columns // 2):
            yield modelled_us(m, n, k, m, columns * groups, 1, cu_count), given


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    (m, _, k), (columns, groups, waves) = key, given.values()
    if m > columns or k % k_step(columns):
        return "at least M columns, and K a multiple of 2048 / columns"
    if groups * waves > MAX_WAVES or waves * k_step(columns) > k:
        return f"groups times waves of at most {MAX_WAVES}, and no more waves than K steps"
    return None


mxfp8_k_packed_out = stub(
    "mxfp8_k_packed_out",
    "module_mxfp8_gemm_k_packed",
    f"{OPERANDS}; columns, groups, waves: int",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_COLUMNS": "columns"},
)


@documented_like(run_raw)
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
        Ws: their scales [N, K/32], aligned to 4 bytes.
        columns: of the output, per group of waves: 4 or 8.
        groups: of a work-group; groups times waves is at most 16.
        waves: of a group, each with a part of K: 1, 2, 4, 8 or 16. Their sums are added in a fixed order.
    """
    return run_raw(K_PACKED, Xq, Wq, Xq, Xs, Wq, Ws, bias, columns=columns, groups=groups, waves=waves)


K_PACKED = Kernel(
    "mxfp8_k_packed",
    archs=("gfx950", "gfx942"),
    parameters=MappingProxyType({"columns": COLUMNS, "groups": range(1, MAX_WAVES + 1), "waves": WAVES}),
    launch=mxfp8_k_packed_out,
    candidates=_candidates,
    pipeline=lambda given, cell, arch: Pipeline(STEPS_AHEAD * STEP_BYTES),
    refusal=_refusal,
    default=_default,
    loop="wave_split_kernel.h",
)
