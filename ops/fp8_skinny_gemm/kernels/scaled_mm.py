"""The skinny fp8 GEMM of sm_90 by ``torch._scaled_mm``, whose tiles are faster from some rows on."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core.kernel import Configuration, Kernel
from hipforge.ops.fp8_skinny_gemm.raw import ALIGNMENT, HOPPER, MAX_BYTES, column_major, row_major

_ones: dict[torch.device, torch.Tensor] = {}


def _scale_of_b(device: torch.device) -> torch.Tensor:
    """Return a one that is kept, but for one whose memory is a graph's."""
    one = _ones.get(device)
    if one is None:
        one = torch.ones((), device=device)
        if not torch.cuda.is_current_stream_capturing():
            _ones[device] = one
    return one


def _launch(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, accumulate: bool, deterministic: bool
) -> None:
    left, right = row_major(a, out), column_major(b, out, MAX_BYTES)
    scales = scale.reshape(()), _scale_of_b(out.device)
    if accumulate:  # rounded once
        product = torch._scaled_mm(left, right, *scales, out_dtype=torch.float32)
        torch.add(product, out, out=out)
    else:
        torch._scaled_mm(left, right, *scales, out_dtype=torch.float16, out=out)


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    return [] if _refusal({}, cell.key, arch) else [{}]


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    return f"N of a multiple of {ALIGNMENT}" if key[1] % ALIGNMENT else None


SCALED_MM = Kernel(
    "skinny_scaled_mm",
    archs=(HOPPER,),
    parameters=MappingProxyType({}),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
)
