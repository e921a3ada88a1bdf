"""The kernels of the skinny fp8 GEMM, and a launch of one; ties go to the first."""

from __future__ import annotations

import torch

from hipforge.ops.core.dispatch import Accepted, Choice
from hipforge.ops.fp8_skinny_gemm.kernels.queue import QUEUE
from hipforge.ops.fp8_skinny_gemm.kernels.row_stream import ROW_STREAM
from hipforge.ops.fp8_skinny_gemm.kernels.scaled_mm import SCALED_MM
from hipforge.ops.fp8_skinny_gemm.kernels.wave_split import WAVE_SPLIT

KERNELS = (WAVE_SPLIT, QUEUE, ROW_STREAM, SCALED_MM)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None,
    taken: Accepted | Choice,
    *,
    deterministic: bool = True,
) -> torch.Tensor:
    """Run the decided kernel on checked operands; a layout that it does not take is copied."""
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float16, device=a.device) if output is None else output
    parameters = taken.configuration.values()
    BY_NAME[taken.kernel].launch(out, a, b, scale, output is not None, deterministic, *parameters)
    return out
