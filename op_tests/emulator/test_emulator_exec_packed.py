"""Packed pairs, mixed precision and dot products."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from helpers.exec_one import (
    INTERESTING_16,
    INTERESTING_32,
    Machine,
    cases,
    from_fraction,
    is_infinite,
    is_nan,
    to_fraction,
)
from helpers.exec_registry import holds, holds_each
from helpers.float_reference import INFINITY, add, extreme, fma, load, multiply, negated, sign


@holds("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32")
def test_packed_f32_selects_each_half(arch: str) -> None:
    rng = np.random.default_rng(4)
    machine = Machine(arch)
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


@holds_each("name", ["v_pk_add_f16", "v_pk_mul_f16", "v_pk_fma_f16", "v_pk_min_f16", "v_pk_max_f16"])
def test_packed_f16_is_two_operations(name: str, arch: str) -> None:
    rng = np.random.default_rng(6)
    machine = Machine(arch)
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


@holds("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def test_mixed_fma_rounds_once_to_half(arch: str) -> None:
    rng = np.random.default_rng(9)
    machine = Machine(arch)
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


def to_half_truncated(code: int) -> int:
    if is_infinite(code, 32):
        return INFINITY[16] | sign(code, 32) << 15
    value = to_fraction(code, 32)
    size = from_fraction(abs(value), 16)
    if is_infinite(size, 16) or to_fraction(size, 16) > abs(value):
        size -= 1  # codes of one sign are ordered, so the one below is the next toward zero
    return size | sign(code, 32) << 15


@holds("v_cvt_pkrtz_f16_f32")
def test_pkrtz_rounds_toward_zero(arch: str) -> None:
    machine = Machine(arch)
    near = (0x38800000, 0x387FFFFF, 0xB3800001, 0x33000000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0xC77FFFFF, 0x3F801FFF)
    for rows in cases((*INTERESTING_32, *near), 32, 2, 1):
        load(machine, rows, 32)
        machine.run("v_cvt_pkrtz_f16_f32 v10, v0, v2")
        for lane, pair in enumerate(zip(*rows, strict=True)):
            for half, code in enumerate(pair):
                got = int(machine.v[10][lane]) >> 16 * half & 0xFFFF
                same = is_nan(got, 16) if is_nan(code, 32) else got == to_half_truncated(code)
                assert same, (hex(code), hex(got))


@holds_each("choice", [(0, 0), (0, 1), (1, 0), (1, 1)], lambda choice: ["v_pk_mov_b32"])
def test_packed_move_picks_a_register_of_each_source(choice: tuple[int, int], arch: str) -> None:
    machine = Machine(arch)
    machine.v[0:4] = np.arange(256, dtype=np.uint32).reshape(4, 64)
    machine.run(f"v_pk_mov_b32 v[10:11], v[0:1], v[2:3] op_sel:[{choice[0]},{choice[1]}]")
    assert machine.v[10].tolist() == machine.v[choice[0]].tolist()
    assert machine.v[11].tolist() == machine.v[2 + choice[1]].tolist()


@holds_each(
    "text",
    ["v_dot2_f32_f16 v4, v0, v2, v4", "v_dot2_f32_bf16 v4, v0, v2, v4", "v_dot2c_f32_f16 v4, v0, v2",
     "v_dot2c_f32_bf16 v4, v0, v2"],
    lambda text: [text.split()[0]],
)  # fmt: skip
def test_float_dot_products(text: str, arch: str) -> None:
    # Both products are exact in double, whose two sums each err by 2^-53 of the terms; then one rounding to f32, half
    # an ulp, is at most 2^-24 of the result. Twice that sum bounds it all.
    rng = np.random.default_rng(12)
    machine = Machine(arch)
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


@holds_each("name", ["v_dot2c_f32_f16", "v_dot4c_i32_i8", "v_dot8c_i32_i4"])
def test_accumulating_dots_take_their_first_source_through_dpp(name: str, arch: str) -> None:
    rng = np.random.default_rng(16)
    plain, moved = Machine(arch), Machine(arch)
    halves_of = rng.standard_normal((2, 128)).astype(np.float16).view(np.uint32)
    first, second = halves_of
    moved.v[0], moved.v[2] = first, second
    plain.v[0], plain.v[2] = first[np.arange(64) ^ 1], second
    moved.run(f"{name} v4, v0, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf")
    plain.run(f"{name} v4, v0, v2")
    assert moved.v[4].tolist() == plain.v[4].tolist()
    assert len(set(plain.v[4].tolist())) > 30
