"""The steps of IEEE division: each alone, and the sequence that compilers emit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from helpers.exec_one import VCC, Machine, cases, from_fraction, is_infinite, is_nan, to_fraction
from helpers.exec_registry import holds_each
from helpers.float_reference import INFINITY, INTERESTING, QUIET, check, fma, load, register, sign


@holds_each("bits", [32, 64], lambda bits: [f"v_div_{step}_f{bits}" for step in ("scale", "fmas", "fixup")])
def test_the_division_sequence_gives_the_rounded_quotient(bits: int, arch: str) -> None:
    """The instructions a compiler emits for IEEE division, on operands that are all scaled differently."""
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
    machine = Machine(arch)
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


INVALID = {16: 0xFE00, 32: 0xFFC00000, 64: 0xFFF8 << 48}
EXPONENT_BITS = {16: (10, 31), 32: (23, 255), 64: (52, 2047)}
UNDERFLOW = {32: -150, 64: -1075}


def fixed_up(quotient: int, below: int, above: int, bits: int) -> int:
    """The ISA's cases in its order; -1 for any NaN."""
    for operand in (above, below):
        if is_nan(operand, bits):
            return operand | QUIET[bits]
    zeros = [not x & (1 << bits - 1) - 1 for x in (below, above)]
    infinite = [is_infinite(x, bits) for x in (below, above)]
    if all(zeros) or all(infinite):
        return INVALID[bits]
    negative = (below ^ above) & 1 << bits - 1
    if zeros[0] or infinite[1]:
        return INFINITY[bits] | negative
    if zeros[1] or infinite[0]:
        return negative
    shift, mask = EXPONENT_BITS[bits]
    if bits > 16 and (above >> shift & mask) - (below >> shift & mask) < UNDERFLOW[bits]:
        return negative
    if is_nan(quotient, bits):
        # Outside that range the steps before compute infinity minus infinity; half precision has no such steps.
        return -1 if bits == 16 else INFINITY[bits] | negative
    return quotient & (1 << bits - 1) - 1 | negative


@holds_each("name", ["v_div_fixup_f16", "v_div_fixup_legacy_f16", "v_div_fixup_f32", "v_div_fixup_f64"])
def test_division_fixup_replaces_special_quotients(name: str, arch: str) -> None:
    bits = int(name[-2:])
    text = f"{name} {register(10, bits)}, {register(0, bits)}, {register(2, bits)}, {register(4, bits)}"
    rows = [*cases(INTERESTING[bits], bits, 3, 15, rounds=4)]
    rows += [[b, c, a] for a, b, c in rows] + [[c, a, b] for a, b, c in rows]  # every source meets every special value
    check(Machine(arch), text, (bits, bits), 3, lambda *x: fixed_up(*x, bits), rows)


@holds_each("bits", [32, 64], lambda bits: [f"v_div_fmas_f{bits}"])
def test_division_fma_is_scaled_where_vcc_says(bits: int, arch: str) -> None:
    """By 2^64 (f64: 2^128) upward for addends from 2 on, downward below: exact, as the results stay normal."""
    text = f"v_div_fmas_f{bits} " + ", ".join(register(i, bits) for i in (10, 0, 2, 4))
    rng = np.random.default_rng(17)
    machine = Machine(arch)
    mask, step = 0x0F0F_5555_AAAA_FF00, 64 if bits == 32 else 128
    for _ in range(6):
        numbers = rng.standard_normal((3, 64)) * 2.0 ** rng.integers(-12, 12, (3, 64))
        numbers[2] = np.copysign(np.abs(numbers[2]) + 2.0**-10, numbers[2])
        codes = numbers.astype(np.float32).view(np.uint32) if bits == 32 else numbers.view(np.uint64)
        rows = [[int(x) for x in row] for row in codes]
        load(machine, rows, bits)
        machine.set64(VCC, mask)
        got = machine.run(text).row64(10)
        for lane, (a, b, c) in enumerate(zip(*rows, strict=True)):
            want = fma(a, b, c, bits)
            if mask >> lane & 1:
                shift, field = EXPONENT_BITS[bits]
                up = c >> shift & field > field // 2
                want = from_fraction(to_fraction(want, bits) * Fraction(2) ** (step if up else -step), bits)
            assert got[lane] & (1 << bits) - 1 == want, (hex(a), hex(b), hex(c))
