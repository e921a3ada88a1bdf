"""LLVM as witness: what clang folds from constants at compile time, the emulator must compute from the instruction.

Each operation is compiled three times into one code object: with its operands as literals, which clang folds to a
stored constant; with the same operands loaded by each lane, which leaves the vector instruction; and loaded by whole
work-groups, which leaves scalar ones. The counters prove it: the operation's mnemonic executes in the second and third
kernel and not in the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from helpers import folded_operations, hip_compile
from helpers.folded_operations import C_TYPE, OPERATIONS, Folded

from hipforge import emulator

HEADER = """
typedef unsigned u32; typedef unsigned long u64; typedef unsigned short u16; typedef short i16;
typedef _Float16 half2 __attribute__((ext_vector_type(2)));
typedef u16 short2_ __attribute__((ext_vector_type(2)));
template <class T> __device__ inline u64 bits(T x) { return (u64)(u32)x; }
__device__ inline u64 bits(float x) { return __builtin_bit_cast(u32, x); }
__device__ inline u64 bits(_Float16 x) { return __builtin_bit_cast(u16, x); }
__device__ inline u64 bits(double x) { return __builtin_bit_cast(u64, x); }
__device__ inline u64 bits(u64 x) { return x; }
template <class T> __device__ inline T from(u64 x) { return (T)x; }
template <> __device__ inline float from<float>(u64 x) { return __builtin_bit_cast(float, (u32)x); }
template <> __device__ inline double from<double>(u64 x) { return __builtin_bit_cast(double, x); }
template <> __device__ inline _Float16 from<_Float16>(u64 x) { return __builtin_bit_cast(_Float16, (u16)x); }
template <class T> __device__ inline T larger(T x, T y) { return __builtin_elementwise_max(x, y); }
template <class T> __device__ inline T smaller(T x, T y) { return __builtin_elementwise_min(x, y); }
extern "C" __device__ int sffbh(int) __asm("llvm.amdgcn.sffbh.i32");
extern "C" __device__ float mul_legacy(float, float) __asm("llvm.amdgcn.fmul.legacy");
template <class T> __device__ inline u32 pair(T x) { return __builtin_bit_cast(u32, x); }
__device__ inline short2_ halves(u32 x) { return __builtin_bit_cast(short2_, x); }
"""


def typed(operation: Folded) -> str:
    """The expression; half-precision library functions return a different type."""
    return f"(_Float16)({operation.text})" if operation.result == "h" else operation.text


def source(kind_of_operands: str) -> str:
    """The kernels of every operation on this kind of operands."""
    parts = ['#include "hip.h"', HEADER]
    for number, operation in enumerate(OPERATIONS):
        if operation.kind != kind_of_operands:
            continue
        kind = C_TYPE[operation.kind]
        lines = [
            f"{{ const {kind} a = from<{kind}>(0x{a:x}ul), b = from<{kind}>(0x{b:x}ul), c = from<{kind}>(0x{c:x}ul); "
            f"(void)b; (void)c; out[{index}] = bits({typed(operation)}); }}"
            for index, (a, b, c) in enumerate(folded_operations.cases(operation))
        ]
        parts.append(f'extern "C" __global__ void folded{number}(u64* out) {{\n' + "\n".join(lines) + "\n}")
        load = ", ".join(f"{name} = from<{kind}>(in[3 * i + {at}])" for at, name in enumerate("abc"))
        body = f"const {kind} {load}; (void)b; (void)c; out[i] = bits({typed(operation)});"
        arguments = "u64* __restrict__ out, const u64* __restrict__ in, int count"
        parts.append(
            f'extern "C" __global__ void executed{number}({arguments}) {{\n'
            f"  const int i = blockIdx.x * 64 + threadIdx.x;\n  if (i >= count) return;\n  {body}\n}}"
        )
        parts.append(f'extern "C" __global__ void uniform{number}({arguments}) {{ const int i = blockIdx.x; {body} }}')
    return "\n".join(parts)


@pytest.fixture(scope="module", params=["gfx950", "gfx942"])
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, emulator.CodeObject]:
    """One code object for each kind of operands: counters of a launch cover all of its code."""
    found = {}
    for kind in C_TYPE:
        folder: Path = tmp_path_factory.mktemp(f"folding-{request.param}-{kind}")
        elf = hip_compile.device_elf(source(kind), folder, request.param, ["-ffp-contract=off"])
        found[kind] = emulator.CodeObject(elf)
    return found


INFINITY = {"f": 0x7F800000, "d": 0x7FF0000000000000, "h": 0x7C00}


def same(x: int, y: int, kind: str) -> bool:
    """Equal bits; IEEE 754 leaves a NaN's sign and payload open, in each half of a pair."""
    if kind == "p":
        return same(x & 0xFFFF, y & 0xFFFF, "h") and same(x >> 16, y >> 16, "h")
    if kind in INFINITY:
        mask = {"f": 0x7FFFFFFF, "d": 2**63 - 1, "h": 0x7FFF}[kind]
        return x == y or (x & mask > INFINITY[kind] and y & mask > INFINITY[kind])
    return x == y


def base(names: Iterable[str]) -> set[str]:
    return {name.removesuffix("_e32").removesuffix("_e64").removesuffix("_sdwa") for name in names}


def wrong(operation: Folded, folded: torch.Tensor, executed: torch.Tensor) -> list[tuple[str, ...]]:
    rows = zip(folded_operations.cases(operation), folded.tolist(), executed.tolist(), strict=True)
    return [
        tuple(f"{word & 2**64 - 1:x}" for word in (*operands, x, y))
        for operands, x, y in rows
        if not same(x & 2**64 - 1, y & 2**64 - 1, operation.result)
    ]


@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=lambda n: OPERATIONS[n].id)
def test_the_emulator_computes_what_clang_folds(code: dict[str, emulator.CodeObject], number: int) -> None:
    operation = OPERATIONS[number]
    kernels = code[operation.kind].kernels
    rows = folded_operations.cases(operation)
    operands = torch.tensor([[x - 2**64 if x >> 63 else x for x in row] for row in rows])
    count = len(rows)
    folded, executed, uniform = (torch.zeros(count, dtype=torch.int64) for _ in range(3))
    at_compile_time = emulator.launch(kernels[f"folded{number}"], 1, 1, [folded])
    by_lanes = emulator.launch(kernels[f"executed{number}"], -(-count // 64), 64, [executed, operands, count])
    by_groups = emulator.launch(kernels[f"uniform{number}"], count, 1, [uniform, operands, count])

    vector, scalar = (set(names.split("|")) - {""} for names in (operation.mnemonics, operation.scalar))
    ran = base(by_lanes.by_mnemonic)
    assert vector & ran, f"the executed kernel holds none of {sorted(vector)}: {sorted(ran)}"
    ran = base(by_groups.by_mnemonic)
    assert (scalar or vector) & ran, f"the uniform kernel holds none of {sorted(scalar or vector)}: {sorted(ran)}"
    if not operation.also:
        assert not vector & base(at_compile_time.by_mnemonic), "clang did not fold this operation"
    for found in (executed, uniform):
        bad = wrong(operation, folded, found)
        assert not bad, f"{len(bad)} of {count} differ, (a, b, c, clang, emulator): {bad[:5]}"
