"""The grouped MX-FP8 GEMM as a family: its problem, table, envelope, default rule and candidates.

The order of the steps is documented in :mod:`hipforge.ops.mxfp8_grouped_gemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.ops.core import checks, invariance
from hipforge.ops.core.dispatch import Accepted, Choice, Refused
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.kernel import Kernel, best, kernel_table, spelled
from hipforge.ops.core.tuned import (
    DEVICE,
    EVIDENCE,
    NEXT,
    USE_HIP,
    Column,
    Former,
    TunedRow,
    Value,
    gemm_shape,
    load_table,
)
from hipforge.ops.mxfp8_gemm.family import FNUZ_REFUSAL, SCALES, UNTYPED_REFUSAL, has_fnuz
from hipforge.ops.mxfp8_gemm.raw import MAX_ELEMENTS
from hipforge.ops.mxfp8_grouped_gemm.kernels import KERNELS, SMALLM_BLOCK_N, stream, tiles, wave_split

TABLE_ARCH = "gfx950"

# Without a tuned row: (most routed slots, least experts). With many experts few slots fall on each, so that the
# kernel keeps to its strength, few rows per expert, for more slots.
DEFAULT_BUCKETS = ((16, 0), (64, 128))

P = TypeVar("P", bound="Problem")


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
        cls: type[P],
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
    ) -> P:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_tensor(a_q=a_q, a_scale=a_scale, w=w, w_scale=w_scale)
        indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens, block_m, a_div
        problem = cls.unscaled(a_q, w, *indices, mul_weight_by, out_dtype)
        problem.require_mx_scales(a_q, a_scale, w_scale)
        return problem

    def require_mx_scales(self, a_q: checks.Described, a_scale: checks.Described, w_scale: checks.Described) -> None:
        """Refuse scales that are not one e8m0 byte per 32 elements of K, and a K that is no multiple of 32."""
        checks.require_last_multiple("a_q", a_q, BLOCK)
        for name, scale, rows in (("a", a_scale, (self.m_act,)), ("w", w_scale, (self.experts, self.n))):
            shape, why = (*rows, self.k // BLOCK), f"one byte per {BLOCK} elements of {name}"
            checks.require_operand(f"{name}_scale", scale, SCALES, shape, why, self.device)

    @classmethod
    def unscaled(
        cls: type[P],
        a_q: checks.Described,
        w: checks.Described,
        sorted_token_ids: checks.Described,
        expert_ids: checks.Described,
        num_tokens_post_padded: checks.Described,
        num_valid_tokens: int,
        block_m: int,
        a_div: int,
        mul_weight_by: checks.Described | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        packing: int = 1,
    ) -> P:
        """Return the problem of operands whose scales are not looked at; w has ``packing`` elements in a byte."""
        checks.require_tensor(a_q=a_q, w=w)
        checks.require_tensor(
            sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, num_tokens_post_padded=num_tokens_post_padded
        )
        if mul_weight_by is not None:
            checks.require_tensor(mul_weight_by=mul_weight_by)
        counts = {"num_valid_tokens": num_valid_tokens, "block_m": block_m, "a_div": a_div}
        slots, block_m, a_div = (checks.require_int(name, count) for name, count in counts.items())
        checks.require_rank("a_q", a_q, 2, "[M_act, K]")
        checks.require_rank("w", w, 3, "[E, N, K]" if packing == 1 else f"[E, N, K/{packing}]")
        fp8 = {"a_q": a_q, "w": w} if packing == 1 else {"a_q": a_q}
        fnuz = has_fnuz(**fp8)
        (m_act, k), (experts, n, _) = a_q.shape, w.shape
        checks.require_shape("w", w, (experts, n, k // packing), "its K is that of a_q")
        checks.require_device("w", w, a_q.device)
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
        all_fnuz = all(q.dtype == torch.float8_e4m3fnuz for q in fp8.values())
        return cls(slots, experts, n, k, m_act, block_m, a_div, has_weight, out_dtype, a_q.device, fnuz, all_fnuz)


def _now(values: Mapping[str, Value]) -> Mapping[str, Value]:
    kernel = values.get("kernel", "smallm")
    block_n, rows, waves = (int(values.get(name) or 0) for name in ("block_n", "rows", "waves"))
    if kernel == "wave_split":
        choice = wave_split.choice(rows, waves, block_n or wave_split.TILE)  # 0 from before there was a choice
    elif kernel == "stream" and (rows, waves) == (stream.ROWS, 1):
        choice = stream.choice(block_n)
    elif kernel == "smallm" and block_n in SMALLM_BLOCK_N and not rows and not waves:
        choice = wave_split.of_smallm(int(values["M"] or 0), int(values["K"] or 0))
    else:
        smallm = f"block_n in {SMALLM_BLOCK_N}, rows=0 and waves=0"
        needs = f"rows={stream.ROWS} and waves=1" if kernel == "stream" else smallm
        raise ValueError(f"a {kernel} row needs {needs}; got block_n={block_n}, rows={rows}, waves={waves}")
    return {**values, "kernel": choice.kernel, "config": spelled(choice.configuration)}


_SHAPE = gemm_shape(NEXT)
EXTRA_KEY = Column("a_div", int, minimum=1), Column("has_weight", int, accepted=(0, 1))
_MIN_EXPERTS = Column("min_experts", int, minimum=0)
_KERNEL = Column("kernel", str, accepted=("smallm", "wave_split", "stream"))
_BLOCK_N, *_REST = (Column(name, int, minimum=0) for name in ("block_n", "rows", "waves"))

TABLE = kernel_table(
    "mxfp8_grouped_gemm",
    KERNELS,
    shape=_SHAPE,
    extra_key=EXTRA_KEY,
    more=(_MIN_EXPERTS, USE_HIP),
    formers=tuple(
        Former((*DEVICE, *_SHAPE, *EXTRA_KEY, *columns, _MIN_EXPERTS, USE_HIP, *EVIDENCE), _now)
        for columns in ((_KERNEL, _BLOCK_N, *_REST), (_BLOCK_N,))
    ),
)


def envelope(problem: Problem, arch: str) -> str | None:
    """Return why the kernels do not take a problem, whatever its scales, or None."""
    slots, experts, n, k = problem.slots, problem.experts, problem.n, problem.k
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    if min(slots, experts, n, k) < 1:
        return f"M, E, N and K must be at least 1; got M={slots}, E={experts}, N={n}, K={k}"
    if problem.block_m % 4:
        return f"block_m must be a multiple of 4; got {problem.block_m}"
    if (count := max(slots, experts, problem.a_div, problem.block_m)) > MAX_ELEMENTS:
        return f"num_valid_tokens, E, a_div and block_m must be at most 2^31 - 1; got {count}"
    largest = max(n, problem.m_act) * k
    if largest > MAX_ELEMENTS:
        return f"N*K and M_act*K must be at most 2^31 - 1 (raw-buffer offsets are int32); got {largest}"
    if k > wave_split.MAX_K:
        return f"K must be at most {wave_split.MAX_K}; got {k}"
    if archs.get(arch).fp8_fnuz and not problem.all_fnuz:
        return UNTYPED_REFUSAL.format(arch)
    return None


def _by_rule(problem: Problem, arch: str, cu_count: int) -> Choice:
    return best(KERNELS, problem, arch, cu_count)


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


def _triton(problem: Problem) -> Accepted | Refused:
    from hipforge.ops.triton import mxfp8_grouped

    reason = FNUZ_REFUSAL if problem.fnuz else mxfp8_grouped.unavailable(problem.device, problem.block_m)
    if reason is not None:
        return Refused("triton", reason)
    configuration = MappingProxyType(asdict(mxfp8_grouped.STOCK))
    return Accepted("triton", "mxfp8_grouped", configuration, "the kernel does not apply")


def invariant(problem: Problem, arch: str, cu_count: int) -> Choice:
    """Return waves that split K, as many as suit a few slots: their number alone decides the order of sums.

    Where no kernel splits K over waves, tiles: each sum is one group's, in the order of K.
    """
    experts, n, k = problem.experts, problem.n, problem.k
    if arch not in wave_split.WAVE_SPLIT.archs:
        return tiles.TILES.choice({"slots": tiles.SLOTS[0]})
    few = wave_split.default_choice(invariance.ROWS, experts, n, k, cu_count).configuration
    rows = wave_split.default_choice(problem.slots, experts, n, k, cu_count).configuration["rows"]
    return wave_split.choice(rows, few["waves"], few["columns"])


def invariant_of(kernel: Kernel) -> Callable[[Problem, str, int], Choice]:
    """Return :func:`invariant` for a kernel that splits K over waves as that of MX-FP8 does."""
    return lambda problem, arch, cu_count: kernel.choice(invariant(problem, arch, cu_count).configuration)


FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    kernels=KERNELS,
    archs=(TABLE_ARCH,),
    envelope=envelope,
    default=_default,
    reference="grouped_mm",
    triton=_triton,
    row_refusal=_row_refusal,
    without_triton=_by_rule,
    invariant=invariant,
)


def _without_a_table(problem: Problem, arch: str, cu_count: int) -> tuple[Choice, str] | None:
    if arch == TABLE_ARCH:
        return None
    return _by_rule(problem, arch, cu_count), f"the table is for {TABLE_ARCH}"


GROUPED = replace(FAMILY, archs=(TABLE_ARCH, "gfx942", "sm_90"), demanded=_without_a_table)
"""The same with the architectures that have no table: there the default rule takes whatever the envelope does."""
