"""LLVM as the witness: its disassembly of bytes and files, and where differing from it is right."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.decoding.ours import Decoder
from hipforge.jit import toolchain

S_NOP = 0xBF800000


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
    """Return LLVM's reading of the first instruction of each item, None where there is none.

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


# Encodings that LLVM prints but that these machines do not have, or that the emulator leaves out on purpose.
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


def assemble(text: str, arch: str, folder: Path) -> bytes:
    """Encode with llvm-mc."""
    command = [llvm_tool("llvm-mc"), "-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-show-encoding"]
    output = subprocess.run(command, input=text, check=True, capture_output=True, text=True, cwd=folder).stdout
    match = re.search(r"encoding: \[(.*)\]", output)
    assert match is not None, output
    return bytes(int(byte, 16) for byte in match[1].split(","))
