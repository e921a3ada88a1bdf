"""The tuner of the MXFP4 GEMM that quantises X in its launch: rows, columns and waves for each (M, N, K).

By default the shapes of the MXFP4 GEMM task. On a GPU the other way is two launches, one that quantises and the GEMM: a
row of a shape where these are faster says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hipforge.ops.core.dispatch import Choice
from hipforge.ops.mx_quantize import mxfp4_quantize
from hipforge.ops.mxfp4_gemm import mxfp4_linear
from hipforge.ops.mxfp4_gemm.raw import launch
from hipforge.ops.mxfp4_made import FAMILY
from hipforge.ops.reference import mxfp4_mm_packed, quantize_mxfp4
from hipforge.tuning import timing
from hipforge.tuning.cases import Cell
from hipforge.tuning.families.mxfp4_gemm import MAX_ERROR, TASKS
from hipforge.tuning.gemm import Operands, Quantizer, gemm_tuner
from hipforge.tuning.tuner import Baselines

OPTIONS = ("gemm",)
# X stays as it is: the kernel quantises it.
QUANTIZERS: tuple[Quantizer, Quantizer] = (lambda x, own: (x, x.new_empty(0)), lambda w, own: quantize_mxfp4(w))


def _reference(parts: Operands) -> torch.Tensor:
    x, _, wq, w_scale = parts
    return mxfp4_mm_packed(*quantize_mxfp4(x), wq, w_scale, out_dtype=torch.float32)


def _run(choice: Choice, parts: Operands) -> torch.Tensor:
    x, _, wq, w_scale = parts
    out = torch.empty((len(x), len(wq)), dtype=torch.bfloat16, device=x.device)
    return launch(FAMILY.kernel(choice.kernel), choice.configuration, out, x, None, wq, w_scale, False)


def _two_launches(cell: Cell, copies: Sequence[Operands]) -> Baselines:
    def call(i: int) -> None:
        x, _, wq, w_scale = copies[i]
        mxfp4_linear(*mxfp4_quantize(x), wq, w_scale)

    us = timing.microseconds_per_call(call, len(copies))
    return us, us


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=sorted({Cell(n, k, m) for m, n, k in TASKS}),
    quantizers=lambda cell: QUANTIZERS,
    reference=_reference,
    run=_run,
    baselines=_two_launches,
)
