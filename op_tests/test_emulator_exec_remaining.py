"""Vector and scalar operations that the other files leave: cmpx, accumulating forms, packed norms, f16 functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from exec_one import (
    EXEC,
    INTERESTING_16,
    INTERESTING_32,
    INTERESTING_64,
    VCC,
    Machine,
    assemble_all,
    cases,
    from_fraction,
    is_infinite,
    is_nan,
    signed,
    to_fraction,
)  # fmt: skip
from test_emulator_exec_float import INFINITY, QUIET, add, extreme, first_nan, fma, median, multiply, negated, sign

MASK32, MASK64 = 2**32 - 1, 2**64 - 1
SPECIAL = {16: INTERESTING_16, 32: INTERESTING_32, 64: INTERESTING_64}
INTEGERS = {
    bits: (0, 1, 2, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 2, (1 << bits) - 1)
    for bits in (16, 32, 64)
}
MASKS = (MASK64, 0x00FF00FF00FF00FF, 0x8000000000000001)


def register(index: int, bits: int) -> str:
    return f"v[{index}:{index + 1}]" if bits == 64 else f"v{index}"


def load(machine: Machine, rows: list[list[int]], bits: int) -> None:
    for i, row in enumerate(rows):
        if bits == 64:
            machine.set_row64(2 * i, row)
        else:
            machine.v[2 * i] = row


# --- compares that write EXEC -----------------------------------------------------------------------------------------

RELATIONS: dict[str, Callable[[Fraction | float, Fraction | float], bool]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a != b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
}
FLOAT_CONDITIONS = (
    "f", "lt", "eq", "le", "gt", "lg", "ge", "o", "u", "nge", "nlg", "ngt", "nle", "neq", "nlt", "tru",
)  # fmt: skip
INTEGER_CONDITIONS = ("f", "lt", "eq", "le", "gt", "ne", "ge", "t")
COMPARES = [
    *((condition, f"f{bits}") for bits in (16, 32, 64) for condition in FLOAT_CONDITIONS),
    *((condition, f"{kind}{bits}") for bits in (16, 32, 64) for kind in "iu" for condition in INTEGER_CONDITIONS),
]


def number(code: int, bits: int) -> Fraction | float:
    if is_infinite(code, bits):
        return -math.inf if sign(code, bits) else math.inf
    return to_fraction(code, bits)


def holds(condition: str, kind: str, a: int, b: int) -> bool:
    bits = int(kind[1:])
    if condition in ("f", "t", "tru"):
        return condition != "f"
    if kind[0] != "f":
        return RELATIONS[condition](*(signed(x, bits) if kind[0] == "i" else x for x in (a, b)))
    unordered = is_nan(a, bits) or is_nan(b, bits)
    if condition in ("o", "u"):
        return unordered == (condition == "u")
    inverted = condition.startswith("n")
    if unordered:
        return inverted
    return RELATIONS[condition.removeprefix("n")](number(a, bits), number(b, bits)) != inverted


def compare_texts(condition: str, kind: str) -> list[str]:
    sources = f"{register(0, int(kind[1:]))}, {register(2, int(kind[1:]))}"
    return [f"v_{op}_{condition}_{kind} {to}, {sources}" for op in ("cmp", "cmpx") for to in ("s[20:21]", "vcc")]


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_all(text for compare in COMPARES for text in compare_texts(*compare))


@pytest.mark.parametrize(("condition", "kind"), COMPARES)
def test_cmpx_writes_its_mask_and_exec(condition: str, kind: str) -> None:
    bits = int(kind[1:])
    machine = Machine()
    specials = SPECIAL[bits] if kind[0] == "f" else INTEGERS[bits]
    for rows in cases(specials, bits, 2, 3, rounds=1):
        load(machine, rows, bits)
        true = sum(holds(condition, kind, a, b) << lane for lane, (a, b) in enumerate(zip(*rows, strict=True)))
        for text in compare_texts(condition, kind):
            for mask in MASKS:
                machine.set64(EXEC, mask)
                machine.set64(20, 0x1234)
                machine.set64(VCC, 0x1234)
                machine.run(text)
                assert machine.get64(20 if "s[" in text else VCC) == true & mask, text
                assert machine.get64(VCC if "s[" in text else 20) == 0x1234, text
                assert machine.get64(EXEC) == (true & mask if "cmpx" in text else mask), text


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_cmpx_class_writes_its_mask_and_exec(bits: int) -> None:
    def class_of(code: int) -> int:
        size = code & (1 << bits - 1) - 1
        if is_nan(code, bits):
            return 1 if code & QUIET[bits] else 0
        place = 3 if is_infinite(code, bits) else 0 if size == 0 else 1 if size < QUIET[bits] * 2 else 2
        return 5 - place if sign(code, bits) else 6 + place

    machine = Machine()
    for rows in cases(SPECIAL[bits], bits, 1, 2, rounds=2):
        load(machine, rows, bits)
        for wanted in (*(1 << i for i in range(10)), 0x3FF, 0, 0x155):
            machine.s[4] = wanted
            true = sum((wanted >> class_of(code) & 1) << lane for lane, code in enumerate(rows[0]))
            for mask in MASKS:
                machine.set64(EXEC, mask)
                machine.run(f"v_cmpx_class_f{bits} s[20:21], {register(0, bits)}, s4")
                assert (machine.get64(20), machine.get64(EXEC)) == (true & mask, true & mask), hex(wanted)


# --- scalar -----------------------------------------------------------------------------------------------------------


def test_conditional_moves_look_at_scc() -> None:
    machine = Machine()
    for scc in (0, 1):
        machine.scc = scc
        machine.set64(4, 0x0123456789ABCDEF)
        machine.set64(10, 7)
        assert machine.run("s_cmov_b32 s10, s4").s[10] == (0x89ABCDEF if scc else 7)
        machine.set64(10, 7)
        assert machine.run("s_cmov_b64 s[10:11], s[4:5]").get64(10) == (0x0123456789ABCDEF if scc else 7)
        machine.set64(10, 7)
        assert machine.run("s_cmovk_i32 s10, 0x8000").s[10] == (0xFFFF8000 if scc else 7)
        assert machine.scc == scc


def test_single_bits_of_64() -> None:
    machine = Machine()
    value = 0x8000000100000001
    for amount in (0, 1, 31, 32, 33, 63, 64, 95):
        machine.set64(4, value)
        machine.s[6] = amount
        bit = value >> (amount & 63) & 1
        assert machine.run("s_bitcmp1_b64 s[4:5], s6").scc == bit
        assert machine.run("s_bitcmp0_b64 s[4:5], s6").scc == 1 - bit
        machine.set64(10, MASK64)
        assert machine.run("s_bitset0_b64 s[10:11], s6").get64(10) == MASK64 & ~(1 << (amount & 63))
        assert machine.scc == 1 - bit


@pytest.mark.parametrize("value", [0, 1, 0x80000000, 0xDEADBEEF, MASK32])
def test_bitreplicate_doubles_each_bit(value: int) -> None:
    machine = Machine()
    machine.s[4] = value
    want = int("".join(2 * digit for digit in format(value, "032b")), 2)
    assert machine.run("s_bitreplicate_b64_b32 s[10:11], s4").get64(10) == want


@pytest.mark.parametrize(
    ("name", "function"), [("andn1", lambda s, e: ~s & e), ("andn2", lambda s, e: s & ~e)]
)  # fmt: skip
def test_wrexec_writes_the_new_mask_to_both(name: str, function: Callable[[int, int], int]) -> None:
    machine = Machine()
    for source in (0, 1, MASK64, 0x0123456789ABCDEF, 1 << 63):
        for mask in (MASK64, 0, 0x00FF00FF00FF00FF):
            machine.set64(4, source)
            machine.set64(EXEC, mask)
            machine.run(f"s_{name}_wrexec_b64 s[10:11], s[4:5]")
            want = function(source, mask) & MASK64
            assert (machine.get64(10), machine.get64(EXEC), machine.scc) == (want, want, int(want != 0))


# --- vector operations of up to three sources: one line each ----------------------------------------------------------
# name: form of the operands, source bits, result bits, function; -1 stands for any NaN.
# An accumulating operation's third operand is what the destination v4 held.


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


def to_half_truncated(code: int) -> int:
    if is_infinite(code, 32):
        return INFINITY[16] | sign(code, 32) << 15
    value = to_fraction(code, 32)
    size = from_fraction(abs(value), 16)
    if is_infinite(size, 16) or to_fraction(size, 16) > abs(value):
        size -= 1  # codes of one sign are ordered, so the one below is the next toward zero
    return size | sign(code, 32) << 15


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


@pytest.mark.parametrize("name", VECTOR)
def test_vector_operations(name: str) -> None:
    form, source, result, function = VECTOR[name]
    text = f"{name} " + form.format(
        d=register(10, result), a=register(0, source), b=register(2, source), c=register(4, source)
    )
    count = 3 if "{c}" in form else 2 if "{b}" in form else 1
    to = 4 if form == ACCUMULATE else 10
    machine = Machine()
    packed_half = "_pk_" in name and name.endswith("f16")
    for index, rows in enumerate(cases(SPECIAL[source], source, count, 1, rounds=3)):
        if packed_half and index % 2:
            rng = np.random.default_rng(index)
            rows = [[int(x) | int(y) << 16 for x, y in rng.choice(INTERESTING_16, (64, 2))] for _ in rows]
        load(machine, rows, source)
        machine.run(text)
        got = machine.row64(to) if result == 64 else [int(x) & (1 << result) - 1 for x in machine.v[to]]
        for lane, operands in enumerate(zip(*rows, strict=True)):
            want = function(*operands)
            same = is_nan(got[lane], result) if want == -1 else got[lane] == want
            assert same, f"{text} of {[hex(x) for x in operands]}: {got[lane]:#x}, expected {want:#x}"


@pytest.mark.parametrize("name", ["v_mad_i16", "v_min3_f16", "v_ashr_pk_i8_i32", "v_bitop3_b16", "v_med3_u16"])
def test_sixteen_bit_results_of_three_sources_keep_the_high_half(name: str) -> None:
    machine = Machine()
    machine.v[10] = 0xABCD0000
    text = VECTOR[name][0].format(d="v10", a="v0", b="v2", c="v4")
    assert set((machine.run(f"{name} {text}").v[10] >> 16).tolist()) == {0xABCD}


@pytest.mark.parametrize(("name", "low", "high"), [("v_mad_i16", -(2**15), 2**15 - 1), ("v_mad_u16", 0, 2**16 - 1)])
def test_clamped_mad_saturates_the_exact_sum(name: str, low: int, high: int) -> None:
    machine = Machine()
    for rows in cases(INTEGERS[16], 16, 3, 4, rounds=2):
        load(machine, rows, 16)
        machine.run(f"{name} v10, v0, v2, v4 clamp")
        packed = f"v_pk_{name[2:]} v12, v0, v2, v4 op_sel_hi:[0,0,0] clamp"
        machine.run(packed)
        for lane, operands in enumerate(zip(*rows, strict=True)):
            a, b, c = (signed(x, 16) if low else x for x in operands)
            want = clamped(a * b + c, low, high) & 0xFFFF
            assert int(machine.v[10][lane]) & 0xFFFF == want, operands
            assert int(machine.v[12][lane]) == want * 0x10001, operands


@pytest.mark.parametrize("table", [0x00, 0x01, 0x80, 0x96, 0xE8, 0xFF])
def test_bitop3_of_16_bits_is_its_truth_table(table: int) -> None:
    machine = Machine()
    machine.v[0], machine.v[2], machine.v[4] = 0xFFFF00F0, 0x0F0F3333, 0x5555
    got = machine.run(f"v_bitop3_b16 v10, v0, v2, v4 bitop3:{table:#x}").v[10]
    assert set((got & 0xFFFF).tolist()) == {table_16(0x00F0, 0x3333, 0x5555, table)}


def test_pkrtz_rounds_toward_zero() -> None:
    machine = Machine()
    near = (0x38800000, 0x387FFFFF, 0xB3800001, 0x33000000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0xC77FFFFF, 0x3F801FFF)
    for rows in cases((*INTERESTING_32, *near), 32, 2, 1):
        load(machine, rows, 32)
        machine.run("v_cvt_pkrtz_f16_f32 v10, v0, v2")
        for lane, pair in enumerate(zip(*rows, strict=True)):
            for half, code in enumerate(pair):
                got = int(machine.v[10][lane]) >> 16 * half & 0xFFFF
                same = is_nan(got, 16) if is_nan(code, 32) else got == to_half_truncated(code)
                assert same, (hex(code), hex(got))


@pytest.mark.parametrize("choice", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_packed_move_picks_a_register_of_each_source(choice: tuple[int, int]) -> None:
    machine = Machine()
    machine.v[0:4] = np.arange(256, dtype=np.uint32).reshape(4, 64)
    machine.run(f"v_pk_mov_b32 v[10:11], v[0:1], v[2:3] op_sel:[{choice[0]},{choice[1]}]")
    assert machine.v[10].tolist() == machine.v[choice[0]].tolist()
    assert machine.v[11].tolist() == machine.v[2 + choice[1]].tolist()


def test_writelane_ignores_exec_and_wraps_the_lane() -> None:
    machine = Machine()
    for lane in (0, 5, 63, 64, 70):
        machine.v[10] = 7
        machine.s[4] = lane
        machine.set64(EXEC, 0)
        machine.run("v_writelane_b32 v10, 33, s4")
        want = [7] * 64
        want[lane % 64] = 33
        assert machine.v[10].tolist() == want


def test_mbcnt_hi_counts_the_lanes_below_in_the_upper_half() -> None:
    machine = Machine()
    rng = np.random.default_rng(2)
    machine.v[0], machine.v[2] = (rng.integers(0, 2**32, 64) for _ in range(2))
    machine.run("v_mbcnt_hi_u32_b32 v10, v0, v2")
    for lane, (mask, base) in enumerate(zip(machine.v[0].tolist(), machine.v[2].tolist(), strict=True)):
        below = (1 << max(lane - 32, 0)) - 1
        assert int(machine.v[10][lane]) == ((mask & below).bit_count() + base) & MASK32


# --- dot products and functions with a tolerance ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["v_dot2_f32_f16 v4, v0, v2, v4", "v_dot2_f32_bf16 v4, v0, v2, v4", "v_dot2c_f32_f16 v4, v0, v2",
     "v_dot2c_f32_bf16 v4, v0, v2"],
)  # fmt: skip
def test_float_dot_products(text: str) -> None:
    # Both products are exact in double, whose two sums each err by 2^-53 of the terms; then one rounding to f32, half
    # an ulp, is at most 2^-24 of the result. Twice that sum bounds it all.
    rng = np.random.default_rng(12)
    machine = Machine()
    for _ in range(8):
        values = (rng.standard_normal((4, 64)) * 2.0 ** rng.integers(-4, 5, (4, 64))).astype(np.float32)
        shift = 16 if "bf16" in text else 0
        codes = values.view(np.uint32) >> 16 if shift else values.astype(np.float16).view(np.uint16).astype(np.uint32)
        accumulator = rng.standard_normal(64).astype(np.float32)
        machine.v[0], machine.v[2] = codes[0] | codes[1] << 16, codes[2] | codes[3] << 16
        machine.v[4] = accumulator.view(np.uint32)
        got = machine.run(text).v[4].view(np.float32)
        for lane in range(64):
            a, b, c, d = (to_fraction(int(x) << shift, 32 if shift else 16) for x in codes[:, lane])
            exact = a * c + b * d + Fraction(float(accumulator[lane]))
            terms = abs(a * c) + abs(b * d) + abs(Fraction(float(accumulator[lane])))
            assert abs(Fraction(float(got[lane])) - exact) <= abs(exact) / 2**23 + terms / 2**51


def sine(x: float) -> float:
    return math.sin(2 * math.pi * (x - round(x)))


def cosine(x: float) -> float:
    return math.cos(2 * math.pi * (x - round(x)))


FUNCTIONS_16: dict[str, Callable[[float], float]] = {
    "v_rcp_f16": lambda x: 1 / x,
    "v_sqrt_f16": math.sqrt,
    "v_rsq_f16": lambda x: 1 / math.sqrt(x),
    "v_log_f16": math.log2,
    "v_exp_f16": lambda x: 2.0**x,
    "v_sin_f16": sine,
    "v_cos_f16": cosine,
}


@pytest.mark.parametrize("name", FUNCTIONS_16)
def test_f16_functions_are_within_one_ulp(name: str) -> None:
    # Every positive finite code. A double result errs far below 2^-40, so that one rounding is half an ulp and a
    # little; sine and cosine near multiples of half a turn cancel, which 2^-40 absolute covers.
    machine = Machine()
    limit = 0x4BFF if name == "v_exp_f16" else 0x7BFF  # 2^15.99 is the last that stays finite
    codes = np.arange(1, limit // 64 * 64 + 1, dtype=np.uint32)
    for row in codes.reshape(-1, 64)[:: 3 if limit > 0x5000 else 2]:
        machine.v[0] = row
        got = (machine.run(f"{name} v10, v0").v[10].astype(np.uint16)).view(np.float16).astype(float)
        for x, result in zip(row.astype(np.uint16).view(np.float16).astype(float).tolist(), got.tolist(), strict=True):
            want = FUNCTIONS_16[name](x)
            if want >= 65520:
                assert math.isinf(result), (name, x)
                continue
            assert abs(result - want) <= float(np.spacing(np.float16(abs(want)))) + 2**-40, (name, x, result, want)


def test_f16_functions_keep_the_special_values() -> None:
    expectations = {
        "v_rcp_f16": [(0, 0x7C00), (0x8000, 0xFC00), (0x7C00, 0), (0xFC00, 0x8000), (1, 0x7C00)],
        "v_sqrt_f16": [(0, 0), (0x8000, 0x8000), (0x7C00, 0x7C00), (0xBC00, -1), (0xFC00, -1)],
        "v_rsq_f16": [(0, 0x7C00), (0x8000, 0xFC00), (0x7C00, 0), (0xBC00, -1)],
        "v_log_f16": [(0, 0xFC00), (0x8000, 0xFC00), (0x3C00, 0), (0x7C00, 0x7C00), (0xBC00, -1)],
        "v_exp_f16": [(0, 0x3C00), (0xFC00, 0), (0x7C00, 0x7C00), (0x4C00, 0x7C00), (0xCE00, 1)],
        "v_sin_f16": [(0, 0), (0x7C00, -1)],
        "v_cos_f16": [(0, 0x3C00), (0x7C00, -1)],
    }
    machine = Machine()
    for name, pairs in expectations.items():
        for source, want in [*pairs, (0x7E00, -1)]:
            machine.v[0] = source
            got = int(machine.run(f"{name} v10, v0").v[10][0])
            assert is_nan(got, 16) if want == -1 else got == want, (name, hex(source), hex(got))


@pytest.mark.parametrize(
    ("legacy", "function"),
    [("v_exp_legacy_f32", lambda x: 2.0**x), ("v_log_legacy_f32", math.log2), ("v_rcp_iflag_f32", lambda x: 1 / x)],
)
def test_second_names_of_f32_functions_are_within_one_ulp(legacy: str, function: Callable[[float], float]) -> None:
    # As for their first names: computed in double, rounded once.
    rng = np.random.default_rng(8)
    machine = Machine()
    for _ in range(10):
        x = np.exp(rng.uniform(-80, 80, 64)).astype(np.float32)
        if "exp" in legacy:
            x = rng.uniform(-120, 120, 64).astype(np.float32)
        machine.v[0] = x.view(np.uint32)
        got = machine.run(f"{legacy} v10, v0").v[10].view(np.float32)
        for value, result in zip(x.tolist(), got.tolist(), strict=True):
            want = function(value)
            assert abs(result - want) <= float(np.spacing(np.float32(abs(want)))), (value, result, want)


@pytest.mark.parametrize("name", ["v_sqrt_f64", "v_rsq_f64"])
def test_f64_roots(name: str) -> None:
    # sqrt rounds once, which is half an ulp or 2^-53 of the value; its reciprocal adds a second rounding. On squares
    # the error is that of the result alone: compare squares, whose relative error is twice 2^-52 and a little.
    rng = np.random.default_rng(14)
    machine = Machine()
    x = 2.0 ** rng.uniform(-1000, 1000, 64)
    machine.set_row64(0, x.view(np.uint64).tolist())
    machine.run(f"{name} v[10:11], v[0:1]")
    for value, code in zip(x.tolist(), machine.row64(10), strict=True):
        square = to_fraction(code, 64) ** 2
        ratio = square / Fraction(value) if "sqrt" in name else square * Fraction(value)
        assert abs(ratio - 1) < Fraction(5, 2) / 2**52, value
    specials = {
        "v_sqrt_f64": [(0, 0), (1 << 63, 1 << 63), (INFINITY[64], INFINITY[64]), (0xBFF0 << 48, -1)],
        "v_rsq_f64": [(0, INFINITY[64]), (1 << 63, INFINITY[64] | 1 << 63), (INFINITY[64], 0), (0xBFF0 << 48, -1)],
    }
    for source, want in specials[name]:
        machine.set_row64(0, [source] * 64)
        got = machine.run(f"{name} v[10:11], v[0:1]").row64(10)[0]
        assert is_nan(got, 64) if want == -1 else got == want, (hex(source), hex(got))


@pytest.mark.parametrize("name", ["v_div_fixup_f16", "v_div_fixup_legacy_f16"])
def test_division_fixup_replaces_special_quotients(name: str) -> None:
    machine = Machine()
    for rows in cases(INTERESTING_16, 16, 3, 15, rounds=2):
        load(machine, rows, 16)
        machine.run(f"{name} v10, v0, v2, v4")
        for lane, (quotient, below, above) in enumerate(zip(*rows, strict=True)):
            zeros = [not x & 0x7FFF for x in (below, above)]
            infinite = [is_infinite(x, 16) for x in (below, above)]
            negative = (below ^ above) & 0x8000
            if is_nan(below, 16) or is_nan(above, 16) or all(zeros) or all(infinite):
                want = -1
            elif zeros[0] or infinite[1]:
                want = INFINITY[16] | negative
            elif zeros[1] or infinite[0]:
                want = negative
            elif is_nan(quotient, 16):
                continue  # dividing finite numbers through f32 gives none, so that no program depends on it
            else:
                want = quotient & 0x7FFF | negative
            got = int(machine.v[10][lane]) & 0xFFFF
            assert is_nan(got, 16) if want == -1 else got == want, (hex(quotient), hex(below), hex(above), hex(got))


@pytest.mark.parametrize("name", ["v_dot2c_f32_f16", "v_dot4c_i32_i8", "v_dot8c_i32_i4"])
def test_accumulating_dots_take_their_first_source_through_dpp(name: str) -> None:
    rng = np.random.default_rng(16)
    plain, moved = Machine(), Machine()
    halves_of = rng.standard_normal((2, 128)).astype(np.float16).view(np.uint32)
    first, second = halves_of
    moved.v[0], moved.v[2] = first, second
    plain.v[0], plain.v[2] = first[np.arange(64) ^ 1], second
    moved.run(f"{name} v4, v0, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf")
    plain.run(f"{name} v4, v0, v2")
    assert moved.v[4].tolist() == plain.v[4].tolist()
    assert len(set(plain.v[4].tolist())) > 30
