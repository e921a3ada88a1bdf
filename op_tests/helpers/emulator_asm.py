"""Assemble single instructions with LLVM, run them on the emulator, and return the registers they wrote.

For tests: one kernel per instruction loads its operands from memory, executes it and stores the result.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from helpers.clang import clang
from hipforge import emulator

LANES = 64
FIRST_INPUT, FIRST_OUTPUT = 8, 80

# --- machine code -----------------------------------------------------------------------------------------------------

KERNEL = """
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
  s_load_dwordx2 s[2:3], s[0:1], 0
  s_load_dwordx2 s[4:5], s[0:1], 8
  v_lshlrev_b32 v0, 2, v0
  s_waitcnt lgkmcnt(0)
{loads}
  s_waitcnt vmcnt(0)
  s_nop 4
  {instruction}
  s_nop 4
{stores}
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_next_free_vgpr 160
  .amdhsa_next_free_sgpr 16
  .amdhsa_accum_offset 128
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_fp16_overflow {overflow}
.end_amdhsa_kernel
"""

METADATA = """
.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.kernels:
{kernels}
.end_amdgpu_metadata
"""

WHOLE_KERNEL = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.amdhsa_code_object_version 6
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_next_free_vgpr 8
  .amdhsa_next_free_sgpr 16
  .amdhsa_accum_offset 8
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
{directives}
.end_amdhsa_kernel
"""
POINTER = (8, "global_buffer, .address_space: global")


def metadata(
    name: str, args: Sequence[tuple[int, str]], kernarg: int, vgprs: int = 8, agprs: int = 0, work_group: int = 64,
    lds: int = 0, private: int = 0,
) -> str:  # fmt: skip
    """Describe a kernel and its arguments, each a size and a kind; ``kernarg`` is the size of their segment."""
    offset, lines = 0, []
    for size, kind in args:
        lines.append(f"      - {{.size: {size}, .offset: {offset}, .value_kind: {kind}}}")
        offset += size
    return f"""  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {kernarg}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {private}
    .wavefront_size: 64
    .sgpr_count: 16
    .vgpr_count: {vgprs}
    .agpr_count: {agprs}
    .max_flat_workgroup_size: {work_group}
    .args:
""" + "".join(f"{line}\n" for line in lines)


def assembled(source: str, folder: Path, arch: str = "gfx950") -> Path:
    """Return the code object of an assembly text."""
    text, image = folder / "k.s", folder / "k.hsaco"
    text.write_text(source)
    command = [clang(arch), "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", str(text), "-o", str(image)]
    subprocess.run(command, check=True)
    return image


def whole_kernel(
    body: str, folder: Path, arch: str = "gfx950", directives: str = "", name: str = "k",
    args: Sequence[tuple[int, str]] = (POINTER,), kernarg: int = 8, **more: int,
) -> Path:  # fmt: skip
    """Return the code object of a kernel of 8 vector registers, which finds its arguments at s[0:1]."""
    text = WHOLE_KERNEL.format(arch=arch, name=name, body=body, directives=directives)
    return assembled(text + METADATA.format(kernels=metadata(name, args, kernarg, **more)), folder, arch)


@dataclass(frozen=True)
class Instruction:
    """One instruction with its operands: inputs in v8 and up, the result in v80 and up."""

    text: str  # with {d} for the result and {a}, {b}, {c}, {e}, {f} for the sources
    widths: tuple[int, ...]  # registers of each source
    outputs: int  # registers of the result
    overflow: int = 0  # MODE.FP16_OVFL

    @property
    def name(self) -> str:
        """A symbol for this instruction and its modifiers."""
        return "".join(c if c.isalnum() else "_" for c in self.text) + f"_{self.overflow}"

    def assembly(self) -> str:
        """Kernel source: in[register][lane] and the old result after it, out[register][lane]."""
        registers, first = [], FIRST_INPUT
        for width in self.widths:
            first += first % 2
            registers.append((first, width))
            first += width
        operand = lambda at, n: f"v{at}" if n == 1 else f"v[{at}:{at + n - 1}]"
        names = {letter: operand(*register) for letter, register in zip("abcef", registers, strict=False)}
        flat = [at + i for at, width in registers for i in range(width)] + [
            FIRST_OUTPUT + i for i in range(self.outputs)
        ]
        loads = [_access("global_load_dword v{r}, v0, s[2:3]", "s2", "s3", i, r) for i, r in enumerate(flat)]
        results = range(FIRST_OUTPUT, FIRST_OUTPUT + self.outputs)
        stores = [_access("global_store_dword v0, v{r}, s[4:5]", "s4", "s5", i, r) for i, r in enumerate(results)]
        return KERNEL.format(
            name=self.name, loads="\n".join(loads), stores="\n".join(stores), overflow=self.overflow,
            instruction=self.text.format(d=operand(FIRST_OUTPUT, self.outputs), **names),
        )  # fmt: skip


def _access(text: str, low: str, high: str, index: int, register: int) -> str:
    """One dword per lane at row `index`; the base moves on every 8 rows because offsets have 13 bits."""
    step = f"  s_add_u32 {low}, {low}, 0x800\n  s_addc_u32 {high}, {high}, 0\n" if index and index % 8 == 0 else ""
    return f"{step}  {text.format(r=register)} offset:{index % 8 * 256}"


def assemble(arch: str, instructions: list[Instruction], folder: Path) -> emulator.CodeObject:
    """One code object with a kernel for each instruction."""
    body = [f'.amdgcn_target "amdgcn-amd-amdhsa--{arch}"', ".amdhsa_code_object_version 6"]
    body += [instruction.assembly() for instruction in instructions]
    described = (metadata(i.name, (POINTER, POINTER), 16, vgprs=160, agprs=32) for i in instructions)
    body.append(METADATA.format(kernels="".join(described)))
    return emulator.CodeObject(assembled("\n".join(body), folder, arch))


def execute(
    code: emulator.CodeObject, instruction: Instruction, inputs: list[np.ndarray], old: np.ndarray
) -> np.ndarray:
    """inputs[i] is [registers, lanes]; returns [outputs, lanes]."""
    rows = np.concatenate([*inputs, old]).astype(np.uint32)
    out = np.zeros((instruction.outputs, LANES), np.uint32)
    tensors = [torch.from_numpy(rows.view(np.int32)), torch.from_numpy(out.view(np.int32))]
    emulator.launch(code.kernels[instruction.name], 1, LANES, tensors)
    return out
