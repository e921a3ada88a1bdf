"""LLVM as witness: what clang folds from constants at compile time, the emulator must compute from the instruction.

Each operation is compiled twice into one code object: with its operands as literals, which clang folds to a stored
constant, and with the same operands loaded from memory, which leaves the instruction. The counters prove both: the
operation's mnemonic executes in the second kernel and not in the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import hip_compile
import pytest
import torch

from hipforge import emulator

F32 = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBFC00000, 0x3F000000, 0x40490FDB,
    0x4B000001, 0xCB7FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x33D6BF95, 0x5F000000, 0x3EAAAAAB, 0xC2F6E979,
)  # fmt: skip
I32 = (
    0x00000000, 0x00000001, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x0000001F, 0x00000020, 0x000000FF, 0x00010000,
    0xDEADBEEF, 0x12345678, 0x00800000, 0xFF7FFFFF, 0x00000018,
)  # fmt: skip


@dataclass(frozen=True)
class Folded:
    """One operation: its text over a, b, c; the mnemonic it must leave; whether operands are floats."""

    name: str
    text: str
    mnemonic: str
    floats: bool
    returns_float: bool


def f(name: str, text: str, mnemonic: str, returns_float: bool = True) -> Folded:
    return Folded(name, text, mnemonic, True, returns_float)


def i(name: str, text: str, mnemonic: str) -> Folded:
    return Folded(name, text, mnemonic, False, False)


OPERATIONS = (
    f("add", "a + b", "v_add_f32"),
    f("sub", "a - b", "v_sub_f32"),
    f("mul", "a * b", "v_mul_f32"),
    f("fma", "__builtin_fmaf(a, b, c)", "v_fma_f32|v_fmac_f32"),
    f("min", "__builtin_fminf(a, b)", "v_min_f32"),
    f("max", "__builtin_fmaxf(a, b)", "v_max_f32"),
    f("floor", "__builtin_floorf(a)", "v_floor_f32"),
    f("ceil", "__builtin_ceilf(a)", "v_ceil_f32"),
    f("trunc", "__builtin_truncf(a)", "v_trunc_f32"),
    f("rint", "__builtin_rintf(a)", "v_rndne_f32"),
    f("ldexp", "__builtin_amdgcn_ldexpf(a, (int)(__builtin_bit_cast(unsigned, b) >> 22) - 300)", "v_ldexp_f32"),
    f("frexp_mant", "__builtin_amdgcn_frexp_mantf(a)", "v_frexp_mant_f32"),
    f("frexp_exp", "__builtin_amdgcn_frexp_expf(a)", "v_frexp_exp_i32_f32", returns_float=False),
    f("med3", "__builtin_amdgcn_fmed3f(a, b, c)", "v_med3_f32"),
    f("less", "a < b", "v_cmp_lt_f32|v_cmp_gt_f32|v_cmp_nlt_f32|v_cmp_ngt_f32", returns_float=False),
    f("unordered_equal", "!(a < b || a > b)", "v_cmp_nlg_f32|v_cmp_lg_f32", returns_float=False),
    f("class", "__builtin_amdgcn_classf(a, 0x2d5)", "v_cmp_class_f32", returns_float=False),
    f("to_half", "(float)(_Float16)a", "v_cvt_f16_f32"),
    f("half_add", "(float)((_Float16)a + (_Float16)b)", "v_add_f16"),
    f("double_mul", "(u32)(__builtin_bit_cast(unsigned long, (double)a * (double)b) >> 32)", "v_mul_f64"),
    f("double_fma", "(float)__builtin_fma((double)a, (double)b, (double)c)", "v_fma_f64|v_fmac_f64"),
    i("add", "a + b", "v_add_u32"),
    i("mul", "a * b", "v_mul_lo_u32"),
    i("mul_hi_u", "(unsigned)(((unsigned long)a * b) >> 32)", "v_mul_hi_u32|v_mad_u64_u32"),
    i("mul_hi_i", "(unsigned)(((long)(int)a * (int)b) >> 32)", "v_mul_hi_i32|v_mad_i64_i32"),
    i("mul_u24", "(a & 0xFFFFFFu) * (b & 0xFFFFFFu)", "v_mul_u32_u24"),
    i("shl", "a << (b & 31)", "v_lshlrev_b32"),
    i("shr", "a >> (b & 31)", "v_lshrrev_b32"),
    i("sar", "(unsigned)((int)a >> (b & 31))", "v_ashrrev_i32"),
    i("shr64", "(unsigned)(((unsigned long)a << 32 | b) >> (c & 63))", "v_lshrrev_b64"),
    i("ubfe", "__builtin_amdgcn_ubfe(a, b & 31, c & 31)", "v_bfe_u32"),
    i("sbfe", "__builtin_amdgcn_sbfe(a, b & 31, c & 31)", "v_bfe_i32"),
    i("alignbit", "__builtin_amdgcn_alignbit(a, b, c)", "v_alignbit_b32"),
    i("perm", "__builtin_amdgcn_perm(a, b, 0x0c070d02u)", "v_perm_b32"),
    i("popcount", "__builtin_popcount(a)", "v_bcnt_u32_b32"),
    i("leading", "a ? __builtin_clz(a) : 32u", "v_ffbh_u32"),
    i("trailing", "a ? __builtin_ctz(a) : 32u", "v_ffbl_b32"),
    i("reverse", "__builtin_bitreverse32(a)", "v_bfrev_b32"),
    i("min_i", "(int)a < (int)b ? a : b", "v_min_i32"),
    i("max_u", "a > b ? a : b", "v_max_u32"),
    i("max3", "__builtin_elementwise_max(__builtin_elementwise_max((int)a, (int)b), (int)c)", "v_max3_i32"),
    i("from_int", "__builtin_bit_cast(unsigned, (float)(int)a)", "v_cvt_f32_i32"),
    i("from_unsigned", "__builtin_bit_cast(unsigned, (float)a)", "v_cvt_f32_u32"),
    i("saturating_add", "__builtin_elementwise_add_sat(a, b)", "v_add_u32"),
)

# These also compute addresses or make constants (v_bfrev_b32 of 1 is 0x80000000).
ALSO_FOR_OTHERS = ("v_add_u32", "v_lshlrev_b32", "v_bfrev_b32")

HEADER = """
typedef unsigned u32;
__device__ inline float as_float(u32 x) { return __builtin_bit_cast(float, x); }
__device__ inline u32 bits(float x) { return __builtin_bit_cast(u32, x); }
__device__ inline u32 bits(u32 x) { return x; }
__device__ inline u32 bits(int x) { return x; }
__device__ inline u32 bits(bool x) { return x; }
"""


def cases(operation: Folded) -> list[tuple[int, int, int]]:
    """Operand triples: every pair of special values, the third cycling."""
    values = F32 if operation.floats else I32
    pairs = [(a, b) for a in values for b in values]
    return [(a, b, values[(number * 7 + 3) % len(values)]) for number, (a, b) in enumerate(pairs)]


def source() -> str:
    """One folded and one executed kernel per operation."""
    parts = ['#include <hip/hip_runtime.h>', HEADER]
    for number, operation in enumerate(OPERATIONS):
        kind, wrap = ("float", "as_float") if operation.floats else ("u32", "")
        lines = [
            f"{{ const {kind} a = {wrap}(0x{a:08x}u), b = {wrap}(0x{b:08x}u), c = {wrap}(0x{c:08x}u); "
            f"(void)b; (void)c; out[{index}] = bits({operation.text}); }}"
            for index, (a, b, c) in enumerate(cases(operation))
        ]
        parts.append(f'extern "C" __global__ void folded{number}(u32* out) {{\n' + "\n".join(lines) + "\n}")
        parts.append(
            f'extern "C" __global__ void executed{number}(u32* out, const u32* in, int count) {{\n'
            "  const int i = blockIdx.x * 64 + threadIdx.x;\n  if (i >= count) return;\n"
            f"  const {kind} a = {wrap}(in[3 * i]), b = {wrap}(in[3 * i + 1]), c = {wrap}(in[3 * i + 2]);\n"
            f"  (void)b; (void)c;\n  out[i] = bits({operation.text});\n}}"
        )
    return "\n".join(parts)


@pytest.fixture(scope="module", params=["gfx950", "gfx942"])
def code(request, tmp_path_factory) -> emulator.CodeObject:
    folder: Path = tmp_path_factory.mktemp(f"folding-{request.param}")
    return emulator.CodeObject(hip_compile.device_elf(source(), folder, request.param, ["-ffp-contract=off"]))


def is_nan(words: torch.Tensor) -> torch.Tensor:
    return (words & 0x7FFFFFFF) > 0x7F800000


@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=lambda n: f"{n}-{OPERATIONS[n].name}")
def test_the_emulator_computes_what_clang_folds(code: emulator.CodeObject, number: int) -> None:
    operation = OPERATIONS[number]
    operands = torch.tensor(cases(operation), dtype=torch.int64).to(torch.int32)
    count = len(operands)
    folded, executed = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    at_compile_time = emulator.launch(code.kernels[f"folded{number}"], 1, 1, [folded])
    at_run_time = emulator.launch(code.kernels[f"executed{number}"], -(-count // 64), 64, [executed, operands, count])

    names = set(operation.mnemonic.split("|"))
    ran = {name.removesuffix("_e32").removesuffix("_e64") for name in at_run_time.by_mnemonic}
    assert names & ran, f"the executed kernel holds none of {sorted(names)}: {sorted(ran)}"
    if operation.mnemonic not in ALSO_FOR_OTHERS:
        precomputed = {name.removesuffix("_e32").removesuffix("_e64") for name in at_compile_time.by_mnemonic}
        assert not names & precomputed, "clang did not fold this operation"

    different = folded != executed
    if operation.returns_float:  # IEEE 754 leaves a NaN's sign and payload open
        different &= ~(is_nan(folded) & is_nan(executed))
    wrong = [tuple(f"{word & 0xFFFFFFFF:08x}" for word in (*operands[n].tolist(), folded[n].item(), executed[n].item()))
             for n in different.nonzero().flatten().tolist()[:5]]  # fmt: skip
    assert not wrong, f"(a, b, c, clang, emulator): {wrong}"
