"""MODE: rounding and denormal control by type against exact rationals, overflow, clamp and output modifiers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from helpers.exec_one import (
    INTERESTING_32,
    MODE_DEFAULT,
    VCC,
    Machine,
    assemble_all,
    cases,
    from_fraction,
    is_nan,
    to_fraction,
)
from helpers.float_reference import (
    DOWN,
    INTERESTING,
    NEAREST,
    UP,
    ZERO,
    Control,
    add,
    check,
    directed,
    fma,
    load,
    multiply,
    register,
)

FP16_OVFL = 1 << 23


def mode_of(round32: int = 0, round64: int = 0, denorm32: int = 3, denorm64: int = 3) -> int:
    """Return MODE with DX10_CLAMP and IEEE set."""
    return 0x300 | round32 | round64 << 2 | denorm32 << 4 | denorm64 << 6


OPERATIONS: dict[str, Callable[..., int]] = {"add": add, "mul": multiply, "fma": fma}
SOURCES = {"add": 2, "mul": 2, "fma": 3}


def text_of(name: str, bits: int) -> str:
    sources = ", ".join(register(index, bits) for index in (0, 2, 4)[: SOURCES[name]])
    return f"v_{name}_f{bits}{'' if name == 'fma' or bits == 64 else '_e32'} {register(10, bits)}, {sources}"


def check_control(name: str, bits: int, mode: int, control: Control) -> None:
    """Compare an operation with its definition on special and on random operands."""
    machine, count = Machine(), SOURCES[name]
    machine.mode = mode
    operands = itertools.islice(cases(INTERESTING[bits], bits, count, 3, 2), 12)
    want = lambda *codes: OPERATIONS[name](*codes, bits, control)
    check(machine, text_of(name, bits), (bits, bits), count, want, operands)


@pytest.fixture(scope="module", autouse=True)
def _assembled() -> None:
    assemble_all(text_of(name, bits) for name in OPERATIONS for bits in (16, 32, 64))


# --- rounding and denormals by type -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", range(4))
@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_width_rounds_by_its_own_field(name: str, bits: int, rounding: int) -> None:
    other = (rounding + 1) % 4
    mode = mode_of(round32=rounding, round64=other) if bits == 32 else mode_of(round32=other, round64=rounding)
    check_control(name, bits, mode, Control(bits, rounding))


@pytest.mark.parametrize("denorm", range(4))
@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_width_flushes_by_its_own_field(name: str, bits: int, denorm: int) -> None:
    mode = (
        mode_of(denorm32=denorm, denorm64=3 - denorm) if bits == 32 else mode_of(denorm32=3 - denorm, denorm64=denorm)
    )
    check_control(name, bits, mode, Control(bits, NEAREST, denorm))


@pytest.mark.parametrize("rounding", range(1, 4))
@pytest.mark.parametrize("denorm", range(3))
def test_rounding_and_flushing_meet(rounding: int, denorm: int) -> None:
    check_control("mul", 32, mode_of(round32=rounding, denorm32=denorm), Control(32, rounding, denorm))


@pytest.mark.parametrize("rounding", range(4))
@pytest.mark.parametrize("name", OPERATIONS)
def test_packed_operations_round_and_flush_as_the_plain_ones(name: str, rounding: int) -> None:
    count, denorm = SOURCES[name], rounding
    single, half = Control(32, rounding, denorm), Control(16, rounding, denorm)
    pairs = ", ".join(f"v[{register}:{register + 1}]" for register in (0, 2, 4)[:count])
    machine = Machine()
    for rows in itertools.islice(cases(INTERESTING_32, 32, 2 * count, 4), 4):
        rows = (rows + rows)[: 2 * count]
        for i, row in enumerate(rows):
            machine.v[i] = row
        machine.mode = mode_of(round32=rounding, denorm32=denorm)
        machine.run(f"v_pk_{name}_f32 v[10:11], {pairs}")
        for lane in range(64):
            for high in (0, 1):
                want = OPERATIONS[name](*(row[lane] for row in rows[high::2]), 32, single)
                assert int(machine.v[10 + high][lane]) == want
        machine.mode = mode_of(round64=rounding, denorm64=denorm)
        sources = ", ".join(f"v{register}" for register in range(count))
        machine.run(f"v_pk_{name}_f16 v10, {sources}")
        for lane in range(64):
            for shift in (0, 16):
                want = OPERATIONS[name](*(row[lane] >> shift & 0xFFFF for row in rows[:count]), 16, half)
                assert int(machine.v[10][lane]) >> shift & 0xFFFF == want


def one_source(text: str, bits: int, result: int, mode: int, codes: list[int]) -> list[int]:
    """Run a one-source operation on the codes."""
    machine = Machine()
    load(machine, [(codes * 64)[:64]], bits)
    machine.mode = mode
    machine.run(text)
    got = machine.row64(10) if result == 64 else [int(x) & (1 << result) - 1 for x in machine.v[10]]
    return got[: len(codes)]


HALVES = [0x3F801001, 0xBF801001, 0x3F800FFF, 0x33000001, 0xB3000001, 0x387FF001, 0x477FF001, 0xC77FE001, 0x00000001]


@pytest.mark.parametrize("rounding", range(4))
def test_conversions_to_f16_round_by_the_wide_field(rounding: int) -> None:
    other = (rounding + 2) % 4
    mode = mode_of(round32=other, round64=rounding)
    want = [directed(to_fraction(code, 32), 16, rounding, False) for code in HALVES]
    assert one_source("v_cvt_f16_f32 v10, v0", 32, 16, mode, HALVES) == want
    assert one_source("v_cvt_pk_f16_f32 v10, v0, v0", 32, 32, mode, HALVES) == [code | code << 16 for code in want]
    integers = [2049, 2051, 4098, 65535, 65520, 1, 0]
    want = [directed(Fraction(x), 16, rounding, False) for x in integers]
    assert one_source("v_cvt_f16_u16 v10, v0", 16, 16, mode, integers) == want
    toward_zero = [directed(to_fraction(code, 32), 16, ZERO, False) for code in HALVES]
    got = one_source("v_cvt_pkrtz_f16_f32 v10, v0, v0", 32, 32, mode, HALVES)
    assert got == [code | code << 16 for code in toward_zero]


@pytest.mark.parametrize("rounding", range(4))
def test_conversions_to_f32_round_by_source(rounding: int) -> None:
    other = (rounding + 1) % 4
    doubles = [0x3FF0000010000001, 0xBFF0000010000001, 0x3FF0000030000000, 0x36A0000000000001, 0xB690000000000001,
               0x47EFFFFFF0000000, 0xC7EFFFFFEFFFFFFF]  # fmt: skip
    want = [directed(to_fraction(code, 64), 32, rounding, False) for code in doubles]
    mode = mode_of(round32=other, round64=rounding)
    assert one_source("v_cvt_f32_f64 v10, v[0:1]", 64, 32, mode, doubles) == want
    integers = [0x1000001, 0x1000003, 0x7FFFFFFF, 0x7FFFFFBF, 1, 0x2000002]
    for name, text in (("i32", "v_cvt_f32_i32 v10, v0"), ("u32", "v_cvt_f32_u32 v10, v0")):
        values = [*integers, 0xFFFFFFFF, 0xFEFFFFFF]
        exact = [x - 2**32 if name == "i32" and x >> 31 else x for x in values]
        want = [directed(Fraction(x), 32, rounding, False) for x in exact]
        assert one_source(text, 32, 32, mode_of(round32=rounding, round64=other), values) == want


def test_conversions_flush_by_the_type_on_either_side() -> None:
    assert one_source("v_cvt_f32_f16 v10, v0", 16, 32, mode_of(denorm64=2), [1, 0x8001]) == [0, 0x80000000]
    assert one_source("v_cvt_f32_f16 v10, v0", 16, 32, mode_of(denorm32=0), [1]) == [0x33800000]
    assert one_source("v_cvt_f16_f32 v10, v0", 32, 16, mode_of(denorm64=1), [0x33800000]) == [0]
    assert one_source("v_cvt_f16_f32 v10, v0", 32, 16, mode_of(denorm32=0), [0x33800000]) == [1]
    assert one_source("v_cvt_pkrtz_f16_f32 v10, v0, v0", 32, 32, mode_of(denorm64=1), [0xB3800000]) == [0x80008000]
    assert one_source("v_cvt_f64_f32 v[10:11], v0", 32, 64, mode_of(denorm32=2), [1]) == [0]
    assert one_source("v_cvt_f32_f64 v10, v[0:1]", 64, 32, mode_of(denorm32=1), [0x36A0000000000000]) == [0]
    assert one_source("v_cvt_f32_f64 v10, v[0:1]", 64, 32, mode_of(denorm64=0), [0x36A0000000000000]) == [1]


@pytest.mark.parametrize("rounding", range(4))
def test_mixed_precision_rounds_by_its_result(rounding: int) -> None:
    other = (rounding + 1) % 4
    machine = Machine()
    for rows in itertools.islice(cases(INTERESTING_32, 32, 3, 6), 8):
        for i, row in enumerate(rows):
            machine.v[i] = row
        machine.mode = mode_of(round32=rounding, round64=other)
        machine.run("v_fma_mix_f32 v10, v0, v1, v2")
        for lane, operands in enumerate(zip(*rows, strict=True)):
            assert int(machine.v[10][lane]) == fma(*operands, 32, Control(32, rounding))
    machine.v[0], machine.v[1] = 0x3F800000, 0x3F801001  # 1 * (1 + a little more than half an f16 unit)
    machine.mode = mode_of(round32=other, round64=rounding)
    machine.run("v_fma_mixlo_f16 v10, v0, v1, 0\nv_fma_mixhi_f16 v10, v0, v1, 0")
    code = directed(to_fraction(0x3F801001, 32), 16, rounding, False)
    assert set(machine.v[10].tolist()) == {code | code << 16}


def test_mixed_precision_rounds_the_exact_sum_once() -> None:
    """1 * (1 + 2^-11) + 2^-60 is above the middle of two f16 numbers, but on it once double has dropped the 2^-60."""
    machine = Machine()
    machine.v[0], machine.v[1], machine.v[2] = 0x3F800000, 0x3F801000, 0x21800000
    machine.run("v_fma_mixlo_f16 v10, v0, v1, v2\nv_fma_mixlo_f16 v11, v0, v1, 0")
    assert (int(machine.v[10][0]), int(machine.v[11][0])) == (0x3C01, 0x3C00)


@pytest.mark.parametrize("denorm", range(4))
def test_mixed_precision_flushes_each_source_by_its_type(denorm: int) -> None:
    machine = Machine()
    machine.v[0], machine.v[1] = 0x00010001, 0x00000001  # the smallest f16 denormal in both halves, that of f32
    machine.mode = mode_of(denorm64=denorm)
    machine.run("v_fma_mix_f32 v10, v0, 1.0, 0 op_sel_hi:[1,0,0]")
    assert machine.v[10][0] == (0x33800000 if denorm & 1 else 0)
    machine.run("v_fma_mixlo_f16 v11, v0, 1.0, 0 op_sel_hi:[1,0,0]")
    assert machine.v[11][0] & 0xFFFF == (1 if denorm == 3 else 0)
    machine.mode = mode_of(denorm32=denorm)
    machine.run("v_fma_mix_f32 v10, v1, 1.0, 0")
    assert machine.v[10][0] == (1 if denorm == 3 else 0)


# name -> (input bits, result bits, result of the smallest denormal with it kept, with it flushed)
ON_A_DENORMAL: dict[str, tuple[int, int, int, int]] = {
    "v_ceil_f32": (32, 32, 0x3F800000, 0),
    "v_trunc_f32": (32, 32, 0, 0),
    "v_ceil_f64": (64, 64, 0x3FF0000000000000, 0),
    "v_ceil_f16": (16, 16, 0x3C00, 0),
    "v_frexp_mant_f32": (32, 32, 0x3F000000, 0),
    "v_frexp_mant_f64": (64, 64, 0x3FE0000000000000, 0),
    "v_frexp_mant_f16": (16, 16, 0x3800, 0),
    "v_frexp_exp_i32_f32": (32, 32, 0xFFFFFF6C, 0),
    "v_frexp_exp_i16_f16": (16, 16, 0xFFE9, 0),
    "v_rcp_f16": (16, 16, 0x7C00, 0x7C00),
    "v_rsq_f64": (64, 64, 0x6180000000000000, 0x7FF0000000000000),
    # these ignore MODE
    "v_mov_b32": (32, 32, 1, 1),
    "v_cvt_flr_i32_f32": (32, 32, 0, 0),
    "v_exp_f32": (32, 32, 0x3F800000, 0x3F800000),
    "v_rcp_f32": (32, 32, 0x7F800000, 0x7F800000),
    "v_rsq_f32": (32, 32, 0x7F800000, 0x7F800000),
    "v_sqrt_f32": (32, 32, 0, 0),
    "v_log_f32": (32, 32, 0xFF800000, 0xFF800000),
}


@pytest.mark.parametrize("name", ON_A_DENORMAL)
def test_one_source_operations_see_a_flushed_denormal_as_zero(name: str) -> None:
    source, result, kept, dropped = ON_A_DENORMAL[name]
    text = f"{name} {register(10, result)}, {register(0, source)}"
    for denorm in range(4):
        mode = mode_of(denorm32=denorm) if source == 32 else mode_of(denorm64=denorm)
        assert one_source(text, source, result, mode, [1]) == [kept if denorm & 1 else dropped]


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("denorm", range(4))
def test_minimum_maximum_median_and_comparison_flush(bits: int, denorm: int) -> None:
    machine = Machine()
    small, smaller = 3, 1 << bits - 1 | 1
    load(machine, [[small] * 64, [smaller] * 64, [0] * 64], bits)
    machine.mode = mode_of(denorm32=denorm) if bits == 32 else mode_of(denorm64=denorm)
    a, b, d = register(0, bits), register(2, bits), register(10, bits)
    keep = denorm == 3

    def result() -> int:
        return machine.row64(10)[0] if bits == 64 else int(machine.v[10][0]) & (1 << bits) - 1

    machine.run(f"v_max_f{bits} {d}, {a}, {b}")
    assert result() == (small if keep else 0)
    machine.run(f"v_min_f{bits} {d}, {a}, {b}")
    assert result() == (smaller if keep else 1 << bits - 1)
    if bits != 64:
        machine.run(f"v_med3_f{bits} {d}, {a}, {a}, {b}")
        assert result() == (small if keep else 0)
    machine.run(f"v_cmp_eq_f{bits} vcc, {a}, {b}")
    assert machine.get64(VCC) == (0 if denorm & 1 else 2**64 - 1)
    machine.run(f"v_mov_b32 v20, 0x80\nv_cmp_class_f{bits} vcc, {a}, v20")
    assert machine.get64(VCC) == 2**64 - 1, "the class is that of the bits"


def test_ldexp_rounds_into_denormals_and_flushes_them() -> None:
    machine = Machine()
    machine.v[0], machine.v[4] = 0x3F800001, 0xFFFFFF81  # (1 + 2^-23) * 2^-127
    for rounding, want in ((NEAREST, 0x00400000), (UP, 0x00400001), (DOWN, 0x00400000)):
        machine.mode = mode_of(round32=rounding)
        assert machine.run("v_ldexp_f32 v10, v0, v4").v[10][0] == want
    machine.mode = mode_of(denorm32=1)
    assert machine.run("v_ldexp_f32 v10, v0, v4").v[10][0] == 0


@pytest.mark.parametrize("rounding", range(4))
@pytest.mark.parametrize("bits", [32, 64])
def test_division_rounds_in_its_last_step(bits: int, rounding: int) -> None:
    """v_div_fmas, scaled and not: fma(a, b, c) * 2^-64 or 2^-128 where VCC says so, rounded once."""
    machine = Machine()
    control = Control(bits, rounding)
    shift = Fraction(2) ** (-64 if bits == 32 else -128)
    tiny = from_fraction(Fraction(2) ** (-120 if bits == 32 else -1000), bits) | 1
    text = f"v_div_fmas_f{bits} {register(10, bits)}, {register(0, bits)}, {register(2, bits)}, {register(4, bits)}"
    unit = from_fraction(Fraction(1), bits)
    triples = [(unit | 1, unit | 3, unit), (tiny, unit | 3, tiny), (unit | 1, tiny, 0)]
    for scaled, (a, b, c) in itertools.product((False, True), triples):
        load(machine, [[code] * 64 for code in (a, b, c)], bits)
        machine.set64(VCC, 2**64 - 1 if scaled else 0)
        machine.mode = mode_of(round32=rounding) if bits == 32 else mode_of(round64=rounding)
        machine.run(text)
        got = machine.row64(10)[0] if bits == 64 else int(machine.v[10][0])
        exact = to_fraction(a, bits) * to_fraction(b, bits) + to_fraction(c, bits)
        assert got == control.write(exact * shift if scaled else exact, False)


def test_floating_dot_products_ignore_mode() -> None:
    machine = Machine()
    machine.v[0], machine.v[1], machine.v[2] = 0x3C003C00, 0x3C000001, 0x00000001
    results = set()
    for rounding in range(4):
        machine.mode = mode_of(round32=rounding, round64=rounding, denorm32=rounding)
        results.add(int(machine.run("v_dot2_f32_f16 v10, v0, v1, v2").v[10][0]))
    assert results == {0x3F800000}, "denormals are flushed always, and the sum rounds to nearest"


def test_fp16_overflow_saturates_unless_the_infinity_is_true() -> None:
    machine = Machine()
    for rounding in range(4):
        machine.mode = mode_of(round64=rounding) | FP16_OVFL
        machine.v[0], machine.v[1], machine.v[2] = 0x7BFF, 0xFC00, 0x477FF000  # 65504, -inf, 65520 as f32
        run = machine.run("v_add_f16 v10, v0, v0\nv_mul_f16 v11, v0, v1\nv_cvt_f16_f32 v12, v2\nv_rcp_f16 v13, v9\n"
                          "v_pk_add_f16 v14, v0, v0\nv_fma_f16 v15, v0, v0, v0\nv_exp_f16 v16, v0")  # fmt: skip
        got = [int(run.v[index][0]) for index in range(10, 17)]
        assert got == [0x7BFF, 0xFC00, 0x7BFF, 0x7C00, 0x7BFF, 0x7BFF, 0x7BFF]


def test_transcendentals_do_not_round_by_mode() -> None:
    rng = np.random.default_rng(8)
    machine = Machine()
    machine.v[0] = rng.uniform(0.1, 10, 64).astype(np.float32).view(np.uint32)
    machine.v[1] = rng.uniform(0.1, 10, 64).astype(np.float16).view(np.uint16)
    for name in ("exp", "log", "rcp", "rsq", "sqrt", "sin", "cos"):
        seen = set()
        for rounding in range(4):
            machine.mode = mode_of(round32=rounding, round64=rounding)
            machine.run(f"v_{name}_f32 v10, v0\nv_{name}_f16 v11, v1")
            seen.add((machine.v[10].tobytes(), machine.v[11].tobytes()))
        assert len(seen) == 1


def test_output_modifiers_flush_and_lose_the_sign_of_zero() -> None:
    machine = Machine()
    machine.v[0], machine.v[1] = 0x80000000, 0x00800000
    machine.mode = 0x1C0  # f32 denormals flushed, no IEEE mode
    machine.run("v_mul_f32 v10, 1.0, v0\nv_mul_f32 v11, 1.0, v0 mul:2\nv_mul_f32 v12, 1.0, v1 div:2")
    assert [int(machine.v[index][0]) for index in (10, 11, 12)] == [0x80000000, 0, 0]


def test_clamp_passes_nan_without_dx10_clamp() -> None:
    machine = Machine()
    machine.v[0], machine.v[1] = 0x7FC00001, 0x7E017E01
    text = ("v_mul_f32 v10, 1.0, v0 clamp\nv_pk_mul_f32 v[12:13], v[0:1], 1.0 op_sel_hi:[0,0] clamp\n"
            "v_mul_f16 v14, 1.0, v1 clamp\nv_fma_mix_f32 v15, v0, 1.0, 0 clamp\n"
            "v_fma_mixlo_f16 v16, v0, 1.0, 0 clamp")  # fmt: skip
    machine.mode = MODE_DEFAULT
    machine.run(text)
    assert [int(machine.v[index][0]) for index in (10, 12, 13, 14, 15, 16)] == [0] * 6
    machine.mode = MODE_DEFAULT & ~0x100
    machine.run(text)
    assert all(is_nan(int(machine.v[index][0]), 32) for index in (10, 12, 13, 15))
    assert all(is_nan(int(machine.v[index][0]), 16) for index in (14, 16))


# --- matrix instructions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("denorm", range(4))
def test_f32_matrix_inputs_flush_by_mode_but_c_and_d_do_not(denorm: int) -> None:
    machine = Machine()
    machine.v[0], machine.v[1] = 0x00400000, 0x3F800000  # 2^-127, 1
    machine.v[4:8] = 0x00000001
    machine.mode = mode_of(round32=UP, denorm32=denorm)
    machine.run("v_mfma_f32_16x16x4_f32 v[8:11], v0, v1, v[4:7]")
    # 2^-125 and half a unit: a tie, which rounding up would not leave at 2^-125
    want = 0x01000000 if denorm & 1 else 1
    assert set(machine.v[8:12].ravel().tolist()) == {want}


def test_narrower_and_wider_matrix_instructions_ignore_mode() -> None:
    machine = Machine()
    machine.v[0:4] = 0x00010001  # the smallest f16 denormals; as f64 a denormal pair when the high dword is zero
    machine.v[20:22] = 0
    machine.v[20] = 1
    one_pair = np.zeros((2, 64), np.uint32)
    one_pair[1] = 0x3FF00000
    machine.v[22:24] = one_pair
    seen = set()
    for mode in (MODE_DEFAULT, mode_of(UP, UP, 0, 0), mode_of(DOWN, ZERO, 1, 2)):
        machine.mode = mode
        machine.run("v_mfma_f32_16x16x16_f16 v[8:11], v[0:1], v[2:3], 0\n"
                    "v_mfma_f64_16x16x4_f64 v[24:31], v[20:21], v[22:23], 0")  # fmt: skip
        seen.add(machine.v[8:12].tobytes() + machine.v[24:32].tobytes())
    assert len(seen) == 1
    assert machine.v[8][0] == from_fraction(16 * Fraction(2) ** -48, 32)
    assert machine.row64(24)[0] == 4
