"""The dense MX-FP8 GEMM as a family: its problem, table, envelope, default rule and candidates.

The order of the steps is documented in :mod:`hipforge.ops.mxfp8_gemm`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import torch

from hipforge import archs
from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Accepted, Choice, Refused
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.kernel import best, kernel_table
from hipforge.ops.core.tuned import Reach, gemm_shape
from hipforge.ops.mxfp8_gemm.former import FORMERS
from hipforge.ops.mxfp8_gemm.kernels import KERNELS, ring_tiles, wave_split
from hipforge.ops.mxfp8_gemm.kernels.wave_split import WAVE_SPLIT
from hipforge.ops.mxfp8_gemm.raw import FEW_ROWS, MAX_ELEMENTS, MAX_K, MAX_M

ALWAYS_M = 16  # up to here mxfp8_gemv takes every shape

FP8_PAYLOADS = (torch.float8_e4m3fn, torch.uint8)
TILE_ARCH = "gfx950"
HOPPER = "sm_90"
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
        checks.require_tensor(x_scale=x_scale, w_scale=w_scale)
        m, n, k = checks.require_factors(xq, wq)
        fnuz = has_fnuz(xq=xq, wq=wq)
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


def _reach(m: int, tuned: Sequence[int]) -> tuple[int, ...]:
    """A row is for its own M; rows of 32 and 64 also for the M below them down to 17, which have no kernel shape."""
    below = ALWAYS_M < m < FEW_ROWS and m != 32
    return (m, *(larger for larger in (32, FEW_ROWS) if below and larger > m))


TABLE = kernel_table("mxfp8_gemm", KERNELS, shape=gemm_shape(Reach("next", _reach)), formers=FORMERS)


def _envelope(problem: Problem, arch: str) -> str | None:
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    m, n, k = problem.key
    if not 1 <= m <= FEW_ROWS or n == 0 or k == 0:
        return f"M must be 1 to {FEW_ROWS}, N and K at least 1; got M={m}, N={n}, K={k}"
    if max(m, n) * k > MAX_ELEMENTS:
        return f"M*K and N*K must be at most 2^31 - 1 (raw-buffer offsets are int32); got {max(m, n) * k}"
    return None


def _default(problem: Problem, arch: str, cu_count: int) -> Choice | str:
    m, n, k = problem.key
    if m > ALWAYS_M:
        return f"M={m} needs a tuned row for (K, N)=({k}, {n}), and there is none"
    return best(KERNELS, problem, arch, cu_count)


def _triton(problem: Problem) -> Accepted | Refused:
    from hipforge.ops.triton import mxfp8_dot_scaled

    reason = FNUZ_REFUSAL if problem.fnuz else mxfp8_dot_scaled.unavailable(problem.device)
    if reason is not None:
        return Refused("triton", reason)
    configuration = MappingProxyType(asdict(mxfp8_dot_scaled.configuration(problem.m)))
    return Accepted("triton", "mxfp8_dot_scaled", configuration, "the kernel does not apply")


def _invariant(problem: Problem, arch: str, cu_count: int) -> Choice:
    if arch == HOPPER:
        return ring_tiles.RING_TILES.choice(ring_tiles.invariant(problem))
    return WAVE_SPLIT.choice(wave_split.invariant(problem, arch, cu_count))


FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    kernels=KERNELS,
    archs=(TILE_ARCH, HOPPER),
    envelope=_envelope,
    default=_default,
    reference="mxfp8_mm",
    triton=_triton,
    invariant=_invariant,
)


def _gemm_envelope(problem: Problem, arch: str) -> str | None:
    if problem.out_dtype != torch.bfloat16:
        return f"the output dtype must be torch.bfloat16; got {problem.out_dtype}"
    m, n, k = problem.key
    if not 1 <= m <= MAX_M or n == 0 or not 0 < k <= MAX_K:
        limits = f"M must be 1 to {MAX_M}, N at least 1 and K 1 to {MAX_K}"
        return f"{limits}; got M={m}, N={n}, K={k}"
    if archs.get(arch).fp8_fnuz and not problem.all_fnuz:
        return UNTYPED_REFUSAL.format(arch)
    return None


GEMM = replace(
    FAMILY,
    archs=(TILE_ARCH, "gfx942", HOPPER),
    envelope=_gemm_envelope,
    default=None,
    without_triton=functools.partial(best, KERNELS),
)
"""The same for any M, and on gfx942; a shape without a row always gets the best of all kernels by rough times."""
