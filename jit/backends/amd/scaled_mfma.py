"""Does every scaled MFMA take its block scales from vector registers?

gfx950 reads the e8m0 scale of a ``v_mfma_scale_*`` from the selected byte of a VGPR. From any other source (SGPR,
inline constant, special register) it takes bits 30:23, the exponent field of a float, so the product is silently wrong.
LLVM restricts the operands to VGPRs from version 22 on (pull request 158117); compilers before that, and hand-written
assembly, do not. A constant 0 is refused with the rest: only the builtin with 0 for *both* scales means "unscaled",
and that compiles to ``v_mfma_*_f8f6f4`` of 8 bytes, which has no scale operands.

The instruction is 16 bytes long. The first half holds the scales, the second is an MFMA whose ABID[0] says that a scale
half precedes it::

    dword 0   [31:16] 0xD3AC
    dword 1   [8:0] scale of A, [17:9] scale of B: source operands, 256 + n for vector register n
    dword 2   [31:16] 0xD3AD (16x16x128) or 0xD3AE (32x32x64), [14:11] ABID = 1
    dword 3   A, B and C

No other instruction needs to be decoded: apart from a pair of literals that spell just these two dwords, the half-words
and ABID do not occur together in other code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from hipforge.jit.backends.amd.code_object import CodeObject, functions
from hipforge.jit.demangle import short_name

_SCALE_HALF = struct.pack("<H", 0xD3AC)
_MNEMONICS = {0xD3AD: "v_mfma_scale_f32_16x16x128_f8f6f4", 0xD3AE: "v_mfma_scale_f32_32x32x64_f8f6f4"}
_ABID_SCALED = 1
_FIRST_VGPR = 256

_SPECIAL = {
    102: "flat_scratch_lo", 103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi", 106: "vcc_lo",
    107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", 235: "src_shared_base", 236: "src_shared_limit",
    237: "src_private_base", 238: "src_private_limit", 239: "src_pops_exiting_wave_id", 240: "0.5", 241: "-0.5",
    242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0", 248: "0.15915494", 251: "src_vccz",
    252: "src_execz", 253: "src_scc", 254: "src_lds_direct", 255: "a literal",
}  # fmt: skip


@dataclass(frozen=True)
class ScaledMfma:
    """One scaled MFMA: the symbol before it, its offset from there in bytes, and its scale operands by name."""

    symbol: str
    offset: int
    mnemonic: str
    a_scale: str
    b_scale: str

    @property
    def misplaced(self) -> list[str]:
        """Return the operands that are not vector registers, as ``scale of A is s5``."""
        operands = {"A": self.a_scale, "B": self.b_scale}
        return [f"the scale of {side} is {name}" for side, name in operands.items() if not _is_vgpr(name)]

    def __str__(self) -> str:
        where = short_name(self.symbol) or "code without a symbol"
        return f"{where}: {self.mnemonic} at byte {self.offset:#x}: {' and '.join(self.misplaced) or 'scales in VGPRs'}"


def scaled_mfmas(code: CodeObject) -> Iterator[ScaledMfma]:
    """Yield every scaled MFMA in a code object, in the order of its functions."""
    for function in functions(code.image):
        at = function.code.find(_SCALE_HALF)
        while at >= 0:
            start = at - 2
            if start >= 0 and start % 4 == 0 and start + 16 <= len(function.code):
                _, operands, mfma = struct.unpack_from("<3I", function.code, start)
                mnemonic = _MNEMONICS.get(mfma >> 16)
                if mnemonic is not None and mfma >> 11 & 15 == _ABID_SCALED:
                    scales = operand_name(operands & 511), operand_name(operands >> 9 & 511)
                    yield ScaledMfma(function.symbol, start, mnemonic, *scales)
            at = function.code.find(_SCALE_HALF, at + 1)


def operand_name(code: int) -> str:
    """Return how an assembler spells a 9-bit source operand."""
    if code >= _FIRST_VGPR:
        return f"v{code - _FIRST_VGPR}"
    if code <= 101:
        return f"s{code}"
    if 108 <= code <= 123:
        return f"ttmp{code - 108}"
    if 128 <= code <= 208:
        return str(code - 128 if code <= 192 else 192 - code)
    return _SPECIAL.get(code, f"source operand {code}")


def _is_vgpr(name: str) -> bool:
    return name.startswith("v") and name[1:].isdigit()
