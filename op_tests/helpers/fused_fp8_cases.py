"""Data and the two-sided comparison shared by the tests of the fused FP8 kernels.

Their results are monotone in the few numbers that the device computes by an instruction of bounded error (rsqrt, exp2)
or in another order than torch (a sum). So a code must lie between those that the two ends of that number's error
interval give, by exactly the same roundings; where both ends give one code, it must be that one bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from helpers.errors import relative
from hipforge.ops import reference
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference.fp8 import quantize_fp8
from hipforge.ops.reference.fp8_static import to_fp8_static

FP8 = fp8_dtypes("cpu")[0]
LARGEST = torch.finfo(FP8).max
DTYPES = (torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")
# Formats whose scales the launch chooses, as the dynamic ops are asked for them.
DYNAMIC = {
    "rows": {"out_format": "rows"},
    "blocks": {"out_format": "blocks"},
    "blocks_e8m0": {"out_format": "blocks", "e8m0": True},
}
U = 2.0**-24  # half a unit in the last place of 1.0 in fp32: the relative error of one rounding


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values one element off a boundary of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def quantiser(form: str, scale: torch.Tensor, fp8_max: float | None = None) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Results by the formats' definitions: fp8 with a static scale, mx, or one of the dynamic ones."""
    if form == "fp8":
        return lambda y: (to_fp8_static(y.float(), scale, FP8, fp8_max),)
    if form == "mx":
        return lambda y: reference.quantize_mxfp8(y, FP8)
    return partial(quantize_fp8, dtype=FP8, **DYNAMIC[form])


def all_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit; NaNs of any sign and payload are equal."""
    assert got.shape == want.shape and got.dtype == want.dtype
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(raw(got)[~nan], raw(want)[~nan])


def assert_between(got: torch.Tensor, one: torch.Tensor, other: torch.Tensor, pinned: float) -> None:
    """``got`` lies between the two ends' results; at least the share ``pinned`` of the elements has one choice."""
    assert got.shape == one.shape and got.dtype == one.dtype
    relative(got, one)  # told to who listens: the ends may both be right
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
