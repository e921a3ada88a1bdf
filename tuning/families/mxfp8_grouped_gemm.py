"""The tuner of the MoE grouped GEMM over MX-FP8: kernel and parameters for each weight shape and number of slots.

By default those of MiniMax-M3.

The number of experts that a row asks for is given here with the cells, not searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hipforge.ops.moe import DEFAULT_BLOCK_M
from hipforge.ops.mxfp8_grouped_gemm.family import DEFAULT_BUCKETS, FAMILY
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp8
from hipforge.ops.triton import mxfp8_grouped as triton_grouped
from hipforge.tuning import timing
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.grouped import Format, MoeCell, MoeOperands, grouped_tuner
from hipforge.tuning.tuner import Baselines

OPTIONS = ("grouped",)

# Gate and up at tensor-parallel degrees 4 and 8, down at both. Their numbers of slots come from measurements of kernels
# with the same interface on an MI355X.
DEFAULT_CELLS: tuple[MoeCell, ...] = (
    *(MoeCell(n, 6144, 4, False, m, least) for n in (1536, 768) for m, least in ((4, 0), (8, 0), (16, 0), (64, 128))),
    *(
        MoeCell(6144, k, 1, weighted, m, least)
        for k in (768, 384)
        for weighted in (True, False)
        for m, least in ((8, 0), (64, 128))
    ),
)


def _product(a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    return mxfp8_mm(a, a_scale, w, w_scale, torch.float32)


FORMAT = Format(quantize_mxfp8, quantize_mxfp8, _product)


def _cell(n: int, k: int, a_div: int, has_weight: bool, m: int, *, experts: int, **more: Any) -> MoeCell:
    """Return a cell whose row asks for as many experts as it is tuned with where the default rule asks for any."""
    few = m <= DEFAULT_BUCKETS[0][0]
    return MoeCell(n, k, a_div, has_weight, m, 0 if few else experts, experts=experts, **more)


def _baselines(cell: MoeCell, copies: Sequence[MoeOperands]) -> Baselines:
    """Return microseconds of Triton's grouped kernel (stock and best), or None without triton."""
    if triton_grouped.unavailable(copies[0].a.device, DEFAULT_BLOCK_M) is not None:
        return None

    def time(config: triton_grouped.GroupedConfig) -> float:
        def call(i: int) -> None:
            parts = copies[i]
            triton_grouped.mxfp8_grouped(
                parts.out, parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index, DEFAULT_BLOCK_M, cell.a_div,
                parts.weights, config,
            )  # fmt: skip

        return timing.microseconds_per_call(call, len(copies))

    stock = time(triton_grouped.STOCK)
    return stock, min(stock, *(time(config) for config in triton_grouped.TUNED))


TUNER = grouped_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=DEFAULT_CELLS,
    cell=_cell,
    made_of=lambda cell: FORMAT,
    given=lambda cell: {"min_experts": cell.min_experts},
    baselines=_baselines,
)
