"""The MXFP4 GEMM as a family: its table, its envelope and a caller's own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hipforge.ops.core import invariance
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.kernel import best, kernel_table, spelled
from hipforge.ops.core.tiles import MAX_K
from hipforge.ops.core.tuned import DEVICE, EVIDENCE, GEMM_SHAPE, USE_HIP, Column, Former, Value
from hipforge.ops.mxfp4_gemm.kernels import KERNELS, TILES, WAVES
from hipforge.ops.mxfp4_gemm.raw import Problem

MAX_BYTES = 2**31 - 1
MAX_ROWS = 1 << 24  # of a tensor, for the kernel in tiles


def _now(values: Mapping[str, Value]) -> Mapping[str, Value]:
    m_sub, n_sub, k_splits = (int(values[name] or 0) for name in ("m_sub", "n_sub", "k_splits"))
    if values.get("kernel") == "tiles":  # whose sides were in units of 16
        kernel, given = TILES, {"tile": 16000 * m_sub + 16 * n_sub, "k_splits": k_splits}
    else:
        kernel, given = WAVES, {"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}
    return {**values, "kernel": kernel.name, "config": spelled(given)}


_KERNEL = Column("kernel", str, accepted=("waves", "tiles"))
_PARAMETERS = tuple(Column(name, int, minimum=1) for name in ("m_sub", "n_sub", "k_splits"))
TABLE = kernel_table(
    "mxfp4_gemm",
    KERNELS,
    formers=tuple(
        Former((*DEVICE, *GEMM_SHAPE, *kernel, *_PARAMETERS, USE_HIP, *EVIDENCE), _now) for kernel in ((_KERNEL,), ())
    ),
)


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
    return best((TILES,), problem, arch, cu_count), "only tiles take a payload of more than 2^31 - 1 bytes"


def _invariant(problem: Problem, arch: str, cu_count: int) -> Choice | None:
    """Return waves with the number of parts of K for few rows; that number alone decides the order of sums."""
    few = best((WAVES,), replace(problem, m=invariance.ROWS), arch, cu_count).configuration
    return None if _needs_tiles(problem) else WAVES.choice(few)


FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    kernels=KERNELS,
    archs=("gfx950",),
    envelope=_envelope,
    demanded=_demanded,
    invariant=_invariant,
    reference="mxfp4_mm_packed",
)
