"""The tuner of the MoE grouped GEMM with MXFP4 weights: kernel and parameters for each weight shape and slots.

By default those of gpt-oss-120b.
"""

from __future__ import annotations

import torch

from hipforge.ops.mxfp4_grouped_gemm import FAMILY
from hipforge.ops.reference import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.grouped import Format, MoeCell, grouped_tuner

OPTIONS = ("grouped",)


def _product(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    return dequantize_mxfp8(a, a_scale) @ dequantize_mxfp4(w, w_scale).T


FORMAT = Format(quantize_mxfp8, lambda w, own: quantize_mxfp4(w), _product)

# Gate and up, and down, of gpt-oss-120b (4 of 128 experts) on one GPU.
DEFAULT_CELLS = tuple(
    MoeCell(n, 2880, a_div, weighted, 4 * tokens)
    for n, a_div, weighted in ((5760, 4, False), (2880, 1, True))
    for tokens in (1, 2, 4, 8)
)

TUNER = grouped_tuner(FAMILY, max_error=MAX_ERROR, default_cells=DEFAULT_CELLS, made_of=lambda cell: FORMAT)
