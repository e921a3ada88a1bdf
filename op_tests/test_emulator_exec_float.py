"""Floating-point operations of the emulator against exact rationals: one rounding, NaN, infinities, denormals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from exec_one import (
    INTERESTING_16,
    INTERESTING_32,
    INTERESTING_64,
    MODE_DEFAULT,
    MODE_IEEE,
    Machine,
    assemble_all,
    cases,
    from_fraction,
    is_infinite,
    is_nan,
    signed,
    to_fraction,
)  # fmt: skip

INTERESTING = {16: INTERESTING_16, 32: INTERESTING_32, 64: INTERESTING_64}
QUIET = {16: 0x0200, 32: 0x00400000, 64: 1 << 51}
INFINITY = {16: 0x7C00, 32: 0x7F800000, 64: 0x7FF0000000000000}
NAN = {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8000000000000}


def sign(code: int, bits: int) -> int:
    return code >> (bits - 1)


def first_nan(codes: tuple[int, ...], bits: int) -> int | None:
    """Return the first NaN made quiet: the emulator's rule for which NaN comes through."""
    return next((code | QUIET[bits] for code in codes if is_nan(code, bits)), None)


def fma(a: int, b: int, c: int, bits: int) -> int:
    nan = first_nan((a, b, c), bits)
    if nan is not None:
        return nan
    product_sign = sign(a, bits) ^ sign(b, bits)
    product_infinite = is_infinite(a, bits) or is_infinite(b, bits)
    zero = any(not x & (1 << bits - 1) - 1 for x in (a, b))
    if product_infinite and (zero or (is_infinite(c, bits) and sign(c, bits) != product_sign)):
        return NAN[bits]
    if product_infinite:
        return INFINITY[bits] | product_sign << bits - 1
    if is_infinite(c, bits):
        return c
    exact = to_fraction(a, bits) * to_fraction(b, bits) + to_fraction(c, bits)
    return from_fraction(exact, bits, negative_zero=bool(product_sign and sign(c, bits)))


def add(a: int, b: int, bits: int) -> int:
    one = from_fraction(Fraction(1), bits)
    return first_nan((a, b), bits) or fma(one, a, b, bits)


def multiply(a: int, b: int, bits: int) -> int:
    nan = first_nan((a, b), bits)
    if nan is not None:
        return nan
    negative = (sign(a, bits) ^ sign(b, bits)) << bits - 1
    return fma(a, b, negative, bits)  # adding a zero of the product's sign changes nothing


def negated(code: int, bits: int) -> int:
    return code ^ 1 << bits - 1


def ordered(code: int, bits: int) -> int:
    """A key that orders numbers, with -0 below +0."""
    return -1 - (code & (1 << bits - 1) - 1) if sign(code, bits) else code


def extreme(a: int, b: int, bits: int, largest: bool, ieee: bool = True) -> int:
    for code in (a, b):
        if ieee and is_nan(code, bits) and not code & QUIET[bits]:
            return code | QUIET[bits]
    if is_nan(a, bits):
        return b
    if is_nan(b, bits):
        return a
    return (max if largest else min)(a, b, key=lambda code: ordered(code, bits))


def median(a: int, b: int, c: int, bits: int) -> int:
    if any(is_nan(code, bits) for code in (a, b, c)):
        return extreme(extreme(a, b, bits, False), c, bits, False)
    return sorted((a, b, c), key=lambda code: ordered(code, bits))[1]


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


def rounded(code: int, bits: int, how: Callable[[Fraction], int]) -> int:
    if is_nan(code, bits):
        return code | QUIET[bits]
    if is_infinite(code, bits):
        return code
    return from_fraction(Fraction(how(to_fraction(code, bits))), bits, bool(sign(code, bits))) | (
        sign(code, bits) << bits - 1
    )


def frexp_parts(code: int, bits: int) -> tuple[Fraction, int]:
    value = to_fraction(code, bits)
    exponent = 0
    while abs(value) >= 1:
        value, exponent = value / 2, exponent + 1
    while value and abs(value) < Fraction(1, 2):
        value, exponent = value * 2, exponent - 1
    return value, exponent


def frexp_exponent(code: int, bits: int) -> int:
    if is_nan(code, bits) or is_infinite(code, bits):
        return 0
    return frexp_parts(code, bits)[1]


def frexp_mantissa(code: int, bits: int) -> int:
    if is_nan(code, bits):
        return code | QUIET[bits]
    if is_infinite(code, bits) or not code & (1 << bits - 1) - 1:
        return code
    return from_fraction(frexp_parts(code, bits)[0], bits)


def to_integer(code: int, bits: int, low: int, high: int) -> int:
    if is_nan(code, bits):
        return 0
    if is_infinite(code, bits):
        return low if sign(code, bits) else high
    return max(low, min(high, math.trunc(to_fraction(code, bits))))


def narrowed(code: int, bits: int, to: int) -> int:
    if is_infinite(code, bits):
        return INFINITY[to] | sign(code, bits) << to - 1
    return from_fraction(to_fraction(code, bits), to, bool(sign(code, bits)))


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


def register(index: int, bits: int) -> str:
    return f"v[{index}:{index + 1}]" if bits == 64 else f"v{index}"


def text_of(name: str) -> str:
    if name in ONE:
        source, result, _ = ONE[name]
        return f"{name} {register(10, result)}, {register(0, source)}"
    count, bits = (3, THREE[name][0]) if name in THREE else (2, TWO[name][0])
    return f"{name} {register(10, bits)}, " + ", ".join(register(2 * i, bits) for i in range(count))


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_all(text_of(name) for name in (*ONE, *TWO, *THREE))


def check(
    text: str, source: int, result: int, count: int, want: Callable[..., int], mode: int = MODE_DEFAULT, seed: int = 1
) -> None:
    machine = Machine()
    machine.mode = mode
    for rows in cases(INTERESTING[source], source, count, seed):
        for i, row in enumerate(rows):
            if source == 64:
                machine.set_row64(2 * i, row)
            else:
                machine.v[2 * i] = row
        machine.run(text)
        got = machine.row64(10) if result == 64 else [int(x) & (1 << result) - 1 for x in machine.v[10]]
        for lane, operands in enumerate(zip(*rows, strict=True)):
            expected = want(*operands)
            same = is_nan(got[lane], result) if expected == -1 else got[lane] == expected
            assert same, f"{text} of {[hex(x) for x in operands]}: {got[lane]:#x}, expected {expected:#x}"


@pytest.mark.parametrize("name", ONE)
def test_one_source(name: str) -> None:
    source, result, function = ONE[name]
    check(text_of(name), source, result, 1, function)


@pytest.mark.parametrize("name", TWO)
def test_two_sources(name: str) -> None:
    bits, function = TWO[name]
    check(text_of(name), bits, bits, 2, function)


@pytest.mark.parametrize("name", THREE)
def test_three_sources(name: str) -> None:
    bits, function = THREE[name]
    check(text_of(name), bits, bits, 3, function)


@pytest.mark.parametrize("largest", [False, True])
def test_without_ieee_mode_a_signaling_nan_loses_to_a_number(largest: bool) -> None:
    name = "v_max_f32" if largest else "v_min_f32"
    check(text_of(name), 32, 32, 2, lambda a, b: extreme(a, b, 32, largest, ieee=False), MODE_DEFAULT & ~MODE_IEEE)


def flushed(code: int) -> int:
    return code & 0x80000000 if not code & 0x7F800000 else code


@pytest.mark.parametrize(("name", "function"), [("v_add_f32", add), ("v_mul_f32", multiply)])
def test_flush_mode_drops_denormals_on_both_sides(name: str, function: Callable[[int, int, int], int]) -> None:
    mode = 0x3C0  # f32 denormals off, f16 and f64 on
    check(text_of(name), 32, 32, 2, lambda a, b: flushed(function(flushed(a), flushed(b), 32)), mode)


def test_flush_mode_leaves_f16_alone() -> None:
    check(text_of("v_add_f16"), 16, 16, 2, lambda a, b: add(a, b, 16), 0x3C0)


@pytest.mark.parametrize("bits", [32, 64])
def test_ldexp_rounds_once_into_denormals(bits: int) -> None:
    rng = np.random.default_rng(5)
    text = f"v_ldexp_f{bits} {register(10, bits)}, {register(0, bits)}, v4"
    edges = [0, 1, -1, 24, -24, 126, -126, 149, -149, -150, 1000, -1000, 2**31 - 1, -(2**31), -1074, -1080]
    machine = Machine()
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


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_classes(bits: int) -> None:
    def class_of(code: int) -> int:
        negative, size = sign(code, bits), code & (1 << bits - 1) - 1
        if is_nan(code, bits):
            return 1 if code & QUIET[bits] else 0
        if is_infinite(code, bits):
            return 2 if negative else 9
        if size == 0:
            return 5 if negative else 6
        if size < QUIET[bits] * 2:
            return 4 if negative else 7
        return 3 if negative else 8

    machine = Machine()
    for rows in cases(INTERESTING[bits], bits, 1, 2):
        if bits == 64:
            machine.set_row64(0, rows[0])
        else:
            machine.v[0] = rows[0]
        for wanted in range(10):
            machine.s[4] = 1 << wanted
            machine.run(f"v_cmp_class_f{bits} s[20:21], {register(0, bits)}, s4")
            assert machine.get64(20) == sum((class_of(code) == wanted) << lane for lane, code in enumerate(rows[0]))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_compares_are_false_for_nan_unless_they_say_otherwise(bits: int) -> None:
    functions: dict[str, Callable[[Fraction | float, Fraction | float], bool]] = {
        "lt": lambda a, b: a < b,
        "eq": lambda a, b: a == b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "lg": lambda a, b: a != b,
        "ge": lambda a, b: a >= b,
    }
    inverse = {"nlt": "lt", "neq": "eq", "nle": "le", "ngt": "gt", "nlg": "lg", "nge": "ge"}

    def number(code: int) -> Fraction | float:
        return math.copysign(math.inf, -sign(code, bits) or 1) if is_infinite(code, bits) else to_fraction(code, bits)

    machine = Machine()
    for rows in cases(INTERESTING[bits], bits, 2, 3, rounds=1):
        for i in (0, 1):
            if bits == 64:
                machine.set_row64(2 * i, rows[i])
            else:
                machine.v[2 * i] = rows[i]
        pairs = list(zip(*rows, strict=True))
        unordered = [is_nan(a, bits) or is_nan(b, bits) for a, b in pairs]
        for name in (*functions, *inverse, "o", "u"):
            machine.run(f"v_cmp_{name}_f{bits} s[20:21], {register(0, bits)}, {register(2, bits)}")
            for lane, (a, b) in enumerate(pairs):
                if name in ("o", "u"):
                    want = unordered[lane] == (name == "u")
                elif unordered[lane]:
                    want = name in inverse
                else:
                    want = functions[inverse.get(name, name)](number(a), number(b)) != (name in inverse)
                assert machine.get64(20) >> lane & 1 == want, (name, hex(a), hex(b))


@pytest.mark.parametrize("bits", [32, 64])
def test_the_division_sequence_gives_the_rounded_quotient(bits: int) -> None:
    """The instructions a compiler emits for IEEE division, on operands whose scaling all differs."""
    d, n = register(0, bits), register(2, bits)
    wide = "f64" if bits == 64 else "f32"
    text = f"""
      v_div_scale_{wide} v[4:5], s[20:21], {d}, {d}, {n}
      v_div_scale_{wide} v[6:7], vcc, {n}, {d}, {n}
      v_rcp_{wide} v[8:9], v[4:5]
      v_fma_{wide} v[10:11], -v[4:5], v[8:9], 1.0
      v_fma_{wide} v[8:9], v[10:11], v[8:9], v[8:9]
      v_mul_{wide} v[10:11], v[6:7], v[8:9]
      v_fma_{wide} v[12:13], -v[4:5], v[10:11], v[6:7]
      v_fma_{wide} v[10:11], v[12:13], v[8:9], v[10:11]
      v_fma_{wide} v[12:13], -v[4:5], v[10:11], v[6:7]
      v_div_fmas_{wide} v[10:11], v[12:13], v[8:9], v[10:11]
      v_div_fixup_{wide} v[10:11], v[10:11], {d}, {n}"""
    if bits == 32:
        for pair in range(4, 14, 2):
            text = text.replace(f"v[{pair}:{pair + 1}]", f"v{pair}")
    machine = Machine()
    for rows in cases(INTERESTING[bits], bits, 2, 11, rounds=30):
        for i in (0, 1):
            if bits == 64:
                machine.set_row64(2 * i, rows[i])
            else:
                machine.v[2 * i] = rows[i]
        machine.run(text)
        got = machine.row64(10) if bits == 64 else machine.v[10].tolist()
        for lane, (a, b) in enumerate(zip(*rows, strict=True)):  # b / a
            negative = sign(a, bits) ^ sign(b, bits)
            zero_a, zero_b = (not x & (1 << bits - 1) - 1 for x in (a, b))
            if (
                is_nan(a, bits)
                or is_nan(b, bits)
                or (zero_a and zero_b)
                or (is_infinite(a, bits) and is_infinite(b, bits))
            ):
                assert is_nan(got[lane], bits), (hex(b), hex(a))
                continue
            if zero_a or is_infinite(b, bits):
                want = INFINITY[bits] | negative << bits - 1
            elif zero_b or is_infinite(a, bits):
                want = negative << bits - 1
            else:
                want = from_fraction(to_fraction(b, bits) / to_fraction(a, bits), bits, bool(negative))
                want |= negative << bits - 1
            assert got[lane] == want, f"{b:#x} / {a:#x}: {got[lane]:#x}, expected {want:#x}"


TRANSCENDENTAL: dict[str, Callable[[float], float]] = {
    "v_exp_f32": lambda x: 2.0**x,
    "v_log_f32": math.log2,
    "v_rcp_f32": lambda x: 1 / x,
    "v_rsq_f32": lambda x: 1 / math.sqrt(x),
    "v_sqrt_f32": math.sqrt,
    "v_sin_f32": lambda x: math.sin(2 * math.pi * (x - round(x))),
    "v_cos_f32": lambda x: math.cos(2 * math.pi * (x - round(x))),
}


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendentals_are_within_one_ulp(name: str) -> None:
    # Each is computed in double with an error far below 2^-40 and rounded once: half a unit plus almost nothing, which
    # one unit in the last place bounds. sin near multiples of half a turn cancels; 2^-40 absolute covers that.
    rng = np.random.default_rng(8)
    machine = Machine()
    for _ in range(20):
        x = np.exp(rng.uniform(-80, 80, 64)).astype(np.float32)
        if name in ("v_exp_f32", "v_sin_f32", "v_cos_f32"):
            x = rng.uniform(-120, 120, 64).astype(np.float32)
        machine.v[0] = x.view(np.uint32)
        machine.run(f"{name} v10, v0")
        got = machine.v[10].view(np.float32)
        for value, result in zip(x.tolist(), got, strict=True):
            want = TRANSCENDENTAL[name](value)
            assert abs(float(result) - want) <= np.spacing(np.float32(abs(want))) + 2**-40 * (
                name[2:5] in ("sin", "cos")
            )


def test_transcendentals_flush_denormals_and_keep_the_special_values() -> None:
    denormal, infinity, minus_infinity = 1, 0x7F800000, 0xFF800000
    expectations = {
        "v_rcp_f32": [(denormal, infinity), (0x80000001, minus_infinity), (infinity, 0), (0x7F000001, 0)],
        "v_rsq_f32": [(denormal, infinity), (infinity, 0), (0xBF800000, 0x7FC00000)],
        "v_sqrt_f32": [(denormal, 0), (0x80000000, 0x80000000), (0xBF800000, 0x7FC00000), (infinity, infinity)],
        "v_log_f32": [(denormal, minus_infinity), (0, minus_infinity), (0x3F800000, 0), (infinity, infinity)],
        "v_exp_f32": [(minus_infinity, 0), (infinity, infinity), (0, 0x3F800000), (0xC3000000, 0)],
        "v_cos_f32": [(infinity, 0x7FC00000), (0, 0x3F800000)],
    }
    machine = Machine()
    for name, pairs in expectations.items():
        for source, want in pairs:
            machine.v[0] = source
            assert machine.run(f"{name} v10, v0").v[10][0] == want, (name, hex(source))


def test_packed_f32_selects_each_half() -> None:
    rng = np.random.default_rng(4)
    machine = Machine()
    machine.v[0:8] = rng.standard_normal((8, 64)).astype(np.float32).view(np.uint32)
    a, b, c = ([int(x) for x in machine.v[i]] for i in (0, 2, 4))
    a_high, b_high, c_high = ([int(x) for x in machine.v[i]] for i in (1, 3, 5))
    machine.run("v_pk_fma_f32 v[10:11], v[0:1], v[2:3], v[4:5]")
    assert machine.v[10].tolist() == [fma(*x, 32) for x in zip(a, b, c, strict=True)]
    assert machine.v[11].tolist() == [fma(*x, 32) for x in zip(a_high, b_high, c_high, strict=True)]
    machine.run("v_pk_fma_f32 v[10:11], v[0:1], v[2:3], v[4:5] op_sel:[1,0,0] op_sel_hi:[0,1,0] neg_lo:[0,1,0]")
    assert machine.v[10].tolist() == [fma(x, negated(y, 32), z, 32) for x, y, z in zip(a_high, b, c, strict=True)]
    assert machine.v[11].tolist() == [fma(*x, 32) for x in zip(a, b_high, c, strict=True)]
    machine.set64(4, 0x40000000_3F800000)
    machine.run("v_pk_mul_f32 v[10:11], v[0:1], s[4:5]")
    assert machine.v[10].tolist() == a
    assert machine.v[11].tolist() == [multiply(x, 0x40000000, 32) for x in a_high]
    # The low result overwrites a source of the high one.
    machine.run("v_pk_add_f32 v[0:1], v[0:1], v[2:3] op_sel_hi:[0,1]")
    assert machine.v[1].tolist() == [add(x, y, 32) for x, y in zip(a, b_high, strict=True)]


@pytest.mark.parametrize("name", ["v_pk_add_f16", "v_pk_mul_f16", "v_pk_fma_f16", "v_pk_min_f16", "v_pk_max_f16"])
def test_packed_f16_is_two_operations(name: str) -> None:
    rng = np.random.default_rng(6)
    machine = Machine()
    text = f"{name} v10, v0, v2" + (", v4" if "fma" in name else "")
    for _ in range(6):
        rows = [[INTERESTING_16[i] for i in rng.integers(0, 16, 128)] for _ in range(3)]
        for i, row in enumerate(rows):
            machine.v[2 * i] = [low | high << 16 for low, high in zip(row[:64], row[64:], strict=True)]
        machine.run(text)
        for lane in range(64):
            for half in (0, 1):
                a, b, c = (row[lane + 64 * half] for row in rows)
                want = {
                    "v_pk_add_f16": lambda a, b, c: add(a, b, 16),
                    "v_pk_mul_f16": lambda a, b, c: multiply(a, b, 16),
                    "v_pk_fma_f16": lambda a, b, c: fma(a, b, c, 16),
                    "v_pk_min_f16": lambda a, b, c: extreme(a, b, 16, False),
                    "v_pk_max_f16": lambda a, b, c: extreme(a, b, 16, True),
                }[name](a, b, c)
                assert int(machine.v[10][lane]) >> 16 * half & 0xFFFF == want, (name, hex(a), hex(b), hex(c))


def test_mixed_fma_rounds_once_to_half() -> None:
    rng = np.random.default_rng(9)
    machine = Machine()
    a, b, c = (rng.standard_normal(64).astype(np.float32).view(np.uint32) for _ in range(3))
    machine.v[0], machine.v[2], machine.v[4] = a, b, c
    machine.v[10] = 0x12345678
    exact = [
        to_fraction(int(x), 32) * to_fraction(int(y), 32) + to_fraction(int(z), 32)
        for x, y, z in zip(a, b, c, strict=True)
    ]
    machine.run("v_fma_mixlo_f16 v10, v0, v2, v4")
    assert machine.v[10].tolist() == [0x12340000 | from_fraction(value, 16) for value in exact]
    machine.v[10] = 0x12345678
    machine.run("v_fma_mixhi_f16 v10, v0, v2, v4")
    assert machine.v[10].tolist() == [from_fraction(value, 16) << 16 | 0x5678 for value in exact]
    halves = rng.standard_normal(64).astype(np.float16).view(np.uint16)
    machine.v[0] = halves.astype(np.uint32) << 16
    machine.run("v_fma_mix_f32 v10, -v0, |v2|, v4 op_sel:[1,0,0] op_sel_hi:[1,0,0]")
    want = [
        from_fraction(-to_fraction(int(h), 16) * abs(to_fraction(int(y), 32)) + to_fraction(int(z), 32), 32)
        for h, y, z in zip(halves, b, c, strict=True)
    ]
    assert machine.v[10].tolist() == want


def test_bits_of_two_over_pi() -> None:
    """Segment by segment they add up: the sum of the first three is 2/pi to 159 bits."""
    machine = Machine()
    machine.set_row64(0, [0x3FF0000000000000] * 64)
    machine.v[2] = np.arange(64)
    machine.run("v_trig_preop_f64 v[10:11], v[0:1], v2")
    total = sum(to_fraction(code, 64) for code in machine.row64(10)[:3])
    # 2/pi from pi's continued fraction convergent 245850922/78256779, which is good to 2^-56.
    assert abs(total - Fraction(2 * 78256779, 245850922)) < Fraction(1, 2**54)
    assert Fraction(1, 2**159) > abs(total - sum(to_fraction(code, 64) for code in machine.row64(10)[:6])) > 0
