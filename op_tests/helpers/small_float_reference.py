"""fp8, bf8, fp6, bf6 and fp4 by their definition: values of torch or of the format, rounded by search."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from .emulator_asm import LANES


@dataclass(frozen=True)
class Format:
    """A small float by its table of non-negative codes; index = code."""

    bits: int
    values: np.ndarray  # all codes, as float64
    top: int  # largest finite positive code
    overflow: int  # code of a positive overflow when it does not saturate
    fnuz: bool = False


@functools.cache
def small(name: str, arch: str = "gfx950") -> Format:
    if name in ("fp8", "bf8"):
        suffix = "fnuz" if arch == "gfx942" else ("fn" if name == "fp8" else "")
        dtype = getattr(torch, f"float8_{'e4m3' if name == 'fp8' else 'e5m2'}{suffix}")
        values = torch.arange(256).to(torch.uint8).view(dtype).double().numpy()
        top = int(np.nanargmax(np.where(np.isfinite(values), values, np.nan)))
        overflow = 0x80 if suffix == "fnuz" else top + 1
        return Format(8, values, top, overflow, suffix == "fnuz")
    exponent_bits, mantissa_bits, bias = {"fp6": (2, 3, 1), "bf6": (3, 2, 3), "fp4": (2, 1, 1)}[name]
    count = 1 << (exponent_bits + mantissa_bits)
    codes = np.arange(count)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    magnitude = (mantissa + (exponent > 0) * (1 << mantissa_bits)) * 2.0 ** (
        np.maximum(exponent, 1) - bias - mantissa_bits
    )
    return Format(exponent_bits + mantissa_bits + 1, np.concatenate([magnitude, -magnitude]), count - 1, count - 1)


def encode(fmt: Format, x: np.ndarray, saturate: bool) -> np.ndarray:
    """Round float64 to the nearest code, ties to even."""
    sign = np.signbit(x)
    magnitude = np.abs(x)
    table = fmt.values[: fmt.top + 1]
    low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, fmt.top)
    # Past the top the next value would be one step of the last binade further.
    step = table[-1] - table[-2]
    upper = np.append(table[1:], table[-1] + step)[low]
    below, above = magnitude - table[low], upper - magnitude
    code = np.where((below > above) | ((below == above) & (low % 2 == 1)), low + 1, low)
    code = np.where(np.isinf(magnitude) | (magnitude > upper), fmt.top + 1, code)
    over = code > fmt.top
    if fmt.bits < 8 or saturate:
        code = np.where(over, fmt.top, code)
        over = np.zeros_like(over)
    half = 1 << (fmt.bits - 1)
    if fmt.fnuz:
        return np.where(over, 0x80, np.where(code == 0, 0, code | sign * half))
    return np.where(over, fmt.overflow, code) | sign * half


def wide_values(kind: str, bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        if kind == "f32":
            return bits.astype(np.uint32).view(np.float32).astype(np.float64)
        if kind == "bf16":
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def wide_codes(kind: str, values: np.ndarray) -> np.ndarray:
    """float64 → the codes of a wide kind, one rounding."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if kind == "f32":
            return values.astype(np.float32).view(np.uint32)
        if kind == "f16":
            return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    # Values of small floats times powers of two: exact in f32 or subnormal there, where bf16 keeps 7 bits fewer.
    spacing = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-300))), -126) - 7)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.where(np.isfinite(values), np.round(values / spacing) * spacing, values)
        return rounded.astype(np.float32).view(np.uint32) >> 16


def random_wide(rng: np.random.Generator, kind: str, shape) -> np.ndarray:
    """Bit patterns around the range of the small formats, with zeros, ties, infinities and extremes; no NaN."""
    exponent = rng.integers(-24, 20, shape)
    mantissa = rng.integers(0, 16, shape) / 16 + rng.choice([0.0, 1 / 32, 1 / 64, 1 / 2**10], shape)
    values = np.ldexp(1 + mantissa, exponent) * rng.choice([-1.0, 1.0], shape)
    special = rng.choice([0.0, -0.0, np.inf, -np.inf, 448.0, -464.0, 465.0, 61440.0, 2.0**-10, 3 * 2.0**-11], shape)
    return wide_codes(kind, np.where(rng.random(shape) < 0.2, special, values)).astype(np.uint32)


def scale_factor(scale: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, (scale >> 23 & 255).astype(np.int64) - 127)


def random_scale(rng: np.random.Generator) -> np.ndarray:
    """f32 bits whose sign and mantissa must not matter."""
    bits = rng.integers(120, 136, LANES).astype(np.uint32) << 23 | rng.integers(0, 1 << 23, LANES).astype(np.uint32)
    return bits | rng.integers(0, 2, LANES).astype(np.uint32) << 31


def same_codes(got: np.ndarray, want: np.ndarray, fmt: Format) -> bool:
    """Equal codes, any NaN for NaN."""
    nan = np.isnan(fmt.values[want])
    return bool(((got == want) | (nan & np.isnan(fmt.values[got]))).all())


def same_wide(got: np.ndarray, want: np.ndarray, kind: str) -> bool:
    nan = np.isnan(wide_values(kind, want))
    return bool(((got == want) | (nan & np.isnan(wide_values(kind, got)))).all())
