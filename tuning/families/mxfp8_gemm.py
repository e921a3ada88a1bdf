"""The tuner of the small-M MX-FP8 GEMM: which kernel and parameters for each (M, N, K).

By default the 15 weight shapes of MiniMax-M3 x M = 1 to 64.

On a GPU candidates are timed and compared with Triton; on the emulator they are ranked by the model of
:mod:`hipforge.tuning.model` over their exact counts. Either way each candidate runs once on real data first and is
rejected if its result is wrong or its build exceeds the module's resource limits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hipforge.ops.mxfp8_gemm.family import FAMILY
from hipforge.ops.mxfp8_gemm.kernels import launch
from hipforge.ops.mxfp8_gemm.raw import new_result
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp8
from hipforge.ops.triton import mxfp8_dot_scaled as dot_scaled
from hipforge.tuning import timing
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell, cells
from hipforge.tuning.gemm import Operands, both, gemm_tuner
from hipforge.tuning.tuner import Baselines

OPTIONS = ("gemm",)

# float32 accumulation and one rounding to bf16 give 1.7e-3 (uniform rounding within half a unit of 8 bits); a single
# wrong scale byte in one block of a K of 6144 gives more than 1e-2.
MAX_ERROR = 3e-3


def _baselines(cell: Cell, copies: Sequence[Operands]) -> Baselines:
    """Return microseconds of Triton in its stock configuration and in its best one; None without triton."""
    device = copies[0][0].device
    if dot_scaled.unavailable(device) is not None:
        return None
    out = torch.empty((cell.m, cell.n), dtype=torch.bfloat16, device=device)

    def time(config: dot_scaled.TileConfig) -> float:
        return timing.microseconds_per_call(lambda i: dot_scaled.mxfp8_dot_scaled(out, *copies[i], config), len(copies))

    stock = time(dot_scaled.STOCK)
    return stock, min(stock, *(time(config) for config in dot_scaled.TUNED))


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=cells(MINIMAX_M3, DECODE_M),
    quantizers=both(quantize_mxfp8),
    reference=lambda parts: mxfp8_mm(*parts, out_dtype=torch.float32),
    run=lambda choice, parts: launch(choice, new_result(parts[0], parts[2]), *parts),
    baselines=_baselines,
)
