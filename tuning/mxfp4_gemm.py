"""The tuner of the MXFP4 GEMM: tile per wave and K splits for each (M, N, K)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hipforge.ops.mxfp4_gemm import ARCH, SUB_TILES, run_mxfp4
from hipforge.ops.reference import mxfp4_mm_packed, quantize_mxfp4
from hipforge.ops.tables import MFMA_K_SPLITS, MXFP4_GEMM, mfma_k_steps
from hipforge.ops.tuned import Value
from hipforge.tuning.cases import Cell
from hipforge.tuning.driver import command_for
from hipforge.tuning.gemm import GemmFamily, Operands, Pipeline
from hipforge.tuning.search import Candidate

MAX_ERROR = 3e-3  # as for MX-FP8: one rounding to bf16 gives 1.7e-3
STEP_BYTES = 1024  # of 16 weight rows, per wave and step

# (m, n, k) of the MXFP4 GEMM task: its tests and its benchmarks.
TASKS = (
    (8, 2112, 7168), (16, 3072, 1536), (64, 3072, 1536), (256, 2880, 512),
    (4, 2880, 512), (16, 2112, 7168), (32, 4096, 512), (32, 2880, 512), (64, 7168, 2048), (256, 3072, 1536),
)  # fmt: skip


def ring_steps(m_sub: int, n_sub: int) -> int:
    """Return how many K steps a wave has in flight."""
    return 4 if m_sub + n_sub <= 4 else 2


def candidates(cell: Cell) -> list[Candidate]:
    """Return the configurations that leave no tile of rows without work, fewest splits first."""
    return [
        Candidate("mxfp4_gemm", MappingProxyType({"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}))
        for k_splits in MFMA_K_SPLITS
        if k_splits <= mfma_k_steps(cell.k)
        for m_sub in SUB_TILES
        if m_sub == 1 or 16 * m_sub // 2 < cell.m
        for n_sub in SUB_TILES
    ]


def _reference(parts: Operands) -> torch.Tensor:
    return mxfp4_mm_packed(*parts, out_dtype=torch.float32)


def _call(candidate: Candidate, parts: Operands) -> torch.Tensor:
    configuration = candidate.configuration
    return run_mxfp4(
        *parts,
        m_sub=configuration["m_sub"],
        n_sub=configuration["n_sub"],
        k_splits=configuration["k_splits"],
    )


def _columns(candidate: Candidate) -> Mapping[str, Value]:
    return candidate.configuration


def _instance(candidate: Candidate, m: int) -> tuple[str, dict[str, int]]:
    configuration = candidate.configuration
    return "module_mxfp4_gemm", {"HF_M_SUB": configuration["m_sub"], "HF_N_SUB": configuration["n_sub"]}


def _pipeline(candidate: Candidate, cell: Cell) -> Pipeline:
    m_sub, n_sub = candidate.configuration["m_sub"], candidate.configuration["n_sub"]
    return Pipeline(ring_steps(m_sub, n_sub) * STEP_BYTES * n_sub)


FAMILY = GemmFamily(
    schema=MXFP4_GEMM,
    arch=ARCH,
    max_error=MAX_ERROR,
    default_cells=tuple(sorted({Cell(n, k, m) for m, n, k in TASKS})),
    candidates=candidates,
    quantize=quantize_mxfp4,
    reference=_reference,
    call=_call,
    columns=_columns,
    instance=_instance,
    pipeline=_pipeline,
)

command = command_for(
    (FAMILY,),
    "Choose m_sub, n_sub and k_splits of the MXFP4 GEMM for each cell; by default the shapes of the MXFP4 GEMM task. "
    "On a GPU cells are measured; elsewhere a model ranks them and rows say so.",
)
