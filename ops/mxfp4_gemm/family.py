"""The MXFP4 GEMM as a family: its problem, table, envelope, default rule and candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.tuned import USE_HIP, Column, TableSchema, TunedRow, Value

SUB_TILES = (1, 2, 4)  # of 16 rows or columns, per wave
K_SPLITS = (1, 2, 4, 8)  # over the waves of a work-group
MOST_TILES = 64  # that the waves of a work-group hold, all parts of K together: LDS decides
SPLIT_STEPS = 4  # a wave has at most so many steps where there are enough waves
K_STEP = 128
MAX_BYTES = 2**31 - 1
PARAMETERS = ("m_sub", "n_sub", "k_splits")

_PAYLOADS = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", None))
_SCALES = (torch.uint8, E8M0_DTYPE)


@dataclass(frozen=True)
class Problem:
    """X[M, K] @ W[N, K]^T; ``shuffled`` says in which order the weight and its scales are."""

    m: int
    n: int
    k: int
    shuffled: bool
    out_dtype: torch.dtype
    device: torch.device

    @property
    def key(self) -> tuple[int, int, int]:
        """Return M, N and K."""
        return self.m, self.n, self.k

    @classmethod
    def of(
        cls,
        xq: checks.Described,
        x_scale: checks.Described,
        wq: checks.Described,
        w_scale: checks.Described,
        out_dtype: torch.dtype = torch.bfloat16,
        *,
        shuffled: bool = False,
    ) -> Problem:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
        checks.require_rank("xq", xq, 2, "[M, K/2]")
        checks.require_rank("wq", wq, 2, "[N, K/2]")
        m, n, k = xq.shape[0], wq.shape[0], 2 * xq.shape[1]
        checks.require_dtype("xq", xq, _PAYLOADS)
        checks.require_operand("wq", wq, _PAYLOADS, (n, k // 2), "its K is that of xq")
        if k % BLOCK:
            raise GuardError(f"K must be a multiple of {BLOCK} (one e8m0 scale per {BLOCK} elements); got K={k}")
        checks.require_operand("x_scale", x_scale, _SCALES, (m, k // BLOCK), f"one byte per {BLOCK} elements of xq")
        shape, why = (n, k // BLOCK), f"one byte per {BLOCK} elements of wq"
        if shuffled:
            if n % 16 or k % 64:
                raise GuardError(f"shuffled weights need N % 16 == 0 and K % 64 == 0; got N={n}, K={k}")
            shape = (-(-n // 256) * 256, -(-(k // BLOCK) // 8) * 8)
            why = "shuffled scales are padded to 256 rows and 8 columns"
        checks.require_operand("w_scale", w_scale, _SCALES, shape, why)
        checks.require_torch_dtype("out_dtype", out_dtype)
        return cls(m, n, k, shuffled, out_dtype, xq.device)


def k_steps(k: int) -> int:
    """Return how many 128-wide K steps the kernel takes; the last may be partial."""
    return -(-k // K_STEP)


def _check_row(values: Mapping[str, Value]) -> str | None:
    m_sub, n_sub, k_splits, k = (int(values[name] or 0) for name in (*PARAMETERS, "K"))
    if m_sub not in SUB_TILES or n_sub not in SUB_TILES or k_splits not in K_SPLITS:
        return f"m_sub and n_sub are in {SUB_TILES}, k_splits in {K_SPLITS}; got {m_sub}, {n_sub}, {k_splits}"
    if m_sub * n_sub * k_splits > MOST_TILES:
        return f"m_sub * n_sub * k_splits must be at most {MOST_TILES}; got {m_sub}, {n_sub}, {k_splits}"
    if k_splits > k_steps(k):
        return f"k_splits cannot exceed the {k_steps(k)} K steps of {K_STEP}; got {k_splits}"
    return None


def _envelope(problem: Problem, arch: str) -> str | None:
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    m, n, k = problem.key
    if min(m, n, k) < 1:
        return f"M, N and K must be at least 1; got M={m}, N={n}, K={k}"
    if max(m, n) * k // 2 > MAX_BYTES:
        return f"a payload must be at most 2^31 - 1 bytes; got {max(m, n) * k // 2}"
    return None


def _choice(m_sub: int, n_sub: int, k_splits: int) -> Choice:
    return Choice("mxfp4_gemm", MappingProxyType({"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}))


def _from_row(row: TunedRow) -> Choice:
    return _choice(*map(row.integer, PARAMETERS))


def _default(problem: Problem, arch: str, cu_count: int) -> Choice:
    """Rows and columns per wave grow as long as work-groups occupy the compute units; waves share K in short parts."""
    m, n, k = problem.key
    m_sub = 1 if m <= 16 else 2 if m <= 32 else 4
    row_tiles = -(-m // (16 * m_sub))
    n_sub = next((wide for wide in (4, 2) if 16 * -(-n // (16 * wide)) * row_tiles >= 9 * cu_count), 1)
    k_splits = 1
    while (
        2 * k_splits <= min(k_steps(k), K_SPLITS[-1], MOST_TILES // (m_sub * n_sub))
        and k_steps(k) > SPLIT_STEPS * k_splits
    ):
        k_splits *= 2
    return _choice(m_sub, n_sub, k_splits)


def candidates(cell: Any, arch: str = "gfx950") -> list[Choice]:
    """Return the configurations that leave no tile of rows without work, fewest splits first."""
    return [
        _choice(m_sub, n_sub, k_splits)
        for k_splits in K_SPLITS
        if k_splits <= k_steps(cell.k)
        for m_sub in SUB_TILES
        if m_sub == 1 or 16 * m_sub // 2 < cell.m
        for n_sub in SUB_TILES
        if m_sub * n_sub * k_splits <= MOST_TILES
    ]


TABLE = TableSchema(
    family="mxfp4_gemm",
    config=(*(Column(name, int, minimum=1) for name in PARAMETERS), USE_HIP),
    check=_check_row,
)

FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    archs=("gfx950",),
    envelope=_envelope,
    default=_default,
    from_row=_from_row,
    candidates=candidates,
    reference="mxfp4_mm_packed",
)
