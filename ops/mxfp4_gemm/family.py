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
from hipforge.ops.mxfp4_gemm.kernels import KERNELS, ROW_STREAM, TILES, WAVES, code_stream
from hipforge.ops.mxfp4_gemm.kernels.row_stream import invariant
from hipforge.ops.mxfp4_gemm.raw import Problem

HOPPER = "sm_90"
MAX_BYTES = 2**31 - 1
MAX_ROWS = 1 << 24  # of a tensor, for the kernel in tiles
# On sm_90: a grid has so many blocks of 16 rows of X, a block keeps the scales of one row of W at least in 64 KiB.
MAX_STREAMED_ROWS, MAX_STREAMED_K, MAX_COLUMNS = 65535 * 16, 1 << 21, 2**31 - 1


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
    if arch == HOPPER:
        if problem.shuffled:
            return "shuffled weights are for gfx950; sm_90 reads plain ones"
        if k > MAX_STREAMED_K or m > MAX_STREAMED_ROWS or n > MAX_COLUMNS:
            limits = f"M at most {MAX_STREAMED_ROWS}, N at most {MAX_COLUMNS} and K at most {MAX_STREAMED_K}"
            return f"{limits} on {HOPPER}; got M={m}, N={n}, K={k}"
        return None
    if problem.bf16:
        return f"bfloat16 activations are for {HOPPER}; {arch} takes MXFP4 ones"
    if _needs_tiles(problem) and (k > MAX_K or max(m, n) > MAX_ROWS):
        limits = f"M and N at most {MAX_ROWS} and K at most {MAX_K}"
        return f"a payload of more than 2^31 - 1 bytes needs {limits}; got M={m}, N={n}, K={k}"
    return None


def _needs_tiles(problem: Problem) -> bool:
    """Return whether a payload is too large for one raw-buffer resource, as which the other kernel reads it."""
    return max(problem.m, problem.n) * problem.k // 2 > MAX_BYTES


def _demanded(problem: Problem, arch: str, cu_count: int) -> tuple[Choice, str] | None:
    if arch == HOPPER or not _needs_tiles(problem):
        return None
    return best((TILES,), problem, arch, cu_count), "only tiles take a payload of more than 2^31 - 1 bytes"


def _invariant(problem: Problem, arch: str, cu_count: int) -> Choice | None:
    """Return the parts of K that few rows have: that number alone decides the order of sums."""
    if arch == HOPPER:
        made = code_stream.invariant(problem, cu_count)
        return ROW_STREAM.choice(invariant(problem, cu_count)) if made is None else code_stream.CODE_STREAM.choice(made)
    few = best((WAVES,), replace(problem, m=invariance.ROWS), arch, cu_count).configuration
    return None if _needs_tiles(problem) else WAVES.choice(few)


FAMILY = Family(
    problem=Problem.of,
    table=TABLE,
    kernels=KERNELS,
    archs=("gfx950", HOPPER),
    envelope=_envelope,
    demanded=_demanded,
    invariant=_invariant,
    reference="mxfp4_mm_packed",
)
