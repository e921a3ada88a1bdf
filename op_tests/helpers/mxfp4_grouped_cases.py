"""Data and an oracle for the MoE grouped GEMM with MXFP4 weights and MX-FP8 activations."""

from __future__ import annotations

import torch

from helpers.mxfp4_cases import dequantize as dequantize_fp4
from helpers.mxfp8_cases import FORMATS, SCALE_NAN
from helpers.mxfp8_grouped_cases import Moe, exact
from hipforge.ops.core.fp8 import fp8_dtypes

OWN = fp8_dtypes("cpu")[0]


def case_of(
    owners: tuple[int, ...], experts: int, n: int, k: int, a_div: int = 1, block_m: int = 20, weighted: bool = False
) -> Moe:
    """Integers as activations and every e2m1 code, the negative zero included; sums are exact in float32."""
    case = exact(owners, experts, n, k, a_div, block_m, weighted, scales=(126, 128))
    generator = torch.Generator().manual_seed(n + k)
    return case.but(w=torch.randint(0, 256, (experts, n, k // 2), generator=generator, dtype=torch.uint8))


def operands(case: Moe) -> tuple[torch.Tensor, ...]:
    return case.a.view(OWN), case.a_scale, case.w, case.w_scale, *case.sorted()


def oracle(case: Moe, arch: str, bias: torch.Tensor | None = None, elsewhere: float = 0.0) -> torch.Tensor:
    a = FORMATS[arch][case.a.long()] * torch.exp2(case.a_scale.double() - 127).repeat_interleave(32, dim=1)
    a[(case.a_scale == SCALE_NAN).repeat_interleave(32, dim=1)] = torch.nan
    want = torch.full((case.slots, case.w.shape[1]), elsewhere, dtype=torch.float64)
    for owner in {owner for owner in case.owners if owner >= 0}:
        w = dequantize_fp4(case.w[owner], case.w_scale[owner])
        for slot in (slot for slot, own in enumerate(case.owners) if own == owner):
            want[slot] = w @ a[slot // case.a_div] + (0 if bias is None else bias[owner].double())
            want[slot] *= 1 if case.weights is None else case.weights[slot].double()
    return want


def counts(case: Moe) -> tuple[int, int, int]:
    return case.slots, case.block_m, case.a_div
