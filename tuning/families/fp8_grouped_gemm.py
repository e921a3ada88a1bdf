"""The tuner of the MoE grouped GEMM over fp8: kernel and parameters for each weight shape, slots and kind of scales.

By default those of Qwen3-235B-A22B on one of four GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hipforge.ops.fp8_grouped_gemm import FAMILY
from hipforge.ops.reference import fp8_mm
from hipforge.ops.reference.fp8 import Scales
from hipforge.tuning.families.fp8_gemm import QUANTIZERS
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.grouped import Format, MoeCell, grouped_tuner

OPTIONS = ("grouped", "block")


@dataclass(frozen=True, order=True)
class ScaledMoeCell(MoeCell):
    """One problem, with the rows of W that share scales."""

    block: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} block={self.block}"

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N, K, a_div, has_weight and the rows of W that share scales."""
        return (*super().key, self.block)


def _product(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    return fp8_mm(a, a_scale, w, w_scale, torch.float32)


FORMATS = {block: Format(*made, _product, rows=max(1, block)) for block, made in QUANTIZERS.items()}
KINDS = {kind.block: kind for kind in (Scales.ONCE, Scales.BLOCKS, Scales.MX_SHARED)}  # that QUANTIZERS make

# Gate and up, and down, of Qwen3-235B-A22B (8 of 128 experts, 128 x 128 blocks) at tensor-parallel degree 4.
DEFAULT_CELLS = tuple(
    ScaledMoeCell(n, k, a_div, weighted, 8 * tokens, experts=128, top_k=8, block=128)
    for n, k, a_div, weighted in ((768, 4096, 8, False), (4096, 384, 1, True))
    for tokens in (1, 2, 4, 8)
)

TUNER = grouped_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=DEFAULT_CELLS,
    made_of=lambda cell: FORMATS[cell.block],
    entry=lambda cell: (int(KINDS[cell.block]),),
)
