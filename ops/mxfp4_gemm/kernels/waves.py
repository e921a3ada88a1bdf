"""The MXFP4 GEMM whose waves split K, for few rows and columns: its stub, its raw op and its value.

The rough times of both kernels come near ``hipforge time`` at shapes with M = 1 to 4,096. At 16 others the choice takes
5 % more modelled time than the best configuration in the mean, 31 % at most (``python op_tests/bench_default_rule.py
--op mxfp4_gemm -m 4 -m 16 -m 64 -m 256 --shapes 2304,6144 --shapes 7168,2048 --shapes 8192,3584 --shapes 4096,4096``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tiles import MAX_K
from hipforge.ops.mxfp4_gemm.raw import OPERANDS, run_raw

SUB_TILES = (1, 2, 4)  # of 16 rows or columns, per wave
K_SPLITS = (1, 2, 4, 8)  # over the waves of a work-group
MOST_TILES = 64  # that the waves of a work-group hold, all parts of K together: LDS decides
K_STEP = 128
MOST_ROWS = 256  # from which on only tiles are tried
STEP_BYTES = 1024  # of 16 weight rows, per wave and step

START_US = 2.2  # of a launch, with the first loads and the last stores
BYTES_PER_US = 24_000  # of one compute unit, whose loads take half a cache line
SHARED_X = 0.65  # of X's bytes, which neighbours find in caches
STEP_US = 0.045  # of each step of a wave
ROUND_US = 0.5  # of each round of waves after the first, eight to a compute unit
WIDE_US = 0.6  # of each tile of columns after the first: fewer steps in flight


def k_steps(k: int) -> int:
    """Return how many 128-wide K steps the waves take; the last may be partial."""
    return -(-k // K_STEP)


def modelled_us(m: int, n: int, k: int, m_sub: int, n_sub: int, k_splits: int, cu_count: int) -> float:
    """Return a rough modelled time of waves that split K.

    Args:
        m: rows of X.
        n: rows of W.
        k: columns of both.
        m_sub: tiles of 16 rows per wave.
        n_sub: tiles of 16 columns per wave.
        k_splits: waves of a work-group.
        cu_count: of the GPU.
    """
    rows, columns = 16 * m_sub, 16 * n_sub
    groups = -(-m // rows) * -(-n // columns)
    read = -(-groups // cu_count) * (SHARED_X * min(m, rows) + columns) * k / 2 / BYTES_PER_US
    later_rounds = -(-groups * k_splits // (8 * cu_count)) - 1
    steps = -(-k_steps(k) // k_splits)
    return START_US + read + STEP_US * steps + ROUND_US * later_rounds + WIDE_US * (n_sub - 1)


def ring_steps(m_sub: int, n_sub: int) -> int:
    """Return how many K steps a wave has in flight."""
    return 4 if m_sub + n_sub <= 4 else 2


def _pipeline(given: Configuration, cell: Any, arch: str) -> Pipeline:
    return Pipeline(ring_steps(given["m_sub"], given["n_sub"]) * STEP_BYTES * given["n_sub"])


def _candidates(cell: Any, arch: str) -> Iterator[Configuration]:
    """Yield the configurations that leave no tile of rows without work, fewest splits first."""
    m = cell.key[0]
    for k_splits in K_SPLITS:
        for m_sub in SUB_TILES:
            for n_sub in SUB_TILES:
                given = {"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}
                if (m_sub == 1 or 16 * m_sub // 2 < m) and _refusal(given, cell.key, arch) is None:
                    yield given


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    m_sub, n_sub, k_splits = given.values()
    if m_sub * n_sub * k_splits > MOST_TILES:
        return f"m_sub * n_sub * k_splits of at most {MOST_TILES}"
    return None if k_splits <= k_steps(key[2]) else f"no more k_splits than steps of {K_STEP}"


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    for given in _candidates(problem, arch) if m <= MOST_ROWS or k > MAX_K else ():
        yield modelled_us(m, n, k, **given, cu_count=cu_count), given


mxfp4_gemm_out = stub(
    "mxfp4_gemm_out",
    "module_mxfp4_gemm",
    f"{OPERANDS}; shuffled: bool; m_sub, n_sub, k_splits: int",
    "Write Xq @ Wq^T into ``out`` [M, N] bf16.",
    variant={"HF_M_SUB": "m_sub", "HF_N_SUB": "n_sub"},
)


@documented_like(run_raw)
def run_mxfp4(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    shuffled: bool = False,
    m_sub: int = 1,
    n_sub: int = 1,
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel whose waves split K, as configured; shapes and dtypes as in :mod:`hipforge.ops.mxfp4_gemm`.

    Args:
        wq: weights [N, K/2]; a payload has at most 2^31 - 1 bytes.
        m_sub: tiles of 16 rows per wave: 1, 2 or 4.
        n_sub: tiles of 16 columns per wave: 1, 2 or 4.
        k_splits: waves of a work-group, each with a part of K: 1, 2, 4 or 8, at most ceil(K / 128) and
            64 / (m_sub n_sub). Their sums are added in order.
    """
    configuration = {"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}
    return run_raw(WAVES, configuration, xq, x_scale, wq, w_scale, shuffled)


WAVES = Kernel(
    "mxfp4_gemm",
    archs=("gfx950",),
    parameters=MappingProxyType({"m_sub": SUB_TILES, "n_sub": SUB_TILES, "k_splits": K_SPLITS}),
    launch=mxfp4_gemm_out,
    candidates=_candidates,
    pipeline=_pipeline,
    refusal=_refusal,
    default=_default,
)
