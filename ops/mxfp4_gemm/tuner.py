"""The tuner of the MXFP4 GEMM: kernel, tile and K splits for each (M, N, K)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hipforge.ops.core.dispatch import Choice
from hipforge.ops.mxfp4_gemm.family import FAMILY, row_of
from hipforge.ops.mxfp4_gemm.kernels import run_mxfp4, run_mxfp4_tiles
from hipforge.ops.mxfp4_gemm.rule import TILED, WAVES
from hipforge.ops.reference import mxfp4_mm_packed, quantize_mxfp4
from hipforge.tuning.cases import Cell
from hipforge.tuning.gemm import Operands, Pipeline, gemm_command, gemm_tuner

MAX_ERROR = 3e-3  # as for MX-FP8: one rounding to bf16 gives 1.7e-3
STEP_BYTES = 1024  # of 16 weight rows, per wave and step
TILE_BYTES_AHEAD = 3 * 2048  # of 64 x 64: three stages of four, and of each a wave's part of W

# (m, n, k) of the MXFP4 GEMM task: its tests and its benchmarks.
TASKS = (
    (8, 2112, 7168), (16, 3072, 1536), (64, 3072, 1536), (256, 2880, 512),
    (4, 2880, 512), (16, 2112, 7168), (32, 4096, 512), (32, 2880, 512), (64, 7168, 2048), (256, 3072, 1536),
)  # fmt: skip


def ring_steps(m_sub: int, n_sub: int) -> int:
    """Return how many K steps a wave has in flight."""
    return 4 if m_sub + n_sub <= 4 else 2


def _run(choice: Choice, parts: Operands) -> torch.Tensor:
    run: Callable[..., torch.Tensor] = run_mxfp4 if choice.kernel == WAVES else run_mxfp4_tiles
    return run(*parts, **choice.configuration)


def _pipeline(choice: Choice, cell: Cell, arch: str) -> Pipeline:
    if choice.kernel == TILED.name:
        return Pipeline(TILE_BYTES_AHEAD)
    m_sub, n_sub = choice.configuration["m_sub"], choice.configuration["n_sub"]
    return Pipeline(ring_steps(m_sub, n_sub) * STEP_BYTES * n_sub)


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=sorted({Cell(n, k, m) for m, n, k in TASKS}),
    quantize=lambda x, arch: quantize_mxfp4(x),
    reference=lambda parts: mxfp4_mm_packed(*parts, out_dtype=torch.float32),
    run=_run,
    pipeline=_pipeline,
    columns=row_of,
    loop=lambda kernel: kernel,
)

command = gemm_command(
    TUNER,
    "Choose kernel, m_sub, n_sub and k_splits of the MXFP4 GEMM for each cell; by default the shapes of the MXFP4 GEMM "
    "task. On a GPU cells are measured; elsewhere a model ranks them and rows say so.",
)
