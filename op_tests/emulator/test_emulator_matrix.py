"""MFMA and SMFMAC against float64, with operands placed lane by lane from the ISA's layout rules.

These tests share the layout rules with the code under test; the independent evidence for them is in the witness
tests, whose kernels were laid out by a compiler. Here integers must come out exactly, in every mnemonic.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.matrix_reference import (
    BITS,
    decode_table,
    dense_case,
    k_of_item,
    operand_registers,
    pack,
    parse,
    random_operand,
    random_result,
    read_result,
    result_registers,
)

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
const char* op_name(int i) { return i < int(Op::count) ? kNames[i] : nullptr; }
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
void shape(const char* name, int cbsz, int blgp, int* out) {
  MatrixShape s = matrix_shape(op_of(name), cbsz, blgp);
  int values[] = {s.m, s.n, s.k, s.blocks, s.a_regs, s.b_regs, s.cd_regs, s.sparse};
  std::memcpy(out, values, sizeof values);
}
// Whether 32x32x16 fp8 operands are multiplied as integers; -1: never on this CPU.
int as_integers(const void* a, const void* b, const void* c) {
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
  MatrixArgs m;
  m.a = (const Row*)a; m.b = (const Row*)b;
  alignas(64) static double acc[kMaxResult];
  constexpr auto& shape = kShape<kRowOfOp[static_cast<std::size_t>(Op::v_mfma_f32_32x32x16_fp8_fp8)]>;
  return multiply_integers<shape>(m, Element::fp8, Element::fp8, nullptr, nullptr, (const Row*)c, acc);
#else
  return -1;
#endif
}
int cycles(const char* name, int cbsz, int blgp, int gfx950) {
  return matrix_cycles(op_of(name), cbsz, blgp, gfx950 ? Arch::gfx950 : Arch::gfx942);
}
}
"""

MNEMONICS = sorted(set(re.findall(r"\b(v_(?:mfma|smfmac)_\w+)", (CSRC / "isa_matrix.inc").read_text())))


def build(root: Path, *flags: str) -> ctypes.CDLL:
    (root / "shim.cpp").write_text(SHIM)
    command = ["g++", "-std=c++20", "-O2", "-march=native", *flags, "-shared", "-fPIC", f"-I{CSRC}"]
    command += [str(root / "shim.cpp"), "-o", str(root / "shim.so")]
    subprocess.run(command, check=True)
    shim = ctypes.CDLL(str(root / "shim.so"))
    shim.op_name.restype = ctypes.c_char_p
    return shim


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same without the instructions that sums of integers need: every product goes through double."""
    return build(tmp_path_factory.mktemp("doubles"), "-mno-avx512vnni", "-mno-avx512vbmi")


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def run(lib, ins, *operands, **options):
    return read_result(ins, registers(lib, ins, *operands, **options))


def registers(
    lib, ins, a, b, c, *, index=None, scale_a=None, scale_b=None, cbsz=0, abid=0, blgp=0, fnuz=False, sel=(0, 0)
):
    d = c.copy() if ins.sparse else np.full_like(c, 0xDEADBEEF)
    flags = np.array([cbsz, abid, blgp, fnuz, *sel], np.int32)
    source_c = None if ins.sparse else pointer(c)
    arrays = [pointer(a), pointer(b), source_c, pointer(d), pointer(index), pointer(scale_a), pointer(scale_b)]
    assert lib.run(ins.name.encode(), *arrays, pointer(flags)) == 0, f"{ins.name} has no function"
    return d


DENSE = [name for name in MNEMONICS if "mfma_" in name and "f8f6f4" not in name]
SPARSE = [name for name in MNEMONICS if "smfmac" in name]
MIXED = [name for name in MNEMONICS if "f8f6f4" in name]


def test_every_matrix_mnemonic_is_covered(lib):
    names = {lib.op_name(i).decode() for i in range(1, 4000) if lib.op_name(i)}
    matrix = {name for name in names if name.startswith(("v_mfma_", "v_smfmac_"))}
    assert matrix == set(MNEMONICS) == {*DENSE, *SPARSE, *MIXED}
    assert len(MNEMONICS) == 70


# First k of register v0, v1, ... in each lane group, as the CDNA4 ISA's tables print them (sections 7.1.5.1, 7.5.1).
# bits, items per lane, lane groups: {register: (k in group 0, group 1, ...)}
ISA_TABLES = {
    "fp8 16x16x128": (8, 32, 4, {0: (0, 16, 32, 48), 3: (12, 28, 44, 60), 4: (64, 80, 96, 112), 7: (76, 92, 108, 124)}),
    "fp8 32x32x64": (8, 32, 2, {0: (0, 16), 3: (12, 28), 4: (32, 48), 7: (44, 60)}),
    "fp6 16x16x128": (6, 32, 4, {0: (0, 32, 64, 96), 3: (16, 48, 80, 112)}),
    "fp6 32x32x64": (6, 32, 2, {0: (0, 32), 3: (16, 48)}),
    "fp4 16x16x128": (4, 32, 4, {0: (0, 32, 64, 96), 3: (24, 56, 88, 120)}),
    "fp4 32x32x64": (4, 32, 2, {0: (0, 32), 3: (24, 56)}),
    "bf16 16x16x32": (16, 8, 4, {0: (0, 8, 16, 24), 3: (6, 14, 22, 30)}),
    "bf16 32x32x16": (16, 8, 2, {0: (0, 8), 3: (6, 14)}),
    "i8 16x16x64": (8, 16, 4, {0: (0, 16, 32, 48), 3: (12, 28, 44, 60)}),
    "i8 32x32x32": (8, 16, 2, {0: (0, 16), 3: (12, 28)}),
    "sparse B, 16-bit 16x16x32": (16, 8, 4, {0: (0, 8, 16, 24), 3: (6, 14, 22, 30)}),
    "sparse B, 8-bit 16x16x64": (8, 16, 4, {0: (0, 16, 32, 48), 3: (12, 28, 44, 60)}),
    "sparse B, 16-bit 16x16x64": (
        16,
        16,
        4,
        {0: (0, 8, 16, 24), 3: (6, 14, 22, 30), 4: (32, 40, 48, 56), 7: (38, 46, 54, 62)},
    ),
    "sparse B, 16-bit 32x32x32": (16, 16, 2, {0: (0, 8), 3: (6, 14), 4: (16, 24), 7: (22, 30)}),
    "sparse B, 8-bit 16x16x128": (8, 32, 4, {0: (0, 16, 32, 48), 4: (64, 80, 96, 112), 7: (76, 92, 108, 124)}),
    "sparse B, 8-bit 32x32x64": (8, 32, 2, {0: (0, 16), 3: (12, 28), 4: (32, 48), 7: (44, 60)}),
}


@pytest.mark.parametrize("name", ISA_TABLES)
def test_the_k_order_is_the_one_that_the_isa_tables_print(name):
    bits, per_lane, groups, registers = ISA_TABLES[name]
    for register, starts in registers.items():
        item = register * 32 // bits
        assert tuple(k_of_item(bits, per_lane, groups, group, item) for group in range(groups)) == starts


@pytest.mark.parametrize("name", DENSE)
def test_dense_integers_are_exact(lib, name):
    ins = parse(name)
    rng = np.random.default_rng(1)
    for fnuz in (False, True) if ins.a in ("fp8", "bf8") else (False,):
        a, b, a_regs, b_regs = dense_case(rng, ins, fnuz=fnuz)
        c = random_result(rng, ins)
        got = run(lib, ins, a_regs, b_regs, result_registers(ins, c), fnuz=fnuz)
        assert (got == c + a @ b.transpose(0, 2, 1)).all()


@pytest.mark.parametrize("name", [name for name in DENSE if "_i8" not in name])
def test_dense_reals_are_rounded_once(lib, name):
    """|error| <= half an ulp of f32 plus the double sum's own error, far below it: compare with the rounded f64."""
    ins = parse(name)
    rng = np.random.default_rng(2)
    a, b, a_regs, b_regs = dense_case(rng, ins, integers=False)
    c = random_result(rng, ins, integers=False)
    exact = c + a @ b.transpose(0, 2, 1)
    got = run(lib, ins, a_regs, b_regs, result_registers(ins, c))
    if ins.cd == "f64":
        # Four fused steps, each within half an ulp of a partial sum of at most |c| + |a| @ |b|.
        bound = 4 * 2.0**-53 * (np.abs(c) + np.abs(a) @ np.abs(b).transpose(0, 2, 1))
        assert (np.abs(got - exact) <= bound).all()
    else:
        # Two double sums in different orders can only fall on different sides of an f32 tie: allow one in 1000.
        wrong = got != exact.astype(np.float32)
        assert wrong.mean() <= 1e-3
        assert (np.abs(got - exact) <= 2.0**-24 * np.abs(exact) * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("fmt_b", range(5))
@pytest.mark.parametrize("fmt_a", range(5))
@pytest.mark.parametrize("name", MIXED)
def test_every_f8f6f4_format_pair_with_scales(lib, name, fmt_a, fmt_b):
    """Unscaled, then scaled with a different exponent for each row and k-block, from each byte of the register."""
    ins = parse(name, fmt_a, fmt_b)
    rng = np.random.default_rng(3)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    c = random_result(rng, ins)
    c_regs = result_registers(ins, c)
    if "scale" not in name:
        got = run(lib, ins, a_regs, b_regs, c_regs, cbsz=fmt_a, blgp=fmt_b)
        assert (got == c + a @ b.transpose(0, 2, 1)).all()
        return
    blocks = ins.k // 32
    scale_a, scale_b = (rng.integers(0, 256, (1, 64), dtype=np.uint32) * 0x01010101 for _ in range(2))
    sel = (int(rng.integers(4)), int(rng.integers(4)))
    ea, eb = rng.integers(124, 131, (blocks, ins.m)), rng.integers(124, 131, (blocks, ins.n))
    for scale, exponents, byte in ((scale_a, ea, sel[0]), (scale_b, eb, sel[1])):
        scale[0] = (scale[0] & ~np.uint32(0xFF << 8 * byte)) | (exponents.ravel().astype(np.uint32) << 8 * byte)
    factor_a = np.repeat(2.0 ** (ea - 127.0), 32, axis=0).T
    factor_b = np.repeat(2.0 ** (eb - 127.0), 32, axis=0).T
    got = run(lib, ins, a_regs, b_regs, c_regs, cbsz=fmt_a, blgp=fmt_b, scale_a=scale_a, scale_b=scale_b, sel=sel)
    exact = c + (a * factor_a) @ (b * factor_b).transpose(0, 2, 1)
    assert (got == exact.astype(np.float32)).all()


@pytest.mark.parametrize("name", [name for name in MIXED if "scale" in name])
def test_extreme_scales(lib, name):
    """0 is 2^-127, 254 is 2^127 and 255 is NaN for its row or column alone, even where the data is zero."""
    ins = parse(name)
    one = 0x38  # 1.0 in e4m3
    a_codes = np.zeros((1, ins.m, ins.k), np.uint64)
    b_codes = np.zeros((1, ins.n, ins.k), np.uint64)
    a_codes[0, :, 0], b_codes[0, :, 0] = one, one
    scale_a = np.full((1, 64), 127, np.uint32)
    scale_b = np.full((1, 64), 127, np.uint32)
    scale_a[0, 0], scale_a[0, 1], scale_a[0, 2] = 0, 254, 255
    scale_b[0, 3], scale_b[0, ins.m + 4] = 0, 255  # the second is k-block 1, where all data is zero
    c = np.zeros((ins.m * ins.n // 64, 64), np.uint32)
    got = run(
        lib, ins, operand_registers(a_codes, 8), operand_registers(b_codes, 8), c, scale_a=scale_a, scale_b=scale_b
    )
    expected = np.ones((ins.m, ins.n))
    expected[0, :] = 2.0**-127
    expected[1, :] = 2.0**127
    expected[:, 3] *= 2.0**-127
    expected[0, 3] = 0.0  # 2^-254 is below the smallest f32
    expected[2, :] = np.nan
    expected[:, 4] = np.nan
    assert np.array_equal(got[0], expected, equal_nan=True)


def test_contiguous_k_order_is_wrong_as_soon_as_scales_differ(lib):
    """fp8 operands laid out 32 contiguous k per lane give the right sum under one scale and a wrong one under several.

    This is the mistake that a kernel author makes by reading the k order of fp4 into fp8.
    """
    ins = parse("v_mfma_scale_f32_16x16x128_f8f6f4")
    rng = np.random.default_rng(4)
    a_codes, a = random_operand(rng, "fp8", (1, 16, 128))
    b_codes, b = random_operand(rng, "fp8", (1, 16, 128))

    def contiguous(codes):
        lanes = np.zeros((64, 32), np.uint64)
        for row, group in np.ndindex(16, 4):
            lanes[row + 16 * group] = codes[0, row, 32 * group : 32 * group + 32]
        return pack(lanes, 8)

    c = np.zeros((4, 64), np.uint32)
    uniform = np.full((1, 64), 127, np.uint32)
    got = run(lib, ins, contiguous(a_codes), contiguous(b_codes), c, scale_a=uniform, scale_b=uniform)
    assert (got == a @ b.transpose(0, 2, 1)).all()
    exponents = rng.integers(124, 131, (4, 16))
    different = exponents.reshape(1, 64).astype(np.uint32)
    exact = (a * np.repeat(2.0 ** (exponents - 127.0), 32, axis=0).T) @ b.transpose(0, 2, 1)
    got = run(lib, ins, contiguous(a_codes), contiguous(b_codes), c, scale_a=different, scale_b=uniform)
    assert (got != exact).mean() > 0.9
    right = run(
        lib, ins, operand_registers(a_codes, 8), operand_registers(b_codes, 8), c, scale_a=different, scale_b=uniform
    )
    assert (right == exact).all()


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_integers_are_exact_for_every_index_set(lib, name):
    ins = parse(name)
    rng = np.random.default_rng(5)
    groups = 64 // ins.m
    dense_items = ins.k // groups
    stored_items = dense_items // 2
    index_bits = 2 * stored_items
    sets = 32 // index_bits
    for fnuz in (False, True) if ins.a in ("fp8", "bf8") else (False,):
        for abid, cbsz in [(set_, 0) for set_ in range(sets)] + [(sets - 1, 1)]:
            chosen = abid if cbsz == 0 else 0
            codes, values = random_operand(rng, ins.a, (64, stored_items), fnuz)
            b_codes, b = random_operand(rng, ins.b, (1, ins.n, ins.k), fnuz)
            index = rng.integers(0, 1 << 32, (1, 64), dtype=np.uint32)
            a = np.zeros((ins.m, ins.k))
            for lane in range(64):
                for item in range(stored_items):
                    if item % 2 == 0:
                        pair = sorted(rng.choice(4, 2, replace=False))
                    shift = chosen * index_bits + 2 * item
                    index[0, lane] = (int(index[0, lane]) & ~(3 << shift)) | int(pair[item % 2]) << shift
                    dense_item = item // 2 * 4 + pair[item % 2]
                    k = dense_items * (lane // ins.m) + dense_item
                    a[lane % ins.m, k] = values[lane, item]
            c = random_result(rng, ins)
            got = run(
                lib, ins, pack(codes, BITS[ins.a]), operand_registers(b_codes, BITS[ins.b]),
                result_registers(ins, c), index=index, cbsz=cbsz, abid=abid, fnuz=fnuz,
            )  # fmt: skip
            assert (got == c + a @ b.transpose(0, 2, 1)).all()


@pytest.mark.parametrize(
    ("name", "cbsz", "abid"),
    [("v_mfma_f32_4x4x4_16b_f16", cbsz, abid) for cbsz, abid in [(1, 1), (2, 3), (3, 5), (4, 9)]]
    + [("v_mfma_f32_16x16x4_4b_bf16", 2, 1), ("v_mfma_f32_32x32x1_2b_f32", 1, 1), ("v_mfma_i32_16x16x4_4b_i8", 1, 0)],
)
def test_cbsz_broadcasts_one_block_of_a(lib, name, cbsz, abid):
    """Broadcasting 64 >> cbsz lanes from group abid hands its blocks of A to all groups of blocks."""
    ins = parse(name)
    rng = np.random.default_rng(6)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    c = random_result(rng, ins)
    per_group = ins.blocks >> cbsz
    source = [block % per_group + per_group * abid for block in range(ins.blocks)]
    got = run(lib, ins, a_regs, b_regs, result_registers(ins, c), cbsz=cbsz, abid=abid)
    assert (got == c + a[source] @ b.transpose(0, 2, 1)).all()


@pytest.mark.parametrize("blgp", range(8))
def test_blgp_permutes_the_lanes_of_b(lib, blgp):
    """With one k per lane group, a permutation of B's lanes is a permutation of (block, column)."""
    ins = parse("v_mfma_f32_16x16x1_4b_f32")
    rng = np.random.default_rng(7)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    lanes = np.arange(64)
    table = [lanes, lanes % 32, lanes % 32 + 32, (lanes + 16) % 64, *(lanes % 16 + 16 * i for i in range(4))]
    flat = b.reshape(64, 1)[table[blgp]].reshape(b.shape)
    c = random_result(rng, ins)
    got = run(lib, ins, a_regs, b_regs, result_registers(ins, c), blgp=blgp)
    assert (got == c + a @ flat.transpose(0, 2, 1)).all()


@pytest.mark.parametrize("blgp", range(8))
@pytest.mark.parametrize("name", ["v_mfma_f64_16x16x4_f64", "v_mfma_f64_4x4x4_4b_f64"])
def test_blgp_negates_f64_operands(lib, name, blgp):
    ins = parse(name)
    rng = np.random.default_rng(8)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    c = random_result(rng, ins)
    signs = [-1.0 if blgp >> bit & 1 else 1.0 for bit in range(3)]
    got = run(lib, ins, a_regs, b_regs, result_registers(ins, c), blgp=blgp)
    assert (got == signs[2] * c + signs[0] * signs[1] * (a @ b.transpose(0, 2, 1))).all()


def test_i8_sums_wrap(lib):
    ins = parse("v_mfma_i32_16x16x64_i8")
    a_codes = np.full((1, 16, 64), 127, np.uint64)
    regs = operand_registers(a_codes, 8)
    c = np.full((1, 16, 16), 2**31 - 1, np.float64)
    got = run(lib, ins, regs, regs, result_registers(ins, c))
    assert (got == 2**31 - 1 + 64 * 127 * 127 - 2**32).all()


def test_infinities_and_nans_propagate_only_along_their_row_and_column(lib):
    ins = parse("v_mfma_f32_16x16x32_bf8_bf8")
    a_codes = np.full((1, 16, 32), 0x3C, np.uint64)  # 1.0 in e5m2
    b_codes = a_codes.copy()
    a_codes[0, 2, 5] = 0x7C  # inf
    a_codes[0, 3, 6] = 0x7F  # NaN
    b_codes[0, 7, 5] = 0x00  # inf * 0
    b_codes[0, 8, 5] = 0xBC  # inf * -1
    c = np.zeros((4, 64), np.uint32)
    got = run(lib, ins, operand_registers(a_codes, 8), operand_registers(b_codes, 8), c)[0]
    expected = np.full((16, 16), 32.0)
    expected[:, 7], expected[:, 8] = 31.0, 30.0
    expected[2, :] = np.inf
    expected[2, 7], expected[2, 8] = np.nan, -np.inf
    expected[3, :] = np.nan
    assert np.array_equal(got, expected, equal_nan=True)


def test_a_sparse_instruction_does_not_touch_what_its_index_skips(lib):
    """The unselected elements of B may be NaN: they are left out, not multiplied by zero."""
    ins = parse("v_smfmac_f32_16x16x64_fp8_fp8")
    a_regs = np.full((2, 64), 0x38383838, np.uint32)
    b_codes = np.full((1, 16, 64), 0x7F, np.uint64)
    b_codes[0, :, 0::4] = 0x38
    b_codes[0, :, 1::4] = 0x38
    index = np.full((1, 64), 0x4444, np.uint32)  # positions 0 and 1 of every four
    got = run(lib, ins, a_regs, operand_registers(b_codes, 8), np.zeros((4, 64), np.uint32), index=index)
    assert (got == 32).all()


def test_f32_overflow_becomes_infinity(lib):
    ins = parse("v_mfma_f32_16x16x4_f32")
    big = np.full((1, 64), np.float32(3e38)).view(np.uint32)
    one = np.full((1, 64), np.float32(1)).view(np.uint32)
    got = run(lib, ins, big, one, np.zeros((4, 64), np.uint32))
    assert np.isposinf(got).all()


@pytest.mark.parametrize("name", MNEMONICS)
def test_shape_and_cycles(lib, name):
    """Registers follow from the shape; cycles are a power of two between 8 and 64 wherever the instruction exists."""
    for fmt_a, fmt_b in [(0, 0), (4, 2), (2, 1)] if name in MIXED else [(0, 0)]:
        ins = parse(name, fmt_a, fmt_b)
        out = np.zeros(8, np.int32)
        lib.shape(name.encode(), fmt_a, fmt_b, pointer(out))
        lanes_a, lanes_b = 64 // (ins.m * ins.blocks), 64 // (ins.n * ins.blocks)
        a_regs = ins.k // lanes_a * BITS[ins.a] // 32 // (2 if ins.sparse else 1)
        b_regs = ins.k // lanes_b * BITS[ins.b] // 32
        cd_regs = ins.m * ins.n * ins.blocks // 64 * (2 if ins.cd == "f64" else 1)
        assert out.tolist() == [ins.m, ins.n, ins.k, ins.blocks, a_regs, b_regs, cd_regs, ins.sparse]
        assert lib.cycles(name.encode(), fmt_a, fmt_b, 1) in ((0,) if "xf32" in name else (8, 16, 32, 64))
        assert lib.cycles(name.encode(), fmt_a, fmt_b, 0) in ((0,) if name in MIXED else (0, 8, 16, 32, 64))


def test_cycles_of_the_f8f6f4_instructions_depend_on_the_formats(lib):
    small, large = b"v_mfma_scale_f32_16x16x128_f8f6f4", b"v_mfma_scale_f32_32x32x64_f8f6f4"
    assert [lib.cycles(small, *formats, 1) for formats in ((0, 0), (4, 1), (4, 4), (2, 3))] == [32, 32, 16, 16]
    assert [lib.cycles(large, *formats, 1) for formats in ((0, 0), (4, 1), (4, 4), (2, 3))] == [64, 64, 32, 32]


def test_a_reserved_format_code_gives_nan_and_no_shape(lib):
    out = np.ones(8, np.int32)
    lib.shape(b"v_mfma_f32_16x16x128_f8f6f4", 5, 0, pointer(out))
    assert not out.any()
    ins = parse("v_mfma_f32_16x16x128_f8f6f4")
    zero = np.zeros((8, 64), np.uint32)
    assert np.isnan(run(lib, ins, zero, zero, np.zeros((4, 64), np.uint32), cbsz=7)).all()


def operand_bytes(rng, kind: str, element: str, fnuz: bool) -> np.ndarray:
    """Eight registers of one operand's codes."""
    shape = (8, 64, 4)
    if kind == "any":
        return rng.integers(0, 256, shape, dtype=np.uint8).view(np.uint32)[..., 0]
    if kind == "signed zeros":
        return (rng.integers(0, 2, shape, dtype=np.uint8) * (0 if fnuz else 0x80)).view(np.uint32)[..., 0]
    # Magnitudes up to the largest, in normal data those of a block of 32; "narrow" has no bits below the unit.
    table = np.nan_to_num(decode_table(element, fnuz), nan=0.0, posinf=0.0, neginf=0.0)
    order = np.argsort(table)
    top = np.abs(table).max()
    wide = {"normal": rng.standard_normal(shape) * top / 3, "largest": rng.choice([-top, top], shape)}
    wide |= {"narrow": rng.integers(-8, 9, shape) * top / 8, "tiny": rng.standard_normal(shape) * top * 2.0**-12}
    nearest = np.searchsorted(table[order], np.clip(wide[kind], -top, top)).clip(0, len(table) - 1)
    codes = order[nearest].astype(np.uint8)
    if element == "fp4":
        codes = codes | rng.permuted(codes, axis=1) << 4
    return codes.view(np.uint32)[..., 0]


SMALL_ELEMENTS = [name for name in DENSE if re.search("_[fb][pf]8_[fb][pf]8$", name)] + MIXED


@pytest.mark.parametrize("fnuz", (False, True))
@pytest.mark.parametrize("name", SMALL_ELEMENTS)
def test_sums_of_integers_have_the_bits_of_sums_in_double(lib, doubles, name, fnuz):
    rng = np.random.default_rng(7)
    kinds = ("normal", "narrow", "tiny", "largest", "signed zeros", "any")
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
                for scale in ("scale_a", "scale_b"):
                    exponents = rng.integers(127 - spread, 128 + spread, (1, 64))
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
    able = {"avx512vbmi", "avx512_vnni"} <= set(Path("/proc/cpuinfo").read_text().split())
    assert lib.as_integers(pointer(a), pointer(b), pointer(c)) == (1 if able else -1)
    assert doubles.as_integers(pointer(a), pointer(b), pointer(c)) == -1
