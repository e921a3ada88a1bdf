"""Scalar operations of the emulator against Python's integers: results, SCC, shift amounts past the width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.exec_one import EXEC, VCC, Machine, assemble_all, signed
from helpers.exec_registry import ARCHS, holds, holds_each, on_each_arch

MASK32, MASK64 = 2**32 - 1, 2**64 - 1
VALUES = (0, 1, 2, 31, 32, 33, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00100003, 0x0040FFFF, 0xDEADBEEF)
WIDE = (0, 1, 63, 64, MASK32, 1 << 32, 1 << 63, MASK64, MASK64 - 1, 0x0123456789ABCDEF)

Result = tuple[int, int | None]  # value, SCC (None: unchanged)


def s32(x: int) -> int:
    return signed(x, 32)


def bit(condition: bool) -> int:
    return int(condition)


def logical(function: Callable[[int, int], int], mask: int) -> Callable[[int, int, int], Result]:
    def run(a: int, b: int, scc: int) -> Result:
        r = function(a, b) & mask
        return r, bit(r != 0)

    return run


def overflow(total: int) -> int:
    return bit(not -(2**31) <= total < 2**31)


def bfe(a: int, b: int, bits: int, is_signed: bool) -> Result:
    offset, width = b & (bits - 1), (b >> 16) & 127
    if is_signed:
        a = signed(a, bits)
    r = (a >> offset) & ((1 << min(width, bits)) - 1)
    if is_signed and 0 < width < bits:
        r = signed(r, width)
    r &= (1 << bits) - 1
    return r, bit(r != 0)


def lshl_add(shift: int) -> Callable[[int, int, int], Result]:
    def run(a: int, b: int, scc: int) -> Result:
        total = (a << shift) + b
        return total & MASK32, bit(total > MASK32)

    return run


def shifted(r: int, mask: int) -> Result:
    r &= mask
    return r, bit(r != 0)


TWO_32: dict[str, Callable[[int, int, int], Result]] = {
    "s_add_u32": lambda a, b, c: ((a + b) & MASK32, (a + b) >> 32),
    "s_sub_u32": lambda a, b, c: ((a - b) & MASK32, bit(a < b)),
    "s_add_i32": lambda a, b, c: ((a + b) & MASK32, overflow(s32(a) + s32(b))),
    "s_sub_i32": lambda a, b, c: ((a - b) & MASK32, overflow(s32(a) - s32(b))),
    "s_addc_u32": lambda a, b, c: ((a + b + c) & MASK32, (a + b + c) >> 32),
    "s_subb_u32": lambda a, b, c: ((a - b - c) & MASK32, bit(a < b + c)),
    "s_min_i32": lambda a, b, c: (min(s32(a), s32(b)) & MASK32, bit(s32(a) < s32(b))),
    "s_min_u32": lambda a, b, c: (min(a, b), bit(a < b)),
    "s_max_i32": lambda a, b, c: (max(s32(a), s32(b)) & MASK32, bit(s32(a) > s32(b))),
    "s_max_u32": lambda a, b, c: (max(a, b), bit(a > b)),
    "s_mul_i32": lambda a, b, c: (a * b & MASK32, None),
    "s_mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b, c: (s32(a) * s32(b) >> 32 & MASK32, None),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
    "s_and_b32": logical(lambda a, b: a & b, MASK32),
    "s_or_b32": logical(lambda a, b: a | b, MASK32),
    "s_xor_b32": logical(lambda a, b: a ^ b, MASK32),
    "s_andn2_b32": logical(lambda a, b: a & ~b, MASK32),
    "s_orn2_b32": logical(lambda a, b: a | ~b, MASK32),
    "s_nand_b32": logical(lambda a, b: ~(a & b), MASK32),
    "s_nor_b32": logical(lambda a, b: ~(a | b), MASK32),
    "s_xnor_b32": logical(lambda a, b: ~(a ^ b), MASK32),
    "s_lshl_b32": lambda a, b, c: shifted(a << (b & 31), MASK32),
    "s_lshr_b32": lambda a, b, c: shifted(a >> (b & 31), MASK32),
    "s_ashr_i32": lambda a, b, c: shifted(s32(a) >> (b & 31), MASK32),
    "s_bfm_b32": lambda a, b, c: (((1 << (a & 31)) - 1 << (b & 31)) & MASK32, None),
    "s_bfe_u32": lambda a, b, c: bfe(a, b, 32, False),
    "s_bfe_i32": lambda a, b, c: bfe(a, b, 32, True),
    "s_absdiff_i32": lambda a, b, c: shifted(abs(s32((a - b) & MASK32)), MASK32),
    "s_lshl1_add_u32": lshl_add(1),
    "s_lshl2_add_u32": lshl_add(2),
    "s_lshl3_add_u32": lshl_add(3),
    "s_lshl4_add_u32": lshl_add(4),
    "s_pack_ll_b32_b16": lambda a, b, c: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "s_pack_lh_b32_b16": lambda a, b, c: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_pack_hh_b32_b16": lambda a, b, c: (a >> 16 | b & 0xFFFF0000, None),
}
TWO_64: dict[str, Callable[[int, int, int], Result]] = {
    "s_and_b64": logical(lambda a, b: a & b, MASK64),
    "s_or_b64": logical(lambda a, b: a | b, MASK64),
    "s_xor_b64": logical(lambda a, b: a ^ b, MASK64),
    "s_andn2_b64": logical(lambda a, b: a & ~b, MASK64),
    "s_orn2_b64": logical(lambda a, b: a | ~b, MASK64),
    "s_nand_b64": logical(lambda a, b: ~(a & b), MASK64),
    "s_nor_b64": logical(lambda a, b: ~(a | b), MASK64),
    "s_xnor_b64": logical(lambda a, b: ~(a ^ b), MASK64),
    "s_cselect_b64": lambda a, b, c: (a if c else b, None),
}
# A 64-bit value and a 32-bit amount.
WIDE_BY_32: dict[str, Callable[[int, int, int], Result]] = {
    "s_lshl_b64": lambda a, b, c: shifted(a << (b & 63), MASK64),
    "s_lshr_b64": lambda a, b, c: shifted(a >> (b & 63), MASK64),
    "s_ashr_i64": lambda a, b, c: shifted(signed(a, 64) >> (b & 63), MASK64),
    "s_bfe_u64": lambda a, b, c: bfe(a, b, 64, False),
    "s_bfe_i64": lambda a, b, c: bfe(a, b, 64, True),
}


def first_zero(a: int, bits: int) -> int:
    inverted = ~a & ((1 << bits) - 1)
    return (inverted & -inverted).bit_length() - 1 & MASK32


def leading(a: int, bits: int) -> int:
    return bits - a.bit_length() if a else MASK32


def leading_signed(a: int, bits: int) -> int:
    value = signed(a, bits)
    return leading(value if value >= 0 else ~value, bits)


def counted(n: int) -> Result:
    return n, bit(n != 0)


def reverse(a: int, bits: int) -> int:
    return int(format(a, f"0{bits}b")[::-1], 2)


def quads(a: int, bits: int, whole: bool) -> Result:
    r = 0
    for i in range(bits // 4):
        if a >> 4 * i & 15:
            r |= 15 << 4 * i if whole else 1 << i
    return r, bit(r != 0)


ONE_32: dict[str, Callable[[int, int], Result]] = {
    "s_mov_b32": lambda a, c: (a, None),
    "s_not_b32": lambda a, c: (~a & MASK32, bit(a != MASK32)),
    "s_brev_b32": lambda a, c: (reverse(a, 32), None),
    "s_bcnt0_i32_b32": lambda a, c: counted(32 - a.bit_count()),
    "s_bcnt1_i32_b32": lambda a, c: counted(a.bit_count()),
    "s_ff0_i32_b32": lambda a, c: (first_zero(a, 32), None),
    "s_ff1_i32_b32": lambda a, c: (first_zero(~a, 32), None),
    "s_flbit_i32_b32": lambda a, c: (leading(a, 32), None),
    "s_flbit_i32": lambda a, c: (leading_signed(a, 32), None),
    "s_sext_i32_i8": lambda a, c: (signed(a, 8) & MASK32, None),
    "s_sext_i32_i16": lambda a, c: (signed(a, 16) & MASK32, None),
    "s_abs_i32": lambda a, c: shifted(abs(s32(a)), MASK32),
    "s_wqm_b32": lambda a, c: quads(a, 32, True),
    "s_quadmask_b32": lambda a, c: quads(a, 32, False),
}
ONE_64: dict[str, Callable[[int, int], Result]] = {
    "s_mov_b64": lambda a, c: (a, None),
    "s_not_b64": lambda a, c: (~a & MASK64, bit(a != MASK64)),
    "s_brev_b64": lambda a, c: (reverse(a, 64), None),
    "s_wqm_b64": lambda a, c: quads(a, 64, True),
    "s_quadmask_b64": lambda a, c: quads(a, 64, False),
}
WIDE_TO_32: dict[str, Callable[[int, int], Result]] = {
    "s_bcnt0_i32_b64": lambda a, c: counted(64 - a.bit_count()),
    "s_bcnt1_i32_b64": lambda a, c: counted(a.bit_count()),
    "s_ff0_i32_b64": lambda a, c: (first_zero(a, 64), None),
    "s_ff1_i32_b64": lambda a, c: (first_zero(~a, 64), None),
    "s_flbit_i32_b64": lambda a, c: (leading(a, 64), None),
    "s_flbit_i32_i64": lambda a, c: (leading_signed(a, 64), None),
}
COMPARES: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def check(machine: Machine, text: str, got: int, want: Result, scc: int, operands: tuple[int, ...]) -> None:
    shown = f"{text} of {[hex(x) for x in operands]}, SCC {scc}"
    assert got == want[0], f"{shown}: {got:#x}, expected {want[0]:#x}"
    assert machine.scc == (scc if want[1] is None else want[1]), f"{shown}: SCC {machine.scc}"


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    two = [f"{name} s10, s4, s6" for name in TWO_32]
    two += [f"{name} s[10:11], s[4:5], s[6:7]" for name in TWO_64] + ["s_bfm_b64 s[10:11], s4, s6"]
    two += [f"{name} s[10:11], s[4:5], s6" for name in WIDE_BY_32]
    one = [f"{name} s10, s4" for name in ONE_32] + [f"{name} s[10:11], s[4:5]" for name in ONE_64]
    one += [f"{name} s10, s[4:5]" for name in WIDE_TO_32]
    compares = [f"s_cmp_{name}_{kind} s4, s6" for name in COMPARES for kind in ("i32", "u32")]
    for arch in ARCHS:
        assemble_all(two + one + compares, arch)


@holds_each("name", TWO_32)
def test_two_words(name: str, arch: str) -> None:
    text, machine = f"{name} s10, s4, s6", Machine(arch)
    for a in VALUES:
        for b in VALUES:
            for scc in (0, 1):
                machine.s[4], machine.s[6], machine.scc = a, b, scc
                check(machine.run(text), text, int(machine.s[10]), TWO_32[name](a, b, scc), scc, (a, b))


@holds_each("name", [*TWO_64, *WIDE_BY_32])
def test_two_double_words(name: str, arch: str) -> None:
    wide = name in TWO_64
    text, machine = f"{name} s[10:11], s[4:5], {'s[6:7]' if wide else 's6'}", Machine(arch)
    for a in WIDE:
        for b in WIDE if wide else VALUES:
            machine.set64(4, a)
            machine.set64(6, b)
            machine.scc = a & 1
            want = (TWO_64 if wide else WIDE_BY_32)[name](a, b, a & 1)
            check(machine.run(text), text, machine.get64(10), want, a & 1, (a, b))


@holds_each("name", [*ONE_32, *ONE_64, *WIDE_TO_32])
def test_one_source(name: str, arch: str) -> None:
    rng = np.random.default_rng(7)
    random = [int(x) for x in rng.integers(0, 2**64, 20, dtype=np.uint64)]
    result = "s[10:11]" if name in ONE_64 else "s10"
    source = "s4" if name in ONE_32 else "s[4:5]"
    text, machine = f"{name} {result}, {source}", Machine(arch)
    for x in (*VALUES, *WIDE, *random):
        a = x & MASK32 if name in ONE_32 else x
        machine.set64(4, a)
        machine.scc = 1
        want = {**ONE_32, **ONE_64, **WIDE_TO_32}[name](a, 1)
        machine.run(text)
        check(machine, text, machine.get64(10) if name in ONE_64 else int(machine.s[10]), want, 1, (a,))


@holds_each("name", COMPARES, lambda name: [f"s_cmp_{name}_{kind}" for kind in ("i32", "u32")])
def test_compares(name: str, arch: str) -> None:
    machine = Machine(arch)
    for a in VALUES:
        for b in VALUES:
            machine.s[4], machine.s[6] = a, b
            assert machine.run(f"s_cmp_{name}_u32 s4, s6").scc == COMPARES[name](a, b), (a, b)
            assert machine.run(f"s_cmp_{name}_i32 s4, s6").scc == COMPARES[name](s32(a), s32(b)), (a, b)


@holds_each("name", COMPARES, lambda name: [f"s_cmpk_{name}_{kind}" for kind in ("i32", "u32")])
def test_compares_with_an_immediate_extend_it_by_kind(name: str, arch: str) -> None:
    machine = Machine(arch)
    for a in (0, 5, 0xFFF0, 0xFFFFFFF0, 0x7FFFFFFF):
        machine.s[4] = a
        assert machine.run(f"s_cmpk_{name}_u32 s4, 0xfff0").scc == COMPARES[name](a, 0xFFF0)
        assert machine.run(f"s_cmpk_{name}_i32 s4, 0xfff0").scc == COMPARES[name](s32(a), -16)


@holds("s_cmp_eq_u64", "s_cmp_lg_u64")
def test_compares_of_64_bits(arch: str) -> None:
    machine = Machine(arch)
    for a in WIDE:
        for b in WIDE:
            machine.set64(4, a)
            machine.set64(6, b)
            assert machine.run("s_cmp_eq_u64 s[4:5], s[6:7]").scc == (a == b)
            assert machine.run("s_cmp_lg_u64 s[4:5], s[6:7]").scc == (a != b)


@holds(
    "s_bitcmp0_b32", "s_bitcmp1_b32", "s_bitset0_b32", "s_bitset1_b32", "s_bitset1_b64", "s_bfm_b64"
)  # fmt: skip
def test_bit_tests_and_single_bits(arch: str) -> None:
    machine = Machine(arch)
    machine.s[4] = 0x80000001
    for amount in (0, 1, 31, 32, 33, 63):
        machine.s[6] = amount
        set_bit = 0x80000001 >> (amount & 31) & 1
        assert machine.run("s_bitcmp1_b32 s4, s6").scc == set_bit
        assert machine.run("s_bitcmp0_b32 s4, s6").scc == 1 - set_bit
        machine.s[10] = 0x0F0F0F0F
        assert machine.run("s_bitset1_b32 s10, s6").s[10] == 0x0F0F0F0F | 1 << (amount & 31)
        assert machine.run("s_bitset0_b32 s10, s6").s[10] == 0x0F0F0F0F & ~(1 << (amount & 31))
        machine.set64(10, 0)
        assert machine.run("s_bitset1_b64 s[10:11], s6").get64(10) == 1 << (amount & 63)
        machine.s[7] = amount
        assert (
            machine.run("s_bfm_b64 s[10:11], s6, s7").get64(10) == ((1 << (amount & 63)) - 1 << (amount & 63)) & MASK64
        )


@holds_each(
    "name, function",
    [
        ("s_and_saveexec_b64", lambda s, e: s & e),
        ("s_or_saveexec_b64", lambda s, e: s | e),
        ("s_xor_saveexec_b64", lambda s, e: s ^ e),
        ("s_andn2_saveexec_b64", lambda s, e: s & ~e),
        ("s_orn2_saveexec_b64", lambda s, e: s | ~e),
        ("s_nand_saveexec_b64", lambda s, e: ~(s & e)),
        ("s_nor_saveexec_b64", lambda s, e: ~(s | e)),
        ("s_xnor_saveexec_b64", lambda s, e: ~(s ^ e)),
        ("s_andn1_saveexec_b64", lambda s, e: ~s & e),
        ("s_orn1_saveexec_b64", lambda s, e: ~s | e),
    ],
    lambda name, function: [name],
)
def test_saveexec_keeps_the_old_mask(name: str, function: Callable[[int, int], int], arch: str) -> None:
    machine = Machine(arch)
    for source in WIDE:
        for mask in (MASK64, 0, 0x00FF00FF00FF00FF):
            machine.set64(4, source)
            machine.set64(EXEC, mask)
            machine.run(f"{name} s[10:11], s[4:5]")
            want = function(source, mask) & MASK64
            assert (machine.get64(10), machine.get64(EXEC), machine.scc) == (mask, want, int(want != 0))


@holds("s_movk_i32", "s_mov_b64", "s_mov_b32", "s_addk_i32", "s_mulk_i32")
def test_constants_and_immediates(arch: str) -> None:
    machine = Machine(arch)
    assert machine.run("s_movk_i32 s10, 0x8000").s[10] == 0xFFFF8000
    assert machine.run("s_mov_b64 s[10:11], -1").get64(10) == MASK64
    assert machine.run("s_mov_b64 s[10:11], 0xdeadbeef").get64(10) == 0xDEADBEEF
    assert machine.run("s_mov_b32 s10, 0.5").s[10] == 0x3F000000
    machine.s[10] = 7
    assert machine.run("s_addk_i32 s10, 0xfff8").s[10] == MASK32
    machine.s[10] = 0x7FFFFFFF
    assert machine.run("s_addk_i32 s10, 1").scc == 1
    machine.s[10] = 3
    assert machine.run("s_mulk_i32 s10, 0xffff").s[10] == (-3) & MASK32


@on_each_arch
def test_aperture_registers_are_outside_user_space(arch: str) -> None:
    machine = Machine(arch)
    for name in ("src_shared_base", "src_private_base"):
        machine.run(f"s_mov_b64 s[10:11], {name}")
        assert machine.s[10] == 0
        assert int(machine.s[11]) << 32 >= 2**47


@holds("s_getreg_b32", "s_setreg_imm32_b32")
def test_mode_register_reads_back_what_was_written(arch: str) -> None:
    machine = Machine(arch)
    assert machine.run("s_getreg_b32 s10, hwreg(HW_REG_MODE, 0, 10)").s[10] == machine.mode
    machine.run("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\ns_getreg_b32 s10, hwreg(HW_REG_MODE, 0, 10)")
    assert machine.s[10] == machine.mode & ~0x30


@on_each_arch
def test_unknown_hardware_registers_are_named(arch: str) -> None:
    with pytest.raises(RuntimeError, match="HW_REG_IB_STS"):
        Machine(arch).run("s_getreg_b32 s10, hwreg(HW_REG_IB_STS)")


@on_each_arch
def test_vcc_is_an_ordinary_pair(arch: str) -> None:
    machine = Machine(arch)
    machine.set64(VCC, 0x123456789)
    machine.run("s_and_b64 vcc, vcc, exec\ns_mov_b32 s10, vcc_hi")
    assert machine.s[10] == 1
