"""tl.dot_scaled in every operand format pair that the compiler accepts, with a different scale for each 32-block."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from .base import BF16, EXACT, GFX942, GFX950, LDS_DMA, TRITON, Problem, Witness, integers

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@triton.jit
def scaled_matmul(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, N: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
    A_SCALED: tl.constexpr, B_SCALED: tl.constexpr,
):  # fmt: skip
    """a is [M, K / A_PACK], b is [N, K / B_PACK]; scales are [rows, K / 32]; C = A @ B^T."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ka, kb = tl.arange(0, BLOCK_K // A_PACK), tl.arange(0, BLOCK_K // B_PACK)
    ks = tl.arange(0, BLOCK_K // 32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + rows[:, None] * (K // A_PACK) + (k // A_PACK + ka)[None, :])
        b = tl.load(b_ptr + cols[None, :] * (K // B_PACK) + (k // B_PACK + kb)[:, None])
        a_scale = None
        b_scale = None
        if A_SCALED:
            a_scale = tl.load(a_scale_ptr + rows[:, None] * (K // 32) + (k // 32 + ks)[None, :])
        if B_SCALED:
            b_scale = tl.load(b_scale_ptr + cols[:, None] * (K // 32) + (k // 32 + ks)[None, :])
        acc = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, acc)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc)


def operand(g: torch.Generator, fmt: str, rows: int, k: int, real: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored tensor, float64 values [rows, k]) of one operand format; two fp4 items share a byte, low nibble first."""
    if fmt == "e2m1":
        codes = torch.randint(0, 16, (rows, k), generator=g, dtype=torch.uint8)
        values = FP4_VALUES[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0).double()
        return codes[:, 0::2] | codes[:, 1::2] << 4, values
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    if real:
        stored = torch.randn((rows, k), generator=g, dtype=torch.float64).to(dtype)
    else:
        stored = integers(g, (rows, k), dtype)
    return stored, stored.double()


def scales(g: torch.Generator, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(e8m0 codes [rows, k / 32], factors [rows, k]) between 2^-3 and 2^3, different in every block."""
    codes = torch.randint(124, 131, (rows, k // 32), generator=g, dtype=torch.uint8)
    return codes, torch.exp2(codes.double() - 127).repeat_interleave(32, dim=1)


def scaled_witness(
    name: str,
    formats: tuple[str, str],
    shape: tuple[int, int, int],
    block: tuple[int, int, int],
    pattern: str,
    *,
    scaled: tuple[bool, bool] = (True, True),
    real: bool = False,
    archs: tuple[str, ...] = (GFX950,),
    knobs: dict[str, bool] | None = None,
    **options: int,
) -> Witness:
    m, n, k = shape

    def problem(arch: str, g: torch.Generator, real: bool = real) -> Problem:
        a, a_values = operand(g, formats[0], m, k, real)
        b, b_values = operand(g, formats[1], n, k, real)
        a_scale, a_factors = scales(g, m, k)
        b_scale, b_factors = scales(g, n, k)
        left = a_values * a_factors if scaled[0] else a_values
        right = b_values * b_factors if scaled[1] else b_values
        c = torch.full((m, n), 77.0)
        args = {
            "a_ptr": a, "a_scale_ptr": a_scale, "b_ptr": b, "b_scale_ptr": b_scale, "c_ptr": c, "K": k, "N": n,
            "BLOCK_M": block[0], "BLOCK_N": block[1], "BLOCK_K": block[2],
            "A_FORMAT": formats[0], "B_FORMAT": formats[1],
            "A_PACK": 2 if formats[0] == "e2m1" else 1, "B_PACK": 2 if formats[1] == "e2m1" else 1,
            "A_SCALED": scaled[0], "B_SCALED": scaled[1],
        }  # fmt: skip
        return Problem(args, (m // block[0], n // block[1]), {"c_ptr": left @ right.T}, BF16 if real else EXACT)

    return Witness(name, scaled_matmul, problem, archs, options, knobs or {}, {GFX950: (pattern,)})


FORMATS = ("e4m3", "e5m2", "e2m1", "bf16", "fp16")


def pairs() -> list[Witness]:
    """Every pair of operand formats. gfx942 widens them all, gfx950 what it has no instruction for."""
    found = []
    for a in FORMATS:
        for b in FORMATS:
            wide = {a, b} & {"bf16", "fp16"}
            # Triton 3.7 compiles no others for gfx942: it looks for matrix instructions of f32 that do not exist.
            archs = (GFX950, GFX942) if len(wide) == 1 or TRITON > (3, 7) else (GFX950,)
            # Triton has no scales for operands of 16 bits.
            witness = scaled_witness(f"pair_{a}_{b}", (a, b), (32, 32, 128), (32, 32, 64), "", num_warps=2,
                                     scaled=(a not in wide, b not in wide), archs=archs)  # fmt: skip
            new = "mfma_f32.*f16" if wide else "mfma_scale"
            # Two different wide formats meet in plain f32 arithmetic.
            needed = {"": ("v_(pk_)?fma",)} if len(wide) == 2 else {GFX950: (new,), GFX942: ("mfma_f32.*f16",)}
            found.append(replace(witness, contains=needed))
    return found


def witnesses() -> list[Witness]:
    """Every tl.dot_scaled witness."""
    found = pairs()
    native = ("e4m3", "e5m2", "e2m1")
    for a in native:
        for b in native:
            for edge, shape, block in ((16, (32, 32, 256), (32, 32, 128)), (32, (64, 32, 128), (64, 32, 128))):
                instruction = f"mfma_scale_f32_{edge}x{edge}x{2048 // edge}_f8f6f4"
                found.append(
                    scaled_witness(
                        f"scaled_{a}_{b}_{edge}x{edge}", (a, b), shape, block, instruction,
                        matrix_instr_nonkdim=edge, num_warps=2,
                    )
                )  # fmt: skip
    for wide in ("bf16", "fp16"):
        for small in native:
            found.append(scaled_witness(f"scaled_{wide}_{small}", (wide, small), (32, 32, 128), (32, 32, 64),
                                        "mfma_f32.*f16", scaled=(False, True), num_warps=2,
                                        archs=(GFX950, "gfx942") if small == "e2m1" else (GFX950,)))  # fmt: skip
    found += [
        scaled_witness("scaled_e4m3_real", ("e4m3", "e4m3"), (64, 64, 256), (32, 64, 128), "mfma_scale",
                       real=True, num_warps=4),
        scaled_witness("scaled_e4m3_e2m1_real", ("e4m3", "e2m1"), (64, 64, 256), (64, 32, 128), "mfma_scale",
                       real=True, num_warps=4),
        scaled_witness("scaled_only_a", ("e4m3", "e4m3"), (32, 32, 128), (32, 32, 128), "mfma_scale",
                       scaled=(True, False), num_warps=2),
        scaled_witness("scaled_pipeline_lds_dma", ("e4m3", "e4m3"), (64, 64, 512), (64, 64, 128), "mfma_scale",
                       num_warps=4, num_stages=3, knobs=LDS_DMA),
        scaled_witness("scaled_fp4_pipeline_lds_dma", ("e2m1", "e2m1"), (64, 64, 1024), (64, 64, 256), "mfma_scale",
                       num_warps=4, num_stages=3, knobs=LDS_DMA),
    ]  # fmt: skip
    return found
