"""The dense MX-FP8 GEMM as a family: its problem, table, envelope, default rule and candidates.

The order of the steps is documented in :mod:`hipforge.ops.mxfp8_gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Accepted, Choice, Refused
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.tiles import K_SPLITS, MAX_K
from hipforge.ops.core.tuned import ANY_CU, USE_HIP, Column, Reach, TableSchema, TunedRow, Value, gemm_shape
from hipforge.ops.mxfp8_gemm import few_rows, group_split, k_packed, wave_split
from hipforge.ops.mxfp8_gemm.tile_kernel import MAX_M, TILED

MAX_ELEMENTS = 2**31 - 1
GEMV_MAX_M = 16
GEMV_BLOCK_N = (4, 8, 16, 32, 64)
DEFAULT_BLOCK_N = 8
MOST_ROWS_PER_W = 32  # up to here a candidate loads W once, so up to 64 rows at most twice
LEGACY_SHORT_BLOCK_N = 4
LEGACY_SHORT_MAX_M = 8
LEGACY_SHORT_MIN_K = 6144
MFMA_MAX_M = 64
MFMA_K_STEP = 128
MFMA_N_SUB = (1, 2, 4)
MFMA_K_SPLITS = (1, 2, 4, 8)

FP8_PAYLOADS = (torch.float8_e4m3fn, torch.uint8)
TILE_ARCH = "gfx950"
SCALES = (torch.uint8, E8M0_DTYPE)
FNUZ_REFUSAL = "the Triton kernel reads e4m3fn; these are e4m3fnuz"
UNTYPED_REFUSAL = "on {} the kernel reads float8_e4m3fnuz (see mx_fn_to_fnuz); other payloads mean e4m3fn"


@dataclass(frozen=True)
class Problem:
    """X[M, K] @ W[N, K]^T."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    device: torch.device
    fnuz: bool = False  # a payload is e4m3fnuz
    all_fnuz: bool = False

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
    ) -> Problem:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
        checks.require_rank("xq", xq, 2, "[M, K]")
        checks.require_rank("wq", wq, 2, "[N, K]")
        fnuz = has_fnuz(xq=xq, wq=wq)
        (m, k), n = xq.shape, wq.shape[0]
        checks.require_shape("wq", wq, (n, k), "its K is that of xq")
        checks.require_last_multiple("xq", xq, BLOCK)
        checks.require_operand("x_scale", x_scale, SCALES, (m, k // BLOCK), f"one byte per {BLOCK} elements of xq")
        checks.require_operand("w_scale", w_scale, SCALES, (n, k // BLOCK), f"one byte per {BLOCK} elements of wq")
        checks.require_torch_dtype("out_dtype", out_dtype)
        all_fnuz = xq.dtype == wq.dtype == torch.float8_e4m3fnuz
        return cls(m, n, k, out_dtype, xq.device, fnuz, all_fnuz)


def has_fnuz(**payloads: checks.Described) -> bool:
    """Return whether an MX-FP8 payload is float8_e4m3fnuz, which only devices of that format are given.

    Raises:
        GuardError: a payload in an fp8 format that the device does not read.
    """
    for name, payload in payloads.items():
        own = fp8_dtypes(payload.device)[0]
        checks.require_dtype(name, payload, FP8_PAYLOADS if own in FP8_PAYLOADS else (*FP8_PAYLOADS, own))
    return any(payload.dtype == torch.float8_e4m3fnuz for payload in payloads.values())


def mfma_k_steps(k: int) -> int:
    """Return how many 128-wide K steps the MFMA kernel takes (the last may be partial)."""
    return -(-k // MFMA_K_STEP)


def _check_row(values: Mapping[str, Value]) -> str | None:
    m, k, n_sub, k_splits = (int(values[name] or 0) for name in ("M", "K", "n_sub", "k_splits"))
    block_n = values["block_n"]
    given = f"got M={m}, K={k}, block_n={block_n}, n_sub={n_sub}, k_splits={k_splits}"
    if values["kernel"] == "gemv":
        if m > GEMV_MAX_M:
            return f"a gemv row needs M of at most {GEMV_MAX_M}; {given}"
        if block_n not in (*GEMV_BLOCK_N, None) or (n_sub, k_splits) != (0, 0):
            return f"a gemv row needs block_n in {GEMV_BLOCK_N} and n_sub=k_splits=0; {given}"
        return None
    if m > MFMA_MAX_M:
        which = "an mfma" if values["kernel"] == "mfma" else f"a {values['kernel']}"
        return f"{which} row needs M of at most {MFMA_MAX_M}; {given}"
    if values["kernel"] == "wave_split":
        columns = int(block_n or wave_split.COLUMNS[0])
        if wave_split.K_STEP * k_splits > k + wave_split.K_STEP - 1 or not wave_split.takes(columns):
            accepted = f"block_n of 0 (16) or a multiple of 4 from 16 to {wave_split.MOST_COLUMNS}"
            return f"a wave_split row needs {accepted}, no more waves (k_splits) than K steps; {given}"
        if 16 * n_sub not in wave_split.ROWS or k_splits not in wave_split.WAVES:
            return f"a wave_split row needs n_sub (tiles of 16 rows) in (1, 2, 4), k_splits in 1 to 16; {given}"
        if k_splits > wave_split.max_waves(16 * n_sub, columns):
            return f"a wave_split row has at most {wave_split.max_waves(16 * n_sub, columns)} waves; {given}"
        return None
    if values["kernel"] == "group_split":
        needs = group_split.refusal(k, int(block_n or 0), 16 * n_sub, k_splits)
        return None if needs is None else f"a group_split row needs {needs}; {given}"
    if values["kernel"] == "k_packed":
        needs = k_packed.refusal(m, k, int(block_n or 0), n_sub, k_splits)
        return None if needs is None else f"a k_packed row needs {needs}; {given}"
    if values["kernel"] == "tiles":
        if (16 * n_sub, block_n) not in TILED.step_us or k_splits not in K_SPLITS:
            tiles = ", ".join(f"{rows // 16} and {columns}" for rows, columns in TILED.step_us)
            return f"a tiles row needs n_sub and block_n of {tiles}, and k_splits in {K_SPLITS}; {given}"
        return None if k_splits <= mfma_k_steps(k) else f"k_splits cannot exceed the {mfma_k_steps(k)} K steps; {given}"
    if n_sub not in MFMA_N_SUB or k_splits not in MFMA_K_SPLITS or block_n not in (0, None):
        return f"an mfma row needs n_sub in {MFMA_N_SUB}, k_splits in {MFMA_K_SPLITS} and block_n=0; {given}"
    if k_splits > mfma_k_steps(k):
        return f"k_splits cannot exceed the {mfma_k_steps(k)} K steps of {MFMA_K_STEP}; {given}"
    return None


def _reach(m: int, tuned: Sequence[int]) -> tuple[int, ...]:
    """A row is for its own M; rows of 32 and 64 also for the M below them down to 17, which have no kernel shape."""
    below = GEMV_MAX_M < m < MFMA_MAX_M and m != 32
    return (m, *(larger for larger in (32, MFMA_MAX_M) if below and larger > m))


TABLE = TableSchema(
    family="mxfp8_gemm",
    shape=gemm_shape(Reach("next", _reach)),
    config=(
        Column("kernel", str, accepted=("gemv", "mfma", "wave_split", "group_split", "k_packed", "tiles")),
        Column("block_n", int, minimum=0),
        Column("n_sub", int, minimum=0),
        Column("k_splits", int, minimum=0),
        USE_HIP,
    ),
    check=_check_row,
    # The format of earlier small-M kernels: always gfx950, no block_n column.
    legacy={
        ("K", "N", "M", "kernel", "n_sub", "k_splits", "use_hip"): {
            "gfx": "gfx950",
            "cu_num": ANY_CU,
            "block_n": None,
            "source": "legacy",
        }
    },
)


def _envelope(problem: Problem, arch: str) -> str | None:
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    m, n, k = problem.key
    if not 1 <= m <= MFMA_MAX_M or n == 0 or k == 0:
        return f"M must be 1 to {MFMA_MAX_M}, N and K at least 1; got M={m}, N={n}, K={k}"
    if max(m, n) * k > MAX_ELEMENTS:
        return f"M*K and N*K must be at most 2^31 - 1 (raw-buffer offsets are int32); got {max(m, n) * k}"
    return None


def _gemv(block_n: int) -> Choice:
    return Choice("smallm_mxfp8_gemv", MappingProxyType({"block_n": block_n}))


def _mfma(n_sub: int, k_splits: int) -> Choice:
    return Choice("smallm_mxfp8_mfma", MappingProxyType({"n_sub": n_sub, "k_splits": k_splits}))


def legacy_block_n(m: int, k: int) -> int:
    """Return the columns per work-group that a GEMV row of the earlier format was tuned with.

    The format has no such column. The launcher that it was written for took 4 where M was at most 8 and K long, else 8.
    """
    return LEGACY_SHORT_BLOCK_N if m <= LEGACY_SHORT_MAX_M and k >= LEGACY_SHORT_MIN_K else DEFAULT_BLOCK_N


def _from_row(row: TunedRow) -> Choice:
    if row.values["kernel"] == "wave_split":
        columns = int(row.values["block_n"] or wave_split.COLUMNS[0])
        return wave_split.choice(16 * row.integer("n_sub"), row.integer("k_splits"), columns)
    if row.values["kernel"] == "group_split":
        return group_split.choice(16 * row.integer("n_sub"), row.integer("block_n"), row.integer("k_splits"))
    if row.values["kernel"] == "k_packed":
        return k_packed.choice(*(row.integer(name) for name in ("block_n", "n_sub", "k_splits")))
    if row.values["kernel"] == "tiles":
        return TILED.choice((16 * row.integer("n_sub"), row.integer("block_n")), row.integer("k_splits"))
    if row.values["kernel"] == "mfma":
        return _mfma(row.integer("n_sub"), row.integer("k_splits"))
    if row.values["block_n"] is None:
        return _gemv(legacy_block_n(row.integer("M"), row.integer("K")))
    return _gemv(row.integer("block_n"))


def _default(problem: Problem, arch: str, cu_count: int) -> Choice | str:
    m, n, k = problem.key
    if m in (8, 16):
        return _mfma(1, next((splits for splits in (4, 2) if mfma_k_steps(k) % splits == 0), 1))
    if m <= GEMV_MAX_M:
        return _gemv(DEFAULT_BLOCK_N)
    return f"M={m} needs a tuned row for (K, N)=({k}, {n}), and there is none"


def candidates(cell: Any, arch: str = "gfx950") -> list[Choice]:
    """Return every configuration that the kernels accept for a cell, simplest first, so that ties go to it."""
    gemv = [_gemv(block_n) for block_n in GEMV_BLOCK_N if cell.m <= GEMV_MAX_M]
    splits = [k_splits for k_splits in MFMA_K_SPLITS if k_splits <= mfma_k_steps(cell.k) and cell.m <= MFMA_MAX_M]
    row_tiles = [rows for rows in wave_split.ROWS if min(cell.m, MOST_ROWS_PER_W) <= rows < 2 * max(cell.m, 16)]
    by_waves = [
        wave_split.choice(rows, waves, columns)
        for rows in row_tiles
        for columns in wave_split.columns_to_try(cell.m, cell.n, rows, archs.get(arch).cu_count)
        for waves in wave_split.waves_to_try(rows, columns, cell.k)
    ]
    by_groups = [
        group_split.choice(rows, columns, k_splits)
        for rows in row_tiles
        for columns, k_splits in group_split.splits_to_try(cell.m, cell.n, cell.k, rows)
    ]
    tiles = [
        TILED.choice(TILED.smallest, k_splits)
        for k_splits in TILED.splits_to_try(cell.k)
        if GEMV_MAX_M < cell.m <= MFMA_MAX_M
    ]
    mfma = [_mfma(n_sub, k_splits) for k_splits in splits for n_sub in MFMA_N_SUB]
    return [*by_waves, *by_groups, *k_packed.candidates(*cell.key), *gemv, *mfma, *tiles]


def _triton(problem: Problem) -> Accepted | Refused:
    from hipforge.ops.triton import mxfp8_dot_scaled

    reason = FNUZ_REFUSAL if problem.fnuz else mxfp8_dot_scaled.unavailable(problem.device)
    if reason is not None:
        return Refused("triton", reason)
    configuration = MappingProxyType(asdict(mxfp8_dot_scaled.configuration(problem.m)))
    return Accepted("triton", "mxfp8_dot_scaled", configuration, "the kernel does not apply")


FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    archs=("gfx950",),
    envelope=_envelope,
    default=_default,
    from_row=_from_row,
    candidates=candidates,
    reference="mxfp8_mm",
    triton=_triton,
    without_triton=lambda problem, arch, cu_count: _mfma(1, 1),
)


def _gemm_envelope(problem: Problem, arch: str) -> str | None:
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    m, n, k = problem.key
    if not 1 <= m <= MAX_M or n == 0 or not 0 < k <= MAX_K:
        limits = f"M must be 1 to {MAX_M}, N at least 1 and K 1 to {MAX_K}"
        return f"{limits}; got M={m}, N={n}, K={k}"
    if arch != TILE_ARCH and not problem.all_fnuz:
        return UNTYPED_REFUSAL.format(arch)
    return None


def _gemm_default(problem: Problem, arch: str, cu_count: int) -> Choice:
    m, n, k = problem.key
    if arch != TILE_ARCH:
        return wave_split.default_choice_gfx942(m, n, k, cu_count)
    return few_rows.default_choice(m, n, k, cu_count) if m <= MFMA_MAX_M else TILED.best(m, n, k, cu_count)[1]


def _without_a_table(problem: Problem, arch: str, cu_count: int) -> tuple[Choice, str] | None:
    """What the kernels with tuned rows do not take: larger problems, and gfx942."""
    reason = f"the table is for {TILE_ARCH}" if arch != TILE_ARCH else _envelope(problem, arch)
    return None if reason is None else (_gemm_default(problem, arch, cu_count), f"no tuned row applies: {reason}")


GEMM = replace(
    FAMILY,
    archs=(TILE_ARCH, "gfx942"),
    envelope=_gemm_envelope,
    default=_gemm_default,
    demanded=_without_a_table,
)
"""The same for any M, and on gfx942: kernels with tuned rows where they apply, and those for any M elsewhere."""
