"""The scaled fp8 GEMM as a family: its problem, table and envelope."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.family import Family
from hipforge.ops.core.kernel import kernel_table
from hipforge.ops.core.tuned import Column
from hipforge.ops.fp8_gemm.kernels import KERNELS, WAVE_SPLIT
from hipforge.ops.mxfp8_gemm.family import UNTYPED_REFUSAL, has_fnuz
from hipforge.ops.mxfp8_gemm.kernels import wave_split
from hipforge.ops.mxfp8_gemm.raw import MAX_K, MAX_M
from hipforge.ops.reference.fp8 import Scales, scales_of

RESULTS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """X[M, K] @ W[N, K]^T."""

    m: int
    n: int
    k: int
    scales: Scales
    out_dtype: torch.dtype
    device: torch.device
    all_fnuz: bool

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Return M, N, K and the rows of W that share scales."""
        return self.m, self.n, self.k, self.scales.block

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
        has_fnuz(xq=xq, wq=wq)
        for name, operand in (("x_scale", x_scale), ("wq", wq), ("w_scale", w_scale)):
            checks.require_device(name, operand, xq.device)
        checks.require_torch_dtype("out_dtype", out_dtype)
        if not out_dtype.is_floating_point:
            raise GuardError(f"out_dtype must be a floating-point dtype; got {out_dtype}")
        scales = scales_of(m, n, k, x_scale, w_scale)
        return cls(m, n, k, scales, out_dtype, xq.device, xq.dtype == wq.dtype == torch.float8_e4m3fnuz)


def _envelope(problem: Problem, arch: str) -> str | None:
    if problem.out_dtype not in RESULTS:
        return f"the output dtype must be torch.bfloat16 or torch.float16; got {problem.out_dtype}"
    m, n, k, _ = problem.key
    if not 1 <= m <= MAX_M or n == 0 or not 0 < k <= MAX_K:
        return f"M must be 1 to {MAX_M}, N at least 1 and K 1 to {MAX_K}; got M={m}, N={n}, K={k}"
    if archs.get(arch).fp8_fnuz and not problem.all_fnuz:
        return UNTYPED_REFUSAL.format(arch)
    return None


# block: rows of W, and elements of K, that share a scale; 0 where sums over all of K are scaled once.
TABLE = kernel_table("fp8_gemm", KERNELS, extra_key=(Column("block", int, accepted=(0, 32, 128)),))

FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    kernels=KERNELS,
    archs=("gfx950", "gfx942"),
    envelope=_envelope,
    reference="fp8_mm",
    invariant=lambda problem, *device: WAVE_SPLIT.choice(wave_split.invariant(problem, *device)),
)
