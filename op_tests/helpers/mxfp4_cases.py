"""Data for the MXFP4 kernels and an oracle that is independent of hipforge's own quantiser and reference."""

from __future__ import annotations

import torch

from helpers import mxfp8_cases
from helpers.errors import assert_within
from helpers.mxfp8_cases import BLOCK, E8M0, embedded
from hipforge.ops.reference import mxfp4_mm_packed, quantize_mxfp4, shuffle_scale, shuffle_weight

# e2m1: a sign, two bits of exponent, one of mantissa.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
CODE_OF_ONE = 2
# (M, N, K, seed) of the MXFP4 GEMM task: its tests and its benchmarks.
TASKS = [(8, 2112, 7168, 124), (16, 3072, 1536, 6635), (64, 3072, 1536, 45), (256, 2880, 512, 78)]
BENCH = [
    (4, 2880, 512, 1),
    (16, 2112, 7168, 1),
    (32, 4096, 512, 1),
    (32, 2880, 512, 1),
    (64, 7168, 2048, 1),
    (256, 3072, 1536, 1),
]


class Operands(mxfp8_cases.Operands):
    """One problem as raw bytes: xq [M, K/2], xs [M, K/32], wq [N, K/2], ws [N, K/32], all uint8 and in plain order."""

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.xq.shape[0], self.wq.shape[0], 2 * self.xq.shape[1]

    def args(self, shuffled: bool = False, pad: int = 255) -> tuple[torch.Tensor, ...]:
        """The four tensors; shuffled scales are padded with NaNs, which no result may show."""
        weights = (shuffle_weight(self.wq), shuffle_scale(self.ws, pad)) if shuffled else (self.wq, self.ws)
        return self.xq, self.xs, *weights


def dequantize(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((payload & 15, payload >> 4), -1).reshape(len(payload), -1)
    return E2M1[codes.long()] * E8M0[scales.long()].repeat_interleave(BLOCK, dim=1)


def oracle(case: Operands) -> torch.Tensor:
    """X W^T in float64. Products are exact; sums are exact wherever a test compares bits."""
    return dequantize(case.xq, case.xs) @ dequantize(case.wq, case.ws).T


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte, the even one in the low nibble."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def random_codes(m: int, n: int, k: int, seed: int = 0, scales: tuple[int, int] = (126, 128)) -> Operands:
    """Every code, and scale bytes drawn per row and block from ``scales`` (both ends included).

    float32 accumulation of these is exact in any order: products are multiples of a quarter of the smallest product of
    scales, and no partial sum exceeds K * 36 times the largest.
    """
    low, high = scales
    assert k * 36 * 4 * 4 ** (high - low) <= 2**24, "sums would not fit in float32's 24 bits"
    generator = torch.Generator().manual_seed(seed)

    def side(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
        return payload, torch.randint(low, high + 1, (rows, k // BLOCK), generator=generator, dtype=torch.uint8)

    return Operands(*side(m), *side(n))


def among_nans(case: Operands) -> tuple[Operands, torch.Tensor]:
    """The case with NaN scales in every other row and all around each tensor, and its oracle."""
    want = oracle(case)
    case.xs[1::2] = 255
    case.ws[1::2] = 255
    want[1::2] = want[:, 1::2] = float("nan")
    return Operands(*(embedded(tensor, 0xFF) for tensor in case.args())), want


def operands(m, n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).bfloat16()
    w = torch.randn(n, k, generator=generator).bfloat16()
    return (*quantize_mxfp4(x), *quantize_mxfp4(w)), (x, w)


def codes(m, n, k, scales, seed=0):
    """Random codes with scale bytes drawn from ``scales``, another one for every block."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows in (m, n):
        parts.append(torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8))
        choice = torch.randint(0, len(scales), (rows, k // 32), generator=generator)
        parts.append(torch.tensor(scales, dtype=torch.uint8)[choice])
    return tuple(parts)


def assert_close(got, parts, k):
    """One bf16 rounding (half a step: 2^-8 relative, 2^-134 where subnormal) and K rounded fp32 additions."""
    xq, xs, wq, ws = parts
    want = mxfp4_mm_packed(xq, xs, wq, ws, torch.float64, torch.float64)
    magnitude = mxfp4_mm_packed(xq & 0x77, xs, wq & 0x77, ws, torch.float64, torch.float64)
    assert got.dtype == torch.bfloat16
    assert_within(got, want, 2.0**-8 * want.abs() + 2.0**-134 + k * 2.0**-24 * magnitude)
