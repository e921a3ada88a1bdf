"""The MXFP4 GEMM that quantises X in its launch, for few rows: its stub, its raw op and its value.

Its X is not MXFP4, so that it has a family of its own, :mod:`hipforge.ops.mxfp4_made`; :mod:`hipforge.ops.fused_linear`
asks for one launch or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core.formats import HALVES
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp4_gemm.kernels.waves import K_SPLITS, K_STEP, k_steps
from hipforge.ops.mxfp4_gemm.raw import Problem, launch

MODULE = "module_mxfp4_gemm_made"
M_SUBS = (1, 2, 4)  # of 16 rows of X, per group
WAVES = 8  # of a group, at most
STEP_BYTES = 1024 + 64  # of LDS: the codes and scales of 16 rows of X and 128 k
LDS_BYTES = 64 << 10
LOAD_STEPS, W_STEP_BYTES = 4, 1024  # of 128 k that a wave requests at once, and of its 16 rows of W
MOST_ROWS = 256  # from which on two launches are always chosen: X would be made too often
MAX_BYTES = 2**31 - 1


def _variant(
    out: torch.Tensor, x: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor, *rest: Any
) -> dict[str, str | int]:
    return {"HF_INPUT": HALVES.get(x.dtype, "bf16"), "HF_M_SUB": rest[1]}


mxfp4_made_out = stub(
    "mxfp4_made_out",
    MODULE,
    "out, x, Wq, Ws: Tensor; shuffled: bool; m_sub, columns, k_splits: int",
    "Write mxfp4(x) @ Wq^T into ``out`` [M, N] bf16.",
    variant=_variant,
)


def _launch(
    out: torch.Tensor, x: torch.Tensor, _: None, wq: torch.Tensor, ws: torch.Tensor, shuffled: bool, *given: int
) -> None:
    mxfp4_made_out(out, x, wq, ws, shuffled, *given)


def run_mxfp4_made(
    x: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    shuffled: bool = False,
    m_sub: int = 1,
    columns: int = 1,
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel that quantises X, as configured; the result is that of ``run_mxfp4`` with the same ``k_splits``.

    Args:
        x: bfloat16 or float16 [M, K], at most 2^31 - 1 bytes; K at most 7,680 / m_sub, whose codes fit into LDS.
        wq: weights [N, K/2]; a payload has at most 2^31 - 1 bytes.
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        shuffled: the weight and its scales are in the shuffled order.
        m_sub: rows of X of a work-group, in units of 16: 1, 2 or 4.
        columns: waves of a work-group that have 16 columns each: 1 to 8.
        k_splits: waves that share K: 1, 2, 4 or 8, at most ceil(K / 128) and 8 / columns. Sums are added in order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    problem = Problem.of_floats(x, wq, w_scale, shuffled=shuffled)
    configuration = MADE.require(m_sub=m_sub, columns=columns, k_splits=k_splits)
    out = torch.empty((problem.m, problem.n), dtype=torch.bfloat16, device=x.device)
    return launch(MADE, configuration, out, x, None, wq, w_scale, shuffled)


START_US = 1.76  # of a launch, with the first loads and the last stores
HBM_BYTES_PER_US = 6.7e6  # of W, which all compute units share
BYTES_PER_US = 80_000  # of X and W, of one compute unit, in each round of work-groups
STEP_US = 0.041  # of 16 rows and 128 k that a wave multiplies
GROUP_US = 0.00075  # of the start of a work-group of the first round
MEETING_US = 0.18  # of waves that share K, in each round


def modelled_us(m: int, n: int, k: int, m_sub: int, columns: int, k_splits: int, cu_count: int) -> float:
    """Return a rough modelled time, least squares over 429 configurations of 23 shapes, the best of each weighted more.

    Of the 17 of them whose configurations were all modelled, those of least rough time take 1.6 % more modelled time
    than the best ones in the mean, 8 % at most.

    Args:
        m: rows of X.
        n: rows of W.
        k: columns of both.
        m_sub: rows of a work-group, in units of 16.
        columns: waves beside each other.
        k_splits: waves that share K.
        cu_count: of the GPU.
    """
    of_w = 17 / 32  # bytes of an element with its scale
    groups = -(-m // (16 * m_sub)) * -(-n // (16 * columns))
    read = (2 * min(m, 16 * m_sub) + 16 * columns * of_w) * k
    of_round = read / BYTES_PER_US + STEP_US * m_sub * k_steps(k) / k_splits + MEETING_US * (k_splits > 1)
    starts = START_US + GROUP_US * min(groups, cu_count)
    return starts + n * k * of_w / HBM_BYTES_PER_US + -(-groups // cu_count) * of_round


def refusal(m: int, n: int, k: int) -> str | None:
    """Return what the kernel needs and [M, N, K] does not have, or None."""
    if not 1 <= m <= MOST_ROWS or n < 1:
        return f"M of 1 to {MOST_ROWS} and N of at least 1; got M={m}, N={n}"
    if k < 1 or k_steps(k) * STEP_BYTES > LDS_BYTES:
        return f"K of 1 to {LDS_BYTES // STEP_BYTES * K_STEP}, whose codes fit into LDS; got K={k}"
    if n * k // 2 > MAX_BYTES:
        return f"a weight of at most 2^31 - 1 bytes; got N={n}, K={k}"
    return None


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    m_sub, columns, k_splits = given.values()
    if columns * k_splits > WAVES:
        return f"columns * k_splits of at most {WAVES}"
    if k_steps(key[2]) * m_sub * STEP_BYTES > LDS_BYTES:
        return f"m_sub * ceil(K / {K_STEP}) of at most {LDS_BYTES // STEP_BYTES}"
    return None if k_splits <= k_steps(key[2]) else f"no more k_splits than steps of {K_STEP}"


def _candidates(cell: Any, arch: str) -> Iterator[Configuration]:
    """Yield the configurations that leave no 16 rows without work, fewest waves first."""
    m = cell.key[0]
    for k_splits in K_SPLITS:
        for columns in range(1, WAVES + 1):
            for m_sub in M_SUBS:
                given = {"m_sub": m_sub, "columns": columns, "k_splits": k_splits}
                if (m_sub == 1 or 16 * m_sub // 2 < m) and _refusal(given, cell.key, arch) is None:
                    yield given


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    for given in _candidates(problem, arch) if refusal(m, n, k) is None else ():
        yield modelled_us(m, n, k, **given, cu_count=cu_count), given


MADE = Kernel(
    "mxfp4_made",
    archs=("gfx950",),
    parameters=MappingProxyType({"m_sub": M_SUBS, "columns": range(1, WAVES + 1), "k_splits": K_SPLITS}),
    launch=_launch,
    candidates=_candidates,
    pipeline=lambda given, cell, arch: Pipeline(LOAD_STEPS * W_STEP_BYTES),
    refusal=_refusal,
    default=_default,
)
