"""Operands and references of the skinny fp8 GEMM's tests."""

from __future__ import annotations

import torch

from hipforge import devices
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.fp8_skinny_gemm.kernels.wave_split import ROWS
from hipforge.ops.reference.skinny import skinny_gemm as reference

ARCH = devices.current().default_arch
FP8 = ops.FORMATS[ARCH]
OTHER = next(dtype for dtype in ops.FORMATS.values() if dtype != FP8)
ONE = torch.tensor([1.0])
NAN_BYTE = 0x80 if ARCH == "gfx942" else 0x7F
# Rows and columns of the kernel that splits k over waves: one to five tiles, the last whole or in part.
WAVE_SPLIT_SHAPES = tuple((r, c) for r in ROWS for c in (8, 16, 24, 32, 64) if c <= 4 * max(r, 8))


def integers(m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands in -2..2: sums of at most 3232 products are below 2^24, and of these sizes below 2^11: exact in fp16."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-2, 3, (m, k), generator=generator).float().to(FP8)
    b = torch.randint(-2, 3, (n, k), generator=generator).float().to(FP8).t()
    return a, b


def normals(m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands of N(0, 1), and a scale that gives their product that distribution too."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).to(FP8)
    return a, torch.randn(n, k, generator=generator).to(FP8).t(), torch.tensor([k**-0.5])


def exact(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor = ONE, output: torch.Tensor | None = None
) -> torch.Tensor:
    """The product in float64, which must be a float16 value everywhere."""
    want = reference(a, b, scale, output, torch.float64, torch.float64)
    assert torch.equal(want.half().double(), want), "the data does not test exactness"
    return want.half()
