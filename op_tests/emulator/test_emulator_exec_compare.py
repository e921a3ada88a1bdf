"""Compares of every type and condition, which write a mask, and their cmpx forms, which write EXEC too."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from helpers.exec_one import (
    EXEC,
    INTERESTING_16,
    INTERESTING_32,
    INTERESTING_64,
    VCC,
    Machine,
    assemble_all,
    cases,
    signed,
)
from helpers.exec_registry import ARCHS, holds_each
from helpers.float_reference import QUIET, is_infinite, is_nan, load, number, register, sign

MASK64 = 2**64 - 1
SPECIAL = {16: INTERESTING_16, 32: INTERESTING_32, 64: INTERESTING_64}
INTEGERS = {
    bits: (0, 1, 2, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 2, (1 << bits) - 1)
    for bits in (16, 32, 64)
}
MASKS = (MASK64, 0x00FF00FF00FF00FF, 0x8000000000000001)


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


def is_true(condition: str, kind: str, a: int, b: int) -> bool:
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
    for arch in ARCHS:
        assemble_all((text for compare in COMPARES for text in compare_texts(*compare)), arch)


@holds_each(
    "condition, kind", COMPARES, lambda condition, kind: [f"v_{op}_{condition}_{kind}" for op in ("cmp", "cmpx")]
)
def test_compares_write_their_mask_and_cmpx_also_exec(condition: str, kind: str, arch: str) -> None:
    bits = int(kind[1:])
    machine = Machine(arch)
    specials = SPECIAL[bits] if kind[0] == "f" else INTEGERS[bits]
    for rows in cases(specials, bits, 2, 3, rounds=1):
        load(machine, rows, bits)
        true = sum(is_true(condition, kind, a, b) << lane for lane, (a, b) in enumerate(zip(*rows, strict=True)))
        for text in compare_texts(condition, kind):
            for mask in MASKS:
                machine.set64(EXEC, mask)
                machine.set64(20, 0x1234)
                machine.set64(VCC, 0x1234)
                machine.run(text)
                assert machine.get64(20 if "s[" in text else VCC) == true & mask, text
                assert machine.get64(VCC if "s[" in text else 20) == 0x1234, text
                assert machine.get64(EXEC) == (true & mask if "cmpx" in text else mask), text


@holds_each("bits", [16, 32, 64], lambda bits: [f"v_cmp_class_f{bits}", f"v_cmpx_class_f{bits}"])
def test_class_compares(bits: int, arch: str) -> None:
    def class_of(code: int) -> int:
        size = code & (1 << bits - 1) - 1
        if is_nan(code, bits):
            return 1 if code & QUIET[bits] else 0
        place = 3 if is_infinite(code, bits) else 0 if size == 0 else 1 if size < QUIET[bits] * 2 else 2
        return 5 - place if sign(code, bits) else 6 + place

    machine = Machine(arch)
    for rows in cases(SPECIAL[bits], bits, 1, 2, rounds=2):
        load(machine, rows, bits)
        for wanted in (*(1 << i for i in range(10)), 0x3FF, 0, 0x155):
            machine.s[4] = wanted
            true = sum((wanted >> class_of(code) & 1) << lane for lane, code in enumerate(rows[0]))
            for mask in MASKS:
                machine.set64(EXEC, mask)
                machine.run(f"v_cmp_class_f{bits} s[20:21], {register(0, bits)}, s4")
                assert (machine.get64(20), machine.get64(EXEC)) == (true & mask, mask), hex(wanted)
                machine.run(f"v_cmpx_class_f{bits} s[20:21], {register(0, bits)}, s4")
                assert (machine.get64(20), machine.get64(EXEC)) == (true & mask, true & mask), hex(wanted)
