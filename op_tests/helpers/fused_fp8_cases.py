"""Data and the two-sided comparison shared by the tests of the fused FP8 kernels.

Their results are monotone in the few numbers that the device computes by an instruction of bounded error (rsqrt, exp2)
or in another order than torch (a sum). So a code must lie between those that the two ends of that number's error
interval give, by exactly the same roundings; where both ends give one code, it must be that one bit for bit.
"""

from __future__ import annotations

import torch

U = 2.0**-24  # half a unit in the last place of 1.0 in fp32: the relative error of one rounding


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int16)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit; NaNs of any sign and payload are equal."""
    assert got.shape == want.shape and got.dtype == want.dtype
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(raw(got)[~nan], raw(want)[~nan])


def assert_between(got: torch.Tensor, one: torch.Tensor, other: torch.Tensor, pinned: float) -> None:
    """``got`` lies between the two ends' results; at least the share ``pinned`` of the elements has one choice."""
    assert got.shape == one.shape and got.dtype == one.dtype
    nan = one.float().isnan()
    assert torch.equal(nan, other.float().isnan()) and torch.equal(nan, got.float().isnan())
    decided = (raw(one) == raw(other)) | nan
    assert decided.float().mean() >= pinned
    exact = decided & ~nan
    assert torch.equal(raw(got)[exact], raw(one)[exact])
    low, high = torch.minimum(one.float(), other.float()), torch.maximum(one.float(), other.float())
    assert bool((nan | ((low <= got.float()) & (got.float() <= high))).all())


def wrong_width(by_mnemonic: dict[str, int]) -> list[str]:
    """Return the vector-memory instructions that were executed and do not move 16 bytes a lane."""
    prefixes = ("global_", "buffer_", "flat_", "scratch_")
    return [name for name in by_mnemonic if name.startswith(prefixes) and "dwordx4" not in name]
