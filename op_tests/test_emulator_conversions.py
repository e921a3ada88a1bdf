"""Every conversion instruction of the small floats, assembled by LLVM and run, against tables built here.

The references share nothing with the emulator: fp8 values are torch's, fp6 and fp4 values come from their definition,
and rounding is a search for the nearest table entry.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from hipforge import emulator

from .emulator_asm import LANES, Instruction, assemble, execute
from .exec_registry import base

# --- reference formats ------------------------------------------------------------------------------------------------


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
    rounded = np.where(np.isfinite(values), np.round(values / spacing) * spacing, values)
    with np.errstate(over="ignore", invalid="ignore"):
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


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An instruction and a check of its result: check(rng, run) calls run(inputs, old) as often as it likes."""

    arch: str
    instruction: Instruction
    check: Callable

    @property
    def id(self) -> str:
        return f"{self.instruction.text.split()[0]}-{self.instruction.name[-24:]}-{self.arch}"


def selection(count: int, which: int) -> str:
    """op_sel text for the destination byte (count 4) or half (count 2)."""
    return f"op_sel:[0,0,{which & 1},{which >> 1}]" if count == 4 else f"op_sel:[0,0,0,{which}]"


def put(old: np.ndarray, field: np.ndarray, bits: int, which: int) -> np.ndarray:
    mask = np.uint32(((1 << bits) - 1) << (bits * which))
    return (old & ~mask) | field.astype(np.uint32) << np.uint32(bits * which)


def field(row: np.ndarray, bits: int, which: int) -> np.ndarray:
    return row >> np.uint32(bits * which) & np.uint32((1 << bits) - 1)


def pack_cases() -> list[Case]:
    """Two values to two bytes, RNE: unscaled from f32, scaled from f32, f16 and bf16; both overflow modes."""
    cases = []
    for name in ("fp8", "bf8"):
        for half in (0, 1):
            for overflow in (0, 1):
                for arch in ("gfx950", "gfx942"):
                    fmt = small(name, arch)

                    def unscaled(rng, run, fmt=fmt, half=half, overflow=overflow):
                        a, b = random_wide(rng, "f32", LANES), random_wide(rng, "f32", LANES)
                        old = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                        got = run([a[None], b[None]], old[None])[0]
                        assert (field(got, 16, 1 - half) == field(old, 16, 1 - half)).all()
                        for i, source in enumerate((a, b)):
                            want = encode(fmt, wide_values("f32", source), bool(overflow))
                            assert same_codes(field(field(got, 16, half), 8, i), want, fmt)

                    text = f"v_cvt_pk_{name}_f32 {{d}}, {{a}}, {{b}} {selection(2, half).replace('0,0,0', '0,0')}"
                    cases.append(Case(arch, Instruction(text, (1, 1), 1, overflow), unscaled))
                for kind in ("f32", "f16", "bf16"):
                    fmt = small(name)

                    def scaled(rng, run, fmt=fmt, half=half, overflow=overflow, kind=kind):
                        scale = random_scale(rng)
                        old = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                        pair = [random_wide(rng, kind, LANES), random_wide(rng, kind, LANES)]
                        sources = [pair[0][None], pair[1][None]] if kind == "f32" else [(pair[0] | pair[1] << 16)[None]]
                        got = run([*sources, scale[None]], old[None])[0]
                        assert (field(got, 16, 1 - half) == field(old, 16, 1 - half)).all()
                        for i in range(2):
                            want = encode(fmt, wide_values(kind, pair[i]) / scale_factor(scale), bool(overflow))
                            assert same_codes(field(field(got, 16, half), 8, i), want, fmt)

                    if kind == "f32":
                        text = f"v_cvt_scalef32_pk_{name}_f32 {{d}}, {{a}}, {{b}}, {{c}} {selection(2, half)}"
                        widths: tuple[int, ...] = (1, 1, 1)
                    else:
                        text = f"v_cvt_scalef32_pk_{name}_{kind} {{d}}, {{a}}, {{b}} op_sel:[0,0,{half}]"
                        widths = (1, 1)
                    cases.append(Case("gfx950", Instruction(text, widths, 1, overflow), scaled))
    return cases


def fp4_encode_cases() -> list[Case]:
    cases = []
    fmt = small("fp4")
    for byte in range(4):
        for kind in ("f32", "f16", "bf16"):

            def check(rng, run, byte=byte, kind=kind):
                scale = random_scale(rng)
                old = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                pair = [random_wide(rng, kind, LANES), random_wide(rng, kind, LANES)]
                sources = [pair[0][None], pair[1][None]] if kind == "f32" else [(pair[0] | pair[1] << 16)[None]]
                got = run([*sources, scale[None]], old[None])[0]
                codes = [encode(fmt, wide_values(kind, x) / scale_factor(scale), True) for x in pair]
                assert (got == put(old, codes[0] | codes[1] << 4, 8, byte)).all()

            if kind == "f32":
                text = f"v_cvt_scalef32_pk_fp4_f32 {{d}}, {{a}}, {{b}}, {{c}} {selection(4, byte)}"
                cases.append(Case("gfx950", Instruction(text, (1, 1, 1), 1), check))
            else:
                text = f"v_cvt_scalef32_pk_fp4_{kind} {{d}}, {{a}}, {{b}} {selection(4, byte)}"
                cases.append(Case("gfx950", Instruction(text, (1, 1), 1), check))
    return cases


def decode_cases() -> list[Case]:
    """Bytes, words and fp4 bytes to wide values, plain and scaled: all 256 codes go through each."""
    cases = []
    for name in ("fp8", "bf8"):
        for arch in ("gfx950", "gfx942"):
            fmt = small(name, arch)

            def plain(rng, run, fmt=fmt, byte=0):
                for start in range(0, 256, LANES):
                    codes = np.arange(start, start + LANES, dtype=np.uint32)
                    noise = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                    got = run([put(noise, codes, 8, byte)[None]], noise[None])[0]
                    assert same_wide(got, wide_codes("f32", fmt.values[codes]), "f32")

            def pair(rng, run, fmt=fmt, word=0):
                for start in range(0, 256, LANES):
                    codes = np.arange(start, start + LANES, dtype=np.uint32)
                    other = rng.permutation(256)[:LANES].astype(np.uint32)
                    noise = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                    source = put(noise, codes | other << 8, 16, word)
                    got = run([source[None]], np.stack([noise, noise]))
                    assert same_wide(got[0], wide_codes("f32", fmt.values[codes]), "f32")
                    assert same_wide(got[1], wide_codes("f32", fmt.values[other]), "f32")

            text = f"v_cvt_f32_{name}"
            cases.append(Case(arch, Instruction(f"{text}_e32 {{d}}, {{a}}", (1,), 1), plain))
            for byte in range(4):
                sdwa = f"{text}_sdwa {{d}}, {{a}} src0_sel:BYTE_{byte}"
                cases.append(Case(arch, Instruction(sdwa, (1,), 1), functools.partial(plain, byte=byte)))
            text = f"v_cvt_pk_f32_{name}"
            cases.append(Case(arch, Instruction(f"{text}_e32 {{d}}, {{a}}", (1,), 2), pair))
            sdwa = f"{text}_sdwa {{d}}, {{a}} src0_sel:WORD_1"
            cases.append(Case(arch, Instruction(sdwa, (1,), 2), functools.partial(pair, word=1)))
        default = small(name)
        for kind in ("f32", "f16", "bf16"):
            for word in range(2):

                def scaled_pair(rng, run, fmt=default, kind=kind, word=word):
                    for start in range(0, 256, LANES):
                        codes = np.arange(start, start + LANES, dtype=np.uint32)
                        other = rng.permutation(256)[:LANES].astype(np.uint32)
                        noise = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                        scale = random_scale(rng)
                        outputs = 2 if kind == "f32" else 1
                        source = put(noise, codes | other << 8, 16, word)
                        got = run([source[None], scale[None]], np.stack([noise] * outputs))
                        halves = got if kind == "f32" else [field(got[0], 16, 0), field(got[0], 16, 1)]
                        for value, code in zip(halves, (codes, other), strict=True):
                            assert same_wide(value, wide_codes(kind, fmt.values[code] * scale_factor(scale)), kind)

                text = f"v_cvt_scalef32_pk_{kind}_{name} {{d}}, {{a}}, {{b}} op_sel:[{word},0,0]"
                cases.append(Case("gfx950", Instruction(text, (1, 1), 2 if kind == "f32" else 1), scaled_pair))
        for kind in ("f32", "f16"):
            for byte in range(4):
                for half in range(2 if kind == "f16" else 1):

                    def scaled_byte(rng, run, fmt=default, kind=kind, byte=byte, half=half):
                        for start in range(0, 256, LANES):
                            codes = np.arange(start, start + LANES, dtype=np.uint32)
                            noise = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                            scale = random_scale(rng)
                            got = run([put(noise, codes, 8, byte)[None], scale[None]], noise[None])[0]
                            if kind == "f16":
                                assert (field(got, 16, 1 - half) == field(noise, 16, 1 - half)).all()
                                got = field(got, 16, half)
                            assert same_wide(got, wide_codes(kind, fmt.values[codes] * scale_factor(scale)), kind)

                    text = f"v_cvt_scalef32_{kind}_{name} {{d}}, {{a}}, {{b}} op_sel:[{byte & 1},{byte >> 1},{half}]"
                    cases.append(Case("gfx950", Instruction(text, (1, 1), 1), scaled_byte))
    for kind in ("f32", "f16", "bf16"):
        for byte in range(4):

            def fp4_pair(rng, run, kind=kind, byte=byte):
                fmt = small("fp4")
                for start in range(0, 256, LANES):
                    codes = np.arange(start, start + LANES, dtype=np.uint32)
                    noise = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                    scale = random_scale(rng)
                    source = put(noise, codes, 8, byte)
                    got = run([source[None], scale[None]], np.stack([noise] * (2 if kind == "f32" else 1)))
                    halves = got if kind == "f32" else [field(got[0], 16, 0), field(got[0], 16, 1)]
                    for value, code in zip(halves, (codes & 15, codes >> 4), strict=True):
                        assert same_wide(value, wide_codes(kind, fmt.values[code] * scale_factor(scale)), kind)

            text = f"v_cvt_scalef32_pk_{kind}_fp4 {{d}}, {{a}}, {{b}} op_sel:[{byte & 1},{byte >> 1},0]"
            cases.append(Case("gfx950", Instruction(text, (1, 1), 2 if kind == "f32" else 1), fp4_pair))
    return cases


def six_bit(codes: np.ndarray) -> np.ndarray:
    """codes[32, lanes] → [6, lanes] dwords."""
    out = np.zeros((6, LANES), np.uint32)
    for item in range(32):
        wide = codes[item].astype(np.uint64) << np.uint64(6 * item % 32)
        out[6 * item // 32] |= (wide & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        if 6 * item % 32 > 26:
            out[6 * item // 32 + 1] |= (wide >> np.uint64(32)).astype(np.uint32)
    return out


def pack_wide(items: np.ndarray, kind: str) -> np.ndarray:
    return items if kind == "f32" else items[0::2] | items[1::2] << 16


def six_bit_cases() -> list[Case]:
    cases = []
    for name in ("fp6", "bf6"):
        fmt = small(name)
        for kind in ("f16", "bf16", "f32"):

            def decode(rng, run, fmt=fmt, kind=kind):
                codes = rng.integers(0, 64, (32, LANES)).astype(np.uint32)
                codes[:, 0], codes[:, 1] = np.arange(32), np.arange(32, 64)
                scale = random_scale(rng)
                rows = 32 if kind == "f32" else 16
                got = run([six_bit(codes), scale[None]], np.zeros((rows, LANES), np.uint32))
                want = wide_codes(kind, fmt.values[codes] * scale_factor(scale))
                assert (got == pack_wide(want, kind)).all()

            text = f"v_cvt_scalef32_pk32_{kind}_{name} {{d}}, {{a}}, {{b}}"
            cases.append(Case("gfx950", Instruction(text, (6, 1), 32 if kind == "f32" else 16), decode))

            def encode32(rng, run, fmt=fmt, kind=kind):
                items = random_wide(rng, kind, (32, LANES))
                scale = random_scale(rng)
                want = six_bit(encode(fmt, wide_values(kind, items) / scale_factor(scale), True))
                sources = [items[0::2], items[1::2]] if kind == "f32" else [pack_wide(items, kind)]
                got = run([*sources, scale[None]], np.zeros((6, LANES), np.uint32))
                assert (got == want).all()

            if kind == "f32":
                text = f"v_cvt_scalef32_2xpk16_{name}_f32 {{d}}, {{a}}, {{b}}, {{c}}"
                cases.append(Case("gfx950", Instruction(text, (16, 16, 1), 6), encode32))
            else:
                text = f"v_cvt_scalef32_pk32_{name}_{kind} {{d}}, {{a}}, {{b}}"
                cases.append(Case("gfx950", Instruction(text, (16, 1), 6), encode32))
    return cases


def next_random(state: np.ndarray) -> np.ndarray:
    return state << np.uint32(1) ^ np.where(state >> 31, np.uint32(197), np.uint32(0)).astype(np.uint32)


def encode_stochastic(fmt: Format, x: np.ndarray, random: np.ndarray, saturate: bool) -> np.ndarray:
    """The lower neighbour, or the upper one when fraction + random / 2^32 reaches one."""
    magnitude = np.abs(x)
    table = fmt.values[: fmt.top + 1]
    low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, fmt.top)
    step = table[-1] - table[-2]
    upper = np.append(table[1:], table[-1] + step)[low]
    with np.errstate(invalid="ignore"):
        fraction = (magnitude - table[low]) / (upper - table[low])
    up = np.floor(fraction * 2.0**32) + random >= 2.0**32
    code = np.where(up, low + 1, low)
    code = np.where(np.isinf(magnitude) | (magnitude >= upper), fmt.top + 1, code)
    rounded = np.where(code > fmt.top, np.inf, table[np.minimum(code, fmt.top)])
    return encode(fmt, np.copysign(rounded, x), saturate)


def stochastic_cases() -> list[Case]:
    cases = []
    for name in ("fp8", "bf8"):
        for byte in (0, 3):
            for arch in ("gfx950", "gfx942"):
                fmt = small(name, arch)

                def plain(rng, run, fmt=fmt, byte=byte):
                    x, random = random_wide(rng, "f32", LANES), rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                    old = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                    got = run([x[None], random[None]], old[None])[0]
                    want = encode_stochastic(fmt, wide_values("f32", x), random, False)
                    assert (got & ~np.uint32(255 << 8 * byte) == old & ~np.uint32(255 << 8 * byte)).all()
                    assert same_codes(field(got, 8, byte), want, fmt)

                text = f"v_cvt_sr_{name}_f32 {{d}}, {{a}}, {{b}} {selection(4, byte)}"
                cases.append(Case(arch, Instruction(text, (1, 1), 1), plain))
            for kind in ("f32", "f16", "bf16"):
                fmt = small(name)

                def scaled(rng, run, fmt=fmt, kind=kind, byte=byte):
                    x, random = random_wide(rng, kind, LANES), rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                    scale = random_scale(rng)
                    got = run([x[None], random[None], scale[None]], np.zeros((1, LANES), np.uint32))[0]
                    want = encode_stochastic(fmt, wide_values(kind, x) / scale_factor(scale), random, False)
                    assert same_codes(field(got, 8, byte), want, fmt)

                text = f"v_cvt_scalef32_sr_{name}_{kind} {{d}}, {{a}}, {{b}}, {{c}} {selection(4, byte)}"
                cases.append(Case("gfx950", Instruction(text, (1, 1, 1), 1), scaled))
    for kind in ("f32", "f16", "bf16"):

        def fp4(rng, run, kind=kind):
            pair = random_wide(rng, kind, (2, LANES))
            random, scale = rng.integers(0, 1 << 32, LANES, dtype=np.uint32), random_scale(rng)
            got = run([pack_wide(pair, kind), random[None], scale[None]], np.zeros((1, LANES), np.uint32))[0]
            values = wide_values(kind, pair) / scale_factor(scale)
            low = encode_stochastic(small("fp4"), values[0], random, True)
            high = encode_stochastic(small("fp4"), values[1], next_random(random), True)
            assert (got == (low | high << 4) << 16).all()

        text = f"v_cvt_scalef32_sr_pk_fp4_{kind} {{d}}, {{a}}, {{b}}, {{c}} {selection(4, 2)}"
        cases.append(Case("gfx950", Instruction(text, (2 if kind == "f32" else 1, 1, 1), 1), fp4))
        for name in ("fp6", "bf6"):
            fmt = small(name)

            def six(rng, run, fmt=fmt, kind=kind):
                items = random_wide(rng, kind, (32, LANES))
                random, scale = rng.integers(0, 1 << 32, LANES, dtype=np.uint32), random_scale(rng)
                got = run([pack_wide(items, kind), random[None], scale[None]], np.zeros((6, LANES), np.uint32))
                codes, state = [], random
                for item in items:
                    codes.append(encode_stochastic(fmt, wide_values(kind, item) / scale_factor(scale), state, True))
                    state = next_random(state)
                assert (got == six_bit(np.stack(codes))).all()

            text = f"v_cvt_scalef32_sr_pk32_{name}_{kind} {{d}}, {{a}}, {{b}}, {{c}}"
            cases.append(Case("gfx950", Instruction(text, (32 if kind == "f32" else 16, 1, 1), 6), six))
    for kind, table_bits in (("f16", 10), ("bf16", 7)):
        for half in range(2):

            def sixteen(rng, run, kind=kind, kept=table_bits, half=half):
                values = (rng.standard_normal(LANES) * 100).astype(np.float32)
                random = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                old = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
                got = run([values.view(np.uint32)[None], random[None]], old[None])[0]
                dropped = 23 - kept
                bits = values.view(np.uint32).astype(np.uint64) + (random >> np.uint32(32 - dropped))
                truncated = (bits & ~np.uint64((1 << dropped) - 1)).astype(np.uint32).view(np.float32)
                assert (field(got, 16, half) == wide_codes(kind, truncated.astype(np.float64))).all()
                assert (field(got, 16, 1 - half) == field(old, 16, 1 - half)).all()

            text = f"v_cvt_sr_{kind}_f32 {{d}}, {{a}}, {{b}} op_sel:[0,0,{half}]"
            cases.append(Case("gfx950", Instruction(text, (1, 1), 1), sixteen))
    return cases


def sixteen_bit_cases() -> list[Case]:
    def bf16_values(rng, run):
        for start in range(0, 1 << 16, LANES * 16):
            codes = np.arange(start, start + LANES, dtype=np.uint32)
            got = run([codes[None] | 0xABCD0000], np.zeros((1, LANES), np.uint32))[0]
            assert same_wide(got, codes << 16, "f32")

    def pair(kind):
        def check(rng, run):
            for _ in range(16):
                a, b = random_wide(rng, "f32", LANES), random_wide(rng, "f32", LANES)
                got = run([a[None], b[None]], np.zeros((1, LANES), np.uint32))[0]
                for i, source in enumerate((a, b)):
                    assert same_wide(field(got, 16, i), wide_codes(kind, wide_values("f32", source)), kind)

        return check

    return [
        Case("gfx950", Instruction("v_cvt_f32_bf16_e32 {d}, {a}", (1,), 1), bf16_values),
        Case("gfx950", Instruction("v_cvt_pk_bf16_f32 {d}, {a}, {b}", (1, 1), 1), pair("bf16")),
        Case("gfx950", Instruction("v_cvt_pk_f16_f32 {d}, {a}, {b}", (1, 1), 1), pair("f16")),
    ]


CASES = pack_cases() + fp4_encode_cases() + decode_cases() + six_bit_cases() + stochastic_cases() + sixteen_bit_cases()
HELD = {(base(case.instruction.text.split()[0]), case.arch) for case in CASES}


@pytest.fixture(scope="module")
def code_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, emulator.CodeObject]:
    found = {}
    for arch in ("gfx950", "gfx942"):
        unique = {case.instruction.name: case.instruction for case in CASES if case.arch == arch}
        found[arch] = assemble(arch, list(unique.values()), tmp_path_factory.mktemp(arch))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_conversion(code_objects: dict[str, emulator.CodeObject], case: Case) -> None:
    code = code_objects[case.arch]
    rng = np.random.default_rng(11)
    case.check(rng, lambda inputs, old: execute(code, case.instruction, inputs, old))


def test_every_small_float_conversion_is_in_the_cases() -> None:
    """All mnemonics of the table whose names speak of fp8, bf8, fp6, bf6, fp4 or bf16, and the packed f16 ones."""
    table = (Path(__file__).resolve().parents[1] / "csrc" / "emulator" / "isa_valu.inc").read_text()
    wanted = set(re.findall(r"\b(v_cvt_\w*(?:fp8|bf8|fp6|bf6|fp4|bf16)\w*|v_cvt_(?:pk|sr)_f16_f32)\b", table))
    covered = {re.sub(r"_(e32|sdwa)$", "", case.instruction.text.split()[0]) for case in CASES}
    assert wanted == covered
