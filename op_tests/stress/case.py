"""What a trial of one op is: how to make arguments that are good, and how to judge what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from stress.floats import Array, plain

T = TypeVar("T")
Arguments = dict[str, Any]


class Rng:
    """The random choices of one call, reproducible from the seed of the run and the number of the call."""

    def __init__(self, *seed: int) -> None:
        self.numbers = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both possible."""
        return int(self.numbers.integers(low, high + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.integer(0, len(items) - 1)]

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return bool(self.numbers.random() < probability)

    def maybe(self, probability: float, make: Callable[[], T]) -> T | None:
        """What ``make`` returns with a probability, else None."""
        return make() if self.chance(probability) else None

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, sigma: float = 1.0) -> torch.Tensor:
        """Normal numbers; now and then a few are zero, huge, tiny or not finite."""
        x = np.asarray(self.numbers.standard_normal(shape) * sigma, dtype=np.float32)
        if self.chance(0.1) and x.size:
            x.flat[self.numbers.integers(0, x.size, 3)] = self.pick((0.0, -0.0, 1e4, 1e-6, np.nan, np.inf))
        return torch.from_numpy(x).to(dtype)

    def finite(self, *shape: int, dtype: torch.dtype = torch.float32, sigma: float = 1.0) -> torch.Tensor:
        """Normal numbers."""
        return torch.from_numpy((self.numbers.standard_normal(shape) * sigma).astype(np.float32)).to(dtype)

    def codes(self, *shape: int, nan: Sequence[int] = ()) -> torch.Tensor:
        """Random bytes; those in ``nan`` are seldom among them."""
        codes = self.numbers.integers(0, 256, shape, dtype=np.uint8)
        if not self.chance(0.05):
            codes[np.isin(codes, list(nan))] = 0
        return torch.from_numpy(codes)

    def scales(self, *shape: int) -> torch.Tensor:
        """Bytes e8m0 near 1; now and then a few are anything."""
        scales = self.numbers.integers(118, 134, shape, dtype=np.uint8)
        if self.chance(0.1) and scales.size:
            scales.flat[self.numbers.integers(0, scales.size, 2)] = self.pick((0, 1, 100, 160, 254, 255))
        return torch.from_numpy(scales)

    def strided(self, x: torch.Tensor) -> torch.Tensor:
        """The same values, often with other strides or off any alignment."""
        if x.dim() < 2 or self.chance(0.7):
            return x
        if self.chance(0.5):
            wide = torch.zeros((*x.shape[:-1], x.shape[-1] + self.pick((1, 3, 16))), dtype=x.dtype)
            wide[..., : x.shape[-1]] = x
            return wide[..., : x.shape[-1]]
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    def as_scale_dtype(self, x: torch.Tensor) -> torch.Tensor:
        """Scale bytes in either dtype that ops take."""
        return x.view(torch.float8_e8m0fnu) if self.chance(0.3) else x


Judge = Callable[[Arguments, Any, Arguments], str | None]


@dataclass(frozen=True)
class Op:
    """One public op.

    Attributes:
        name: its name in the package.
        make: good arguments.
        judge: (the arguments before the call, the result, the arguments after it) -> what is wrong, or None. It may
            raise for arguments that mean nothing.
        writes: the arguments that the op may change.
        call: what is called, if it is not the package's attribute ``name``.
        fixed: arguments that stay good, because the trial itself uses them or the op does not.
        mistake: spoils good arguments as only this op's can be.
    """

    name: str
    make: Callable[[Rng], Arguments]
    judge: Judge
    writes: tuple[str, ...] = ()
    call: Callable[..., Any] | None = None
    fixed: tuple[str, ...] = ()
    mistake: Callable[[Rng, Arguments], Arguments] | None = None


def integers(x: torch.Tensor) -> Array:
    """Indices as int64."""
    if x.dtype.is_floating_point or x.dtype == torch.bool:
        raise ValueError(f"indices must be an integer tensor, got {x.dtype}")
    return plain(x).numpy().astype(np.int64)


def is_given(result: torch.Tensor, given: torch.Tensor | None, name: str) -> str | None:
    """Complain where a result is not the tensor that was given for it."""
    return None if given is None or result is given else f"the result is not {name}"


def first(*complaints: str | None) -> str | None:
    """The first complaint, or None."""
    return next((complaint for complaint in complaints if complaint), None)
