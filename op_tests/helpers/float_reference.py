"""Floating-point operations by their definition: exact rationals, one rounding, one rule for NaN payloads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from helpers.exec_one import (
    INTERESTING_16,
    INTERESTING_32,
    INTERESTING_64,
    Machine,
    cases,
    from_fraction,
    is_infinite,
    is_nan,
    to_fraction,
)

INTERESTING = {16: INTERESTING_16, 32: INTERESTING_32, 64: INTERESTING_64}
QUIET = {16: 0x0200, 32: 0x00400000, 64: 1 << 51}
INFINITY = {16: 0x7C00, 32: 0x7F800000, 64: 0x7FF0000000000000}
NAN = {16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8000000000000}


def sign(code: int, bits: int) -> int:
    return code >> (bits - 1)


def first_nan(codes: tuple[int, ...], bits: int) -> int | None:
    """Return the first NaN made quiet: the emulator's rule for which NaN comes through."""
    return next((code | QUIET[bits] for code in codes if is_nan(code, bits)), None)


NEAREST, UP, DOWN, ZERO = range(4)


@dataclass(frozen=True)
class Control:
    """What MODE asks of results of one width; by default as :data:`helpers.exec_one.MODE_DEFAULT` does."""

    bits: int
    rounding: int = NEAREST
    denorm: int = 3

    def read(self, code: int) -> int:
        """Return an input as the operation sees it."""
        return code if self.denorm & 1 else flushed(code, self.bits)

    def write(self, value: Fraction, negative_zero: bool) -> int:
        """Return the code of an exact result."""
        code = directed(value, self.bits, self.rounding, negative_zero)
        return code if self.denorm & 2 else flushed(code, self.bits)


def flushed(code: int, bits: int) -> int:
    """Return a denormal as the zero of its sign."""
    return code if code & INFINITY[bits] else code & 1 << bits - 1


def directed(value: Fraction, bits: int, rounding: int, negative_zero: bool) -> int:
    """Round to a neighbour: the one below in size first, then one code further if the direction says so."""
    if rounding == NEAREST or value == 0:
        return from_fraction(value, bits, negative_zero)
    negative = (1 << bits - 1) if value < 0 else 0
    code = from_fraction(abs(value), bits)
    if is_infinite(code, bits) or to_fraction(code, bits) > abs(value):
        code -= 1
    outward = rounding == (DOWN if negative else UP)
    return negative | (code + 1 if outward and to_fraction(code, bits) != abs(value) else code)


def fma(a: int, b: int, c: int, bits: int, control: Control | None = None) -> int:
    control = control or Control(bits)
    a, b, c = (control.read(code) for code in (a, b, c))
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
    both = product_sign == sign(c, bits)
    return control.write(exact, bool(product_sign) if both else control.rounding == DOWN)


def add(a: int, b: int, bits: int, control: Control | None = None) -> int:
    one = from_fraction(Fraction(1), bits)
    return first_nan((a, b), bits) or fma(one, a, b, bits, control)


def multiply(a: int, b: int, bits: int, control: Control | None = None) -> int:
    negative = (sign(a, bits) ^ sign(b, bits)) << bits - 1
    # Adding a zero of the product's sign changes nothing.
    return first_nan((a, b), bits) or fma(a, b, negative, bits, control)


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


def number(code: int, bits: int) -> Fraction | float:
    """The value of a code that is not NaN."""
    if is_infinite(code, bits):
        return -math.inf if sign(code, bits) else math.inf
    return to_fraction(code, bits)


def register(index: int, bits: int) -> str:
    return f"v[{index}:{index + 1}]" if bits == 64 else f"v{index}"


def load(machine: Machine, rows: list[list[int]], bits: int) -> None:
    """Operands into v0, v2, v4."""
    for i, row in enumerate(rows):
        if bits == 64:
            machine.set_row64(2 * i, row)
        else:
            machine.v[2 * i] = row


def check(
    machine: Machine, text: str, bits: tuple[int, int], count: int, want: Callable[..., int],
    operands: Iterable[list[list[int]]] | None = None, destination: int = 10,
) -> None:  # fmt: skip
    """Compare an operation on v0, v2, v4 with a function of their codes.

    Args:
        machine: its mode and architecture apply.
        text: the instruction.
        bits: of the sources and of the result.
        count: sources.
        want: the result's code, or -1 for any NaN.
        operands: rows of 64 codes for each source, special values against special values by default.
        destination: the VGPR of the result.
    """
    source, result = bits
    for rows in operands or cases(INTERESTING[source], source, count, 1):
        load(machine, rows, source)
        machine.run(text)
        got = machine.row64(destination)
        for lane, codes in enumerate(zip(*rows, strict=True)):
            expected, code = want(*codes), got[lane] & (1 << result) - 1
            same = is_nan(code, result) if expected == -1 else code == expected
            assert same, f"{text} of {[hex(x) for x in codes]}: {code:#x}, expected {expected:#x}"
