"""The tuner of the MXFP4 GEMM: kernel, tile and K splits for each (M, N, K).

By default the shapes of the MXFP4 GEMM task.
"""

from __future__ import annotations

import torch

from hipforge.ops.core.dispatch import Choice
from hipforge.ops.mxfp4_gemm.family import FAMILY
from hipforge.ops.mxfp4_gemm.raw import launch
from hipforge.ops.reference import mxfp4_mm_packed, quantize_mxfp4
from hipforge.tuning.cases import Cell
from hipforge.tuning.gemm import Operands, both, gemm_tuner

OPTIONS = ("gemm",)
MAX_ERROR = 3e-3  # as for MX-FP8: one rounding to bf16 gives 1.7e-3

# (m, n, k) of the MXFP4 GEMM task: its tests and its benchmarks.
TASKS = (
    (8, 2112, 7168), (16, 3072, 1536), (64, 3072, 1536), (256, 2880, 512),
    (4, 2880, 512), (16, 2112, 7168), (32, 4096, 512), (32, 2880, 512), (64, 7168, 2048), (256, 3072, 1536),
)  # fmt: skip


def _run(choice: Choice, parts: Operands) -> torch.Tensor:
    xq, _, wq, _ = parts
    out = torch.empty((xq.shape[0], wq.shape[0]), dtype=torch.bfloat16, device=xq.device)
    return launch(FAMILY.kernel(choice.kernel), choice.configuration, out, *parts, False)


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=sorted({Cell(n, k, m) for m, n, k in TASKS}),
    quantizers=both(lambda x, own: quantize_mxfp4(x)),
    reference=lambda parts: mxfp4_mm_packed(*parts, out_dtype=torch.float32),
    run=_run,
)
