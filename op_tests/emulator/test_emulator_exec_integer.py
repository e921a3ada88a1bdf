"""Integer and bitwise vector operations of the emulator against Python's integers, 64 cases at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.exec_one import EXEC, VCC, Machine, signed
from helpers.exec_registry import assemble_for, holds, holds_each

M16, M32, M64 = 2**16 - 1, 2**32 - 1, 2**64 - 1
EDGES = (
    0, 1, 2, 7, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFF, 0x800000, 0xFFFFFF,
    0x1000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x0C0D0B0A, 0xDEADBEEF,
)  # fmt: skip


def s16(x: int) -> int:
    return signed(x, 16)


def s24(x: int) -> int:
    return signed(x, 24)


def s32(x: int) -> int:
    return signed(x, 32)


def bytes_of(x: int) -> list[int]:
    return [x >> 8 * i & 255 for i in range(4)]


def sad(a: int, b: int) -> int:
    return sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b), strict=True))


def perm(a: int, b: int, selector: int) -> int:
    both = (a << 32 | b).to_bytes(8, "little")
    result = 0
    for i, code in enumerate(bytes_of(selector)):
        if code < 8:
            byte = both[code]
        elif code < 12:
            byte = 255 if both[2 * (code - 8) + 1] & 128 else 0  # the sign of one of the four halves
        else:
            byte = 0 if code == 12 else 255
        result |= byte << 8 * i
    return result


def bfe(a: int, b: int, c: int, is_signed: bool) -> int:
    offset, width = b & 31, c & 31
    field = (s32(a) >> offset if is_signed else a >> offset) & ((1 << width) - 1)
    return signed(field, width) & M32 if is_signed and width else field


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def median(a: int, b: int, c: int) -> int:
    return sorted((a, b, c))[1]


def leading(a: int) -> int:
    return 32 - a.bit_length() if a else M32


TWO: dict[str, Callable[[int, int], int]] = {
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: s32(a) * s32(b) >> 32,
    "v_mul_i32_i24": lambda a, b: s24(a) * s24(b),
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_hi_i32_i24": lambda a, b: s24(a) * s24(b) >> 32,
    "v_mul_hi_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32,
    "v_min_i32": lambda a, b: min(s32(a), s32(b)),
    "v_max_i32": lambda a, b: max(s32(a), s32(b)),
    "v_min_u32": min,
    "v_max_u32": max,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: s32(b) >> (a & 31),
    "v_bfm_b32": lambda a, b: (1 << (a & 31)) - 1 << (b & 31),
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_cvt_pk_u16_u32": lambda a, b: min(a, M16) | min(b, M16) << 16,
    "v_cvt_pk_i16_i32": lambda a, b: (
        clamp(s32(a), -(2**15), 2**15 - 1) & M16 | (clamp(s32(b), -(2**15), 2**15 - 1) & M16) << 16
    ),
    "v_add_u16": lambda a, b: a + b & M16,
    "v_sub_u16": lambda a, b: a - b & M16,
    "v_subrev_u16": lambda a, b: b - a & M16,
    "v_mul_lo_u16": lambda a, b: a * b & M16,
    "v_lshlrev_b16": lambda a, b: b << (a & 15) & M16,
    "v_lshrrev_b16": lambda a, b: (b & M16) >> (a & 15),
    "v_ashrrev_i16": lambda a, b: s16(b) >> (a & 15) & M16,
    "v_min_i16": lambda a, b: min(s16(a), s16(b)) & M16,
    "v_max_i16": lambda a, b: max(s16(a), s16(b)) & M16,
    "v_min_u16": lambda a, b: min(a & M16, b & M16),
    "v_max_u16": lambda a, b: max(a & M16, b & M16),
}
THREE: dict[str, Callable[[int, int, int], int]] = {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M32) << (c & 31),
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_bfe_u32": lambda a, b, c: bfe(a, b, c, False),
    "v_bfe_i32": lambda a, b, c: bfe(a, b, c, True),
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32": perm,
    "v_min3_i32": lambda a, b, c: min(s32(a), s32(b), s32(c)),
    "v_min3_u32": min,
    "v_max3_i32": lambda a, b, c: max(s32(a), s32(b), s32(c)),
    "v_max3_u32": max,
    "v_med3_i32": lambda a, b, c: median(s32(a), s32(b), s32(c)),
    "v_med3_u32": median,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + c,
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_u32_u16": lambda a, b, c: (a & M16) * (b & M16) + c,
    "v_mad_i32_i16": lambda a, b, c: s16(a) * s16(b) + c,
    "v_sad_u8": lambda a, b, c: sad(a, b) + c,
    "v_sad_hi_u8": lambda a, b, c: (sad(a, b) << 16) + c,
    "v_sad_u16": lambda a, b, c: abs((a & M16) - (b & M16)) + abs((a >> 16) - (b >> 16)) + c,
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    "v_msad_u8": lambda a, b, c: sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b), strict=True) if y) + c,
    "v_lerp_u8": lambda a, b, c: sum(
        (x + y + (z & 1) >> 1) << 8 * i
        for i, (x, y, z) in enumerate(zip(bytes_of(a), bytes_of(b), bytes_of(c), strict=True))
    ),
    "v_dot4_i32_i8": lambda a, b, c: (
        sum(signed(x, 8) * signed(y, 8) for x, y in zip(bytes_of(a), bytes_of(b), strict=True)) + c
    ),
    "v_dot4_u32_u8": lambda a, b, c: sum(x * y for x, y in zip(bytes_of(a), bytes_of(b), strict=True)) + c,
    "v_dot8_i32_i4": lambda a, b, c: sum(signed(a >> 4 * i, 4) * signed(b >> 4 * i, 4) for i in range(8)) + c,
    "v_dot8_u32_u4": lambda a, b, c: sum((a >> 4 * i & 15) * (b >> 4 * i & 15) for i in range(8)) + c,
    "v_dot2_i32_i16": lambda a, b, c: s16(a) * s16(b) + s16(a >> 16) * s16(b >> 16) + c,
    "v_dot2_u32_u16": lambda a, b, c: (a & M16) * (b & M16) + (a >> 16) * (b >> 16) + c,
}
ONE: dict[str, Callable[[int], int]] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: int(format(a, "032b")[::-1], 2),
    "v_ffbh_u32": leading,
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1,
    "v_ffbh_i32": lambda a: leading(s32(a) if s32(a) >= 0 else ~s32(a)),
    "v_sat_pk_u8_i16": lambda a: clamp(s16(a), 0, 255) | clamp(s16(a >> 16), 0, 255) << 8,
    "v_prng_b32": lambda a: a << 1 & M32 ^ (197 if a >> 31 else 0),
}
PACKED: dict[str, Callable[[int, int], int]] = {
    "v_pk_add_i16": lambda a, b: a + b,
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_sub_i16": lambda a, b: a - b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_lshlrev_b16": lambda a, b: b << (a & 15),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & 15),
    "v_pk_ashrrev_i16": lambda a, b: s16(b) >> (a & 15),
    "v_pk_max_i16": lambda a, b: max(s16(a), s16(b)),
    "v_pk_min_i16": lambda a, b: min(s16(a), s16(b)),
    "v_pk_max_u16": max,
    "v_pk_min_u16": min,
}
# With the clamp bit the result saturates at the ends of its type.
SATURATING: dict[str, tuple[Callable[..., int], int, int, int]] = {
    "v_add_u32": (lambda a, b: a + b, 0, M32, M32),
    "v_sub_u32": (lambda a, b: a - b, 0, M32, M32),
    "v_add_i32": (lambda a, b: s32(a) + s32(b), -(2**31), 2**31 - 1, M32),
    "v_sub_i32": (lambda a, b: s32(a) - s32(b), -(2**31), 2**31 - 1, M32),
    "v_add_u16": (lambda a, b: (a & M16) + (b & M16), 0, M16, M16),
    "v_sub_u16": (lambda a, b: (a & M16) - (b & M16), 0, M16, M16),
    "v_add_i16": (lambda a, b: s16(a) + s16(b), -(2**15), 2**15 - 1, M16),
    "v_sub_i16": (lambda a, b: s16(a) - s16(b), -(2**15), 2**15 - 1, M16),
}


def text_of(name: str, sources: int, suffix: str = "") -> str:
    e64_only = name in THREE or name in PACKED
    return f"{name}{'' if e64_only else suffix} v10, " + ", ".join(f"v{i}" for i in range(sources))


def text(name: str) -> str:
    return text_of(name, 1 if name in ONE else 3 if name in THREE else 2)


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_for(text, (*TWO, *PACKED, *THREE, *ONE))
    assemble_for(lambda name: f"{name} v10, v0, v1 clamp", SATURATING)


def operands(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    pairs = [(a, b) for a in EDGES for b in EDGES]
    rows = []
    for start in range(0, len(pairs) // 64 * 64, 64):
        chunk = pairs[start : start + 64]
        rows.append([[a for a, _ in chunk], [b for _, b in chunk], [int(x) for x in rng.choice(EDGES, 64)]][:count])
    for _ in range(4):
        rows.append([[int(x) for x in rng.integers(0, 2**32, 64)] for _ in range(count)])
    return rows


def run_all(arch: str, text: str, count: int, want: Callable[..., int]) -> None:
    machine = Machine(arch)
    for rows in operands(count):
        for register, row in enumerate(rows):
            machine.v[register] = row
        machine.v[10] = 0x55555555
        machine.run(text)
        expected = [want(*lane) & M32 for lane in zip(*rows, strict=True)]
        got = machine.v[10].tolist()
        wrong = [(lane, [hex(r[lane]) for r in rows]) for lane in range(64) if got[lane] != expected[lane]]
        assert not wrong, f"{text} of {wrong[0][1]}: {got[wrong[0][0]]:#x}, expected {expected[wrong[0][0]]:#x}"


@holds_each("name", TWO)
def test_two_sources(name: str, arch: str) -> None:
    run_all(arch, text(name), 2, TWO[name])


@holds_each("name", THREE)
def test_three_sources(name: str, arch: str) -> None:
    run_all(arch, text(name), 3, THREE[name])


@holds_each("name", ONE)
def test_one_source(name: str, arch: str) -> None:
    run_all(arch, text(name), 1, ONE[name])


@holds_each("name", PACKED)
def test_both_halves(name: str, arch: str) -> None:
    function = PACKED[name]
    run_all(
        arch, text(name), 2, lambda a, b: function(a & M16, b & M16) & M16 | (function(a >> 16, b >> 16) & M16) << 16
    )


@holds_each("name", SATURATING)
def test_clamp_saturates(name: str, arch: str) -> None:
    function, low, high, mask = SATURATING[name]
    keeps = 0x55550000 if name in ("v_add_i16", "v_sub_i16") else 0  # VOP3-only forms leave the high half alone
    run_all(arch, f"{name} v10, v0, v1 clamp", 2, lambda a, b: clamp(function(a, b), low, high) & mask | keeps)


@holds_each("table", [0x00, 0x3C, 0x96, 0xCA, 0xE8, 0xFE, 0xFF], lambda table: ["v_bitop3_b32"])
def test_bitop3_is_a_truth_table(table: int, arch: str) -> None:
    def want(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

    run_all(arch, f"v_bitop3_b32 v10, v0, v1, v2 bitop3:{table:#x}", 3, want)


ADDENDS = (0, 1, M64, 1 << 63, (1 << 63) - 1, 0x0123456789ABCDEF)


@holds_each("is_signed", [False, True], lambda is_signed: ["v_mad_i64_i32" if is_signed else "v_mad_u64_u32"])
def test_multiply_add_of_64_bits_and_its_carry(is_signed: bool, arch: str) -> None:
    name = "v_mad_i64_i32" if is_signed else "v_mad_u64_u32"
    rng = np.random.default_rng(3)
    machine = Machine(arch)
    for a, b in operands(2):
        c = [ADDENDS[i] for i in rng.integers(0, len(ADDENDS), 64)]
        machine.v[0], machine.v[1] = a, b
        machine.set_row64(2, c)
        machine.run(f"{name} v[10:11], s[20:21], v0, v1, v[2:3]")
        for lane in range(64):
            if is_signed:
                exact = s32(a[lane]) * s32(b[lane]) + signed(c[lane], 64)
                carry = not -(2**63) <= exact < 2**63
            else:
                exact = a[lane] * b[lane] + c[lane]
                carry = exact > M64
            assert machine.row64(10)[lane] == exact & M64
            assert machine.get64(20) >> lane & 1 == carry


@holds_each(
    "name, function",
    [
        ("v_lshlrev_b64", lambda a, b: b << (a & 63)),
        ("v_lshrrev_b64", lambda a, b: b >> (a & 63)),
        ("v_ashrrev_i64", lambda a, b: signed(b, 64) >> (a & 63)),
    ],
    lambda name, function: [name],
)
def test_shifts_of_64_bits(name: str, function: Callable[[int, int], int], arch: str) -> None:
    amounts = [*range(60), 63, 64, 65, 127]
    machine = Machine(arch)
    for value in (1, M64, 1 << 63, 0x0123456789ABCDEF):
        machine.v[0] = amounts
        machine.set_row64(2, [value] * 64)
        # The destination is the source.
        machine.run(f"{name} v[2:3], v0, v[2:3]")
        assert machine.row64(2) == [function(a, value) & M64 for a in amounts]


@holds("v_lshl_add_u64")
def test_add_of_shifted_64_bits(arch: str) -> None:
    machine = Machine(arch)
    for amount in range(5):
        machine.set_row64(2, [M64 - lane for lane in range(64)])
        machine.set_row64(4, [lane << 40 for lane in range(64)])
        machine.run(f"v_lshl_add_u64 v[10:11], v[2:3], {amount}, v[4:5]")
        assert machine.row64(10) == [((M64 - lane << amount) + (lane << 40)) & M64 for lane in range(64)]


CARRIES: dict[str, Callable[[int, int, int], int]] = {
    "v_add_co_u32": lambda a, b, c: a + b,
    "v_sub_co_u32": lambda a, b, c: a - b,
    "v_subrev_co_u32": lambda a, b, c: b - a,
    "v_addc_co_u32": lambda a, b, c: a + b + c,
    "v_subb_co_u32": lambda a, b, c: a - b - c,
    "v_subbrev_co_u32": lambda a, b, c: b - a - c,
}


@holds_each("name", CARRIES)
def test_carries_in_and_out(name: str, arch: str) -> None:
    takes = name in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
    machine = Machine(arch)
    mask = 0x00FFF0F0F0FFFFFF
    for a, b in operands(2):
        machine.v[0], machine.v[1], machine.v[10] = a, b, 77
        machine.set64(VCC, 0xA5A5A5A5_5A5A5A5A)
        machine.set64(EXEC, mask)
        machine.run(f"{name} v10, vcc, v0, v1{', vcc' if takes else ''}")
        carries = 0
        for lane in range(64):
            if not mask >> lane & 1:
                assert machine.v[10][lane] == 77
                continue
            exact = CARRIES[name](a[lane], b[lane], 0xA5A5A5A5_5A5A5A5A >> lane & 1)
            assert machine.v[10][lane] == exact & M32
            carries |= int(not 0 <= exact <= M32) << lane
        assert machine.get64(VCC) == carries, "an inactive lane gives 0"
