"""Vector operations that round, pick, pack or accumulate in their own ways: one line each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
from helpers.exec_one import (
    EXEC,
    INTERESTING_16,
    Machine,
    cases,
    from_fraction,
    is_infinite,
    is_nan,
    signed,
    to_fraction,
)
from helpers.exec_registry import assemble_for, holds, holds_each
from helpers.float_reference import (
    INTERESTING,
    QUIET,
    add,
    check,
    extreme,
    first_nan,
    fma,
    load,
    median,
    multiply,
    negated,
    number,
    register,
    sign,
)

MASK32 = 2**32 - 1


def halves(function: Callable[..., int]) -> Callable[..., int]:
    """Apply a 16-bit function to both halves."""
    return lambda *x: function(*(v & 0xFFFF for v in x)) | function(*(v >> 16 for v in x)) << 16


def clamped(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def to_int(code: int, how: Callable[[Fraction], int]) -> int:
    if is_nan(code, 32):
        return 0
    if is_infinite(code, 32):
        return 0x80000000 if sign(code, 32) else 0x7FFFFFFF
    return clamped(how(to_fraction(code, 32)), -(2**31), 2**31 - 1) & MASK32


def fract(code: int, bits: int) -> int:
    if is_nan(code, bits):
        return code | QUIET[bits]
    if is_infinite(code, bits):
        return -1
    below_one = from_fraction(Fraction(1), bits) - 1
    value = to_fraction(code, bits)
    return min(from_fraction(value - math.floor(value), bits), below_one)


def ldexp16(code: int, amount: int) -> int:
    if is_nan(code, 16):
        return code | QUIET[16]
    if is_infinite(code, 16):
        return code
    return from_fraction(to_fraction(code, 16) * Fraction(2) ** signed(amount, 16), 16, bool(sign(code, 16)))


def mad16(a: int, b: int, c: int) -> int:
    """Two roundings."""
    return add(multiply(a, b, 16), c, 16)


def dot(a: int, b: int, c: int, bits: int) -> int:
    fields = range(0, 32, bits)
    return sum(signed(a >> i, bits) * signed(b >> i, bits) for i in fields) + c & MASK32


def norm(code: int, bits: int, is_signed: bool) -> int:
    if is_nan(code, bits):
        return 0
    limited = min(max(number(code, bits), -1 if is_signed else 0), 1)
    return round(Fraction(limited) * (32767 if is_signed else 65535)) & 0xFFFF  # halves to even


def pack_u8(a: int, b: int, c: int) -> int:
    value = 0 if is_nan(a, 32) else clamped(round(min(max(number(a, 32), 0), 255)), 0, 255)
    return c & ~(255 << 8 * (b & 3)) | value << 8 * (b & 3)


def mul_legacy(a: int, b: int) -> int:
    if not a << 1 & MASK32 or not b << 1 & MASK32:
        return 0
    result = multiply(a, b, 32)
    return -1 if is_nan(result, 32) else result


def propagating(a: int, b: int, c: int, bits: int, largest: bool) -> int:
    nan = first_nan((a, b, c), bits)
    return extreme(extreme(a, b, bits, largest), c, bits, largest) if nan is None else nan


def table_16(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(16))


def packed_shift(a: int, b: int, c: int, low: int, high: int) -> int:
    x, y = (clamped(signed(v) >> (c & 31), low, high) & 255 for v in (a, b))
    return x | y << 8


def subtract_reversed(a: int, b: int, bits: int) -> int:
    nan = first_nan((a, b), bits)
    return add(b, negated(a, bits), bits) if nan is None else nan


# name: form of the operands, source bits, result bits, function; -1 stands for any NaN.
# An accumulating operation's third operand is what the destination v4 held.
THREE_F32, THREE_F16 = 0x40400000, 0x4200
ONE_SOURCE, TWO_SOURCES, ACCUMULATE = "{d}, {a}", "{d}, {a}, {b}", "{c}, {a}, {b}"
THREE_SOURCES = "{d}, {a}, {b}, {c}"
Case = tuple[str, int, int, Callable[..., int]]
VECTOR: dict[str, Case] = {
    "v_cvt_rpi_i32_f32": (ONE_SOURCE, 32, 32, lambda a: to_int(a, lambda x: math.floor(x + Fraction(1, 2)))),
    "v_cvt_flr_i32_f32": (ONE_SOURCE, 32, 32, lambda a: to_int(a, math.floor)),
    "v_cvt_off_f32_i4": (ONE_SOURCE, 32, 32, lambda a: from_fraction(Fraction(signed(a, 4), 16), 32)),
    "v_cvt_f32_ubyte1": (ONE_SOURCE, 32, 32, lambda a: from_fraction(Fraction(a >> 8 & 255), 32)),
    "v_cvt_f32_ubyte2": (ONE_SOURCE, 32, 32, lambda a: from_fraction(Fraction(a >> 16 & 255), 32)),
    "v_fract_f16": (ONE_SOURCE, 16, 16, lambda a: fract(a, 16)),
    "v_fract_f32": (ONE_SOURCE, 32, 32, lambda a: fract(a, 32)),
    "v_fract_f64": (ONE_SOURCE, 64, 64, lambda a: fract(a, 64)),
    "v_mov_b64": (ONE_SOURCE, 64, 64, lambda a: a),
    "v_cvt_norm_i16_f16": (ONE_SOURCE, 16, 16, lambda a: norm(a, 16, True)),
    "v_cvt_norm_u16_f16": (ONE_SOURCE, 16, 16, lambda a: norm(a, 16, False)),
    "v_subrev_f32": (TWO_SOURCES, 32, 32, lambda a, b: subtract_reversed(a, b, 32)),
    "v_subrev_f16": (TWO_SOURCES, 16, 16, lambda a, b: subtract_reversed(a, b, 16)),
    "v_ldexp_f16": (TWO_SOURCES, 16, 16, ldexp16),
    "v_mul_legacy_f32": (TWO_SOURCES, 32, 32, mul_legacy),
    "v_pack_b32_f16": (TWO_SOURCES, 16, 32, lambda a, b: a | b << 16),
    "v_cvt_pknorm_i16_f16": (TWO_SOURCES, 16, 32, lambda a, b: norm(a, 16, True) | norm(b, 16, True) << 16),
    "v_cvt_pknorm_u16_f16": (TWO_SOURCES, 16, 32, lambda a, b: norm(a, 16, False) | norm(b, 16, False) << 16),
    "v_cvt_pknorm_i16_f32": (TWO_SOURCES, 32, 32, lambda a, b: norm(a, 32, True) | norm(b, 32, True) << 16),
    "v_cvt_pknorm_u16_f32": (TWO_SOURCES, 32, 32, lambda a, b: norm(a, 32, False) | norm(b, 32, False) << 16),
    "v_fmac_f32": (ACCUMULATE, 32, 32, lambda a, b, c: fma(a, b, c, 32)),
    "v_fmac_f64": (ACCUMULATE, 64, 64, lambda a, b, c: fma(a, b, c, 64)),
    "v_fmaak_f32": ("{d}, {a}, {b}, 0x40400000", 32, 32, lambda a, b: fma(a, b, THREE_F32, 32)),
    "v_fmamk_f32": ("{d}, {a}, 0x40400000, {b}", 32, 32, lambda a, b: fma(a, THREE_F32, b, 32)),
    "v_mac_f16": (ACCUMULATE, 16, 16, mad16),
    "v_madak_f16": ("{d}, {a}, {b}, 0x4200", 16, 16, lambda a, b: mad16(a, b, THREE_F16)),
    "v_madmk_f16": ("{d}, {a}, 0x4200, {b}", 16, 16, lambda a, b: mad16(a, THREE_F16, b)),
    "v_mad_f16": (THREE_SOURCES, 16, 16, mad16),
    "v_mad_legacy_f16": (THREE_SOURCES, 16, 16, mad16),
    "v_fma_legacy_f16": (THREE_SOURCES, 16, 16, lambda a, b, c: fma(a, b, c, 16)),
    "v_pk_fmac_f16": (ACCUMULATE, 32, 32, halves(lambda a, b, c: fma(a, b, c, 16))),
    "v_dot2c_i32_i16": (ACCUMULATE, 32, 32, lambda a, b, c: dot(a, b, c, 16)),
    "v_dot4c_i32_i8": (ACCUMULATE, 32, 32, lambda a, b, c: dot(a, b, c, 8)),
    "v_dot8c_i32_i4": (ACCUMULATE, 32, 32, lambda a, b, c: dot(a, b, c, 4)),
    "v_cvt_pk_u8_f32": (THREE_SOURCES, 32, 32, pack_u8),
    "v_min3_f16": (THREE_SOURCES, 16, 16, lambda a, b, c: extreme(extreme(a, b, 16, False), c, 16, False)),
    "v_max3_f16": (THREE_SOURCES, 16, 16, lambda a, b, c: extreme(extreme(a, b, 16, True), c, 16, True)),
    "v_med3_f16": (THREE_SOURCES, 16, 16, lambda a, b, c: median(a, b, c, 16)),
    "v_min3_i16": (THREE_SOURCES, 16, 16, lambda *x: min(x, key=lambda v: signed(v, 16))),
    "v_max3_i16": (THREE_SOURCES, 16, 16, lambda *x: max(x, key=lambda v: signed(v, 16))),
    "v_med3_i16": (THREE_SOURCES, 16, 16, lambda *x: sorted(x, key=lambda v: signed(v, 16))[1]),
    "v_min3_u16": (THREE_SOURCES, 16, 16, lambda *x: min(x)),
    "v_max3_u16": (THREE_SOURCES, 16, 16, lambda *x: max(x)),
    "v_med3_u16": (THREE_SOURCES, 16, 16, lambda *x: sorted(x)[1]),
    **{
        f"v_mad{legacy}_{kind}16": (THREE_SOURCES, 16, 16, lambda a, b, c: a * b + c & 0xFFFF)
        for legacy in ("", "_legacy")
        for kind in "iu"
    },
    "v_pk_mad_i16": (THREE_SOURCES, 32, 32, halves(lambda a, b, c: a * b + c & 0xFFFF)),
    "v_pk_mad_u16": (THREE_SOURCES, 32, 32, halves(lambda a, b, c: a * b + c & 0xFFFF)),
    "v_minimum3_f32": (THREE_SOURCES, 32, 32, lambda a, b, c: propagating(a, b, c, 32, False)),
    "v_maximum3_f32": (THREE_SOURCES, 32, 32, lambda a, b, c: propagating(a, b, c, 32, True)),
    "v_pk_minimum3_f16": (THREE_SOURCES, 32, 32, halves(lambda a, b, c: propagating(a, b, c, 16, False))),
    "v_pk_maximum3_f16": (THREE_SOURCES, 32, 32, halves(lambda a, b, c: propagating(a, b, c, 16, True))),
    "v_bitop3_b16": (THREE_SOURCES + " bitop3:0x35", 16, 16, lambda a, b, c: table_16(a, b, c, 0x35)),
    "v_ashr_pk_i8_i32": (THREE_SOURCES, 32, 16, lambda a, b, c: packed_shift(a, b, c, -128, 127)),
    "v_ashr_pk_u8_i32": (THREE_SOURCES, 32, 16, lambda a, b, c: packed_shift(a, b, c, 0, 255)),
}


def text_of(name: str) -> str:
    form, source, result, _ = VECTOR[name]
    operands = {"a": register(0, source), "b": register(2, source), "c": register(4, source)}
    return f"{name} " + form.format(d=register(10, result), **operands)


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_for(text_of, VECTOR)


def operands_of(name: str) -> Iterator[list[list[int]]]:
    """Special values and random ones; packed halves also with special values in both."""
    form, source, _, _ = VECTOR[name]
    count = 3 if "{c}" in form else 2 if "{b}" in form else 1
    packed_half = "_pk_" in name and name.endswith("f16")
    for index, rows in enumerate(cases(INTERESTING[source], source, count, 1, rounds=3)):
        if packed_half and index % 2:
            rng = np.random.default_rng(index)
            yield [[int(x) | int(y) << 16 for x, y in rng.choice(INTERESTING_16, (64, 2))] for _ in rows]
        else:
            yield rows


@holds_each("name", VECTOR)
def test_vector_operations(name: str, arch: str) -> None:
    form, source, result, function = VECTOR[name]
    to = 4 if form == ACCUMULATE else 10
    check(Machine(arch), text_of(name), (source, result), 0, function, operands_of(name), to)


@holds_each("name", ["v_mad_i16", "v_min3_f16", "v_ashr_pk_i8_i32", "v_bitop3_b16", "v_med3_u16"])
def test_sixteen_bit_results_of_three_sources_keep_the_high_half(name: str, arch: str) -> None:
    machine = Machine(arch)
    machine.v[10] = 0xABCD0000
    text = VECTOR[name][0].format(d="v10", a="v0", b="v2", c="v4")
    assert set((machine.run(f"{name} {text}").v[10] >> 16).tolist()) == {0xABCD}


EDGES_16 = (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)


@holds_each(
    "name, low, high",
    [("v_mad_i16", -(2**15), 2**15 - 1), ("v_mad_u16", 0, 2**16 - 1)],
    lambda name, low, high: [name, f"v_pk_{name[2:]}"],
)
def test_clamped_mad_saturates_the_exact_sum(name: str, low: int, high: int, arch: str) -> None:
    machine = Machine(arch)
    for rows in cases(EDGES_16, 16, 3, 4, rounds=2):
        load(machine, rows, 16)
        machine.run(f"{name} v10, v0, v2, v4 clamp")
        packed = f"v_pk_{name[2:]} v12, v0, v2, v4 op_sel_hi:[0,0,0] clamp"
        machine.run(packed)
        for lane, operands in enumerate(zip(*rows, strict=True)):
            a, b, c = (signed(x, 16) if low else x for x in operands)
            want = clamped(a * b + c, low, high) & 0xFFFF
            assert int(machine.v[10][lane]) & 0xFFFF == want, operands
            assert int(machine.v[12][lane]) == want * 0x10001, operands


@holds_each("table", [0x00, 0x01, 0x80, 0x96, 0xE8, 0xFF], lambda table: ["v_bitop3_b16"])
def test_bitop3_of_16_bits_is_its_truth_table(table: int, arch: str) -> None:
    machine = Machine(arch)
    machine.v[0], machine.v[2], machine.v[4] = 0xFFFF00F0, 0x0F0F3333, 0x5555
    got = machine.run(f"v_bitop3_b16 v10, v0, v2, v4 bitop3:{table:#x}").v[10]
    assert set((got & 0xFFFF).tolist()) == {table_16(0x00F0, 0x3333, 0x5555, table)}


@holds("v_writelane_b32")
def test_writelane_ignores_exec_and_wraps_the_lane(arch: str) -> None:
    machine = Machine(arch)
    for lane in (0, 5, 63, 64, 70):
        machine.v[10] = 7
        machine.s[4] = lane
        machine.set64(EXEC, 0)
        machine.run("v_writelane_b32 v10, 33, s4")
        want = [7] * 64
        want[lane % 64] = 33
        assert machine.v[10].tolist() == want


@holds("v_mbcnt_hi_u32_b32")
def test_mbcnt_hi_counts_the_lanes_below_in_the_upper_half(arch: str) -> None:
    machine = Machine(arch)
    rng = np.random.default_rng(2)
    machine.v[0], machine.v[2] = (rng.integers(0, 2**32, 64) for _ in range(2))
    machine.run("v_mbcnt_hi_u32_b32 v10, v0, v2")
    for lane, (mask, base) in enumerate(zip(machine.v[0].tolist(), machine.v[2].tolist(), strict=True)):
        below = (1 << max(lane - 32, 0)) - 1
        assert int(machine.v[10][lane]) == ((mask & below).bit_count() + base) & MASK32
