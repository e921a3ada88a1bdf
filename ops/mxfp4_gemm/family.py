"""The MXFP4 GEMM as a family: its problem, table, envelope, default rule and candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.tiles import MAX_K
from hipforge.ops.core.tuned import DEVICE_COLUMNS, EVIDENCE_COLUMNS, USE_HIP, Column, TableSchema, TunedRow, Value
from hipforge.ops.mxfp4_gemm.rule import (
    K_SPLITS,
    K_STEP,
    MOST_TILES,
    SUB_TILES,
    TILED,
    WAVES,
    default_choice,
    k_steps,
    waves,
    waves_to_try,
)

MAX_BYTES = 2**31 - 1
PARAMETERS = ("m_sub", "n_sub", "k_splits")
MAX_ROWS = 1 << 24  # of a tensor, for the kernel in tiles

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


def _check_row(values: Mapping[str, Value]) -> str | None:
    m_sub, n_sub, k_splits, k = (int(values[name] or 0) for name in (*PARAMETERS, "K"))
    given = f"got {m_sub}, {n_sub}, {k_splits}"
    if values["kernel"] == "tiles":
        if (16 * m_sub, 16 * n_sub) not in TILED.step_us:
            tiles = ", ".join(f"{rows // 16} and {columns // 16}" for rows, columns in TILED.step_us)
            return f"a tiles row needs m_sub and n_sub of {tiles}; {given}"
        if k_splits not in TILED.splits_to_try(k) or k > MAX_K:
            return f"a tiles row needs k_splits in {TILED.splits_to_try(k)} and K of at most {MAX_K}; {given}, K={k}"
        return None
    if m_sub not in SUB_TILES or n_sub not in SUB_TILES or k_splits not in K_SPLITS:
        return f"m_sub and n_sub are in {SUB_TILES}, k_splits in {K_SPLITS}; {given}"
    if m_sub * n_sub * k_splits > MOST_TILES:
        return f"m_sub * n_sub * k_splits must be at most {MOST_TILES}; {given}"
    if k_splits > k_steps(k):
        return f"k_splits cannot exceed the {k_steps(k)} K steps of {K_STEP}; got {k_splits}"
    return None


def _envelope(problem: Problem, arch: str) -> str | None:
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    m, n, k = problem.key
    if min(m, n, k) < 1:
        return f"M, N and K must be at least 1; got M={m}, N={n}, K={k}"
    if _needs_tiles(problem) and (k > MAX_K or max(m, n) > MAX_ROWS):
        limits = f"M and N at most {MAX_ROWS} and K at most {MAX_K}"
        return f"a payload of more than 2^31 - 1 bytes needs {limits}; got M={m}, N={n}, K={k}"
    return None


def _needs_tiles(problem: Problem) -> bool:
    """Return whether a payload is too large for one raw-buffer resource, as which the other kernel reads it."""
    return max(problem.m, problem.n) * problem.k // 2 > MAX_BYTES


def _demanded(problem: Problem, arch: str, cu_count: int) -> tuple[Choice, str] | None:
    if not _needs_tiles(problem):
        return None
    return TILED.best(*problem.key, cu_count)[1], "only tiles take a payload of more than 2^31 - 1 bytes"


def _from_row(row: TunedRow) -> Choice:
    m_sub, n_sub, k_splits = map(row.integer, PARAMETERS)
    if row.values["kernel"] == "tiles":
        return TILED.choice((16 * m_sub, 16 * n_sub), k_splits)
    return waves(m_sub, n_sub, k_splits)


def row_of(choice: Choice) -> Mapping[str, Value]:
    """Return the columns of a tuned row that name a choice; tiles count their 16 rows as the other kernel does."""
    if choice.kernel == WAVES:
        return {"kernel": "waves", **choice.configuration}
    rows, columns = divmod(choice.configuration["tile"], 1000)
    return {
        "kernel": "tiles", "m_sub": rows // 16, "n_sub": columns // 16, "k_splits": choice.configuration["k_splits"]
    }  # fmt: skip


def candidates(cell: Any, arch: str = "gfx950") -> list[Choice]:
    """Return the configurations worth a trial: those of waves, fewest splits first, and tiles near the rough best."""
    m, n, k = cell.m, cell.n, cell.k
    cu_count = archs.get(arch).cu_count
    return [*(waves(*given) for given in waves_to_try(m, k)), *TILED.candidates(m, n, k, cu_count)]


TABLE = TableSchema(
    family="mxfp4_gemm",
    config=(
        Column("kernel", str, accepted=("waves", "tiles")),
        *(Column(name, int, minimum=1) for name in PARAMETERS),
        USE_HIP,
    ),
    check=_check_row,
    # From before there was a second kernel, and from before modelled times were kept.
    legacy={
        (*DEVICE_COLUMNS, "M", "N", "K", *PARAMETERS, "use_hip", *evidence): {"kernel": "waves"}
        for evidence in (EVIDENCE_COLUMNS, tuple(name for name in EVIDENCE_COLUMNS if name != "model_us"))
    },
)

FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    archs=("gfx950",),
    envelope=_envelope,
    default=lambda problem, arch, cu_count: default_choice(*problem.key, cu_count),
    from_row=_from_row,
    candidates=candidates,
    demanded=_demanded,
    reference="mxfp4_mm_packed",
)
