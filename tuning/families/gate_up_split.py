"""The tuner of how a MoE layer's first product with SwiGLU in its launch divides K, for each weight, slots and kind.

By default those of MiniMax-M3 (MX-FP8) on one of eight GPUs. A call has the rows of the grouped GEMM's default rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hipforge import devices
from hipforge.ops import fp8_grouped_gemm, moe_gate_up, mxfp4_grouped_gemm
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.gate_up_split import FAMILY, MX_FP8, MXFP4
from hipforge.ops.moe import DEFAULT_BLOCK_M
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import KERNEL, default_choice, has_lines
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands
from hipforge.ops.reference.fp8 import Scales
from hipforge.ops.swiglu_fp8 import swiglu_fp8_dynamic, swiglu_mxfp8
from hipforge.tuning import grouped, model
from hipforge.tuning.families import fp8_grouped_gemm as fp8
from hipforge.tuning.families import mxfp4_grouped_gemm as mxfp4
from hipforge.tuning.families import mxfp8_grouped_gemm as mxfp8
from hipforge.tuning.gemm import works
from hipforge.tuning.grouped import Format, MoeCell, MoeOperands
from hipforge.tuning.tuner import Counted, Tuner, relative_error

OPTIONS = ("gate_up", "kind")
# Of codes of both ways: sums in another order round some results, and with them a block's scale, to a neighbour.
MAX_ERROR = 0.02


@dataclass(frozen=True)
class Kind:
    """A kind of weights: what makes operands, the launch that is tuned, and SwiGLU as a launch of its own."""

    made: Format
    launch: Callable[..., None]
    activated: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    new: Callable[..., tuple[torch.Tensor, torch.Tensor]] = moe_gate_up.new_gate_up


def _of_fp8(scales: Scales, activated: Callable[..., Any]) -> Kind:
    fused = fp8_grouped_gemm.FUSED[scales][fp8_grouped_gemm.KERNEL]
    return Kind(fp8.FORMATS[scales.block], fused.launch, activated, partial(fp8_grouped_gemm.new_of_kind, scales))


KINDS = {
    MX_FP8: Kind(mxfp8.FORMAT, moe_gate_up.FUSED[KERNEL].launch, swiglu_mxfp8),
    MXFP4: Kind(mxfp4.FORMAT, mxfp4_grouped_gemm.FUSED[mxfp4_grouped_gemm.KERNEL].launch, swiglu_mxfp8),
    128: _of_fp8(Scales.BLOCKS, partial(swiglu_fp8_dynamic, out_format="blocks")),
    32: _of_fp8(Scales.MX_SHARED, swiglu_mxfp8),
}


@dataclass(frozen=True, order=True)
class SplitCell(MoeCell):
    """One problem, with its kind of weights."""

    kind: int = MX_FP8

    def __str__(self) -> str:
        return f"M={self.m} N={self.n} K={self.k} experts={self.experts} kind={self.kind}"

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N, K, E and the kind."""
        return self.m, self.n, self.k, self.experts, self.kind


def _operands(cell: SplitCell, arch: str, device: torch.device) -> MoeOperands:
    return grouped.operands(cell, KINDS[cell.kind].made, arch, device)


def _expected(cell: SplitCell, parts: MoeOperands) -> torch.Tensor:
    gate_up = grouped.expected(cell, KINDS[cell.kind].made, parts).bfloat16()
    return KINDS[cell.kind].activated(gate_up, alpha=1.0, beta=0.0, limit=None, interleaved=False)[0].float()


def _run(choice: Choice, cell: SplitCell, parts: MoeOperands) -> torch.Tensor:
    """Launch a kernel; return its codes [M, N / 2], every row of which has a slot."""
    kind = KINDS[cell.kind]
    given = Operands(parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index, cell.m, DEFAULT_BLOCK_M, cell.a_div)
    lines = cell.kind == MX_FP8 and has_lines(cell.k, devices.current().arch_of())
    ruled = default_choice(cell.m, cell.experts, cell.n, cell.k, devices.current().cu_count(), lines)
    rows = ruled.configuration["rows"]
    q, scales = kind.new(parts.a, parts.w, cell.m)
    activation = 1.0, 0.0, math.inf, False
    kind.launch(q, scales, *given.tensors, None, *given.sizes, *activation, rows=rows, **choice.configuration)
    return q.view(fp8_dtypes(parts.a.device)[0])


def _count(cell: SplitCell, arch: str) -> Counted:
    parts = _operands(cell, arch, torch.device("cpu"))
    right = _expected(cell, parts)

    def counted(choice: Choice) -> tuple[list[model.Work], float]:
        from hipforge import emulator

        described = FAMILY.kernel(choice.kernel).pipeline
        assert described is not None
        with emulator.counters() as collector:
            got = _run(choice, cell, parts)
        return works(collector.result, described(choice.configuration, cell, arch), "w"), relative_error(got, right)

    return counted


TUNER = Tuner(
    family=FAMILY,
    max_error=MAX_ERROR,
    default_cells=tuple(SplitCell(768, 6144, 4, False, 4 * tokens) for tokens in (1, 2, 4, 8, 16)),
    cell=SplitCell,
    operands=_operands,
    expected=_expected,
    run=_run,
    count=_count,
    copies=grouped.rerouted,
    bytes_per_call=lambda parts: len(parts.busy) * parts.w[0].numel(),
    modelled=grouped.over_routings(lambda cell, arch: _operands(cell, arch, torch.device("cpu")), _run),
    loop=lambda name: "gate_up_kernel.h",
)
