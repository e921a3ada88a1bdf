"""Matrix products of 8- and 4-bit floats as sums of integers have the bits of sums in double, in whatever data."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.matrix_reference import decode_table, parse

from .test_emulator_matrix import MNEMONICS

CSRC = Path(__file__).resolve().parents[2] / "emulator" / "native"

SHIM = """
#include <cstring>
#include "matrix.cpp"
using namespace hfemu;
static const char* kNames[] = {"",
#define HFEMU_OP(name, ...) #name,
#include "isa_ops.inc"
#undef HFEMU_OP
};
static Op op_of(const char* name) {
  for (int i = 1; i < int(Op::count); ++i) if (!std::strcmp(kNames[i], name)) return Op(i);
  return Op::invalid;
}
extern "C" {
int run(const char* name, const void* a, const void* b, const void* c, void* d, const void* index,
        const void* scale_a, const void* scale_b, const int* f) {
  MatrixFn fn = matrix_function(op_of(name));
  if (!fn) return 1;
  MatrixArgs m;
  m.a = (const Row*)a; m.b = (const Row*)b; m.c = (const Row*)c; m.d = (Row*)d; m.index = (const Row*)index;
  m.scale_a = (const Row*)scale_a; m.scale_b = (const Row*)scale_b;
  m.cbsz = f[0]; m.abid = f[1]; m.blgp = f[2]; m.fnuz = f[3]; m.scale_sel_a = f[4]; m.scale_sel_b = f[5];
  fn(m);
  return 0;
}
// Whether fp8 operands of 32x32x16, or with scales of 16x16x128, are multiplied as integers; -1: never on this CPU.
int as_integers(const void* a, const void* b, const void* c, const void* scale_a, const void* scale_b) {
#if defined(__AVX2__) && defined(__FMA__)
  MatrixArgs m;
  m.a = (const Row*)a; m.b = (const Row*)b; m.scale_a = (const Row*)scale_a; m.scale_b = (const Row*)scale_b;
  static Row d[kMaxResult / kMatrixLanes];
  m.c = (const Row*)c; m.d = d;
  constexpr auto& plain = kShape<kRowOfOp[static_cast<std::size_t>(Op::v_mfma_f32_32x32x16_fp8_fp8)]>;
  constexpr auto& scaled = kShape<kRowOfOp[static_cast<std::size_t>(Op::v_mfma_scale_f32_16x16x128_f8f6f4)]>;
  return scale_a ? multiply_integers<scaled>(m, Element::fp8, Element::fp8)
                 : multiply_integers<plain>(m, Element::fp8, Element::fp8);
#else
  return -1;
#endif
}
}
"""


def build(root: Path, *flags: str) -> ctypes.CDLL:
    (root / "shim.cpp").write_text(SHIM)
    command = ["g++", "-std=c++20", "-O2", "-march=native", *flags, "-shared", "-fPIC", f"-I{CSRC}"]
    command += [str(root / "shim.cpp"), "-o", str(root / "shim.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(root / "shim.so"))


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same without the instructions that sums of integers need: every product goes through double."""
    return build(tmp_path_factory.mktemp("doubles"), "-mno-avx2")


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def registers(
    lib, ins, a, b, c, *, index=None, scale_a=None, scale_b=None, cbsz=0, abid=0, blgp=0, fnuz=False, sel=(0, 0)
):
    d = c.copy() if ins.sparse else np.full_like(c, 0xDEADBEEF)
    flags = np.array([cbsz, abid, blgp, fnuz, *sel], np.int32)
    source_c = None if ins.sparse else pointer(c)
    arrays = [pointer(a), pointer(b), source_c, pointer(d), pointer(index), pointer(scale_a), pointer(scale_b)]
    assert lib.run(ins.name.encode(), *arrays, pointer(flags)) == 0, f"{ins.name} has no function"
    return d


def operand_bytes(rng, kind: str, element: str, fnuz: bool) -> np.ndarray:
    """Eight registers of one operand's codes."""
    shape = (8, 64, 4)
    if kind == "any":
        return rng.integers(0, 256, shape, dtype=np.uint8).view(np.uint32)[..., 0]
    if kind == "signed zeros":
        return (rng.integers(0, 2, shape, dtype=np.uint8) * (0 if fnuz else 0x80)).view(np.uint32)[..., 0]
    # Magnitudes up to the largest, in normal data those of a block of 32; "narrow" has no bits below the unit;
    # "few rows" are those of few tokens, the others are zeros.
    table = np.nan_to_num(decode_table(element, fnuz), nan=0.0, posinf=0.0, neginf=0.0)
    order = np.argsort(table)
    top = np.abs(table).max()
    wide = {"normal": rng.standard_normal(shape) * top / 3, "largest": rng.choice([-top, top], shape)}
    wide |= {"narrow": rng.integers(-8, 9, shape) * top / 8, "tiny": rng.standard_normal(shape) * top * 2.0**-12}
    wide["few rows"] = np.where(ROWS[None, :, None], wide["normal"], 0)
    nearest = np.searchsorted(table[order], np.clip(wide[kind], -top, top)).clip(0, len(table) - 1)
    codes = order[nearest].astype(np.uint8)
    if element == "fp4":
        codes = codes | rng.permuted(codes, axis=1) << 4
    return codes.view(np.uint32)[..., 0]


ROWS = np.arange(64) % 16 < 5
MIXED = [name for name in MNEMONICS if "f8f6f4" in name]
SMALL_ELEMENTS = [name for name in MNEMONICS if re.search("mfma_.*_[fb][pf]8_[fb][pf]8$", name)] + MIXED


@pytest.mark.parametrize("fnuz", (False, True))
@pytest.mark.parametrize("name", SMALL_ELEMENTS)
def test_sums_of_integers_have_the_bits_of_sums_in_double(lib, doubles, name, fnuz):
    rng = np.random.default_rng(7)
    kinds = ("normal", "narrow", "tiny", "largest", "signed zeros", "any", "few rows")
    formats = [(0, 0), (0, 1), (4, 4), (1, 4)] if name in MIXED else [(0, 0)]
    seen = set()
    for (fmt_a, fmt_b), kind_a, kind_b in itertools.product(formats, kinds, kinds):
        ins = parse(name, fmt_a, fmt_b)
        a, b = operand_bytes(rng, kind_a, ins.a, fnuz), operand_bytes(rng, kind_b, ins.b, fnuz)
        for spread in (0, 2, 12, 127):
            shape = (ins.m * ins.n // 64, 64)
            size = 10.0 ** rng.choice([-40, -20, -3, 0, 4, 12, 30, 37])
            c = rng.standard_normal(shape) * size * 2.0 ** rng.integers(0, 9, shape)
            c = rng.choice([c, np.zeros(shape), np.where(rng.random(shape) < 0.01, -0.0, c)])
            options = {"cbsz": fmt_a, "blgp": fmt_b, "fnuz": fnuz}
            if "scale" in name:
                for scale, kind in (("scale_a", kind_a), ("scale_b", kind_b)):
                    exponents = rng.integers(127 - spread, 128 + spread, (1, 64))
                    if kind == "few rows":  # the scales of zeros are anything; one that is NaN counts
                        exponents = np.where(ROWS, exponents, rng.choice([0, 200, 255], p=[0.6, 0.3, 0.1]))
                    options[scale] = exponents.astype(np.uint32) * np.uint32(0x01010101)
            with np.errstate(over="ignore"):  # an infinite C is a case
                operands = a, b, c.astype(np.float32).view(np.uint32)
            got, expected = (registers(which, ins, *operands, **options) for which in (lib, doubles))
            assert np.array_equal(got, expected), (kind_a, kind_b, spread)
            seen.add(got.tobytes())
    assert len(seen) > 30


def test_operands_of_matrix_multiplications_are_multiplied_as_integers(lib, doubles):
    """What the test above compares: on a CPU that can, normal data takes the path through integers."""
    rng = np.random.default_rng(8)
    a, b = (operand_bytes(rng, "normal", "fp8", False) for _ in range(2))
    c = (rng.standard_normal((16, 64)) * 1e4).astype(np.float32).view(np.uint32)
    able = {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split())
    assert lib.as_integers(*map(pointer, (a, b, c, None, None))) == (1 if able else -1)
    assert doubles.as_integers(*map(pointer, (a, b, c, None, None))) == -1
    few = operand_bytes(rng, "few rows", "fp8", False)
    scales = np.where(ROWS, 127, 0).astype(np.uint32), np.full(64, 127, np.uint32)
    for operands, takes in ((few, 1), (a, 0)):
        assert lib.as_integers(*map(pointer, (operands, b, c[:4].copy(), *scales))) == (takes if able else -1)


def test_one_bit_of_an_operand_that_was_multiplied_before_counts(lib, doubles):
    """Operands and scales are decoded once for several instructions: not where a bit, format or shape differs."""
    rng = np.random.default_rng(9)
    a, b = (operand_bytes(rng, "narrow", "fp8", False) for _ in range(2))
    scales = [rng.integers(125, 129, (64, 4), dtype=np.uint8).view(np.uint32)[..., 0] for _ in range(2)]
    names = ["v_mfma_f32_32x32x64_f8f6f4", "v_mfma_scale_f32_16x16x128_f8f6f4", "v_mfma_f32_16x16x32_fp8_bf8"]
    c = np.zeros((16, 64), np.uint32)
    for change in range(200):
        name = rng.choice([names[1], *names])
        formats = (0, 0) if "bf8" in name else tuple(rng.choice([0, 0, 1, 4], 2))
        ins = parse(name, *formats)
        options = {"cbsz": formats[0], "blgp": formats[1], "fnuz": rng.integers(2), "sel": rng.integers(2, size=2)}
        options |= {"scale_a": scales[0], "scale_b": scales[1]} if "scale" in name and rng.integers(4) else {}
        operands = a, rng.choice([a, b]), c[: ins.m * ins.n // 64].copy()
        got, expected = (registers(which, ins, *operands, **options) for which in (lib, doubles))
        assert np.array_equal(got, expected), (change, name, options)
        if change % 4 == 0:
            (a, b)[change // 4 % 2][rng.integers(8), rng.integers(64)] ^= np.uint32(1 << rng.integers(0, 30))
        elif change % 4 == 2:
            scales[change // 4 % 2][rng.integers(64)] ^= np.uint32(1)
