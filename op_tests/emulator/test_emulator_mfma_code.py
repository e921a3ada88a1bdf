"""Every MFMA and SMFMAC from its machine code: encoding, register operands, modifiers and scales, through the executor.

`test_emulator_matrix.py` checks arithmetic against the layout rules; here LLVM encodes the same instructions and the
whole path from the bytes to the registers must give the same results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import hip_compile
from helpers.emulator_asm import Instruction, assemble, execute
from helpers.exec_registry import base
from helpers.matrix_reference import (
    BITS,
    dense_case,
    operand_registers,
    pack,
    parse,
    random_operand,
    random_result,
    read_result,
    result_registers,
)
from helpers.matrix_reference import (
    Instruction as Shape,
)

from hipforge import emulator

TABLE = (Path(__file__).resolve().parents[2] / "emulator" / "native" / "isa_matrix.inc").read_text()
MNEMONICS = sorted(set(re.findall(r"\b(v_(?:mfma|smfmac)_\w+)", TABLE)))
GFX950_ONLY = {name for name in MNEMONICS if re.search(rf"\b{name}\b.*gfx950_only", TABLE)}
GFX942_ONLY = {name for name in MNEMONICS if "xf32" in name}
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
            return Instruction(
                f"{self.name} {{d}}, {{a}}, {{b}}, {{c}}, {{e}}, {{f}} {modifiers}", (a, b, cd, 1, 1), cd
            )
        c = "0" if self.inline_c else "{c}"
        return Instruction(f"{self.name} {{d}}, {{a}}, {{b}}, {c} {modifiers}", (a, b, cd), cd)


def forms() -> list[Form]:
    found = []
    for name in MNEMONICS:
        archs = ["gfx950"] if name in GFX950_ONLY else ["gfx942"] if name in GFX942_ONLY else ["gfx950", "gfx942"]
        for arch in archs:
            if "f8f6f4" not in name:
                found.append(Form(name, arch))
                continue
            for pair in FORMAT_PAIRS:
                select = f"op_sel:[{pair[0] & 1},{pair[1] & 1},0] op_sel_hi:[{pair[0] >> 1 & 1},{pair[1] >> 1 & 1},0]"
                found.append(Form(name, arch, pair, select if "scale" in name else ""))
    found += [
        Form("v_mfma_f32_16x16x32_f16", "gfx950", inline_c=True),
        Form("v_mfma_f64_16x16x4_f64", "gfx950", inline_c=True),
        Form("v_mfma_f32_4x4x4_16b_f16", "gfx942", modifiers="cbsz:2 abid:3"),
        Form("v_mfma_f32_16x16x1_4b_f32", "gfx950", modifiers="blgp:3"),
        Form("v_mfma_f64_16x16x4_f64", "gfx950", modifiers="neg:[1,0,1]"),
        Form("v_smfmac_f32_16x16x32_f16", "gfx942", modifiers="abid:2"),
        Form("v_smfmac_f32_16x16x64_fp8_fp8", "gfx950", modifiers="abid:1"),
    ]
    return found


FORMS = forms()
HELD = {(base(form.name), form.arch) for form in FORMS}


@pytest.fixture(scope="module")
def code_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, emulator.CodeObject]:
    found = {}
    for arch in ("gfx950", "gfx942"):
        instructions = [form.instruction for form in FORMS if form.arch == arch]
        found[arch] = assemble(arch, instructions, tmp_path_factory.mktemp(arch))
    return found


def modified(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + a @ b^T under the form's modifiers."""
    ins = form.shape
    if match := re.search(r"cbsz:(\d) abid:(\d)", form.modifiers):
        size, group = (int(x) for x in match.groups())
        per_group = ins.blocks >> size
        a = a[[block % per_group + per_group * group for block in range(ins.blocks)]]
    if "blgp:3" in form.modifiers:
        b = b.reshape(64, -1)[(np.arange(64) + 16) % 64].reshape(b.shape)
    if "neg:[1,0,1]" in form.modifiers:
        a, c = -a, -c
    if form.inline_c:
        c = np.zeros_like(c)
    return c + a @ b.transpose(0, 2, 1)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.instruction.name}-{f.arch}")
def test_machine_code_gives_exact_integers(code_objects: dict[str, emulator.CodeObject], form: Form) -> None:
    rng = np.random.default_rng(21)
    ins, code, fnuz = form.shape, code_objects[form.arch], form.arch == "gfx942"
    if ins.sparse:
        sparse(rng, form, code, fnuz)
        return
    a, b, a_regs, b_regs = dense_case(rng, ins, fnuz=fnuz)
    c = random_result(rng, ins)
    sources = [a_regs, b_regs, result_registers(ins, c)]
    if "scale" in form.name:
        blocks = ins.k // 32
        for edge, which, operand in ((ins.m, 0, "a"), (ins.n, 1, "b")):
            exponents = rng.integers(124, 131, (blocks, edge))
            byte = np.uint32(8 * (form.formats[which] & 3))
            register = rng.integers(0, 1 << 32, (1, 64), dtype=np.uint32) & ~(np.uint32(255) << byte)
            sources.append(register | exponents.reshape(1, 64).astype(np.uint32) << byte)
            factor = np.repeat(2.0 ** (exponents - 127.0), 32, axis=0).T
            if operand == "a":
                a = a * factor
            else:
                b = b * factor
    want = modified(form, a, b, c)
    if ins.cd == "f32":
        want = want.astype(np.float32)
    old = rng.integers(0, 1 << 32, sources[2].shape, dtype=np.uint32)
    assert (read_result(ins, execute(code, form.instruction, sources, old)) == want).all()


def sparse(rng: np.random.Generator, form: Form, code: emulator.CodeObject, fnuz: bool) -> None:
    """The index set that ABID names places two stored items in each four of k; D is the old destination plus that."""
    ins = form.shape
    groups = 64 // ins.m
    dense_items = ins.k // groups
    stored = dense_items // 2
    abid = re.search(r"abid:(\d)", form.modifiers)
    shift = 2 * stored * (int(abid.group(1)) if abid else 0)
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
    got = read_result(ins, execute(code, form.instruction, sources, result_registers(ins, c)))
    assert (got == c + a @ b.transpose(0, 2, 1)).all()


def lines(*parts: str | list[str]) -> str:
    """Instructions of one kernel body."""
    return "\n  ".join(line for part in parts for line in ([part] if isinstance(part, str) else part))


def test_accumulation_registers_and_overlapping_operands(tmp_path: Path) -> None:
    """A from AccVGPRs, B from VGPRs, C and D in AccVGPRs; then D on top of A's own registers."""
    in_agprs = lines(
        [f"v_accvgpr_write_b32 a{i}, v{12 + i}" for i in range(4)],
        [f"v_accvgpr_write_b32 a{10 + i}, v{8 + i}" for i in range(2)],
        "s_nop 4",
        "v_mfma_f32_16x16x16_f16 a[4:7], a[10:11], {b}, a[0:3]",
        "s_nop 15",
        [f"v_accvgpr_read_b32 v{80 + i}, a{4 + i}" for i in range(4)],
    )
    overlap = lines(
        "v_mfma_f32_16x16x16_f16 v[8:11], {a}, {b}, {c}",
        "s_nop 15",
        [f"v_mov_b32 v{80 + i}, v{8 + i}" for i in range(4)],
    )
    instructions = [Instruction(in_agprs, (2, 2, 4), 4), Instruction(overlap, (2, 2, 4), 4)]
    ins = parse("v_mfma_f32_16x16x16_f16")
    rng = np.random.default_rng(22)
    for arch in ("gfx950", "gfx942"):
        code = assemble(arch, instructions, tmp_path)
        for instruction in instructions:
            a, b, a_regs, b_regs = dense_case(rng, ins)
            c = random_result(rng, ins)
            got = execute(code, instruction, [a_regs, b_regs, result_registers(ins, c)], np.zeros((4, 64), np.uint32))
            assert (read_result(ins, got) == c + a @ b.transpose(0, 2, 1)).all()


# v_mfma_scale_f32_16x16x128_f8f6f4 v[80:83], v[8:15], v[16:23], v[24:27], 4.0, 0.5 op_sel:[1,0,0], whose constants
# (246 and 240 in the scale prefix) LLVM's assembler does not take inline.
INLINE_SCALES = f".long 0xd3ac0800, {246 | 240 << 9:#x}, 0xd3ad0850, 0x04622108"


def test_an_inline_constant_scale_is_the_exponent_of_that_float(tmp_path: Path) -> None:
    """4.0 quadruples and 0.5 halves, whatever byte is selected (ISA: the exponent portion of inline floats is used)."""
    instruction = Instruction(INLINE_SCALES, (8, 8, 4), 4)
    code = assemble("gfx950", [instruction], tmp_path)
    ins = parse("v_mfma_scale_f32_16x16x128_f8f6f4")
    rng = np.random.default_rng(23)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    c = random_result(rng, ins)
    got = execute(code, instruction, [a_regs, b_regs, result_registers(ins, c)], np.zeros((4, 64), np.uint32))
    assert (read_result(ins, got) == c + 2 * (a @ b.transpose(0, 2, 1))).all()


@pytest.mark.parametrize(("a_scale", "b_scale", "factor"), [(0x40800000, 0x3F000000, 2), (127, 0x3F800000, 2.0**-127)])
def test_a_scalar_register_as_scale_is_the_exponent_of_a_float_too(
    tmp_path: Path, a_scale: int, b_scale: int, factor: float
) -> None:
    """Bits 30:23 count, not a byte (LLVM pull request 158117): a constant e8m0 of 127 there is 2^-127 instead of 1."""
    scales = f"s_mov_b32 s8, {a_scale:#x}\n  s_mov_b32 s9, {b_scale:#x}\n  s_nop 4"
    words = f".long 0xd3ac0000, {8 | 9 << 9:#x}, 0xd3ad0850, 0x04622108"
    instruction = Instruction(f"{scales}\n  {words}", (8, 8, 4), 4)
    code = assemble("gfx950", [instruction], tmp_path)
    ins = parse("v_mfma_scale_f32_16x16x128_f8f6f4")
    rng = np.random.default_rng(25)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    c = random_result(rng, ins)
    got = execute(code, instruction, [a_regs, b_regs, result_registers(ins, c)], np.zeros((4, 64), np.uint32))
    assert (read_result(ins, got) == (c + factor * (a @ b.transpose(0, 2, 1))).astype(np.float32)).all()


def test_exec_does_not_matter_to_a_matrix_instruction(tmp_path: Path) -> None:
    body = "s_mov_b64 exec, 0x55\n  v_mfma_f32_16x16x32_f16 {d}, {a}, {b}, {c}\n  s_mov_b64 exec, -1\n  s_nop 15"
    instruction = Instruction(body, (4, 4, 4), 4)
    code = assemble("gfx950", [instruction], tmp_path)
    ins = parse("v_mfma_f32_16x16x32_f16")
    rng = np.random.default_rng(24)
    a, b, a_regs, b_regs = dense_case(rng, ins)
    c = random_result(rng, ins)
    got = execute(code, instruction, [a_regs, b_regs, result_registers(ins, c)], np.zeros((4, 64), np.uint32))
    assert (read_result(ins, got) == c + a @ b.transpose(0, 2, 1)).all()


K_ORDER_KERNEL = """
typedef int v8i __attribute__((ext_vector_type(8)));
typedef int v4i __attribute__((ext_vector_type(4)));
typedef float v4f __attribute__((ext_vector_type(4)));
// D = A @ B^T of 16x128 e4m3 rows with one scale per 32 elements. FIRST and SECOND: where a lane's two 16-byte pieces
// of a row come from.
extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64)))
void NAME(const char* a, const char* b, const unsigned char* a_scale, const unsigned char* b_scale, float* d) {
  unsigned lane = __builtin_amdgcn_workitem_id_x(), row = lane % 16, g = lane / 16;
  v8i x, y;
  *(v4i*)&x = *(const v4i*)(a + 128 * row + FIRST);
  *((v4i*)&x + 1) = *(const v4i*)(a + 128 * row + SECOND);
  *(v4i*)&y = *(const v4i*)(b + 128 * row + FIRST);
  *((v4i*)&y + 1) = *(const v4i*)(b + 128 * row + SECOND);
  int sa = a_scale[4 * row + g], sb = b_scale[4 * row + g];
  v4f c = {0, 0, 0, 0};
  c = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, c, 0, 0, 0, sa, 0, sb);
  for (unsigned r = 0; r < 4; ++r) d[16 * (4 * g + r) + row] = c[r];
}
"""


def test_a_kernel_with_the_contiguous_k_order_is_right_until_scales_differ(tmp_path: Path) -> None:
    """Reading 32 contiguous e4m3 per lane pairs the data with the wrong blocks' scales; 16-byte chunks do not."""
    orders = {"contiguous": ("32 * g", "32 * g + 16"), "chunked": ("16 * g", "64 + 16 * g")}
    text = "".join(
        K_ORDER_KERNEL.replace("NAME", name).replace("FIRST", first).replace("SECOND", second)
        for name, (first, second) in orders.items()
    )
    code = emulator.CodeObject(hip_compile.device_elf(text, tmp_path, "gfx950", ["-nogpuinc"]))
    g = torch.Generator().manual_seed(25)
    a, b = (torch.randint(-4, 5, (16, 128), generator=g).to(torch.float8_e4m3fn) for _ in range(2))
    different = torch.randint(124, 131, (2, 16, 4), generator=g, dtype=torch.uint8)
    for scales, wrong_orders in ((torch.full_like(different, 127), set()), (different, {"contiguous"})):
        factors = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=2)
        want = ((a.double() * factors[0]) @ (b.double() * factors[1]).T).float()
        wrong = set()
        for name in orders:
            d = torch.zeros((16, 16))
            emulator.launch(code.kernels[name], 1, 64, [a, b, scales[0], scales[1], d])
            if (d != want).double().mean() > 0.9:
                wrong.add(name)
            else:
                assert torch.equal(d, want)
        assert wrong == wrong_orders
