"""The emulator's decoder and disassembler against LLVM: text and length of every instruction must be llvm-objdump's.

Every row of the instruction table is sampled in each of its encodings; whole code objects and random words follow.
"""

from __future__ import annotations

import ctypes
import functools
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import hipforge.csrc
from hipforge.jit import toolchain

SOURCES = Path(hipforge.csrc.__file__).parent / "emulator"
ARCHS = ("gfx942", "gfx950")
S_NOP = 0xBF800000

# --- ours: the decoder alone, with the fields of an Inst that its text does not show ---------------------------------

SHIM = """
#include <cstdio>
#include "decode.h"
#include "disasm.h"
using namespace hfemu;
extern "C" int disassemble_one(const uint8_t* code, size_t bytes, int arch, char* text, size_t capacity) {
  Inst inst;
  if (!decode(code, bytes, 0, static_cast<Arch>(arch), inst)) return 0;
  std::snprintf(text, capacity, "%s", disassemble(inst).c_str());
  return inst.bytes;
}
extern "C" uint64_t source_constant(const uint8_t* code, size_t bytes, int arch, int index) {
  Inst inst;
  const bool known = decode(code, bytes, 0, static_cast<Arch>(arch), inst);
  return known && inst.src[index].kind == OperandKind::imm ? inst.src[index].imm : 1234567;
}
static int put(char* text, size_t capacity, const Operand& o) {
  return std::snprintf(text, capacity, "%c%d+%d ", " svaix"[static_cast<int>(o.kind)], o.reg, o.dwords);
}
// Operands by name, with registers and widths, in the order dst dst2 src0.. vaddr saddr vdata vdata2 srsrc soffset.
extern "C" void operands(const uint8_t* code, size_t bytes, int arch, char* text, size_t capacity) {
  Inst i;
  text[0] = 0;
  if (!decode(code, bytes, 0, static_cast<Arch>(arch), i)) return;
  const struct { const char* name; const Operand* operand; } named[] = {
      {"dst", &i.dst}, {"dst2", &i.dst2}, {"src0", &i.src[0]}, {"src1", &i.src[1]}, {"src2", &i.src[2]},
      {"vaddr", &i.vaddr}, {"saddr", &i.saddr}, {"vdata", &i.vdata}, {"vdata2", &i.vdata2}, {"srsrc", &i.srsrc},
      {"soffset", &i.soffset}, {"scale_a", &i.scale_a}, {"scale_b", &i.scale_b}};
  size_t at = 0;
  for (const auto& n : named) {
    if (n.operand->kind == OperandKind::none) continue;
    at += std::snprintf(text + at, capacity - at, "%s=", n.name);
    at += put(text + at, capacity - at, *n.operand);
  }
}
"""


@dataclass(frozen=True)
class Decoder:
    """Our decoder, compiled on its own."""

    library: ctypes.CDLL

    def __call__(self, code: bytes, arch: str) -> tuple[int, str]:
        """Return the length and the text of the first instruction; (0, "") if it is none."""
        text = ctypes.create_string_buffer(400)
        size = self.library.disassemble_one(code, len(code), ARCHS.index(arch), text, len(text))
        return size, text.value.decode()

    def constant(self, code: bytes, arch: str, index: int) -> int:
        return self.library.source_constant(code, len(code), ARCHS.index(arch), index)

    def operands(self, code: bytes, arch: str) -> str:
        text = ctypes.create_string_buffer(400)
        self.library.operands(code, len(code), ARCHS.index(arch), text, len(text))
        return text.value.decode().strip()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "shim.cpp").write_text(SHIM)
    sources = [str(SOURCES / f"{name}.cpp") for name in ("isa", "decode", "disasm")]
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{SOURCES}", *sources, str(folder / "shim.cpp")]
    subprocess.run([*command, "-o", str(folder / "decoder.so")], check=True)
    library = ctypes.CDLL(str(folder / "decoder.so"))
    pointer, size = ctypes.c_char_p, ctypes.c_size_t
    library.disassemble_one.argtypes = (pointer, size, ctypes.c_int, pointer, size)
    library.source_constant.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int)
    library.source_constant.restype = ctypes.c_uint64
    library.operands.argtypes = (pointer, size, ctypes.c_int, pointer, size)
    library.operands.restype = None
    return Decoder(library)


# --- LLVM ------------------------------------------------------------------------------------------------------------


@functools.cache
def llvm_tool(name: str) -> str:
    """Return the path of an LLVM 22 tool: spelling differs between versions."""
    found = shutil.which(f"{name}-22")
    return found or str(toolchain.select("gfx950").llvm / "bin" / name)


@dataclass(frozen=True)
class Line:
    """One instruction as llvm-objdump prints it."""

    address: int
    code: bytes
    text: str


LINE = re.compile(r"^\s+(?P<text>\S.*?)\s*// (?P<address>[0-9A-F]+): (?P<words>[0-9A-F]+(?: [0-9A-F]+)*)(?: <.*>)?$")


def objdump(path: Path, arch: str) -> list[Line]:
    """Disassemble all of .text; what LLVM does not know is left out."""
    command = [llvm_tool("llvm-objdump"), "-d", "-z", "-j", ".text", f"--mcpu={arch}", str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = []
    for line in output.splitlines():
        match = LINE.match(line)
        if match is None or match["text"].startswith((".long", "<unknown>")):
            continue
        code = b"".join(int(word, 16).to_bytes(4, "little") for word in match["words"].split())
        lines.append(Line(int(match["address"], 16), code, " ".join(match["text"].split())))
    return lines


def llvm_texts(items: Sequence[bytes], arch: str, folder: Path) -> list[Line | None]:
    """Return LLVM's reading of the first instruction of each item, None where it is none.

    Every item starts a slot of 32 bytes filled with s_nop, so that a wrong length cannot shift the next one.
    """
    slot = 32
    assert all(len(item) <= 16 for item in items)
    padding = struct.pack("<8I", *[S_NOP] * 8)
    (folder / "words.bin").write_bytes(b"".join(item + padding[len(item) :] for item in items))
    (folder / "words.s").write_text('.text\n.incbin "words.bin"\n')
    assemble = [llvm_tool("llvm-mc"), "-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-filetype=obj"]
    subprocess.run([*assemble, "words.s", "-o", "words.o"], check=True, cwd=folder)
    found: list[Line | None] = [None] * len(items)
    for line in objdump(folder / "words.o", arch):
        if line.address % slot == 0:
            found[line.address // slot] = line
    return found


# Encodings that LLVM prints but that are no instructions of these machines, or that the emulator leaves out on purpose.
EXCLUDED: tuple[tuple[str, str], ...] = (
    (r"/\*", "LLVM itself marks an operand as invalid"),
    (r"scalar reg isn't aligned", "a misaligned scalar tuple"),
    (r"^v_(cndmask|addc|subb|subbrev)_.*_e64 .*, v\[\d+:\d+\]( clamp)?$", "a mask or carry must be an SGPR pair"),
    (r"^v_s?mfma\w* .*(\bs\d|\bs\[|src_|vcc|exec|m0|ttmp|flat_scratch|xnack)", "matrix operands are VGPRs"),
    (r"^v_mfma_ld_scale_b32", "half of a scaled MFMA"),
    (r"^v_accvgpr_(mov|read)_b32 \S+ (src_|-|\d|s|m0|vcc|exec|ttmp|xnack|flat)", "the source is an AccVGPR"),
    (r"\bnull\b|src_flat_scratch_base_", "sources of later architectures"),
    (r"^v_ldexp_f16_e64 .*, -?(0\.5|1\.0|2\.0|4\.0|0\.15915494)", "a floating-point constant as exponent"),
    (r"MSG_GS", "graphics messages"),
    (r"^tbuffer_", "typed buffers: graphics"),
)


def excluded(line: Line) -> bool:
    """Tell whether a difference from LLVM is accepted, for one of the reasons above."""
    beyond = any(int(end) > 255 for end in re.findall(r"\[\d+:(\d+)\]", line.text))
    return beyond or any(re.search(pattern, line.text) for pattern, _ in EXCLUDED)


def disagreements(items: Sequence[bytes], arch: str, decoder: Decoder, folder: Path) -> tuple[list[str], set[str]]:
    """Return what differs from LLVM, and the mnemonics of the items on which both agree."""
    wrong, agreed = [], set()
    for item, line in zip(items, llvm_texts(items, arch, folder), strict=True):
        if line is None or excluded(line):
            continue
        size, text = decoder(item + struct.pack("<4I", *[S_NOP] * 4), arch)
        # An offset of zero beside a register cannot be told from none.
        if (size, text) == (len(line.code), line.text.replace(" offset:0x0", "")):
            agreed.add(text.split()[0])
        else:
            wrong.append(f"{arch} {item.hex()}: LLVM {len(line.code)} '{line.text}', ours {size} '{text}'")
    return wrong, agreed


def report(wrong: Sequence[str]) -> str:
    return f"{len(wrong)} differences, among them:\n" + "\n".join(wrong[:20])


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    encoding: str
    opcode: int
    name: str
    arguments: str

    def operand(self, position: int) -> str | None:
        """Return the type of the operand at this place of the list (0: the destination), None where there is none."""
        types = [word.strip() for word in self.arguments.split(",")[1:]]
        found = types[position] if position < len(types) else "none"
        return found if re.fullmatch(r"(pk_)?b?[bfi]\d+(x\d+)?", found) else None

    def exists_on(self, arch: str) -> bool:
        other = ARCHS[1 - ARCHS.index(arch)]
        return f"{other}_only" not in self.arguments


def table() -> list[Row]:
    rows = []
    for path in sorted(SOURCES.glob("isa_*.inc")):
        for match in re.finditer(r"^HFEMU_(\w+)\((0x[0-9a-f]+), (\w+)(.*)\)$", path.read_text(), re.MULTILINE):
            rows.append(Row(match[1], int(match[2], 16), match[3], match[4]))
    return rows


# --- sampled encodings -----------------------------------------------------------------------------------------------

SGPR = (0, 2, 4, 20, 100, 102, 104, 106, 108, 112, 126)
CONSTANTS = (128, 129, 150, 192, 193, 208, *range(240, 249))
SPECIAL = (124, 107, 127, 235, 236, 237, 238, 239, 251, 252, 253)
SCALAR = (*SGPR, *CONSTANTS, *SPECIAL, 5, 101)
VGPR8 = (0, 2, 4, 64, 128, 200, 254, 255)
VECTOR = (*SCALAR, *(256 + v for v in VGPR8), *(256 + v for v in VGPR8))
ONLY_VGPR = tuple(256 + v for v in VGPR8)
LITERALS = (0, 1, 5, 64, 65, 0x3C00, 0x8000, 0x3F800000, 0x40000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678)
IMM16 = (0, 1, 5, 64, 65, 0x7FFF, 0x8000, 0xFFF0, 0xFFFF, 0xC07F, 0x0F70, 0x3FFF, 0xF801, 0x1801, 0x0801)
OFTEN = (0, 0, 0, 0, 0)  # LLVM refuses an instruction that sets bits it does not have: most samples leave them clear
FLAG = (0, 0, 0, 1)
DPP_CONTROLS = (*range(0, 256, 27), 0x101, 0x10F, 0x111, 0x11F, 0x121, 0x12F, 0x130, 0x134, 0x138, 0x13C, 0x140, 0x141,
                0x142, 0x143, 0x150, 0x15F)  # fmt: skip

Values = Sequence[int]
Field = tuple[int, Values | Callable[["Row"], Values]]  # lowest bit in the 128-bit instruction, values


@dataclass(frozen=True)
class Form:
    """How rows of one encoding can be encoded: fixed bits, the opcode's place, and fields to vary."""

    encoding: str
    base: int
    opcode_bit: int
    fields: tuple[Field, ...]
    size: int = 8
    opcode_offset: int = 0
    only: Callable[[Row], bool] = lambda row: True

    def samples(self, row: Row, count: int, rng: random.Random) -> Iterator[bytes]:
        for _ in range(count):
            word = self.base | (row.opcode + self.opcode_offset) << self.opcode_bit
            for bit, values in self.fields:
                word |= rng.choice(values(row) if callable(values) else values) << bit
            yield word.to_bytes(16, "little")[: self.size]


def is_f8f6f4(row: Row) -> bool:
    return "f8f6f4" in row.name


def register(position: int) -> Callable[[Row], Values]:
    """VGPRs for the operand at this place of the row, zero where there is none."""
    return lambda row: VGPR8 if row.operand(position) else (0,)


def source(position: int) -> Callable[[Row], Values]:
    """Any source for the operand at this place, only VGPRs for one wider than 64 bits."""

    def values(row: Row) -> Values:
        kind = row.operand(position)
        if kind is None:
            return (0,)
        return ONLY_VGPR if kind in ("b96", "b128", "b192", "b256", "b512", "b1024") else VECTOR

    return values


def accumulator(row: Row) -> Values:
    """C of an MFMA may be a constant, the index of a sparse one may not."""
    return ONLY_VGPR if "sparse" in row.arguments else (*ONLY_VGPR, *CONSTANTS)


def has_operands(row: Row) -> bool:
    return row.operand(0) is not None or row.operand(1) is not None


def has_literal(row: Row) -> bool:
    return "literal_" in row.arguments


LITERAL: Field = (32, LITERALS)
MODIFIERS = (0, 0, 0, 0, 1, 2, 4, 7)
OP_SEL = (0, 0, 0, 1, 2, 4, 8, 15)
SDWA: tuple[Field, ...] = (
    (32, (0, 5, 100, 106, 128, 130, 193, 242)), (40, range(7)), (43, range(3)), (45, FLAG), (46, (*OFTEN, 1, 2, 3)),
    (48, range(7)), (51, (*OFTEN, 1, 2, 4, 6)), (55, FLAG), (56, (6, *range(7))), (59, (*OFTEN, 1, 2, 4, 6)),
    (63, FLAG),
)  # fmt: skip
SDWA_COMPARE = (*(f for f in SDWA if f[0] not in (40, 43, 45, 46)), (40, (0, 0x82, 0xEA, 0xFE)))
DPP: tuple[Field, ...] = (
    (32, VGPR8), (40, DPP_CONTROLS), (51, FLAG), (52, (*OFTEN, 1, 2, 4, 8, 15)), (56, (0, 5, 15)), (60, (0, 3, 15)),
)  # fmt: skip
VOP3_BITS: tuple[Field, ...] = ((8, MODIFIERS), (11, OP_SEL), (15, FLAG), (59, (*OFTEN, 1, 2, 3)), (61, MODIFIERS))
VOP3_SOURCES: tuple[Field, ...] = ((32, source(1)), (41, source(2)), (50, source(3)))
VOP3P_BITS: tuple[Field, ...] = (
    (8, MODIFIERS), (11, MODIFIERS), (14, (0, 1)), (15, FLAG), (59, range(4)), (61, MODIFIERS),
)  # fmt: skip
CACHE = ((16, FLAG), (17, FLAG), (25, FLAG))


def vop(encoding: str, base: int, bit: int, offset: int, own: tuple[Field, ...], sdwa: tuple[Field, ...]) -> list[Form]:
    """The short encoding with a register, a literal, SDWA or DPP, and the VOP3 one."""
    short = [
        Form(encoding, base, bit, (*own, (0, VECTOR)), size=4, only=lambda row: not has_literal(row)),
        Form(encoding, base | 255, bit, (*own, LITERAL), only=lambda row: not has_literal(row)),
        Form(encoding, base, bit, (*own, (0, VECTOR), LITERAL), only=has_literal),
        Form(encoding, base | 249, bit, (*own, *sdwa), only=has_operands),
        Form(encoding, base | 250, bit, (*own, *DPP), only=has_operands),
    ]
    scalar_destination = encoding == "VOPC"
    destination: Field = (0, SGPR if scalar_destination else VGPR8)
    first = 0 if encoding == "VOPC" else 1
    carry: Field = (50, lambda row: SGPR if "carry_in" in row.arguments else (0,))
    sources: tuple[Field, ...] = ((32, source(first)), (41, source(first + 1) if encoding != "VOP1" else (0,)), carry)
    long = Form(encoding, 0xD0000000, 16, (destination, *sources), opcode_offset=offset)
    return [*short, long, replace(long, fields=(*long.fields, *VOP3_BITS))]


DS_OFFSETS = (0, 1, 0x34, 0xFFFF, 0x8004, 0xC020, 0xE01F, 0x041F, 0x0018, 0x7C1F)
DS_REGISTERS: tuple[Field, ...] = ((32, register(1)), (40, register(2)), (48, register(3)), (56, register(0)))


def gds(row: Row) -> Values:
    return (1,) if "gws" in row.name else FLAG


def f_memory(encoding: str, segment: int, fields: tuple[Field, ...]) -> Form:
    base = 0xDC000000 | segment << 14
    return Form(encoding, base, 18, (*CACHE, (32, VGPR8), (40, register(1)), (55, FLAG), (56, register(0)), *fields))


FORMS: tuple[Form, ...] = (
    Form("SOP2", 0x80000000, 23, ((0, SCALAR), (8, SCALAR), (16, SGPR)), size=4),
    Form("SOP2", 0x800000FF, 23, ((8, (*SCALAR, 255)), (16, SGPR), LITERAL)),
    Form("SOP1", 0xBE800000, 8, ((0, SCALAR), (16, SGPR)), size=4),
    Form("SOP1", 0xBE8000FF, 8, ((16, SGPR), LITERAL)),
    Form("SOPC", 0xBF000000, 16, ((0, SCALAR), (8, (*SCALAR, *range(16)))), size=4),
    Form("SOPC", 0xBF00FF00, 16, ((0, SCALAR), LITERAL)),
    Form("SOPK", 0xB0000000, 23, ((0, IMM16), (16, SGPR), LITERAL)),
    Form("SOPP", 0xBF800000, 16, ((0, (*IMM16, *range(16))),), size=4),
    Form("SOPP", 0xBF800000, 16, (), size=4),
    Form("SMEM", 0xC0000000, 18,
         ((0, (0, 1, 2, 4, 50)), (6, (0, *SGPR)), (14, FLAG), (16, FLAG), (17, (0, 1)),
          (32, (0, 4, 106, 0x10, 0x1FFFF0, 0x100000)), (57, (0, 0, 5, 106, 124)))),
    *vop("VOP1", 0x7E000000, 9, 0x140, ((17, VGPR8),), SDWA),
    *vop("VOP2", 0x00000000, 25, 0x100, ((9, VGPR8), (17, VGPR8)), SDWA),
    *vop("VOPC", 0x7C000000, 17, 0x000, ((9, VGPR8),), SDWA_COMPARE),
    Form("VOP3", 0xD0000000, 16, ((0, (0, 4, 20, 64, 106)), *VOP3_SOURCES)),
    Form("VOP3", 0xD0000000, 16, ((0, (0, 4, 20, 64, 106)), *VOP3_SOURCES, *VOP3_BITS)),
    Form("VOP3P", 0xD3800000, 16, ((0, VGPR8), *VOP3_SOURCES, *VOP3P_BITS)),
    Form("MAI", 0xD3800000, 16,
         ((0, VGPR8), (8, (0, 0, *range(8))), (11, (0, 0, 1, 9, 15)), (15, FLAG), (32, ONLY_VGPR), (41, ONLY_VGPR),
          (50, accumulator), (59, range(4)), (61, lambda row: (0,) if "sparse" in row.arguments else range(8))),
         only=lambda row: not is_f8f6f4(row) and "accvgpr" not in row.name),
    Form("MAI", 0xD3800000, 16, ((0, VGPR8), (32, ONLY_VGPR)), only=lambda row: row.name == "v_accvgpr_read_b32"),
    Form("MAI", 0xD3800000, 16, ((0, VGPR8), (32, VECTOR)), only=lambda row: row.name == "v_accvgpr_write_b32"),
    Form("MAI", 0xD3800000, 16,
         ((0, VGPR8), (8, range(5)), (15, FLAG), (32, ONLY_VGPR), (41, ONLY_VGPR), (50, (*ONLY_VGPR, *CONSTANTS)),
          (59, range(4)), (61, range(5))),
         only=lambda row: is_f8f6f4(row) and "scale" not in row.name),
    Form("MAI", 0xD380_0800_0000_0000_D3AC_0000, 80,
         ((11, range(4)), (32, VECTOR), (41, VECTOR), (59, range(4)), (64, VGPR8), (72, range(5)), (79, FLAG),
          (96, ONLY_VGPR), (105, ONLY_VGPR), (114, accumulator), (123, range(4)), (125, range(5))),
         size=16, only=lambda row: is_f8f6f4(row) and "scale" in row.name),
    Form("DS", 0xD8000000, 17, ((0, DS_OFFSETS), (16, gds), (25, FLAG), *DS_REGISTERS)),
    Form("DS", 0xD8000000, 17, ((16, gds), *DS_REGISTERS)),
    f_memory("FLAT", 0, ((0, (0, 4, 0xFFF)), (48, (0,)))),
    f_memory("GLOBAL", 2, ((0, (0, 4, 0xFFF, 0x1000, 0x1FFF)), (48, (127, 127, 0, 4, 106)))),
    f_memory("SCRATCH", 1, ((0, (0, 4, 0xFFF, 0x1000, 0x1FFF)), (13, (0, 1)), (48, (127, 127, 0, 5, 106)))),
    f_memory("SCRATCH", 1, ((0, (0, 4, 0xFFF, 0x1000, 0x1FFF)), (48, (127, 127, 0, 5, 106)), (32, (0,)))),
    Form("MUBUF", 0xE0000000, 18, ((14, FLAG), (15, FLAG)), only=lambda row: row.operand(0) is row.operand(1) is None),
    Form("MUBUF", 0xE0000000, 18,
         ((0, (0, 4, 0xFFF)), (12, (0, 1)), (13, FLAG), (14, FLAG), (15, FLAG), (16, FLAG), (17, FLAG), (32, VGPR8),
          (40, VGPR8), (48, (0, 2, 10, 24)), (55, FLAG), (56, (0, 5, 106, 124, 128, 129, 193, 240)))),
)  # fmt: skip


def sample(rows: Iterable[Row], arch: str, count: int) -> list[bytes]:
    rng = random.Random(950)
    items = []
    for row in rows:
        if not row.exists_on(arch):
            continue
        forms = [form for form in FORMS if form.encoding == row.encoding and form.only(row)]
        assert forms, f"no form samples {row}"
        for form in forms:
            # LLVM wants f8f6f4 operands of exactly the size that their format has: few samples fit.
            items.extend(form.samples(row, 8 * count if is_f8f6f4(row) else count, rng))
    return items


def base_mnemonic(text: str) -> str:
    return re.sub(r"_(e32|e64|sdwa|dpp)$", "", text)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_of_the_table_reads_as_llvm_does(arch: str, decoder: Decoder, tmp_path: Path) -> None:
    rows = table()
    assert len(rows) > 1200
    wrong, agreed = disagreements(sample(rows, arch, 16), arch, decoder, tmp_path)
    assert not wrong, report(wrong)
    # Not one row may have escaped because LLVM refused all its samples.
    expected = {row.name for row in rows if row.exists_on(arch)}
    assert expected - {base_mnemonic(name) for name in agreed} == set()


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
def test_many_encodings_of_every_row(arch: str, decoder: Decoder, tmp_path: Path) -> None:
    for encoding in sorted({form.encoding for form in FORMS}):
        rows = [row for row in table() if row.encoding == encoding]
        wrong, _ = disagreements(sample(rows, arch, 150), arch, decoder, tmp_path)
        assert not wrong, report(wrong)


# --- random words ----------------------------------------------------------------------------------------------------


def stops_llvm(item: bytes) -> bool:
    """Tell whether LLVM 22's disassembler crashes on these bytes instead of refusing them."""
    low, high = struct.unpack_from("<2I", item)
    top = low >> 26
    literal = any((high >> bit & 511) == 255 for bit in (0, 9, 18))
    compare_beyond = top == 0x34 and (low >> 16 & 1023 < 256 or low >> 16 & 1023 in (0x289, 0x1E0, 0x1E1)) and low & 128
    matrix_format = low >> 16 in (0xD3AC, 0xD3AD, 0xD3AE)
    return bool((top == 0x34 and (literal or matrix_format)) or compare_beyond or (top == 0x38 and high >> 24 == 255))


@pytest.mark.parametrize("arch", ARCHS)
def test_random_words_read_as_llvm_does(arch: str, decoder: Decoder, tmp_path: Path) -> None:
    rng = random.Random(942)
    items = [rng.randbytes(8) for _ in range(20_000)]
    # Uniform words are mostly VOP2: the other half begins with a byte of the rarer encodings.
    rare = (
        0x80,
        0xB0,
        0xBE,
        0xBF,
        0xC0,
        0xD0,
        0xD1,
        0xD2,
        0xD3,
        0xD8,
        0xD9,
        0xDA,
        0xDB,
        0xDC,
        0xDD,
        0xE0,
        0xE1,
        0x7C,
        0x7E,
    )
    items = [item if i % 2 else item[:3] + bytes([rng.choice(rare)]) + item[4:] for i, item in enumerate(items)]
    wrong, agreed = disagreements([item for item in items if not stops_llvm(item)], arch, decoder, tmp_path)
    assert not wrong, report(wrong)
    assert len(agreed) > 500


# --- whole code objects ----------------------------------------------------------------------------------------------

HIP_SOURCE = """
#include <hip/hip_runtime.h>
struct Node { double weight; long long key; unsigned short tag; signed char step; };

__global__ void scalars_and_branches(int* out, const int* in, int n, unsigned long long seed) {
  int lookup[16];
  for (int i = 0; i < 16; ++i) lookup[i] = in[i] * i;
  unsigned long long state = seed;
  long long sum = 0;
  for (int i = 0; i < n; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    sum += lookup[(state >> 33) & 15] / (in[i] | 1);
    switch (in[i] & 7) {
      case 0: sum <<= 3; break;
      case 1: sum ^= state; break;
      case 2: sum = __builtin_bitreverse64(sum); break;
      case 3: sum += __builtin_popcountll(state); break;
      case 4: sum -= __builtin_clzll(state | 1); break;
      default: sum = sum % 1000003; break;
    }
  }
  out[threadIdx.x + blockIdx.x * blockDim.x] = static_cast<int>(sum);
}

__global__ void floating_point(float* out, const float* x, double* d, _Float16* h, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  out[i] = expf(v) / logf(fabsf(v) + 1.0f) + sqrtf(v) * sinf(v) + powf(v, 1.7f) + fmodf(v, 3.0f) + ldexpf(v, 3);
  d[i] = d[i] / 3.7 + sqrt(d[i]) - floor(d[i]) * 1e300 + (double)v + exp(d[i]);
  h[i] = h[i] * (_Float16)v + (_Float16)3.5 - (h[i] > (_Float16)0 ? (_Float16)1 : (_Float16)-2);
  out[i + n] = (float)h[i] + (float)(long long)v + (float)(unsigned)v + (v != v ? 0.15915494f : 4.0f);
}

__global__ void memory(Node* nodes, unsigned char* bytes, short* shorts, unsigned* counter, float* f,
                       unsigned long long* w) {
  __shared__ int tile[256];
  __shared__ unsigned short half_tile[64];
  extern __shared__ double dynamic[];
  int t = threadIdx.x;
  tile[t] = bytes[t] + shorts[t];
  half_tile[t & 63] = static_cast<unsigned short>(shorts[t] * 3);
  dynamic[t] = nodes[t].weight;
  __syncthreads();
  Node node = nodes[tile[t ^ 1] & 63];
  node.key += half_tile[(t + 1) & 63];
  node.step = static_cast<signed char>(node.tag >> 3);
  node.weight = dynamic[t ^ 3] * 2;
  nodes[t] = node;
  bytes[t] = static_cast<unsigned char>(tile[255 - t]);
  atomicAdd(counter, 1u);
  atomicMax(counter + 1, (unsigned)t);
  atomicCAS(counter + 2, 0u, (unsigned)t);
  atomicExch(counter + 3, (unsigned)t);
  atomicAdd(f, 1.5f);
  atomicAdd(w, 5ull);
  atomicAdd(&tile[t & 3], t);
  __threadfence();
  shorts[t] = static_cast<short>(__shfl_xor(tile[t], 5) + __shfl_down(t, 3) + __popcll(__ballot(t & 1)));
}

__device__ __attribute__((noinline)) int recurse(int depth, int* path) {
  return depth == 0 ? path[depth] : recurse(depth - 1, path) + path[depth] * 3;
}
__global__ void calls(int* out, int depth) {
  int path[32];
  for (int i = 0; i < 32; ++i) path[i] = out[i];
  out[threadIdx.x] = recurse(depth, path);
}

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef short s16x2 __attribute__((ext_vector_type(2)));
__global__ void matrix(float* out, const long* a, const long* b, const f16x4* h, short* s) {
  int t = threadIdx.x;
  f32x4 c = {};
  f32x16 c16 = {};
  c = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(a[t], b[t], c, 0, 0, 0);
  c = __builtin_amdgcn_mfma_f32_16x16x16f16(h[t], h[t + 64], c, 0, 0, 0);
  c16 = __builtin_amdgcn_mfma_f32_32x32x2f32(out[t], out[t + 64], c16, 0, 0, 0);
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = c[i] + c16[i];
  int packed = __builtin_amdgcn_cvt_pk_fp8_f32(out[t], out[t + 1], 0, false);
  packed = __builtin_amdgcn_cvt_pk_fp8_f32(out[t + 2], out[t + 3], packed, true);
  out[t] = __builtin_amdgcn_cvt_f32_fp8(packed, 2) + __builtin_amdgcn_mov_dpp(t, 0x111, 0xf, 0xf, true);
  s16x2 u = {s[t], s[t + 1]}, v = {s[t + 2], s[t + 3]};
  u = u * v + u;
  s[t] = u.x ^ u.y;
}
"""


def device_code(source: Path, arch: str, flags: Sequence[str], output: Path) -> Path:
    """Compile HIP to a bare code object with the package's own toolchain."""
    chosen = toolchain.select(arch)
    roots = chosen.roots()
    words = [re.sub(r"\$\{(\w+)\}", lambda m: roots[m[1]], word) for word in chosen.device_flags(arch)]
    command = [str(chosen.cxx.path), *words, *flags, "-c", "--no-gpu-bundle-output", str(source), "-o", str(output)]
    subprocess.run(command, check=True)
    return output


def check_code_object(path: Path, arch: str, decoder: Decoder) -> set[str]:
    """Compare every instruction with llvm-objdump; returns the mnemonics."""
    lines = objdump(path, arch)
    wrong = []
    for i, line in enumerate(lines):
        code = b"".join(later.code for later in lines[i : i + 4])
        size, text = decoder(code, arch)
        if (size, text) != (len(line.code), line.text):
            wrong.append(f"{arch} {line.code.hex()}: LLVM '{line.text}', ours '{text}'")
    assert not wrong, report(wrong)
    assert len(lines) > 30
    return {base_mnemonic(line.text.split()[0]) for line in lines}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_compiled_hip_reads_as_llvm_does(level: str, arch: str, decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "kernels.hip").write_text(HIP_SOURCE)
    seen = check_code_object(device_code(tmp_path / "kernels.hip", arch, [level], tmp_path / "k.co"), arch, decoder)
    assert len(seen) > 150


@triton.jit
def triton_gemm(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        left = tl.load(a + rows[:, None] * k + (start + inner)[None, :], mask=(rows < m)[:, None], other=0.0)
        right = tl.load(b + (start + inner)[:, None] * n + columns[None, :], mask=(columns < n)[None, :], other=0.0)
        total = tl.dot(left, right, total)
    keep = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16), mask=keep)


@triton.jit
def triton_softmax(x, y, counter, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * n + at, mask=at < n, other=float("-inf")).to(tl.float32)
    shifted = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * n + at, (shifted / tl.sum(shifted, 0)).to(tl.float8e5), mask=at < n)
    tl.atomic_add(counter, 1)


@triton.jit
def triton_scaled(a, sa, b, sb, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner, blocks = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    left = tl.load(a + rows[:, None] * K + inner[None, :])
    right = tl.load(b + inner[:, None] + columns[None, :] * K)
    left_scale = tl.load(sa + rows[:, None] * (K // 32) + blocks[None, :])
    right_scale = tl.load(sb + columns[:, None] * (K // 32) + blocks[None, :])
    out = tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e4m3")
    tl.store(c + rows[:, None] * N + columns[None, :], out)


TRITON_KERNELS = (
    ("gemm-f16", triton_gemm, "*fp16 *fp16 *bf16 i32 i32 i32", {"BM": 64, "BN": 64, "BK": 32}, ARCHS),
    ("gemm-bf16", triton_gemm, "*bf16 *bf16 *bf16 i32 i32 i32", {"BM": 32, "BN": 128, "BK": 64}, ARCHS),
    ("softmax", triton_softmax, "*fp32 *fp8e5 *i32 i32", {"BLOCK": 1024}, ("gfx950",)),
    ("scaled", triton_scaled, "*fp8e4nv *u8 *fp8e4nv *u8 *fp32", {"M": 64, "N": 64, "K": 256}, ("gfx950",)),
)


@pytest.mark.parametrize(
    ("kernel", "types", "constants", "arch"),
    [
        pytest.param(kernel, types, constants, arch, id=f"{name}-{arch}")
        for name, kernel, types, constants, archs in TRITON_KERNELS
        for arch in archs
    ],
)
def test_triton_kernels_read_as_llvm_does(
    kernel: triton.JITFunction, types: str, constants: dict[str, int], arch: str, decoder: Decoder, tmp_path: Path
) -> None:
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("hip", arch, 64))
    (tmp_path / "kernel.co").write_bytes(compiled.asm["hsaco"])
    check_code_object(tmp_path / "kernel.co", arch, decoder)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", sorted(SOURCES.parent.glob("*/*.cu")), ids=lambda path: path.stem)
def test_shipped_kernels_read_as_llvm_does(source: Path, arch: str, decoder: Decoder, tmp_path: Path) -> None:
    flags = ["-O3", "-std=c++20", f"-I{SOURCES.parent / 'include'}"]
    check_code_object(device_code(source, arch, flags, tmp_path / "kernel.co"), arch, decoder)


# --- what the text does not show -------------------------------------------------------------------------------------


def assemble(text: str, arch: str, folder: Path) -> bytes:
    """Encode with llvm-mc."""
    command = [llvm_tool("llvm-mc"), "-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-show-encoding"]
    output = subprocess.run(command, input=text, check=True, capture_output=True, text=True, cwd=folder).stdout
    match = re.search(r"encoding: \[(.*)\]", output)
    assert match is not None, output
    return bytes(int(byte, 16) for byte in match[1].split(","))


CONSTANT_CASES: tuple[tuple[str, int, int], ...] = (
    # instruction, source, the value an executor must see
    ("v_mov_b32 v0, -16", 0, 0xFFFFFFF0),
    ("v_mov_b32 v0, 0.5", 0, 0x3F000000),
    ("v_add_f32 v0, 0.15915494, v1", 0, 0x3E22F983),
    ("v_add_f32 v0, 0x12345678, v1", 0, 0x12345678),
    ("v_add_f16 v0, -4.0, v1", 0, 0xC400),
    ("v_add_f16 v0, 0x1234, v1", 0, 0x1234),
    ("v_add_u16 v0, -1, v1", 0, 0xFFFF),
    ("v_add_f64 v[0:1], v[2:3], 1.0", 1, 0x3FF0000000000000),
    ("v_add_f64 v[0:1], v[2:3], -3", 1, 0xFFFFFFFFFFFFFFFD),  # an integer is the integer's bits, also for f64
    ("v_cvt_f32_f64 v0, 0x40100001", 0, 0x4010000100000000),  # a literal is the high half of an f64
    ("s_mov_b64 s[0:1], 0x80000000", 0, 0x80000000),  # and is zero-extended for unsigned 64-bit operands
    ("v_cmp_lt_i64 vcc, 0x80000001, v[2:3]", 0, 0xFFFFFFFF80000001),  # but sign-extended for signed ones
    ("s_ashr_i64 s[0:1], 0x80000001, s2", 0, 0xFFFFFFFF80000001),
    ("s_mov_b64 s[0:1], -2", 0, 0xFFFFFFFFFFFFFFFE),
    ("s_mov_b64 s[0:1], 2.0", 0, 0x4000000000000000),
    ("v_pk_add_f16 v0, v1, 1.0", 1, 0x00003C00),  # packed 16-bit: op_sel_hi chooses, the constant is not repeated
    ("v_pk_add_u16 v0, v1, -2", 1, 0xFFFFFFFE),
    ("v_pk_add_u16 v0, v1, 7", 1, 7),
    ("v_pk_mul_f32 v[0:1], v[2:3], 4.0", 1, 0x4080000040800000),
    ("v_fmaak_f32 v0, v1, v2, 0x3f800001", 2, 0x3F800001),
    ("v_fmamk_f32 v0, v1, 0x3f800001, v2", 1, 0x3F800001),
    ("v_mfma_f32_16x16x4_f32 v[0:3], v4, v5, 1.0", 2, 0x3F800000),
    ("v_fma_mix_f32 v0, v1, v2, 1.0 op_sel_hi:[0,0,1]", 2, 0x3C00),
    ("v_fma_mix_f32 v0, v1, v2, 1.0", 2, 0x3F800000),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE), 0x12", 0, 0x12),
)


@pytest.mark.parametrize(("text", "index", "value"), CONSTANT_CASES, ids=[case[0] for case in CONSTANT_CASES])
def test_constants_are_widened_for_their_operand(
    text: str, index: int, value: int, decoder: Decoder, tmp_path: Path
) -> None:
    assert decoder.constant(assemble(text, "gfx950", tmp_path), "gfx950", index) == value


OPERAND_CASES: tuple[tuple[str, str], ...] = (
    # Registers are numbered s0.. (vcc 106, m0 124, exec 126), v0.., a0..; +n is the number of dwords.
    ("v_addc_co_u32_e32 v0, vcc, v1, v2, vcc", "dst=v0+1 dst2=s106+2 src0=v1+1 src1=v2+1 src2=s106+2"),
    ("v_addc_co_u32_e64 v0, s[2:3], v1, v2, s[4:5]", "dst=v0+1 dst2=s2+2 src0=v1+1 src1=v2+1 src2=s4+2"),
    ("v_add_co_u32_e32 v0, vcc, v1, v2", "dst=v0+1 dst2=s106+2 src0=v1+1 src1=v2+1"),
    ("v_cndmask_b32_e32 v0, v1, v2, vcc", "dst=v0+1 src0=v1+1 src1=v2+1 src2=s106+2"),
    ("v_cndmask_b32_dpp v0, v1, v2, vcc quad_perm:[0,0,0,0]", "dst=v0+1 src0=v1+1 src1=v2+1 src2=s106+2"),
    ("v_fmac_f32_e32 v0, v1, v2", "dst=v0+1 src0=v1+1 src1=v2+1 src2=v0+1"),
    ("v_fmac_f64_e64 v[2:3], v[4:5], v[6:7]", "dst=v2+2 src0=v4+2 src1=v6+2 src2=v2+2"),
    ("v_dot2c_f32_f16_dpp v5, v1, v2 row_mirror", "dst=v5+1 src0=v1+1 src1=v2+1 src2=v5+1"),
    ("v_cmp_eq_u16_sdwa s[8:9], v1, s2 src0_sel:BYTE_0 src1_sel:DWORD", "dst=s8+2 src0=v1+1 src1=s2+1"),
    ("v_cmp_eq_u64_e32 vcc, s[4:5], v[2:3]", "dst=s106+2 src0=s4+2 src1=v2+2"),
    ("v_div_scale_f64 v[0:1], vcc, v[2:3], v[4:5], v[2:3]", "dst=v0+2 dst2=s106+2 src0=v2+2 src1=v4+2 src2=v2+2"),
    ("v_mad_u64_u32 v[0:1], s[2:3], v4, s5, v[6:7]", "dst=v0+2 dst2=s2+2 src0=v4+1 src1=s5+1 src2=v6+2"),
    ("v_readlane_b32 s1, v2, m0", "dst=s1+1 src0=v2+1 src1=s124+1"),
    ("v_accvgpr_read_b32 v1, a2", "dst=v1+1 src0=a2+1"),
    ("v_accvgpr_write_b32 a1, s2", "dst=a1+1 src0=s2+1"),
    ("v_accvgpr_mov_b32 a1, a2", "dst=a1+1 src0=a2+1"),
    ("s_swappc_b64 s[30:31], s[4:5]", "dst=s30+2 src0=s4+2"),
    ("s_and_saveexec_b64 s[2:3], vcc", "dst=s2+2 src0=s106+2"),
    ("s_cmpk_lt_i32 s5, 0x7", "src0=s5+1"),
    ("s_load_dwordx4 s[4:7], s[2:3], 0x10", "dst=s4+4 saddr=s2+2"),
    ("s_load_dword s4, s[2:3], s7", "dst=s4+1 saddr=s2+2 soffset=s7+1"),
    ("s_buffer_load_dwordx2 s[4:5], s[8:11], 0x10", "dst=s4+2 srsrc=s8+4"),
    ("s_store_dword s4, s[2:3], 0x0", "saddr=s2+2 vdata=s4+1"),
    ("s_atomic_dec s4, s[2:3], 0x0 glc", "dst=s4+1 saddr=s2+2 vdata=s4+1"),
    ("ds_read_b128 a[4:7], v1", "dst=a4+4 vaddr=v1+1"),
    ("ds_write2_b64 v0, v[2:3], v[4:5] offset0:1 offset1:2", "vaddr=v0+1 vdata=v2+2 vdata2=v4+2"),
    ("ds_bpermute_b32 v0, v1, v2", "dst=v0+1 vaddr=v1+1 vdata=v2+1"),
    ("global_load_dwordx4 v[4:7], v1, s[2:3] offset:16", "dst=v4+4 vaddr=v1+1 saddr=s2+2"),
    ("global_load_dwordx4 a[4:7], v[0:1], off", "dst=a4+4 vaddr=v0+2"),
    ("global_load_lds_dwordx4 v[2:3], off", "vaddr=v2+2"),
    ("global_atomic_cmpswap_x2 v[0:1], v2, v[4:7], s[2:3] sc0", "dst=v0+2 vaddr=v2+1 saddr=s2+2 vdata=v4+4"),
    ("global_atomic_add v[0:1], v2, off", "vaddr=v0+2 vdata=v2+1"),
    ("flat_store_dwordx3 v[0:1], v[4:6]", "vaddr=v0+2 vdata=v4+3"),
    ("scratch_load_dword v0, off, s33 offset:4", "dst=v0+1 saddr=s33+1"),
    ("scratch_store_dwordx2 v3, v[0:1], off", "vaddr=v3+1 vdata=v0+2"),
    ("scratch_load_dword v0, off, off offset:4", "dst=v0+1"),
    ("buffer_load_dwordx4 v[0:3], v[4:5], s[8:11], s3 idxen offen", "dst=v0+4 vaddr=v4+2 srsrc=s8+4 soffset=s3+1"),
    ("buffer_load_dword v4, s[8:11], 0 offen lds", "vaddr=v4+1 srsrc=s8+4 soffset=i0+1"),
    ("buffer_store_short a2, off, s[8:11], m0", "vdata=a2+1 srsrc=s8+4 soffset=s124+1"),
    ("buffer_atomic_pk_add_bf16 v1, v2, s[4:7], 0 offen sc0", "dst=v1+1 vaddr=v2+1 vdata=v1+1 srsrc=s4+4 soffset=i0+1"),
    ("v_smfmac_f32_16x16x64_fp8_fp8 a[0:3], v[4:5], v[8:11], v12", "dst=a0+4 src0=v4+2 src1=v8+4 src2=v12+1"),
    (
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:9], a[12:15], v[0:3], v20, v21 cbsz:2 blgp:4",
        "dst=v0+4 src0=v4+6 src1=a12+4 src2=v0+4 scale_a=v20+1 scale_b=v21+1",
    ),
)


@pytest.mark.parametrize(("text", "operands"), OPERAND_CASES, ids=[case[0] for case in OPERAND_CASES])
def test_operands_are_explicit(text: str, operands: str, decoder: Decoder, tmp_path: Path) -> None:
    assert decoder.operands(assemble(text, "gfx950", tmp_path), "gfx950") == operands


def test_two_unscaled_matrix_instructions_are_two(decoder: Decoder, tmp_path: Path) -> None:
    plain = assemble("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3]", "gfx950", tmp_path)
    assert decoder(plain + plain, "gfx950")[0] == 8


def test_instructions_of_the_other_architecture_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    only_gfx950 = assemble("v_permlane32_swap_b32 v0, v1", "gfx950", tmp_path)
    only_gfx942 = assemble("v_mfma_f32_16x16x8_xf32 v[0:3], v[4:5], v[6:7], v[0:3]", "gfx942", tmp_path)
    assert decoder(only_gfx950, "gfx942") == (0, "")
    assert decoder(only_gfx942, "gfx950") == (0, "")


def test_truncated_instructions_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    texts = ("s_mov_b32 s0, 0x12345", "v_add3_u32 v0, v1, v2, v3", "v_mov_b32_dpp v0, v1 row_shr:1")
    scaled = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21"
    for text in (*texts, scaled):
        code = assemble(text, "gfx950", tmp_path)
        assert decoder(code, "gfx950")[0] == len(code)
        assert all(decoder(code[:size], "gfx950") == (0, "") for size in range(len(code)))
