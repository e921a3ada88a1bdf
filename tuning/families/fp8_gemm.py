"""The tuner of the scaled fp8 GEMM: kernel and configuration for each (M, N, K) and kind of scales.

By default the weight shapes of MiniMax-M3 x M = 1 to 64, with a scale per row of X and of W, as serving quantises
activations and weights; ``--block`` asks for blocks of 128 x 128 with float32 scales, or of 32 x 32 with e8m0 scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from hipforge.ops.core.dispatch import Choice
from hipforge.ops.fp8_gemm.family import FAMILY
from hipforge.ops.fp8_gemm.kernels import BY_NAME
from hipforge.ops.mxfp8_gemm.kernels import launch
from hipforge.ops.mxfp8_gemm.raw import new_result
from hipforge.ops.reference import fp8_mm, quantize_mxfp8
from hipforge.ops.reference.fp8 import Scales, quantize_fp8_blocks, quantize_fp8_rows, quantize_fp8_weights, scales_of
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell, cells
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.gemm import Operands, Quantizer, gemm_tuner

OPTIONS = ("gemm", "block")
# Besides MiniMax-M3's shapes that of its experts' down projection, for which there are published times.
SHAPES = (*MINIMAX_M3, (6144, 2048))


@dataclass(frozen=True, order=True)
class ScaledCell(Cell):
    """One problem size, with the rows of W that share scales."""

    block: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} block={self.block}"

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N, K and the rows of W that share scales."""
        return (*super().key, self.block)


# Of the two kinds that share 128 rows that with float32 scales, as checkpoints of blocks of 128 have them.
QUANTIZERS: dict[int, tuple[Quantizer, Quantizer]] = {
    Scales.ONCE.block: (quantize_fp8_rows, quantize_fp8_rows),
    Scales.BLOCKS.block: (quantize_fp8_blocks, quantize_fp8_weights),
    Scales.MX_SHARED.block: (
        quantize_mxfp8,
        partial(quantize_fp8_weights, e8m0=True, block=Scales.MX_SHARED.block),
    ),
}
"""What makes the operands of X and of W, by the rows of W that share scales."""


def _run(choice: Choice, parts: Operands) -> torch.Tensor:
    xq, x_scale, wq, w_scale = parts
    (n, k), m = wq.shape, len(xq)
    scales = scales_of(m, n, k, x_scale, w_scale)
    return launch(choice, new_result(xq, wq), *parts, None, int(scales), kernels=BY_NAME)


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=[ScaledCell(cell.n, cell.k, cell.m) for cell in cells(SHAPES, DECODE_M)],
    quantizers=lambda cell: QUANTIZERS[cell.block],
    reference=lambda parts: fp8_mm(*parts, out_dtype=torch.float32),
    run=_run,
)
