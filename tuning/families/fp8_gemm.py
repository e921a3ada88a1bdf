"""The tuner of the scaled fp8 GEMM with a scale per row of X and of W, as serving quantises activations and weights."""

from __future__ import annotations

import torch

from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.fp8_gemm.family import FAMILY
from hipforge.ops.fp8_gemm.kernels import BY_NAME
from hipforge.ops.mxfp8_gemm.kernels import launch
from hipforge.ops.mxfp8_gemm.raw import new_result
from hipforge.ops.reference import fp8_mm
from hipforge.ops.reference.fp8 import Scales
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, cells
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.gemm import gemm_command, gemm_tuner

# Besides MiniMax-M3's shapes that of its experts' down projection, for which there are published times.
SHAPES = (*MINIMAX_M3, (6144, 2048))


def _quantize(x: torch.Tensor, arch: str) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = fp8_dtypes(arch)[0]
    scale = x.float().abs().amax(dim=1, keepdim=True) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=cells(SHAPES, DECODE_M),
    quantize=_quantize,
    reference=lambda parts: fp8_mm(*parts, out_dtype=torch.float32),
    run=lambda choice, parts: launch(
        choice, new_result(parts[0], parts[2]), *parts, None, int(Scales.ONCE), kernels=BY_NAME
    ),
    extra_key=(Scales.ONCE.block,),
)

command = gemm_command(
    TUNER,
    "Choose kernel and configuration of the scaled fp8 GEMM with scales per row for each cell; by default the weight "
    "shapes of MiniMax-M3 x M = 1 to 64. On a GPU cells are measured; elsewhere a model ranks them and rows say so.",
)
