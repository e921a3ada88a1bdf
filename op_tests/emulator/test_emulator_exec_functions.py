"""Functions whose hardware bits are not documented: within one unit in the last place, and exact on special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from helpers.exec_one import Machine, is_nan, to_fraction
from helpers.exec_registry import holds, holds_each, on_each_arch
from helpers.float_reference import INFINITY

TRANSCENDENTAL: dict[str, Callable[[float], float]] = {
    "v_exp_f32": lambda x: 2.0**x,
    "v_log_f32": math.log2,
    "v_rcp_f32": lambda x: 1 / x,
    "v_rsq_f32": lambda x: 1 / math.sqrt(x),
    "v_sqrt_f32": math.sqrt,
    "v_sin_f32": lambda x: math.sin(2 * math.pi * (x - round(x))),
    "v_cos_f32": lambda x: math.cos(2 * math.pi * (x - round(x))),
}


@holds_each("name", TRANSCENDENTAL)
def test_transcendentals_are_within_one_ulp(name: str, arch: str) -> None:
    # Each is computed in double with an error far below 2^-40 and rounded once: half a unit plus almost nothing, which
    # one unit in the last place bounds. sin near multiples of half a turn cancels; 2^-40 absolute covers that.
    rng = np.random.default_rng(8)
    machine = Machine(arch)
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


@on_each_arch
def test_transcendentals_flush_denormals_and_keep_the_special_values(arch: str) -> None:
    denormal, infinity, minus_infinity = 1, 0x7F800000, 0xFF800000
    expectations = {
        "v_rcp_f32": [(denormal, infinity), (0x80000001, minus_infinity), (infinity, 0), (0x7F000001, 0)],
        "v_rsq_f32": [(denormal, infinity), (infinity, 0), (0xBF800000, 0x7FC00000)],
        "v_sqrt_f32": [(denormal, 0), (0x80000000, 0x80000000), (0xBF800000, 0x7FC00000), (infinity, infinity)],
        "v_log_f32": [(denormal, minus_infinity), (0, minus_infinity), (0x3F800000, 0), (infinity, infinity)],
        "v_exp_f32": [(minus_infinity, 0), (infinity, infinity), (0, 0x3F800000), (0xC3000000, 0)],
        "v_cos_f32": [(infinity, 0x7FC00000), (0, 0x3F800000)],
    }
    machine = Machine(arch)
    for name, pairs in expectations.items():
        for source, want in pairs:
            machine.v[0] = source
            assert machine.run(f"{name} v10, v0").v[10][0] == want, (name, hex(source))


@holds("v_trig_preop_f64")
def test_bits_of_two_over_pi(arch: str) -> None:
    """Segment by segment they add up: the sum of the first three is 2/pi to 159 bits."""
    machine = Machine(arch)
    machine.set_row64(0, [0x3FF0000000000000] * 64)
    machine.v[2] = np.arange(64)
    machine.run("v_trig_preop_f64 v[10:11], v[0:1], v2")
    total = sum(to_fraction(code, 64) for code in machine.row64(10)[:3])
    # 2/pi from pi's continued fraction convergent 245850922/78256779, which is good to 2^-56.
    assert abs(total - Fraction(2 * 78256779, 245850922)) < Fraction(1, 2**54)
    assert Fraction(1, 2**159) > abs(total - sum(to_fraction(code, 64) for code in machine.row64(10)[:6])) > 0


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


@holds_each("name", FUNCTIONS_16)
def test_f16_functions_are_within_one_ulp(name: str, arch: str) -> None:
    # Every positive finite code. A double result errs far below 2^-40, so that one rounding is half an ulp and a
    # little; sine and cosine near multiples of half a turn cancel, which 2^-40 absolute covers.
    machine = Machine(arch)
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


@on_each_arch
def test_f16_functions_keep_the_special_values(arch: str) -> None:
    expectations = {
        "v_rcp_f16": [(0, 0x7C00), (0x8000, 0xFC00), (0x7C00, 0), (0xFC00, 0x8000), (1, 0x7C00)],
        "v_sqrt_f16": [(0, 0), (0x8000, 0x8000), (0x7C00, 0x7C00), (0xBC00, -1), (0xFC00, -1)],
        "v_rsq_f16": [(0, 0x7C00), (0x8000, 0xFC00), (0x7C00, 0), (0xBC00, -1)],
        "v_log_f16": [(0, 0xFC00), (0x8000, 0xFC00), (0x3C00, 0), (0x7C00, 0x7C00), (0xBC00, -1)],
        "v_exp_f16": [(0, 0x3C00), (0xFC00, 0), (0x7C00, 0x7C00), (0x4C00, 0x7C00), (0xCE00, 1)],
        "v_sin_f16": [(0, 0), (0x7C00, -1)],
        "v_cos_f16": [(0, 0x3C00), (0x7C00, -1)],
    }
    machine = Machine(arch)
    for name, pairs in expectations.items():
        for source, want in [*pairs, (0x7E00, -1)]:
            machine.v[0] = source
            got = int(machine.run(f"{name} v10, v0").v[10][0])
            assert is_nan(got, 16) if want == -1 else got == want, (name, hex(source), hex(got))


@holds_each(
    "legacy, function",
    [("v_exp_legacy_f32", lambda x: 2.0**x), ("v_log_legacy_f32", math.log2), ("v_rcp_iflag_f32", lambda x: 1 / x)],
    lambda legacy, function: [legacy],
)
def test_second_names_of_f32_functions_are_within_one_ulp(
    legacy: str, function: Callable[[float], float], arch: str
) -> None:
    # As under their first names: computed in double, rounded once.
    rng = np.random.default_rng(8)
    machine = Machine(arch)
    for _ in range(10):
        x = np.exp(rng.uniform(-80, 80, 64)).astype(np.float32)
        if "exp" in legacy:
            x = rng.uniform(-120, 120, 64).astype(np.float32)
        machine.v[0] = x.view(np.uint32)
        got = machine.run(f"{legacy} v10, v0").v[10].view(np.float32)
        for value, result in zip(x.tolist(), got.tolist(), strict=True):
            want = function(value)
            assert abs(result - want) <= float(np.spacing(np.float32(abs(want)))), (value, result, want)


@holds_each("name", ["v_sqrt_f64", "v_rsq_f64", "v_rcp_f64"])
def test_f64_roots_and_reciprocal(name: str, arch: str) -> None:
    # sqrt rounds once, which is half an ulp or 2^-53 of the value; its reciprocal adds a second rounding. On squares
    # the error is that of the result alone: compare squares, whose relative error is twice 2^-52 and a little.
    rng = np.random.default_rng(14)
    machine = Machine(arch)
    x = 2.0 ** rng.uniform(-1000, 1000, 64)
    machine.set_row64(0, x.view(np.uint64).tolist())
    machine.run(f"{name} v[10:11], v[0:1]")
    for value, code in zip(x.tolist(), machine.row64(10), strict=True):
        power = to_fraction(code, 64) ** (1 if "rcp" in name else 2)
        ratio = power / Fraction(value) if "sqrt" in name else power * Fraction(value)
        assert abs(ratio - 1) < Fraction(5, 2) / 2**52, value
    specials = {
        "v_sqrt_f64": [(0, 0), (1 << 63, 1 << 63), (INFINITY[64], INFINITY[64]), (0xBFF0 << 48, -1)],
        "v_rsq_f64": [(0, INFINITY[64]), (1 << 63, INFINITY[64] | 1 << 63), (INFINITY[64], 0), (0xBFF0 << 48, -1)],
        "v_rcp_f64": [(0, INFINITY[64]), (1 << 63, INFINITY[64] | 1 << 63), (INFINITY[64] | 1 << 63, 1 << 63)],
    }
    for source, want in specials[name]:
        machine.set_row64(0, [source] * 64)
        got = machine.run(f"{name} v[10:11], v[0:1]").row64(10)[0]
        assert is_nan(got, 64) if want == -1 else got == want, (hex(source), hex(got))
