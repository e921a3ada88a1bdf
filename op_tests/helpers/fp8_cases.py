"""Operands of products of fp8 matrices with scales of any kind, and their oracle in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import torch

from helpers.mxfp8_cases import E8M0, FORMATS, embedded, nan_byte
from hipforge.ops.reference import dequantize_mxfp8
from hipforge.ops.reference.fp8 import Scales

# kind -> (rows of W, elements of K) that share a scale; None for all of K
BLOCKS = {"rows": (1, None), "tensor": (None, None), "blocks": (128, 128), "blocks_e8m0": (128, 128), "mx": (32, 32)}
NUMBERS = {"rows": 0, "tensor": 0, "blocks": 1, "blocks_e8m0": 2, "mx": 3}
KINDS = tuple(BLOCKS)


def dequantised(q: torch.Tensor, scale: torch.Tensor, kind: Scales) -> torch.Tensor:
    """Activations as numbers, float64."""
    if kind is Scales.MX_SHARED:
        return dequantize_mxfp8(q, scale, torch.float64)
    if kind is Scales.ONCE:
        return q.double() * scale.double()[:, None]
    factor = scale.double() if scale.dtype == torch.float32 else 2.0 ** (scale.double() - 127)
    return q.double() * factor.repeat_interleave(128, 1)[:, : q.shape[1]]


@dataclass(frozen=True)
class Case:
    """fp8 bytes [M, K] and [N, K] and their scales."""

    arch: str
    kind: str
    xq: torch.Tensor
    xs: torch.Tensor
    wq: torch.Tensor
    ws: torch.Tensor

    def typed(self) -> tuple[torch.Tensor, ...]:
        own = torch.float8_e4m3fn if self.arch == "gfx950" else torch.float8_e4m3fnuz
        return self.xq.view(own), self.xs, self.wq.view(own), self.ws

    def oracle(self) -> torch.Tensor:
        """X W^T in float64, from the bytes' definition."""

        def dequantized(payload: torch.Tensor, scales: torch.Tensor, rows: int | None) -> torch.Tensor:
            values = E8M0[scales.long()] if scales.dtype == torch.uint8 else scales.double()
            count, k = payload.shape
            row = torch.arange(count) // rows if rows else torch.zeros(count, dtype=torch.long)
            block = BLOCKS[self.kind][1]
            column = torch.arange(k) // block if block else torch.zeros(k, dtype=torch.long)
            grid = values.reshape(-1, values.shape[1] if block else 1)
            return FORMATS[self.arch][payload.long()] * grid[row][:, column]

        rows = BLOCKS[self.kind][0]
        x = dequantized(self.xq, self.xs, None if self.kind == "tensor" else 1)
        return x @ dequantized(self.wq, self.ws, rows).T


def case_of(kind: str, m: int, n: int, k: int, arch: str, seed: int = 0) -> Case:
    """Integers of -4 to 4 and powers of two as scales: float32 sums are exact in any order, so results compare in bits.

    Products are multiples of 2^-4 of at most 16 * 2^4, and K of them stay below 2^24 times the smallest for K <= 4096.
    """
    assert k <= 4096
    generator = torch.Generator().manual_seed(seed)
    table = torch.tensor([int((FORMATS[arch] == value).nonzero()[0]) for value in range(-4, 5)], dtype=torch.uint8)
    (rows, block) = BLOCKS[kind]

    def payload(count: int) -> torch.Tensor:
        return table[torch.randint(0, 9, (count, k), generator=generator)]

    def scale(count: int, shared: int | None) -> torch.Tensor:
        groups = ceil(count / shared) if shared else 1
        shape = (groups, ceil(k / block)) if block else (groups,)
        exponent = torch.randint(-2, 3, shape, generator=generator)
        return (exponent + 127).to(torch.uint8) if kind in ("mx", "blocks_e8m0") else torch.exp2(exponent.float())

    x_shared = None if kind == "tensor" else 1
    return Case(arch, kind, payload(m), scale(m, x_shared), payload(n), scale(n, rows))


def surrounded(case: Case) -> Case:
    """The same operands with bytes around them that would show in a result."""
    fill = nan_byte(case.arch) | 0x80

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        return embedded(tensor.view(torch.uint8), fill).view(tensor.dtype)

    return replace(case, xq=inside(case.xq), xs=inside(case.xs), wq=inside(case.wq), ws=inside(case.ws))
