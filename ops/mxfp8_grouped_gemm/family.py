"""The grouped MX-FP8 GEMM as a family: its problem, table, envelope, default rule and candidates.

The order of the steps is documented in :mod:`hipforge.ops.mxfp8_grouped_gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Accepted, Choice, Refused
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.tuned import (
    EVIDENCE_COLUMNS,
    LATER_COLUMNS,
    NEXT,
    USE_HIP,
    Column,
    TableSchema,
    TunedRow,
    Value,
    gemm_shape,
    load_table,
)
from hipforge.ops.mxfp8_gemm.family import FNUZ_REFUSAL, SCALES, UNTYPED_REFUSAL, has_fnuz
from hipforge.ops.mxfp8_gemm.raw import K_STEP, MAX_ELEMENTS
from hipforge.ops.mxfp8_grouped_gemm import stream, wave_split

MOE_BLOCK_N = (8, 16)  # of rows that name an earlier kernel, smallm
TABLE_ARCH = "gfx950"

# Without a tuned row: (most routed slots, least experts). With many experts few slots fall on each, so that the
# kernel keeps to its strength, few rows per expert, for more slots.
DEFAULT_BUCKETS = ((16, 0), (64, 128))


@dataclass(frozen=True)
class Problem:
    """``slots`` rows of ``m_act`` activations [M_act, K], each times its expert's weight [N, K]."""

    slots: int
    experts: int
    n: int
    k: int
    m_act: int
    block_m: int
    a_div: int
    has_weight: bool
    out_dtype: torch.dtype
    device: torch.device
    fnuz: bool = False  # a payload is e4m3fnuz
    all_fnuz: bool = False

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N, K, a_div and has_weight."""
        return self.slots, self.n, self.k, self.a_div, int(self.has_weight)

    @classmethod
    def of(
        cls,
        a_q: checks.Described,
        a_scale: checks.Described,
        w: checks.Described,
        w_scale: checks.Described,
        sorted_token_ids: checks.Described,
        expert_ids: checks.Described,
        num_tokens_post_padded: checks.Described,
        num_valid_tokens: int,
        block_m: int,
        a_div: int,
        mul_weight_by: checks.Described | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Problem:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_tensor(a_q=a_q, a_scale=a_scale, w=w, w_scale=w_scale)
        checks.require_tensor(
            sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, num_tokens_post_padded=num_tokens_post_padded
        )
        if mul_weight_by is not None:
            checks.require_tensor(mul_weight_by=mul_weight_by)
        counts = {"num_valid_tokens": num_valid_tokens, "block_m": block_m, "a_div": a_div}
        slots, block_m, a_div = (checks.require_int(name, count) for name, count in counts.items())
        checks.require_rank("a_q", a_q, 2, "[M_act, K]")
        checks.require_rank("w", w, 3, "[E, N, K]")
        fnuz = has_fnuz(a_q=a_q, w=w)
        (m_act, k), (experts, n, _) = a_q.shape, w.shape
        checks.require_shape("w", w, (experts, n, k), "its K is that of a_q")
        checks.require_device("w", w, a_q.device)
        checks.require_last_multiple("a_q", a_q, BLOCK)
        for name, scale, rows in (("a", a_scale, (m_act,)), ("w", w_scale, (experts, n))):
            shape, why = (*rows, k // BLOCK), f"one byte per {BLOCK} elements of {name}"
            checks.require_operand(f"{name}_scale", scale, SCALES, shape, why, a_q.device)
        if block_m < 1 or a_div < 1 or slots < 0:
            raise GuardError(
                "block_m and a_div must be positive and num_valid_tokens not negative; "
                f"got {block_m}, {a_div} and {slots}"
            )
        if m_act < -(-slots // a_div):
            raise GuardError(
                f"a_q must have a row for each {a_div} of the {slots} slots (num_valid_tokens), {-(-slots // a_div)}; "
                f"got M_act={m_act}"
            )
        checks.require_torch_dtype("out_dtype", out_dtype)
        has_weight = mul_weight_by is not None
        all_fnuz = a_q.dtype == w.dtype == torch.float8_e4m3fnuz
        return cls(slots, experts, n, k, m_act, block_m, a_div, has_weight, out_dtype, a_q.device, fnuz, all_fnuz)


def _check_row(values: Mapping[str, Value]) -> str | None:
    kernel, block_n, rows, waves = (values[name] for name in ("kernel", "block_n", "rows", "waves"))
    given = f"got block_n={block_n}, rows={rows}, waves={waves}"
    if kernel == "smallm" and (block_n not in MOE_BLOCK_N or rows or waves):
        return f"a smallm row needs block_n in {MOE_BLOCK_N}, rows=0 and waves=0; {given}"
    if kernel == "stream":
        k = int(values["K"] or 0)
        if block_n not in stream.COLUMNS or rows != stream.ROWS or waves != 1 or not stream.takes(k):
            needs = (
                f"block_n in {stream.COLUMNS}, rows={stream.ROWS}, waves=1 and K a multiple of 128 up to {stream.MAX_K}"
            )
            return f"a stream row needs {needs}; {given}, K={k}"
        return None
    if kernel != "wave_split":
        return None
    columns = block_n or wave_split.TILE  # 0 in rows from before there was a choice
    if rows not in wave_split.ROWS or waves not in wave_split.WAVES or columns not in wave_split.COLUMNS:
        return (
            f"a wave_split row needs rows in {wave_split.ROWS}, waves in {wave_split.WAVES} and block_n in "
            f"{wave_split.COLUMNS}; {given}"
        )
    if not wave_split.fits(int(waves), int(columns)):
        return f"a wave_split row has at most {wave_split.MOST_WAVES} waves, block_n / 16 times waves; {given}"
    return None


# The format before there were two kernels, with the columns of evidence then and later.
_EARLIER = ("gfx", "cu_num", "M", "N", "K", "a_div", "has_weight", "block_n", "min_experts", "use_hip")
_IMPLIED: Mapping[str, Value] = {"kernel": "smallm", "rows": 0, "waves": 0}


TABLE = TableSchema(
    family="mxfp8_grouped_gemm",
    shape=gemm_shape(NEXT),
    extra_key=(Column("a_div", int, minimum=1), Column("has_weight", int, accepted=(0, 1))),
    config=(
        Column("kernel", str, accepted=("smallm", "wave_split", "stream")),
        Column("block_n", int, minimum=0),
        Column("rows", int, minimum=0),
        Column("waves", int, minimum=0),
        Column("min_experts", int, minimum=0),
        USE_HIP,
    ),
    check=_check_row,
    legacy={
        (*_EARLIER, *(name for name in EVIDENCE_COLUMNS if with_model or name not in LATER_COLUMNS)): _IMPLIED
        for with_model in (True, False)
    },
)


def _envelope(problem: Problem, arch: str) -> str | None:
    slots, experts, n, k = problem.slots, problem.experts, problem.n, problem.k
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    if min(slots, experts, n, k) < 1:
        return f"M, E, N and K must be at least 1; got M={slots}, E={experts}, N={n}, K={k}"
    if problem.block_m % 4:
        return f"block_m must be a multiple of 4; got {problem.block_m}"
    largest = max(n, problem.m_act) * k
    if largest > MAX_ELEMENTS:
        return f"N*K and M_act*K must be at most 2^31 - 1 (raw-buffer offsets are int32); got {largest}"
    if k > wave_split.MAX_K:
        return f"K must be at most {wave_split.MAX_K}; got {k}"
    if arch != TABLE_ARCH and not problem.all_fnuz:
        return UNTYPED_REFUSAL.format(arch)
    return None


def _from_row(row: TunedRow) -> Choice:
    if row.values["kernel"] == "wave_split":
        columns = row.integer("block_n") or wave_split.TILE
        return wave_split.choice(row.integer("rows"), row.integer("waves"), columns)
    if row.values["kernel"] == "stream":
        return stream.choice(row.integer("block_n"))
    return wave_split.of_smallm(row.integer("M"), row.integer("K"))


def _by_rule(problem: Problem, arch: str, cu_count: int) -> Choice:
    sizes = problem.slots, problem.experts, problem.n, problem.k, cu_count
    streamed = stream.default_choice(*sizes) if arch == stream.ARCH else None
    return streamed or wave_split.default_choice(*sizes)


def _row_refusal(problem: Problem, row: TunedRow) -> str | None:
    least = row.integer("min_experts")
    return f"asks for at least {least} experts; got E={problem.experts}" if problem.experts < least else None


def _default(problem: Problem, arch: str, cu_count: int) -> Choice | str:
    slots, *rest = problem.key
    table = load_table(TABLE)
    tuned = [m for m in table.values(0) if table.find(arch, cu_count, m, *rest) is not None]
    if tuned:
        return f"the tuned rows of (N, K, a_div, has_weight)={tuple(rest)} end at M={tuned[-1]}; got M={slots}"
    if any(slots <= most and problem.experts >= least for most, least in DEFAULT_BUCKETS):
        return _by_rule(problem, arch, cu_count)
    rules = " or ".join(f"M at most {most} with E at least {least}" for most, least in DEFAULT_BUCKETS)
    return f"no tuned row; the default needs {rules}; got M={slots}, E={problem.experts}"


def candidates(cell: Any, arch: str = "gfx950") -> list[Choice]:
    """Return every configuration that the kernels accept for a cell, simplest first, so that ties go to it."""
    steps = -(-cell.k // K_STEP)
    split = [
        wave_split.choice(rows, waves, columns)
        for waves in wave_split.WAVES
        if waves <= steps
        for columns in wave_split.COLUMNS
        if wave_split.fits(waves, columns)
        for rows in wave_split.ROWS
    ]
    streamed = [stream.choice(columns) for columns in stream.COLUMNS if stream.takes(cell.k)]
    return [*split, *streamed]


def _triton(problem: Problem) -> Accepted | Refused:
    from hipforge.ops.triton import mxfp8_grouped

    reason = FNUZ_REFUSAL if problem.fnuz else mxfp8_grouped.unavailable(problem.device, problem.block_m)
    if reason is not None:
        return Refused("triton", reason)
    configuration = MappingProxyType(asdict(mxfp8_grouped.STOCK))
    return Accepted("triton", "mxfp8_grouped", configuration, "the kernel does not apply")


FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    archs=(TABLE_ARCH,),
    envelope=_envelope,
    default=_default,
    from_row=_from_row,
    candidates=candidates,
    reference="grouped_mm",
    triton=_triton,
    row_refusal=_row_refusal,
    without_triton=_by_rule,
)


def _without_a_table(problem: Problem, arch: str, cu_count: int) -> tuple[Choice, str] | None:
    if arch == TABLE_ARCH:
        return None
    return _by_rule(problem, arch, cu_count), f"the table is for {TABLE_ARCH}"


GROUPED = replace(FAMILY, archs=(TABLE_ARCH, "gfx942"), demanded=_without_a_table)
"""The same with gfx942, which has no table: one kernel takes whatever the envelope does."""
