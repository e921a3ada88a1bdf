"""Data and an oracle for the small-M MX-FP8 kernels, independent of hipforge's own reference and quantiser."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from stress import floats

from helpers.errors import assert_within, relative

BLOCK = 32
SCALE_ONE = 127  # e8m0 byte of 2^0
SCALE_NAN = 255
PAYLOAD_NAN = 0x7F
PAYLOAD_MINUS_ZERO = 0x80

# A result of fp32 accumulation rounded once to bf16 (8 significant bits) is off by at most 2^-9 of itself; twice that
# leaves room for a rounding that tips over. The second term is for outputs that cancel: every product passes through
# fewer than 64 fp32 additions of values that sum to at most sqrt(K) rms < 100 rms, so the error stays below
# 64 * 2^-24 * 100 rms = 3.8e-4 rms = 0.1 * 2^-8 rms.
RELATIVE_BOUND = 2.0**-8
CANCELLATION_BOUND = 0.1 * 2.0**-8
# bf16 rounding errors are uniform within 2^-9 of the binade, so relF is 1.66e-3 on normal data whatever the kernel; a
# single wrong scale block in a thousand moves it past 3e-3.
MAX_RELF = 3e-3


@dataclass(frozen=True)
class Operands:
    """One problem as raw bytes: xq [M, K], xs [M, K/32], wq [N, K], ws [N, K/32], all uint8."""

    xq: torch.Tensor
    xs: torch.Tensor
    wq: torch.Tensor
    ws: torch.Tensor

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.xq.shape[0], self.wq.shape[0], self.xq.shape[1]

    def out(self) -> torch.Tensor:
        """An output full of a value that no test expects."""
        m, n, _ = self.mnk
        return torch.full((m, n), -123.0, dtype=torch.bfloat16)

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.xq, self.xs, self.wq, self.ws

    def but(self, **changes: torch.Tensor) -> Operands:
        return replace(self, **changes)


E4M3FN, E4M3FNUZ = (torch.from_numpy(table) for table in (floats.E4M3FN, floats.E4M3FNUZ))
FORMATS = {"gfx950": E4M3FN, "gfx942": E4M3FNUZ}
E8M0 = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], dtype=torch.float64)
BYTE_OF_INTEGER = {
    int(value): byte for byte, value in reversed(list(enumerate(E4M3FN.tolist()))) if value.is_integer()
}  # of the two zeros, +0


def dequantize(payload: torch.Tensor, scales: torch.Tensor, arch: str = "gfx950") -> torch.Tensor:
    return FORMATS[arch][payload.long()] * E8M0[scales.long()].repeat_interleave(BLOCK, dim=1)


def oracle(case: Operands, arch: str = "gfx950") -> torch.Tensor:
    """X W^T in float64. Products are exact; sums are exact wherever a test compares bits."""
    return dequantize(case.xq, case.xs, arch) @ dequantize(case.wq, case.ws, arch).T


def nan_byte(arch: str) -> int:
    """A NaN in the architecture's own e4m3."""
    return PAYLOAD_NAN if arch == "gfx950" else PAYLOAD_MINUS_ZERO


def integers(m: int, n: int, k: int, seed: int = 0, scales: tuple[int, int] = (125, 129)) -> Operands:
    """Integers of -4 to 4, scale bytes drawn per row and block from ``scales`` (both ends included).

    fp32 accumulation of these is exact in any order, so the result must be the correctly rounded one: products are
    multiples of the smallest product of scales, and no partial sum exceeds K * 16 times the largest.
    """
    low, high = scales
    assert k * 16 * 4 ** (high - low) <= 2**24, "sums would not fit in fp32's 24 bits"
    generator = torch.Generator().manual_seed(seed)
    table = torch.tensor([BYTE_OF_INTEGER[value] for value in range(-4, 5)], dtype=torch.uint8)

    def payload(rows: int) -> torch.Tensor:
        return table[torch.randint(0, 9, (rows, k), generator=generator)]

    def scale(rows: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (rows, k // BLOCK), generator=generator, dtype=torch.uint8)

    return Operands(payload(m), scale(m), payload(n), scale(n))


def normal(m: int, n: int, k: int, seed: int = 0) -> Operands:
    """x = 0.5 randn and w = 0.1 randn, quantised with the smallest scale that does not clip (448)."""
    generator = torch.Generator().manual_seed(seed)

    def quantize(rows: int, width: float) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.randn(rows, k // BLOCK, BLOCK, generator=generator) * width
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).double() / 448)).clamp(-127, 127)
        payload = (blocks.double() * torch.exp2(-exponent)).float().clamp(-448, 448).to(torch.float8_e4m3fn)
        return payload.reshape(rows, k).view(torch.uint8), (exponent.squeeze(-1) + 127).to(torch.uint8)

    return Operands(*quantize(m, 0.5), *quantize(n, 0.1))


def assert_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """``got`` bf16 equals the correctly rounded ``want`` (float64), NaN where that is NaN."""
    expected = want.to(torch.bfloat16)
    differs = (got != expected) & ~(got.isnan() & expected.isnan())
    assert not differs.any(), (
        f"{int(differs.sum())} of {got.numel()} outputs differ, first at {differs.nonzero()[0].tolist()}: "
        f"got {got[differs][0].item()}, want {expected[differs][0].item()}"
    )


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both bounds for real data: relative Frobenius error, and every element."""
    error = relative(got, want)
    assert error <= MAX_RELF, f"relF {error:.2e} > {MAX_RELF:.0e}"
    rms = want.square().mean().sqrt()
    assert_within(got, want, RELATIVE_BOUND * want.abs() + CANCELLATION_BOUND * rms)


def embedded(tensor: torch.Tensor, fill: int, margin: int = 64) -> torch.Tensor:
    """The same bytes, contiguous, inside a larger buffer whose other bytes are ``fill``; starts at a multiple of 16."""
    flat = torch.full((tensor.numel() + 2 * margin,), fill, dtype=torch.uint8)
    inside = flat[margin : margin + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def among_nans(case: Operands, arch: str = "gfx950") -> tuple[Operands, torch.Tensor]:
    """The case with NaN payloads and NaN scales in every other row and all around each tensor, and its oracle."""
    want = oracle(case, arch)
    for payload, scales in ((case.xq, case.xs), (case.wq, case.ws)):
        payload[1::2] = nan_byte(arch)
        scales[1::2] = SCALE_NAN
    want[1::2] = want[:, 1::2] = float("nan")
    return Operands(*(embedded(tensor, nan_byte(arch) | 0x80) for tensor in case.args())), want


def bias_for(case: Operands, arch: str = "gfx950") -> tuple[torch.Tensor, torch.Tensor]:
    """A bias for which adding it after a rounding would show, and the oracle with it."""
    bias = (torch.arange(case.mnk[1]) * 0.37 + 1e-3).to(torch.bfloat16)
    want = oracle(case, arch) + bias.double()
    twice = oracle(case, arch).to(torch.bfloat16) + bias
    assert (want.to(torch.bfloat16) != twice).any(), "rounding twice would pass"
    return bias, want
