"""Number formats in numpy and float64, written from their definitions: what the oracles read, and how results round.

An oracle knows a result only up to the roundings that the op may make on the way, so it states the least and the
largest real value, and what is returned must lie between the two as the format rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
F32 = 2.0**-24  # the largest relative error of one rounding to float32


def _table(exponent_bits: int, mantissa_bits: int, bias: int, kind: str) -> Array:
    values = np.zeros(256)
    for code in range(256):
        exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
        if exponent:
            size = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        else:
            size = mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
        values[code] = -size if code & 0x80 else size
    if kind == "fn":
        values[[0x7F, 0xFF]] = np.nan
    elif kind == "uz":
        values[0x80] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


E4M3FN, E4M3FNUZ = _table(4, 3, 7, "fn"), _table(4, 3, 8, "uz")
E5M2, E5M2FNUZ = _table(5, 2, 15, "ieee"), _table(5, 2, 16, "uz")
TABLES = {
    torch.float8_e4m3fn: E4M3FN, torch.float8_e4m3fnuz: E4M3FNUZ, torch.float8_e5m2: E5M2,
    torch.float8_e5m2fnuz: E5M2FNUZ,
}  # fmt: skip
FP8_MAX = {dtype: float(np.nanmax(np.where(np.isinf(table), np.nan, table))) for dtype, table in TABLES.items()}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def raw_bytes(x: torch.Tensor) -> Array:
    """The bits of one-byte elements as uint8."""
    return plain(x).view(torch.uint8).clone(memory_format=torch.contiguous_format).numpy()


def plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage holds what its elements are."""
    x = x.as_subclass(torch.Tensor)
    return (x.clone() if x._is_zerotensor() else x).detach().resolve_conj().resolve_neg()


def values(x: torch.Tensor, fp8: torch.dtype | None = None) -> Array:
    """The elements of a tensor as float64 (integers stay integers); ``fp8`` says what uint8 bytes mean."""
    x = plain(x)
    if x.dtype in TABLES or (x.dtype == torch.uint8 and fp8 is not None):
        return TABLES[x.dtype if x.dtype in TABLES else fp8][raw_bytes(x)]  # type: ignore[index]  # fp8 is given where x is bytes
    if x.dtype == torch.float8_e8m0fnu:
        return e8m0(x)
    if x.dtype == torch.bfloat16:
        bits = x.contiguous().view(torch.int16).numpy().astype(np.int64) << 16
        return bits.astype(np.int32).view(np.float32).astype(np.float64)
    return x.numpy().astype(np.float64) if x.dtype.is_floating_point else x.numpy()


def e8m0(x: torch.Tensor) -> Array:
    """The values of scale bytes; 255 is NaN."""
    codes = raw_bytes(x).astype(np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))


def fp4_values(packed: torch.Tensor) -> Array:
    """The elements of packed e2m1 codes, the even one in the low nibble."""
    codes = raw_bytes(packed)
    return FP4[np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])]


@dataclass(frozen=True)
class Format:
    """A binary format: bits of mantissa, exponents of the least normal and the largest number, and what is above it."""

    mantissa: int
    least: int
    largest: float
    saturates: bool = False

    def round(self, x: Array) -> Array:
        """The nearest number, ties to even."""
        x = np.asarray(x, dtype=np.float64)
        _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
        step = np.ldexp(1.0, np.maximum(exponent - 1, self.least) - self.mantissa)
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = np.where(np.isfinite(x), np.rint(x / step) * step, x)
        if self.saturates:
            return np.clip(rounded, -self.largest, self.largest)
        return np.where(np.abs(rounded) > self.largest, np.copysign(np.inf, rounded), rounded)


F16_FORMAT = Format(10, -14, 65504.0)
BF16_FORMAT = Format(7, -126, float(np.ldexp(2 - 2.0**-7, 127)))
F32_FORMAT = Format(23, -126, float(np.finfo(np.float32).max))
E2M1_FORMAT = Format(1, 0, 6.0, saturates=True)
FORMATS = {
    torch.float16: F16_FORMAT, torch.bfloat16: BF16_FORMAT, torch.float32: F32_FORMAT,
    torch.float8_e4m3fn: Format(3, -6, 448.0, True), torch.float8_e4m3fnuz: Format(3, -7, 240.0, True),
    torch.float8_e5m2: Format(2, -14, 57344.0, True), torch.float8_e5m2fnuz: Format(2, -15, 57344.0, True),
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """The least and the largest value that something may have, elementwise; NaN in either where it must be NaN."""

    low: Array
    high: Array

    @staticmethod
    def of(x: Array, error: Array | float = 0.0) -> Span:
        """x plus or minus an absolute error."""
        with np.errstate(all="ignore"):
            error = np.where(np.isinf(x), 0.0, error)
            return Span(x - error, x + error)

    def map(self, function: Callable[[Array], Array]) -> Span:
        """The span of a function that rises or falls throughout."""
        with np.errstate(all="ignore"):
            a, b = function(self.low), function(self.high)
        return Span(np.minimum(a, b), np.maximum(a, b))

    def widened(self, relative: Array | float, absolute: float = 0.0) -> Span:
        """The span after an operation of such errors."""
        with np.errstate(all="ignore"):
            down, up = (np.where(np.isinf(x), 0.0, np.abs(x) * relative + absolute) for x in (self.low, self.high))
            return Span(self.low - down, self.high + up)

    def times(self, factor: Array) -> Span:
        """The span of the product with exact values."""
        with np.errstate(invalid="ignore"):
            a, b = self.low * factor, self.high * factor
        return Span(np.minimum(a, b), np.maximum(a, b))

    def plus(self, addend: Array) -> Span:
        """The span of the sum with exact values."""
        return Span(self.low + addend, self.high + addend)

    def rounded(self, dtype: torch.dtype) -> Span:
        """The span after rounding to a dtype."""
        return self.map(FORMATS[dtype].round)

    def complaint(self, name: str, got: Array, judged: Array | bool = True) -> str | None:
        """What is wrong with ``got``, or None; elements outside ``judged`` may be anything."""
        if got.shape != self.low.shape:
            return f"{name} has shape {got.shape} instead of {self.low.shape}"
        nan = np.isnan(self.low) | np.isnan(self.high)
        with np.errstate(invalid="ignore"):
            right = np.where(nan, np.isnan(got), (got >= self.low) & (got <= self.high))
        wrong = ~right & judged
        if not wrong.any():
            return None
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{name}{list(at)} = {got[at]!r}, not within [{self.low[at]!r}, {self.high[at]!r}]; {wrong.sum()} such"


def same(name: str, got: Array, wanted: Array) -> str | None:
    """What differs between two arrays of numbers, NaN being equal to NaN; or None."""
    if got.shape != wanted.shape:
        return f"{name} has shape {got.shape} instead of {wanted.shape}"
    wrong = ~((got == wanted) | ((got != got) & (wanted != wanted)))
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{name}{list(at)} = {got[at]!r} instead of {wanted[at]!r}; {wrong.sum()} such"
