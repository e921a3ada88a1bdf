"""MFMA and SMFMAC from their machine code, which LLVM encodes, with operands placed by the ISA's layout rules.

These tests share the layout rules with the code under test; the independent evidence for them is in
test_emulator_matrix_layouts.py and in the witness tests, whose kernels were laid out by a compiler. Integers must come
out exactly, in every mnemonic, format, modifier and index set, through the whole path from the bytes to the registers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.emulator_asm import Instruction, assemble, execute
from helpers.exec_registry import base
from helpers.matrix_reference import (
    BITS,
    dense_case,
    k_of_item,
    operand_registers,
    pack,
    parse,
    random_operand,
    random_result,
    read_result,
    result_registers,
)  # fmt: skip
from helpers.matrix_reference import Instruction as Shape

from hipforge import emulator
from hipforge.errors import EmulatorFault

TABLE = (Path(__file__).resolve().parents[2] / "emulator" / "native" / "isa_matrix.inc").read_text()
MNEMONICS = sorted(set(re.findall(r"\b(v_(?:mfma|smfmac)_\w+)", TABLE)))
GFX950_ONLY = {name for name in MNEMONICS if re.search(rf"\b{name}\b.*gfx950_only", TABLE)}
GFX942_ONLY = {name for name in MNEMONICS if "xf32" in name}
assert len(MNEMONICS) == 70
FORMAT_PAIRS = [(a, b) for a in range(5) for b in range(5)]


@dataclass(frozen=True)
class Form:
    """One encoding of a mnemonic: its modifiers, and whether operands live in AccVGPRs."""

    name: str
    arch: str
    formats: tuple[int, int] = (0, 0)
    modifiers: str = ""
    inline_c: bool = False  # C is the constant 0

    @property
    def shape(self) -> Shape:
        return parse(self.name, *self.formats)

    @property
    def instruction(self) -> Instruction:
        shape = self.shape
        sparse = 2 if shape.sparse else 1
        a = shape.k // (64 // (shape.m * shape.blocks)) * BITS[shape.a] // 32 // sparse
        b = shape.k // (64 // (shape.n * shape.blocks)) * BITS[shape.b] // 32
        cd = shape.m * shape.n * shape.blocks // 64 * (2 if shape.cd == "f64" else 1)
        modifiers = self.modifiers
        if "f8f6f4" in self.name:
            modifiers += f" cbsz:{self.formats[0]} blgp:{self.formats[1]}"
        if shape.sparse:
            return Instruction(f"{self.name} {{d}}, {{a}}, {{b}}, {{c}} {modifiers}", (a, b, 1), cd)
        if "scale" in self.name:
            text = f"{self.name} {{d}}, {{a}}, {{b}}, {{c}}, {{e}}, {{f}} {modifiers}"
            return Instruction(text, (a, b, cd, 1, 1), cd)
        c = "0" if self.inline_c else "{c}"
        return Instruction(f"{self.name} {{d}}, {{a}}, {{b}}, {c} {modifiers}", (a, b, cd), cd)


def sparse_forms(name: str, arch: str) -> list[Form]:
    """One for each index set that ABID names; a nonzero CBSZ takes the first one."""
    ins = parse(name)
    sets = 32 // (ins.k // (64 // ins.m))
    last = f"cbsz:1 abid:{sets - 1}"
    return [Form(name, arch, modifiers=modifiers) for modifiers in (*(f"abid:{i}" for i in range(sets)), last)]


def forms() -> list[Form]:
    found = []
    for name in MNEMONICS:
        archs = ["gfx950"] if name in GFX950_ONLY else ["gfx942"] if name in GFX942_ONLY else ["gfx950", "gfx942"]
        for arch in archs:
            if "smfmac" in name:
                found += sparse_forms(name, arch)
            elif "f8f6f4" not in name:
                found.append(Form(name, arch))
            for pair in FORMAT_PAIRS if "f8f6f4" in name else ():
                select = f"op_sel:[{pair[0] & 1},{pair[1] & 1},0] op_sel_hi:[{pair[0] >> 1 & 1},{pair[1] >> 1 & 1},0]"
                found.append(Form(name, arch, pair, select if "scale" in name else ""))
    for name in ("v_mfma_f64_16x16x4_f64", "v_mfma_f64_4x4x4_4b_f64"):
        signs = [f"neg:[{bits & 1},{bits >> 1 & 1},{bits >> 2}]" for bits in range(1, 8)]
        found += [Form(name, "gfx950", modifiers=modifiers) for modifiers in signs]
    # Broadcasting 64 >> cbsz lanes from group abid hands its blocks of A to all groups of blocks.
    found += [
        Form(name, arch, modifiers=f"cbsz:{cbsz} abid:{abid}")
        for name, arch, cbsz, abid in (
            *(("v_mfma_f32_4x4x4_16b_f16", "gfx942", *one) for one in [(1, 1), (2, 3), (3, 5), (4, 9)]),
            ("v_mfma_f32_16x16x4_4b_bf16", "gfx950", 2, 1), ("v_mfma_f32_32x32x1_2b_f32", "gfx950", 1, 1),
            ("v_mfma_i32_16x16x4_4b_i8", "gfx950", 1, 0),
        )
    ]  # fmt: skip
    found += [Form("v_mfma_f32_16x16x1_4b_f32", "gfx950", modifiers=f"blgp:{blgp}") for blgp in range(1, 8)]
    return [
        *found,
        Form("v_mfma_f32_16x16x32_f16", "gfx950", inline_c=True),
        Form("v_mfma_f64_16x16x4_f64", "gfx950", inline_c=True),
    ]


FORMS = forms()
HELD = {(base(form.name), form.arch) for form in FORMS}


@pytest.fixture(scope="module")
def code_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, emulator.CodeObject]:
    found = {}
    for arch in ("gfx950", "gfx942"):
        instructions = [form.instruction for form in FORMS if form.arch == arch]
        found[arch] = assemble(arch, instructions, tmp_path_factory.mktemp(arch))
    return found


Code = dict[str, emulator.CodeObject]


def run(code: Code, form: Form, *sources: np.ndarray, old: np.ndarray | None = None) -> np.ndarray:
    old = np.full((form.instruction.outputs, 64), 0xDEADBEEF, np.uint32) if old is None else old
    return read_result(form.shape, execute(code[form.arch], form.instruction, list(sources), old))


def zeros(form: Form) -> np.ndarray:
    return np.zeros((form.instruction.outputs, 64), np.uint32)


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
    "sparse B, 16-bit 16x16x64": (16, 16, 4, {0: (0, 8, 16, 24), 3: (6, 14, 22, 30), 7: (38, 46, 54, 62)}),
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


def modified(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + a @ b^T under the form's modifiers."""
    ins = form.shape
    if match := re.search(r"cbsz:(\d) abid:(\d)", form.modifiers):
        size, group = (int(x) for x in match.groups())
        per_group = ins.blocks >> size
        a = a[[block % per_group + per_group * group for block in range(ins.blocks)]]
    if match := re.match(r"blgp:(\d)", form.modifiers):
        # With one k per lane group, a permutation of B's lanes is a permutation of (block, column).
        lanes = np.arange(64)
        table = [lanes, lanes % 32, lanes % 32 + 32, (lanes + 16) % 64, *(lanes % 16 + 16 * i for i in range(4))]
        b = b.reshape(64, -1)[table[int(match[1])]].reshape(b.shape)
    if match := re.search(r"neg:\[(.),(.),(.)\]", form.modifiers):
        a, b, c = ((1 - 2 * int(sign)) * x for sign, x in zip(match.groups(), (a, b, c), strict=True))
    if form.inline_c:
        c = np.zeros_like(c)
    return c + a @ b.transpose(0, 2, 1)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.instruction.name}-{f.arch}")
def test_machine_code_gives_exact_integers(code_objects: Code, form: Form) -> None:
    rng = np.random.default_rng(21)
    ins, fnuz = form.shape, form.arch == "gfx942"
    if ins.sparse:
        sparse(rng, form, code_objects, fnuz)
        return
    a, b, a_regs, b_regs = dense_case(rng, ins, fnuz=fnuz)
    c = random_result(rng, ins)
    sources = [a_regs, b_regs, result_registers(ins, c)]
    if "scale" in form.name:
        blocks = ins.k // 32
        for edge, which in ((ins.m, 0), (ins.n, 1)):
            exponents = rng.integers(124, 131, (blocks, edge))
            byte = np.uint32(8 * (form.formats[which] & 3))
            register = rng.integers(0, 1 << 32, (1, 64), dtype=np.uint32) & ~(np.uint32(255) << byte)
            sources.append(register | exponents.reshape(1, 64).astype(np.uint32) << byte)
            factor = np.repeat(2.0 ** (exponents - 127.0), 32, axis=0).T
            a, b = (a * factor, b) if which == 0 else (a, b * factor)
    want = modified(form, a, b, c)
    if ins.cd == "f32":
        want = want.astype(np.float32)
    old = rng.integers(0, 1 << 32, sources[2].shape, dtype=np.uint32)
    with emulator.counters() as counted:
        got = run(code_objects, form, *sources, old=old)
    assert (got == want).all()
    assert counted.mfma_count == 1 and counted.mfma_cycles in (8, 16, 32, 64)
    if "f8f6f4" in form.name:  # eight bits on either side take twice as long
        assert counted.mfma_cycles == (32 if max(BITS[ins.a], BITS[ins.b]) == 8 else 16) * ins.m // 16


def sparse(rng: np.random.Generator, form: Form, code: Code, fnuz: bool) -> None:
    """The index set places two stored items in each four of k; D is the old destination plus that."""
    ins = form.shape
    groups = 64 // ins.m
    dense_items = ins.k // groups
    stored = dense_items // 2
    shift = 0 if "cbsz:1" in form.modifiers else 2 * stored * int(form.modifiers[-1])
    codes, values = random_operand(rng, ins.a, (64, stored), fnuz)
    b_codes, b = random_operand(rng, ins.b, (1, ins.n, ins.k), fnuz)
    index = rng.integers(0, 1 << 32, (1, 64), dtype=np.uint32)
    a = np.zeros((ins.m, ins.k))
    for lane in range(64):
        bits = int(index[0, lane])
        for quad in range(stored // 2):
            pair = sorted(rng.choice(4, 2, replace=False).tolist())
            for i in range(2):
                at = shift + 4 * quad + 2 * i
                bits = bits & ~(3 << at) | pair[i] << at
                k = dense_items * (lane // ins.m) + 4 * quad + pair[i]
                a[lane % ins.m, k] = values[lane, 2 * quad + i]
        index[0, lane] = bits
    c = random_result(rng, ins)
    sources = [pack(codes, BITS[ins.a]), operand_registers(b_codes, BITS[ins.b]), index]
    got = run(code, form, *sources, old=result_registers(ins, c))
    assert (got == c + a @ b.transpose(0, 2, 1)).all()


@pytest.mark.parametrize(
    "form", [form for form in FORMS if re.fullmatch(r"v_mfma_(?!i32).*(?<!f8f6f4)", form.name) and not form.modifiers],
    ids=lambda form: f"{form.instruction.name}-{form.arch}",
)  # fmt: skip
def test_dense_reals_are_rounded_once(code_objects: Code, form: Form) -> None:
    """|error| <= half an ulp of f32 plus the double sum's own error, far below it: compare with the rounded f64."""
    ins = form.shape
    rng = np.random.default_rng(2)
    a, b, a_regs, b_regs = dense_case(rng, ins, integers=False, fnuz=form.arch == "gfx942")
    c = random_result(rng, ins, integers=False)
    exact = modified(form, a, b, c)
    got = run(code_objects, form, a_regs, b_regs, result_registers(ins, c))
    if ins.cd == "f64":
        # Four fused steps, each within half an ulp of a partial sum of at most |c| + |a| @ |b|.
        bound = 4 * 2.0**-53 * (np.abs(c) + np.abs(a) @ np.abs(b).transpose(0, 2, 1))
        assert (np.abs(got - exact) <= bound).all()
    else:
        # Two double sums in different orders can only fall on different sides of an f32 tie: allow one in 1000.
        wrong = got != exact.astype(np.float32)
        assert wrong.mean() <= 1e-3
        assert (np.abs(got - exact) <= 2.0**-24 * np.abs(exact) * (1 + 2.0**-20)).all()


def scaled(shape: str) -> Form:
    return Form(f"v_mfma_scale_f32_{shape}_f8f6f4", "gfx950", modifiers="op_sel:[0,0,0] op_sel_hi:[0,0,0]")


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
def test_extreme_scales(code_objects: Code, shape: str) -> None:
    """0 is 2^-127, 254 is 2^127 and 255 is NaN for its row or column alone, even where the data is zero."""
    form = scaled(shape)
    ins = form.shape
    a_codes = np.zeros((1, ins.m, ins.k), np.uint64)
    a_codes[0, :, 0] = 0x38  # 1.0 in e4m3
    registers = operand_registers(a_codes, 8)
    scale_a, scale_b = (np.full((1, 64), 127, np.uint32) for _ in range(2))
    scale_a[0, 0], scale_a[0, 1], scale_a[0, 2] = 0, 254, 255
    scale_b[0, 3], scale_b[0, ins.m + 4] = 0, 255  # the second is k-block 1, where all data is zero
    got = run(code_objects, form, registers, registers, zeros(form), scale_a, scale_b)
    expected = np.ones((ins.m, ins.n))
    expected[0, :] = 2.0**-127
    expected[1, :] = 2.0**127
    expected[:, 3] *= 2.0**-127
    expected[0, 3] = 0.0  # 2^-254 is below the smallest f32
    expected[2, :] = np.nan
    expected[:, 4] = np.nan
    assert np.array_equal(got[0], expected, equal_nan=True)


def test_every_scale_byte_is_its_power_of_two_and_255_is_nan(code_objects: Code) -> None:
    form = scaled("16x16x128")
    codes = np.zeros((1, 16, 128), np.uint64)
    codes[0, :, 0] = 0x38
    registers, uniform = operand_registers(codes, 8), np.full((1, 64), 127, np.uint32)
    for first in range(0, 256, 16):
        scale = uniform.copy()
        scale[0, :16] = first + np.arange(16)
        got = run(code_objects, form, registers, registers, zeros(form), scale, uniform)[0]
        want = torch.arange(first, first + 16, dtype=torch.uint8).view(torch.float8_e8m0fnu).double().numpy()
        np.testing.assert_array_equal(got, np.broadcast_to(want[:, None], (16, 16)))


def test_contiguous_k_order_is_wrong_as_soon_as_scales_differ(code_objects: Code) -> None:
    """fp8 operands laid out 32 contiguous k per lane give the right sum under one scale and a wrong one under several.

    This is the mistake that a kernel author makes by reading the k order of fp4 into fp8.
    """
    form = scaled("16x16x128")
    rng = np.random.default_rng(4)
    a_codes, a = random_operand(rng, "fp8", (1, 16, 128))
    b_codes, b = random_operand(rng, "fp8", (1, 16, 128))

    def contiguous(codes):
        lanes = np.zeros((64, 32), np.uint64)
        for row, group in np.ndindex(16, 4):
            lanes[row + 16 * group] = codes[0, row, 32 * group : 32 * group + 32]
        return pack(lanes, 8)

    uniform = np.full((1, 64), 127, np.uint32)
    exponents = rng.integers(124, 131, (4, 16))
    different = exponents.reshape(1, 64).astype(np.uint32)
    exact = (a * np.repeat(2.0 ** (exponents - 127.0), 32, axis=0).T) @ b.transpose(0, 2, 1)
    wrong = contiguous(a_codes), contiguous(b_codes), zeros(form)
    right = operand_registers(a_codes, 8), operand_registers(b_codes, 8), zeros(form)
    assert (run(code_objects, form, *wrong, uniform, uniform) == a @ b.transpose(0, 2, 1)).all()
    assert (run(code_objects, form, *wrong, different, uniform) != exact).mean() > 0.9
    assert (run(code_objects, form, *right, different, uniform) == exact).all()


def test_i8_sums_wrap(code_objects: Code) -> None:
    form = Form("v_mfma_i32_16x16x64_i8", "gfx950")
    regs = operand_registers(np.full((1, 16, 64), 127, np.uint64), 8)
    c = np.full((1, 16, 16), 2**31 - 1, np.float64)
    got = run(code_objects, form, regs, regs, result_registers(form.shape, c))
    assert (got == 2**31 - 1 + 64 * 127 * 127 - 2**32).all()


def test_infinities_and_nans_propagate_only_along_their_row_and_column(code_objects: Code) -> None:
    form = Form("v_mfma_f32_16x16x32_bf8_bf8", "gfx950")
    a_codes = np.full((1, 16, 32), 0x3C, np.uint64)  # 1.0 in e5m2
    b_codes = a_codes.copy()
    a_codes[0, 2, 5] = 0x7C  # inf
    a_codes[0, 3, 6] = 0x7F  # NaN
    b_codes[0, 7, 5] = 0x00  # inf * 0
    b_codes[0, 8, 5] = 0xBC  # inf * -1
    got = run(code_objects, form, operand_registers(a_codes, 8), operand_registers(b_codes, 8), zeros(form))[0]
    expected = np.full((16, 16), 32.0)
    expected[:, 7], expected[:, 8] = 31.0, 30.0
    expected[2, :] = np.inf
    expected[2, 7], expected[2, 8] = np.nan, -np.inf
    expected[3, :] = np.nan
    assert np.array_equal(got, expected, equal_nan=True)


def test_a_sparse_instruction_does_not_touch_what_its_index_skips(code_objects: Code) -> None:
    """The unselected elements of B may be NaN: they are left out, not multiplied by zero."""
    form = Form("v_smfmac_f32_16x16x64_fp8_fp8", "gfx950", modifiers="abid:0")
    b_codes = np.full((1, 16, 64), 0x7F, np.uint64)
    b_codes[0, :, 0::4] = b_codes[0, :, 1::4] = 0x38
    a_regs, index = (np.full((n, 64), x, np.uint32) for n, x in ((2, 0x38383838), (1, 0x4444)))  # 0 and 1 of every four
    assert (run(code_objects, form, a_regs, operand_registers(b_codes, 8), index, old=zeros(form)) == 32).all()


def test_f32_overflow_becomes_infinity(code_objects: Code) -> None:
    form = Form("v_mfma_f32_16x16x4_f32", "gfx950")
    big, one = (np.full((1, 64), np.float32(x)).view(np.uint32) for x in (3e38, 1))
    assert np.isposinf(run(code_objects, form, big, one, zeros(form))).all()


IN_AGPRS = "\n  ".join([  # A from AccVGPRs, B from VGPRs, C and D in AccVGPRs
    *(f"v_accvgpr_write_b32 a{i}, v{12 + i}" for i in range(4)),
    *(f"v_accvgpr_write_b32 a{10 + i}, v{8 + i}" for i in range(2)),
    "s_nop 4",
    "v_mfma_f32_16x16x16_f16 a[4:7], a[10:11], {b}, a[0:3]",
    "s_nop 15",
    *(f"v_accvgpr_read_b32 v{80 + i}, a{4 + i}" for i in range(4)),
])  # fmt: skip
OVERLAP = "\n  ".join([  # D on top of A's own registers
    "v_mfma_f32_16x16x16_f16 v[8:11], {a}, {b}, {c}", "s_nop 15", *(f"v_mov_b32 v{80 + i}, v{8 + i}" for i in range(4)),
])  # fmt: skip
NO_LANE = "s_mov_b64 exec, 0x55\n  v_mfma_f32_16x16x32_f16 {d}, {a}, {b}, {c}\n  s_mov_b64 exec, -1\n  s_nop 15"


def scales_from(a: int, b: int, before: str = "") -> str:
    """v_mfma_scale_f32_16x16x128_f8f6f4 v[80:83], v[8:15], v[16:23], v[24:27] with operands that LLVM refuses."""
    return f"{before}.long 0xd3ac0800, {a | b << 9:#x}, 0xd3ad0850, 0x04622108"


def scalar_scales(a: int, b: int) -> str:
    return scales_from(8, 9, f"s_mov_b32 s8, {a:#x}\n  s_mov_b32 s9, {b:#x}\n  s_nop 4\n  ")


SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4"
SPECIAL = {  # instructions, what they are, architecture, what they multiply A times B by
    "AccVGPRs": (IN_AGPRS, "v_mfma_f32_16x16x16_f16", "gfx950", 1),
    "AccVGPRs of gfx942": (IN_AGPRS, "v_mfma_f32_16x16x16_f16", "gfx942", 1),
    "D over A": (OVERLAP, "v_mfma_f32_16x16x16_f16", "gfx950", 1),
    "D over A on gfx942": (OVERLAP, "v_mfma_f32_16x16x16_f16", "gfx942", 1),
    "exec does not matter": (NO_LANE, "v_mfma_f32_16x16x32_f16", "gfx950", 1),
    # 4.0 and 0.5, whatever byte is selected (ISA: the exponent portion of inline floats is used).
    "an inline constant as scale": (scales_from(246, 240), SCALED, "gfx950", 2),
    # Bits 30:23 count, not a byte (LLVM pull request 158117): a constant e8m0 of 127 there is 2^-127 instead of 1.
    "a float in a scalar register": (scalar_scales(0x40800000, 0x3F000000), SCALED, "gfx950", 2),
    "an e8m0 byte in a scalar register": (scalar_scales(127, 0x3F800000), SCALED, "gfx950", 2.0**-127),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_other_registers_and_constants(tmp_path: Path, name: str) -> None:
    text, mnemonic, arch, factor = SPECIAL[name]
    ins = parse(mnemonic)
    instruction = Instruction(text, Form(mnemonic, arch).instruction.widths[:3], 4)
    rng = np.random.default_rng(22)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    c = random_result(rng, ins)
    code = assemble(arch, [instruction], tmp_path)
    got = read_result(ins, execute(code, instruction, [a_regs, b_regs, result_registers(ins, c)], np.zeros((4, 64))))
    np.testing.assert_array_equal(got, (c + factor * (a @ b.transpose(0, 2, 1))).astype(np.float32))


def test_a_reserved_format_code_is_no_instruction(tmp_path: Path) -> None:
    instruction = Instruction(".long 0xd3ad0750, 0x04622108", (8, 8, 4), 4)  # cbsz:7
    code, rows = assemble("gfx950", [instruction], tmp_path), [np.zeros((n, 64), np.uint32) for n in (8, 8, 4, 4)]
    with pytest.raises(EmulatorFault, match="these bytes are no instruction"):
        execute(code, instruction, rows[:3], rows[3])
