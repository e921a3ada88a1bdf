"""Sparse and small-float matrix instructions as clang emits them from its builtins: encodings, operands and modifiers.

The builtins only pass registers on, so a kernel that loads them, calls one and stores the result must compute what
the bare instruction computes on the same registers. LLVM chooses registers and encodings here, not these tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import hip_compile
from helpers.exec_one import Machine
from helpers.matrix_reference import BITS, Instruction, parse

from hipforge import emulator

from .test_emulator_matrix_layouts import PAIRS, SPARSE, registers

A, B, D, INDEX, SCALE_A, SCALE_B = 0, 16, 64, 40, 42, 44


@dataclass(frozen=True)
class Call:
    """One builtin with its immediates, and the instruction that it must be."""

    name: str
    arch: str
    formats: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> Instruction:
        return parse(self.name, *self.formats)

    @property
    def symbol(self) -> str:
        return f"{self.name}_{self.formats[0]}{self.formats[1]}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Registers of A, B and D."""
        ins = self.shape
        d = ins.m * ins.n // 64
        if not ins.sparse:
            return BITS[ins.a], BITS[ins.b], d
        stored = ins.k // (64 // ins.m) // 2 * BITS[ins.a] // 32
        return stored, 2 * stored, d

    def kernel(self) -> str:
        ins = self.shape
        a, b, d = self.sizes
        number = "int" if ins.cd == "i32" else "float"
        text = [f'extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void {self.symbol}('
                "const int* in, int* out) {", "  unsigned lane = __builtin_amdgcn_workitem_id_x();",
                f"  vec<int, {a}> a; vec<int, {b}> b; vec<{number}, {d}> d;"]  # fmt: skip
        for row, (variable, kind, count) in enumerate((("a", "int", a), ("b", "int", b), ("d", number, d))):
            text += [
                f"  {variable}[{i}] = __builtin_bit_cast({kind}, in[64 * {(0, a, a + b)[row] + i} + lane]);"
                for i in range(count)
            ]
        first = a + b + d
        text += [f"  int p = in[64 * {first} + lane], q = in[64 * {first + 1} + lane]; (void)q;"]
        if ins.sparse:
            kind = {"f16": "_Float16", "bf16": "short" if ins.k * ins.m == 512 else "__bf16"}.get(ins.a)
            left, right = ("a", "b") if kind is None else (
                f"__builtin_bit_cast(vec<{kind}, {2 * a}>, a)", f"__builtin_bit_cast(vec<{kind}, {2 * b}>, b)"
            )  # fmt: skip
            call = f"__builtin_amdgcn_{self.name[2:]}({left}, {right}, d, p, {self.formats[0]}, {self.formats[1]})"
        else:
            wide = [f"__builtin_shufflevector({x}, {x}, {', '.join(str(i if i < n else -1) for i in range(8))})"
                    for x, n in (("a", a), ("b", b))]  # fmt: skip
            sel_a, sel_b = self.formats[0] % 4, self.formats[1] % 4
            call = (
                f"__builtin_amdgcn_{self.name[2:]}({wide[0]}, {wide[1]}, d, {self.formats[0]}, {self.formats[1]}, "
                f"{sel_a}, p, {sel_b}, q)"
            )
        text.append(f"  d = {call};")
        text += [f"  {{ {number} x = d[{i}]; out[64 * {i} + lane] = __builtin_bit_cast(int, x); }}" for i in range(d)]
        return "\n".join([*text, "}"])

    def instruction(self) -> str:
        """The text for the bare instruction, on this file's own registers."""
        a, b, d = self.sizes
        operands = f"{registers(D, d)}, {registers(A, a)}, {registers(B, b)}"
        if self.shape.sparse:
            return f"{self.name} {operands}, v{INDEX} cbsz:{self.formats[0]} abid:{self.formats[1]}"
        sel = [x % 4 for x in self.formats]
        return (
            f"{self.name} {operands}, {registers(D, d)}, v{SCALE_A}, v{SCALE_B} "
            f"op_sel:[{sel[0] & 1},{sel[1] & 1},0] op_sel_hi:[{sel[0] >> 1},{sel[1] >> 1},0] "
            f"cbsz:{self.formats[0]} blgp:{self.formats[1]}"
        )


CALLS = [Call(name, arch, immediates) for name, arch in SPARSE for immediates in ((0, 0), (0, 1), (1, 1))]
CALLS += [
    Call(f"v_mfma_scale_f32_{shape}_f8f6f4", "gfx950", pair) for shape in ("16x16x128", "32x32x64") for pair in PAIRS
]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, emulator.CodeObject]:
    found = {}
    for arch in ("gfx950", "gfx942"):
        text = "template <class T, int n> using vec = T __attribute__((ext_vector_type(n)));\n"
        text += "\n".join(call.kernel() for call in CALLS if call.arch == arch)
        folder: Path = tmp_path_factory.mktemp(arch)
        found[arch] = emulator.CodeObject(hip_compile.device_elf(text, folder, arch, ["-nogpuinc"]))
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.symbol}-{call.arch}")
def test_a_builtin_is_its_instruction(code: dict[str, emulator.CodeObject], call: Call) -> None:
    rng = np.random.default_rng(41)
    a, b, d = call.sizes
    rows = rng.integers(0, 2**32, (a + b + d + 2, 64), dtype=np.uint32)
    if call.shape.cd == "f32":
        rows[a + b : a + b + d] = rng.standard_normal((d, 64)).astype(np.float32).view(np.uint32)
        if call.shape.a in ("f16", "bf16"):  # finite ones
            rows[: a + b] &= 0xBFFF_BFFF
        elif call.shape.a in ("fp8", "bf8") or call.shape.b in ("fp8", "bf8"):
            rows[: a + b] &= 0xBFBF_BFBF
    if not call.shape.sparse:
        rows[-2:] = 0x7F7E8081 + rng.integers(0, 3, (2, 64), dtype=np.uint32) * 0x01010101  # around 1
    out = torch.zeros((d, 64), dtype=torch.int32)
    kernel = code[call.arch].kernels[call.symbol]
    counters = emulator.launch(kernel, 1, 64, [torch.from_numpy(rows.view(np.int32)), out])
    assert call.name in counters.by_mnemonic
    machine = Machine(call.arch)
    machine.v[A : A + a], machine.v[B : B + b] = rows[:a], rows[a : a + b]
    machine.v[D : D + d] = rows[a + b : a + b + d]
    machine.v[INDEX], machine.v[SCALE_A], machine.v[SCALE_B] = rows[-2], rows[-2], rows[-1]
    machine.run(call.instruction())
    assert (out.numpy().view(np.uint32) == machine.v[D : D + d]).all()
    assert len(np.unique(machine.v[D : D + d])) > 32
