"""The instruction table as the C++ reads it, and encodings of its rows to try."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from helpers.decoding.ours import ARCHS, SOURCES


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
