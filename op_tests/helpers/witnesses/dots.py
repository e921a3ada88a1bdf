"""tl.dot in every operand type and tile shape, including accumulation loops, transposes and multi-stage pipelines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .base import BF16, EXACT, GFX942, GFX950, LDS_DMA, LDS_DMA_GLOBAL, Problem, Witness, integers, normal


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b_tile = b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for _ in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_tile)
        b = tl.load(b_tile)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk
    c_tile = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_tile, acc.to(c_ptr.dtype.element_ty))


@triton.jit
def masked_matmul(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + ks[None, :], mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0)
        b = tl.load(b_ptr + ks[:, None] * N + cols[None, :], mask=(ks[:, None] < K) & (cols[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def batched_dot(a_ptr, b_ptr, c_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    batch = tl.arange(0, B)[:, None, None]
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + batch * M * K + m[None, :, None] * K + k[None, None, :])
    b = tl.load(b_ptr + batch * K * N + k[None, :, None] * N + n[None, None, :])
    tl.store(c_ptr + batch * M * N + m[None, :, None] * N + n[None, None, :], tl.dot(a, b))


TORCH_FP8 = {
    GFX950: {"e4": torch.float8_e4m3fn, "e5": torch.float8_e5m2},
    GFX942: {"e4": torch.float8_e4m3fnuz, "e5": torch.float8_e5m2fnuz},
}
PLAIN = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "xf32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
}
ACCUMULATORS = {"f64": tl.float64, "i8": tl.int32}
OUTPUTS = {"f64": torch.float64, "i8": torch.int32}


def dtype_of(kind: str, arch: str) -> torch.dtype:
    """The torch dtype of an operand kind on an architecture."""
    return PLAIN.get(kind) or TORCH_FP8[arch][kind]


def matmul_witness(
    name: str,
    kinds: tuple[str, str],
    shape: tuple[int, int, int],
    block: tuple[int, int, int],
    instruction: dict[str, str],
    *,
    archs: tuple[str, ...] = (GFX950, GFX942),
    real: bool = False,
    transposed_b: bool = False,
    precision: str = "ieee",
    knobs: dict[str, bool] | None = None,
    contains: tuple[str, ...] = (),
    miscompiled: tuple[tuple[int, int], str] | None = None,
    **options: int,
) -> Witness:
    """C = A @ B in one operand kind each; integers compared exactly, `real` data by bf16."""
    m, n, k = shape

    def problem(arch: str, g: torch.Generator, real: bool = real) -> Problem:
        make = normal if real else integers
        a = make(g, (m, k), dtype_of(kinds[0], arch))
        b = make(g, (k, n), dtype_of(kinds[1], arch))
        if kinds[0] == "xf32":  # what the instruction keeps of an f32: ten bits of mantissa
            a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
        if transposed_b:
            b = b.t().contiguous().t()
        want = a.to(torch.float64) @ b.to(torch.float64)
        c = torch.full((m, n), 77, dtype=OUTPUTS.get(kinds[0], torch.float32))
        args = {
            "a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k,
            "stride_am": a.stride(0), "stride_ak": a.stride(1),
            "stride_bk": b.stride(0), "stride_bn": b.stride(1), "stride_cm": n,
            "BLOCK_M": block[0], "BLOCK_N": block[1], "BLOCK_K": block[2],
            "ACC": ACCUMULATORS.get(kinds[0], tl.float32), "PRECISION": precision,
        }  # fmt: skip
        return Problem(args, (m // block[0], n // block[1]), {"c_ptr": want}, BF16 if real else EXACT)

    patterns = {arch: (pattern,) for arch, pattern in instruction.items()} | {"": contains}
    return Witness(name, matmul, problem, archs, options, knobs or {}, patterns, miscompiled=miscompiled)


def both(pattern_950: str, pattern_942: str) -> dict[str, str]:
    """Patterns by architecture."""
    return {GFX950: pattern_950, GFX942: pattern_942}


def fp8_pairs() -> list[Witness]:
    found = []
    for a in ("e4", "e5"):
        for b in ("e4", "e5"):
            names = {"e4": "fp8", "e5": "bf8"}
            small = both(
                f"f8f6f4|16x16x32_{names[a]}_{names[b]}|{names[b]}_{names[a]}", f"16x16x32_({names[a]}|{names[b]})"
            )
            large = both(
                f"f8f6f4|32x32x16_{names[a]}_{names[b]}|{names[b]}_{names[a]}", f"32x32x16_({names[a]}|{names[b]})"
            )
            found.append(matmul_witness(f"dot_{a}_{b}_16x16", (a, b), (32, 32, 128), (32, 32, 64), small,
                                        matrix_instr_nonkdim=16, num_warps=1))  # fmt: skip
            found.append(matmul_witness(f"dot_{a}_{b}_32x32", (a, b), (64, 32, 128), (64, 32, 128), large,
                                        matrix_instr_nonkdim=32, num_warps=2))  # fmt: skip
    return found


def masked_problem(arch: str, g: torch.Generator) -> Problem:
    m, n, k = 37, 43, 75
    a, b = integers(g, (m, k), torch.float16), integers(g, (k, n), torch.float16)
    c = torch.full((m, n), 77.0)
    args = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k, "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    return Problem(args, (2, 2), {"c_ptr": a.double() @ b.double()})


def batched_problem(arch: str, g: torch.Generator) -> Problem:
    batch, m, n, k = 4, 16, 16, 32
    a, b = integers(g, (batch, m, k), torch.float16), integers(g, (batch, k, n), torch.float16)
    c = torch.empty((batch, m, n))
    args = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "B": batch, "M": m, "N": n, "K": k}
    return Problem(args, (1,), {"c_ptr": a.double() @ b.double()})


def witnesses() -> list[Witness]:
    """Every tl.dot witness."""
    found = [
        matmul_witness("dot_f16_16x16", ("f16", "f16"), (32, 32, 64), (32, 32, 32),
                       both("mfma_f32_16x16x32_f16", "mfma_f32_16x16x16_f16"), matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_f16_32x32", ("f16", "f16"), (64, 64, 64), (64, 64, 32),
                       both("mfma_f32_32x32x16_f16", "mfma_f32_32x32x8_f16"), matrix_instr_nonkdim=32, num_warps=4),
        matmul_witness("dot_bf16_16x16", ("bf16", "bf16"), (32, 32, 64), (16, 16, 32),
                       both("mfma_f32_16x16x32_bf16", "mfma_f32_16x16x16_bf16"), matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_bf16_32x32", ("bf16", "bf16"), (64, 64, 64), (32, 64, 64),
                       both("mfma_f32_32x32x16_bf16", "mfma_f32_32x32x8_bf16"), matrix_instr_nonkdim=32, num_warps=2),
        matmul_witness("dot_f16_16x16_short_k", ("f16", "f16"), (16, 16, 16), (16, 16, 16),
                       both("mfma_f32_16x16x16_f16", "mfma_f32_16x16x16_f16"), matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_bf16_32x32_short_k", ("bf16", "bf16"), (32, 32, 8), (32, 32, 8),
                       both("mfma_f32_32x32x8_bf16", "mfma_f32_32x32x8_bf16"), matrix_instr_nonkdim=32, num_warps=1),
        matmul_witness("dot_f32_16x16", ("f32", "f32"), (32, 32, 32), (32, 32, 16),
                       both("mfma_f32_16x16x4_f32", "mfma_f32_16x16x4_f32"), matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_f32_32x32", ("f32", "f32"), (32, 64, 32), (32, 64, 16),
                       both("mfma_f32_32x32x2_f32", "mfma_f32_32x32x2_f32"), matrix_instr_nonkdim=32, num_warps=2),
        matmul_witness("dot_f32_real", ("f32", "f32"), (32, 32, 64), (32, 32, 16),
                       both("mfma_f32_16x16x4_f32", "mfma_f32_16x16x4_f32"), matrix_instr_nonkdim=16, real=True),
        matmul_witness("dot_xf32_16x16", ("xf32", "xf32"), (32, 32, 32), (32, 32, 16), {GFX942: "16x16x8_xf32"},
                       archs=(GFX942,), precision="tf32", matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_xf32_32x32", ("xf32", "xf32"), (32, 32, 32), (32, 32, 16), {GFX942: "32x32x4_xf32"},
                       archs=(GFX942,), precision="tf32", matrix_instr_nonkdim=32, num_warps=1),
        matmul_witness("dot_i8_16x16", ("i8", "i8"), (32, 32, 128), (32, 32, 64),
                       both("mfma_i32_16x16x64_i8", "mfma_i32_16x16x32_i8"), matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_i8_32x32", ("i8", "i8"), (32, 64, 64), (32, 64, 64),
                       both("mfma_i32_32x32x32_i8", "mfma_i32_32x32x16_i8"), matrix_instr_nonkdim=32, num_warps=2),
        matmul_witness("dot_f64", ("f64", "f64"), (32, 32, 16), (32, 32, 16),
                       both("mfma_f64_16x16x4_f64", "mfma_f64_16x16x4_f64"), num_warps=1),
        matmul_witness("dot_bf16_real", ("bf16", "bf16"), (64, 64, 128), (32, 32, 64),
                       both("mfma_f32", "mfma_f32"), real=True, num_warps=4),
        matmul_witness("dot_f16_transposed_b", ("f16", "f16"), (64, 64, 128), (32, 32, 64),
                       both("mfma_f32", "mfma_f32"), transposed_b=True, num_warps=4),
        matmul_witness("dot_bf16_pipeline_3", ("bf16", "bf16"), (64, 64, 256), (64, 64, 32),
                       both("mfma_f32", "mfma_f32"), num_warps=4, num_stages=3, contains=("s_barrier",)),
        matmul_witness("dot_bf16_lds_dma", ("bf16", "bf16"), (64, 64, 256), (64, 64, 64), {GFX950: "mfma_f32"},
                       archs=(GFX950,), num_warps=4, num_stages=3, knobs=LDS_DMA,
                       contains=("(buffer|global)_load_(lds_)?dwordx4",)),
        matmul_witness("dot_f16_lds_dma_transposed", ("f16", "f16"), (64, 64, 256), (64, 64, 64), {GFX950: "mfma_f32"},
                       archs=(GFX950,), num_warps=4, num_stages=3, knobs=LDS_DMA, transposed_b=True, real=True),
        matmul_witness("dot_e4_lds_dma", ("e4", "e4"), (64, 64, 512), (64, 64, 128), {GFX950: "f8f6f4|fp8"},
                       archs=(GFX950,), num_warps=4, num_stages=3, knobs=LDS_DMA),
        matmul_witness("dot_e4_real", ("e4", "e4"), (64, 64, 256), (64, 64, 64), both("f8f6f4|fp8", "fp8"),
                       num_warps=4, real=True),
        matmul_witness("dot_bf16_wide_tile", ("bf16", "bf16"), (128, 128, 64), (128, 128, 64),
                       both("mfma_f32", "mfma_f32"), num_warps=8),
        matmul_witness("dot_e4_16x16_k128", ("e4", "e4"), (32, 32, 256), (32, 32, 128),
                       {GFX950: "mfma_f32_16x16x128_f8f6f4"}, archs=(GFX950,), matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_e5_16x16_k128", ("e5", "e4"), (32, 32, 256), (16, 32, 128),
                       {GFX950: "mfma_f32_16x16x128_f8f6f4"}, archs=(GFX950,), matrix_instr_nonkdim=16, num_warps=1),
        matmul_witness("dot_bf16_global_lds_dma", ("bf16", "bf16"), (64, 64, 256), (64, 64, 64),
                       {GFX950: "global_load_lds_dwordx4"}, archs=(GFX950,), num_warps=4, num_stages=3,
                       knobs=LDS_DMA_GLOBAL,
                       # Its LLVM has lgkmcnt count global_load_lds, which only vmcnt does: it waits too little.
                       miscompiled=((3, 7), r"before s_waitcnt lgkmcnt has waited for the load .*ds_read_b128")),
        matmul_witness("dot_f16_64_bit_addresses", ("f16", "f16"), (64, 32, 64), (32, 32, 32),
                       both("global_load_(lds_)?dword", "global_load_dwordx"), num_warps=2,
                       knobs={"use_buffer_ops": False}),
        matmul_witness("dot_bf16_spilling", ("bf16", "bf16"), (256, 128, 32), (256, 128, 32),
                       both("scratch_load_dword|v_accvgpr_read", "scratch_load_dword|v_accvgpr_read"), num_warps=1),
        matmul_witness("dot_f16_tall", ("f16", "f16"), (128, 16, 64), (128, 16, 64), both("mfma_f32", "mfma_f32"),
                       num_warps=4),
        matmul_witness("dot_i8_flat", ("i8", "i8"), (16, 128, 128), (16, 128, 128), both("mfma_i32", "mfma_i32"),
                       num_warps=4),
        Witness("dot_masked_edges", masked_matmul, masked_problem, options={"num_warps": 2}),
        Witness("dot_batched", batched_dot, batched_problem, options={"num_warps": 4}, contains={"": ("mfma",)}),
    ]  # fmt: skip
    return found + fp8_pairs()
