"""The emulator's number formats: every code, both directions, against torch and against exact fractions."""

from __future__ import annotations

import ctypes
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

CSRC = Path(__file__).resolve().parents[2] / "emulator" / "native"

# In the shim's order: exponent bits, mantissa bits, bias; one sign bit each.
FORMATS = {
    "e4m3fn": (4, 3, 7),
    "e4m3fnuz": (4, 3, 8),
    "e5m2": (5, 2, 15),
    "e5m2fnuz": (5, 2, 16),
    "e2m3": (2, 3, 1),
    "e3m2": (3, 2, 3),
    "e2m1": (2, 1, 1),
    "f16_format": (5, 10, 15),
    "bf16_format": (8, 7, 127),
}
INDEX = {name: i for i, name in enumerate(FORMATS)}
TORCH_FP8 = {
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
SMALL = ["e2m3", "e3m2", "e2m1"]
NEAREST, UP, DOWN, TOWARD_ZERO, STOCHASTIC = range(5)

SHIM = """
#include "formats.h"
using namespace hfemu;
static const FloatFormat kFormats[] = {e4m3fn, e4m3fnuz, e5m2, e5m2fnuz, e2m3, e3m2, e2m1, f16_format, bf16_format};
extern "C" {
void encode_all(int f, const double* x, const uint32_t* random, uint32_t* out, int64_t n, int saturate, int rounding) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = encode(kFormats[f], x[i], saturate, static_cast<Rounding>(rounding), random ? random[i] : 0);
}
void decode_all(int f, const uint32_t* code, double* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = decode(kFormats[f], code[i]);
}
void f32_to_bf16_all(const float* x, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(x[i]);
}
void f32_to_f16_all(const float* x, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = f32_to_f16(x[i]);
}
void e8m0_all(double* out) { for (uint32_t i = 0; i < 256; ++i) out[i] = decode_e8m0(i); }
const float* table(int f) {
  const float* tables[] = {e4m3fn_table.data(), e4m3fnuz_table.data(), e5m2_table.data(), e5m2fnuz_table.data(),
                           e2m3_table.data(), e3m2_table.data(), e2m1_table.data()};
  return tables[f];
}
uint32_t next(uint32_t state) { return next_random(state); }
}
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    root = tmp_path_factory.mktemp("formats")
    (root / "shim.cpp").write_text(SHIM)
    command = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([*command, str(root / "shim.cpp"), "-o", str(root / "shim.so")], check=True)
    shim = ctypes.CDLL(str(root / "shim.so"))
    shim.table.restype = ctypes.POINTER(ctypes.c_float)
    shim.next.restype = ctypes.c_uint32
    return shim


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def encode(lib, name, values, *, saturate=False, rounding=NEAREST, random=None):
    with np.errstate(invalid="ignore"):  # signalling NaNs among the inputs
        values = np.ascontiguousarray(values, np.float64)
    out = np.empty(values.shape, np.uint32)
    seeds = None if random is None else pointer(np.ascontiguousarray(random, np.uint32))
    lib.encode_all(
        INDEX[name], pointer(values), seeds, pointer(out), ctypes.c_int64(values.size), int(saturate), rounding
    )
    return out


def decode(lib, name, codes):
    codes = np.ascontiguousarray(codes, np.uint32)
    out = np.empty(codes.shape, np.float64)
    lib.decode_all(INDEX[name], pointer(codes), pointer(out), ctypes.c_int64(codes.size))
    return out


def same(a, b):
    """Equal values with equal signs of zero; NaNs are equal whatever their payload."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return ((a == b) & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b))


def exact_magnitudes(name) -> list[Fraction]:
    """The value of each non-negative code of a format without specials, from its definition."""
    exponent_bits, mantissa_bits, bias = FORMATS[name]
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        hidden = 0 if exponent == 0 else 1
        unit = Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)
        values.append((mantissa + (hidden << mantissa_bits)) * unit)
    return values


def nearest_code(magnitudes: list[Fraction], x: Fraction) -> int:
    """Round to nearest, ties to the even code; past the end saturates."""
    if x >= magnitudes[-1]:
        return len(magnitudes) - 1
    low = max(i for i, value in enumerate(magnitudes) if value <= x)
    below, above = x - magnitudes[low], magnitudes[low + 1] - x
    return low if below < above or (below == above and low % 2 == 0) else low + 1


def interesting_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """f32 bit patterns of every exponent, plus those around each representable value of an 8-bit float."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    small = (rng.integers(100, 150, count, dtype=np.uint32) << 23) | (bits & 0x807FFFFF)
    ties = small & 0xFFFC0000
    return np.concatenate([bits, small, ties, ties + 1, ties - 1]).view(np.float32)


@pytest.mark.parametrize("name", TORCH_FP8)
def test_every_fp8_code_decodes_as_in_torch(lib, name):
    codes = np.arange(256, dtype=np.uint32)
    expected = torch.from_numpy(codes.astype(np.uint8)).view(TORCH_FP8[name]).to(torch.float64).numpy()
    assert same(decode(lib, name, codes), expected).all()
    table = np.ctypeslib.as_array(lib.table(INDEX[name]), (256,))
    assert same(table, expected).all()


@pytest.mark.parametrize("name", [*TORCH_FP8, *SMALL, "f16_format", "bf16_format"])
def test_every_code_survives_a_round_trip(lib, name):
    exponent_bits, mantissa_bits, _ = FORMATS[name]
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits), dtype=np.uint32)
    values = decode(lib, name, codes)
    finite = ~np.isnan(values)
    assert (encode(lib, name, values)[finite] == codes[finite]).all()
    assert np.isnan(decode(lib, name, encode(lib, name, values)[~finite])).all()


@pytest.mark.parametrize("name", TORCH_FP8)
def test_f32_encodes_to_fp8_as_in_torch(lib, name):
    values = interesting_floats(np.random.default_rng(1), 200_000)
    limit = torch.finfo(TORCH_FP8[name]).max
    # torch's treatment of overflow differs between formats and versions: compare inside the range, NaN included.
    values = values[~(np.abs(values) > limit)]
    expected = torch.from_numpy(values).to(TORCH_FP8[name]).view(torch.uint8).numpy()
    assert (encode(lib, name, values) == expected).all()


@pytest.mark.parametrize("name", TORCH_FP8)
def test_fp16_encodes_to_fp8_exhaustively(lib, name):
    halves = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    finite = halves[~(np.abs(halves.astype(np.float64)) > torch.finfo(TORCH_FP8[name]).max)]
    expected = torch.from_numpy(finite).to(torch.float32).to(TORCH_FP8[name]).view(torch.uint8).numpy()
    assert (encode(lib, name, finite.astype(np.float64)) == expected).all()


@pytest.mark.parametrize(
    ("name", "largest", "first_overflow", "default", "saturated"),
    [
        ("e4m3fn", 464.0, np.nextafter(np.float32(464), np.float32(1e9)), 0x7F, 0x7E),
        ("e4m3fnuz", np.nextafter(np.float32(248), np.float32(0)), 248.0, 0x80, 0x7F),
        ("e5m2", np.nextafter(np.float32(61440), np.float32(0)), 61440.0, 0x7C, 0x7B),
        ("e5m2fnuz", np.nextafter(np.float32(61440), np.float32(0)), 61440.0, 0x80, 0x7F),
    ],
)
def test_fp8_overflow_follows_fp16_ovfl(lib, name, largest, first_overflow, default, saturated):
    """464 is halfway between 448 and 480 and goes to the even code, 448; the other limits tie upwards."""
    top = decode(lib, name, [saturated])[0]
    assert decode(lib, name, encode(lib, name, [largest]))[0] == top
    for value in (first_overflow, 1e30, np.inf):
        for sign in (1.0, -1.0):
            negative = 0x80 if sign < 0 else 0
            expected = default if default == 0x80 else default | negative
            assert encode(lib, name, [sign * value])[0] == expected
            assert encode(lib, name, [sign * value], saturate=True)[0] == saturated | negative
    assert np.isnan(decode(lib, name, encode(lib, name, [np.nan], saturate=True)))[0]


@pytest.mark.parametrize("name", SMALL)
def test_fp6_and_fp4_match_exact_tables_and_round_to_nearest_even(lib, name):
    magnitudes = exact_magnitudes(name)
    half = len(magnitudes)
    codes = np.arange(2 * half, dtype=np.uint32)
    expected = [float(v) for v in magnitudes] + [-float(v) for v in magnitudes]
    assert same(decode(lib, name, codes), expected).all()
    assert same(np.ctypeslib.as_array(lib.table(INDEX[name]), (2 * half,)), expected).all()
    # Every multiple of a sixteenth of the smallest subnormal up to past saturation: all ties and both their sides.
    step = magnitudes[1] / 16
    points = [step * i for i in range(int(magnitudes[-1] / step) + 40)]
    wanted = np.array([nearest_code(magnitudes, x) for x in points])
    values = np.array([float(x) for x in points])
    assert (encode(lib, name, values) == wanted).all()
    assert (encode(lib, name, -values) == wanted + half).all()
    assert (encode(lib, name, [np.inf, -np.inf, np.nan, 1e30]) == [half - 1, 2 * half - 1, half - 1, half - 1]).all()


def test_half_and_bfloat16_agree_with_numpy_and_torch(lib):
    values = interesting_floats(np.random.default_rng(2), 100_000)
    out = np.empty(values.shape, np.uint16)
    lib.f32_to_f16_all(pointer(values), pointer(out), ctypes.c_int64(values.size))
    with np.errstate(over="ignore", invalid="ignore"):
        halves = values.astype(np.float16)
    nan = np.isnan(values)
    assert (out[~nan] == halves.view(np.uint16)[~nan]).all()
    assert np.isnan(out.view(np.float16)[nan]).all()
    lib.f32_to_bf16_all(pointer(values), pointer(out), ctypes.c_int64(values.size))
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (out[~nan] == expected[~nan]).all()
    assert torch.from_numpy(out.copy()).view(torch.bfloat16).isnan().numpy()[nan].all()
    assert (encode(lib, "bf16_format", values) == out).all(), "the generic encoder and the shorthand differ"


@pytest.mark.parametrize("rounding", [UP, DOWN, TOWARD_ZERO])
@pytest.mark.parametrize("name", ["f16_format", "e4m3fn"])
def test_directed_rounding_brackets_the_value(lib, name, rounding):
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.uniform(-400, 400, 5000), rng.uniform(-1, 1, 5000) * 2.0**-8, [1e-30, -1e-30]])
    got = decode(lib, name, encode(lib, name, values, rounding=rounding))
    nearest = decode(lib, name, encode(lib, name, values))
    if rounding == UP:
        assert (got >= values).all()
    elif rounding == DOWN:
        assert (got <= values).all()
    else:
        assert (np.abs(got) <= np.abs(values)).all()
    # One step from the nearest value at most: the next code in the direction of the error.
    step = np.abs(got - nearest)
    spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(nearest), 2.0**-14))) - (10 if name == "f16_format" else 3))
    smallest = 2.0**-24 if name == "f16_format" else 2.0**-9
    assert (step <= np.maximum(spacing, smallest)).all()


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1", "e2m3", "bf16_format"])
def test_stochastic_rounding_hits_each_neighbour_in_proportion(lib, name):
    """Seeds k/64 of the full range: a value at fraction p between neighbours rounds up for exactly 64 * p of them."""
    one = encode(lib, name, [1.0])[0]
    low, high = decode(lib, name, [one, one + 1])
    seeds = (np.arange(64, dtype=np.uint64) << 26).astype(np.uint32)
    for eighths in range(8):
        value = low + (high - low) * eighths / 8
        codes = encode(lib, name, np.full(64, value), rounding=STOCHASTIC, random=seeds)
        assert set(codes) <= {one, one + 1}
        assert (codes == one + 1).sum() == 8 * eighths


def test_e8m0_is_a_power_of_two_with_one_nan(lib):
    out = np.empty(256, np.float64)
    lib.e8m0_all(pointer(out))
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).to(torch.float64).numpy()
    assert same(out, expected).all()
    assert out[0] == 2.0**-127 and np.isnan(out[255])


def test_the_generator_does_not_repeat_early(lib):
    state, seen = 1, set()
    for _ in range(10_000):
        state = lib.next(ctypes.c_uint32(state))
        assert state not in seen and state != 0
        seen.add(state)
