"""Floating-point operations of the emulator against exact rationals: one rounding, NaN, infinities, denormals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from helpers.exec_one import MODE_DEFAULT, MODE_IEEE, Machine, from_fraction, is_infinite, is_nan, signed, to_fraction
from helpers.exec_registry import assemble_for, holds_each, on_each_arch
from helpers.float_reference import (
    INTERESTING,
    QUIET,
    add,
    check,
    extreme,
    first_nan,
    fma,
    frexp_exponent,
    frexp_mantissa,
    median,
    multiply,
    narrowed,
    negated,
    register,
    rounded,
    sign,
    to_integer,
)

TWO: dict[str, tuple[int, Callable[[int, int], int]]] = {
    f"v_{name}_f{bits}": (bits, function)
    for bits in (16, 32, 64)
    for name, function in {
        "add": lambda a, b, n=bits: add(a, b, n),
        "sub": lambda a, b, n=bits: first_nan((a, b), n) or add(a, negated(b, n), n),
        "mul": lambda a, b, n=bits: multiply(a, b, n),
        "min": lambda a, b, n=bits: extreme(a, b, n, False),
        "max": lambda a, b, n=bits: extreme(a, b, n, True),
    }.items()
    if not (name == "sub" and bits == 64)
}
THREE: dict[str, tuple[int, Callable[[int, int, int], int]]] = {
    "v_fma_f32": (32, lambda a, b, c: fma(a, b, c, 32)),
    "v_fma_f64": (64, lambda a, b, c: fma(a, b, c, 64)),
    "v_fma_f16": (16, lambda a, b, c: fma(a, b, c, 16)),
    "v_min3_f32": (32, lambda a, b, c: extreme(extreme(a, b, 32, False), c, 32, False)),
    "v_max3_f32": (32, lambda a, b, c: extreme(extreme(a, b, 32, True), c, 32, True)),
    "v_med3_f32": (32, lambda a, b, c: median(a, b, c, 32)),
    "v_med3_f16": (16, lambda a, b, c: median(a, b, c, 16)),
}


# name: source bits, result bits, function; NaN results are compared as NaN where the payload has no single rule
ONE: dict[str, tuple[int, int, Callable[[int], int]]] = {
    **{
        f"v_{name}_f{bits}": (bits, bits, function)
        for bits in (16, 32, 64)
        for name, function in {
            "trunc": lambda a, n=bits: rounded(a, n, math.trunc),
            "ceil": lambda a, n=bits: rounded(a, n, math.ceil),
            "floor": lambda a, n=bits: rounded(a, n, math.floor),
            "rndne": lambda a, n=bits: rounded(a, n, round),
            "frexp_mant": lambda a, n=bits: frexp_mantissa(a, n),
        }.items()
    },
    "v_frexp_exp_i32_f32": (32, 32, lambda a: frexp_exponent(a, 32) & 0xFFFFFFFF),
    "v_frexp_exp_i32_f64": (64, 32, lambda a: frexp_exponent(a, 64) & 0xFFFFFFFF),
    "v_frexp_exp_i16_f16": (16, 16, lambda a: frexp_exponent(a, 16) & 0xFFFF),
    "v_cvt_i32_f32": (32, 32, lambda a: to_integer(a, 32, -(2**31), 2**31 - 1) & 0xFFFFFFFF),
    "v_cvt_u32_f32": (32, 32, lambda a: to_integer(a, 32, 0, 2**32 - 1)),
    "v_cvt_i32_f64": (64, 32, lambda a: to_integer(a, 64, -(2**31), 2**31 - 1) & 0xFFFFFFFF),
    "v_cvt_u32_f64": (64, 32, lambda a: to_integer(a, 64, 0, 2**32 - 1)),
    "v_cvt_u16_f16": (16, 16, lambda a: to_integer(a, 16, 0, 2**16 - 1)),
    "v_cvt_i16_f16": (16, 16, lambda a: to_integer(a, 16, -(2**15), 2**15 - 1) & 0xFFFF),
    "v_cvt_f32_i32": (32, 32, lambda a: from_fraction(Fraction(signed(a)), 32)),
    "v_cvt_f32_u32": (32, 32, lambda a: from_fraction(Fraction(a), 32)),
    "v_cvt_f64_i32": (32, 64, lambda a: from_fraction(Fraction(signed(a)), 64)),
    "v_cvt_f64_u32": (32, 64, lambda a: from_fraction(Fraction(a), 64)),
    "v_cvt_f16_i16": (16, 16, lambda a: from_fraction(Fraction(signed(a, 16)), 16)),
    "v_cvt_f16_u16": (16, 16, lambda a: from_fraction(Fraction(a), 16)),
    "v_cvt_f32_f16": (16, 32, lambda a: narrowed(a, 16, 32) if not is_nan(a, 16) else -1),
    "v_cvt_f16_f32": (32, 16, lambda a: narrowed(a, 32, 16) if not is_nan(a, 32) else -1),
    "v_cvt_f32_f64": (64, 32, lambda a: narrowed(a, 64, 32) if not is_nan(a, 64) else -1),
    "v_cvt_f64_f32": (32, 64, lambda a: narrowed(a, 32, 64) if not is_nan(a, 32) else -1),
    "v_cvt_f32_ubyte0": (32, 32, lambda a: from_fraction(Fraction(a & 255), 32)),
    "v_cvt_f32_ubyte3": (32, 32, lambda a: from_fraction(Fraction(a >> 24), 32)),
}


def text_of(name: str) -> str:
    if name in ONE:
        source, result, _ = ONE[name]
        return f"{name} {register(10, result)}, {register(0, source)}"
    count, bits = (3, THREE[name][0]) if name in THREE else (2, TWO[name][0])
    return f"{name} {register(10, bits)}, " + ", ".join(register(2 * i, bits) for i in range(count))


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_for(text_of, (*ONE, *TWO, *THREE))


@holds_each("name", ONE)
def test_one_source(name: str, arch: str) -> None:
    source, result, function = ONE[name]
    check(Machine(arch), text_of(name), (source, result), 1, function)


@holds_each("name", TWO)
def test_two_sources(name: str, arch: str) -> None:
    bits, function = TWO[name]
    check(Machine(arch), text_of(name), (bits, bits), 2, function)


@holds_each("name", THREE)
def test_three_sources(name: str, arch: str) -> None:
    bits, function = THREE[name]
    check(Machine(arch), text_of(name), (bits, bits), 3, function)


def in_mode(arch: str, mode: int) -> Machine:
    machine = Machine(arch)
    machine.mode = mode
    return machine


@on_each_arch
@pytest.mark.parametrize("largest", [False, True])
def test_without_ieee_mode_a_signaling_nan_loses_to_a_number(largest: bool, arch: str) -> None:
    name = "v_max_f32" if largest else "v_min_f32"
    machine = in_mode(arch, MODE_DEFAULT & ~MODE_IEEE)
    check(machine, text_of(name), (32, 32), 2, lambda a, b: extreme(a, b, 32, largest, ieee=False))


def flushed(code: int) -> int:
    return code & 0x80000000 if not code & 0x7F800000 else code


@on_each_arch
@pytest.mark.parametrize(("name", "function"), [("v_add_f32", add), ("v_mul_f32", multiply)])
def test_flush_mode_drops_denormals_on_both_sides(
    name: str, function: Callable[[int, int, int], int], arch: str
) -> None:
    mode = 0x3C0  # f32 denormals off, f16 and f64 on
    want = lambda a, b: flushed(function(flushed(a), flushed(b), 32))
    check(in_mode(arch, mode), text_of(name), (32, 32), 2, want)


@on_each_arch
def test_flush_mode_leaves_f16_alone(arch: str) -> None:
    check(in_mode(arch, 0x3C0), text_of("v_add_f16"), (16, 16), 2, lambda a, b: add(a, b, 16))


@holds_each("bits", [32, 64], lambda bits: [f"v_ldexp_f{bits}"])
def test_ldexp_rounds_once_into_denormals(bits: int, arch: str) -> None:
    rng = np.random.default_rng(5)
    text = f"v_ldexp_f{bits} {register(10, bits)}, {register(0, bits)}, v4"
    edges = [0, 1, -1, 24, -24, 126, -126, 149, -149, -150, 1000, -1000, 2**31 - 1, -(2**31), -1074, -1080]
    machine = Machine(arch)
    for _ in range(12):
        codes = [INTERESTING[bits][i] for i in rng.integers(0, len(INTERESTING[bits]), 64)]
        exponents = [int(x) for x in rng.choice(edges, 64)]
        if bits == 64:
            machine.set_row64(0, codes)
        else:
            machine.v[0] = codes
        machine.v[4] = np.array(exponents, np.int64).astype(np.uint32)
        machine.run(text)
        got = machine.row64(10) if bits == 64 else machine.v[10].tolist()
        for lane, (code, exponent) in enumerate(zip(codes, exponents, strict=True)):
            if is_nan(code, bits):
                want = code | QUIET[bits]
            elif is_infinite(code, bits):
                want = code
            else:
                power = Fraction(2) ** max(-5000, min(5000, exponent))
                want = from_fraction(to_fraction(code, bits) * power, bits, bool(sign(code, bits)))
            assert got[lane] == want, (hex(code), exponent, hex(got[lane]), hex(want))
