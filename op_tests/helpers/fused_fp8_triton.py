"""Triton kernels for the jobs of the fused FP8 ops, as one would write them: what the bench counts beside ours.

For finite values; e4m3 results are clamped and rounded by Triton's own casts, MX scales chosen by RCEIL on the bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hipforge import devices

MX = 32
QUANTIZE_BLOCKS, ACTIVATION_BLOCKS = 64, 32  # of 32 elements per program
WARPS = 4

FORMATS = {torch.float8_e4m3fn: (448.0, 8, 0x1FFFFF), torch.float8_e4m3fnuz: (240.0, 7, 0x0FFFFF)}
E2M1 = (6.0, 2, 0x200000)  # even


@triton.jit
def mx_scale(amax, ROUNDING: tl.constexpr, EXPONENT: tl.constexpr):
    """Return the e8m0 bytes of block maxima, and the reciprocals of the scales."""
    byte = tl.maximum(((amax.to(tl.int32, bitcast=True) + ROUNDING) >> 23) - EXPONENT, 0)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    return byte.to(tl.uint8), inverse


@triton.jit
def to_mx(values, BLOCKS: tl.constexpr, MOST: tl.constexpr, ROUNDING: tl.constexpr, EXPONENT: tl.constexpr):
    """Return values [BLOCKS * 32] over their blocks' scales, clamped, and the scale bytes [BLOCKS]."""
    blocks = tl.reshape(values, (BLOCKS, 32))
    byte, inverse = mx_scale(tl.max(tl.abs(blocks), axis=1), ROUNDING, EXPONENT)
    scaled = tl.clamp(blocks * inverse[:, None], -MOST, MOST)
    return tl.reshape(scaled, (BLOCKS * 32,)), byte


@triton.jit
def quantize_fp8(
    x, q, scales, blocks, BLOCKS: tl.constexpr, MOST: tl.constexpr, ROUNDING: tl.constexpr, EXPONENT: tl.constexpr
):
    """MX-FP8 of x, flat."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = tl.program_id(0) * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    values = tl.load(x + at, mask=at < blocks * 32, other=0.0).to(tl.float32)
    scaled, byte = to_mx(values, BLOCKS, MOST, ROUNDING, EXPONENT)
    tl.store(q + at, scaled.to(q.dtype.element_ty), mask=at < blocks * 32)
    tl.store(scales + block, byte, mask=block < blocks)


@triton.jit
def quantize_fp4(
    x, q, scales, blocks, BLOCKS: tl.constexpr, MOST: tl.constexpr, ROUNDING: tl.constexpr, EXPONENT: tl.constexpr
):
    """MXFP4 of x, flat, two codes to a byte; e2m1 by integer rounding of fp32 bits."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = tl.program_id(0) * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    values = tl.load(x + at, mask=at < blocks * 32, other=0.0).to(tl.float32)
    scaled, byte = to_mx(values, BLOCKS, MOST, ROUNDING, EXPONENT)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) & 7
    large = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - 252
    code = tl.where(magnitude < 0x3F800000, small, large) | ((bits >> 28) & 8)
    even, odd = tl.split(tl.reshape(code, (BLOCKS * 16, 2)))
    pair = tl.program_id(0) * BLOCKS * 16 + tl.arange(0, BLOCKS * 16)
    tl.store(q + pair, (even | (odd << 4)).to(tl.uint8), mask=pair < blocks * 16)
    tl.store(scales + block, byte, mask=block < blocks)


@triton.jit
def activation(
    gate_up, q, scales, scale, d, blocks_of_row,
    BLOCKS: tl.constexpr, IS_MX: tl.constexpr, MOST: tl.constexpr, ROUNDING: tl.constexpr, EXPONENT: tl.constexpr,
):  # fmt: skip
    """SwiGLU of gate_up [rows, 2 d], then MX-FP8 or FP8 by one scale; one program per piece of a row."""
    row, piece = tl.program_id(0), tl.program_id(1)
    column = piece * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    inside = column < d
    gate = tl.load(gate_up + row * 2 * d + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * d + d + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-gate * 1.44269504089)) * up
    if IS_MX:
        scaled, byte = to_mx(y, BLOCKS, MOST, ROUNDING, EXPONENT)
        block = piece * BLOCKS + tl.arange(0, BLOCKS)
        tl.store(scales + row * blocks_of_row + block, byte, mask=block < blocks_of_row)
    else:
        scaled = tl.clamp(y * (1.0 / tl.load(scale)), -MOST, MOST)
    tl.store(q + row * d + column, scaled.to(q.dtype.element_ty), mask=inside)


@triton.jit
def norm(
    x, residual, weight, q, scales, scale, cols, epsilon,
    BLOCKS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_MX: tl.constexpr,
    MOST: tl.constexpr, ROUNDING: tl.constexpr, EXPONENT: tl.constexpr,
):  # fmt: skip
    """RMS norm of x, or of residual += x, then MX-FP8 or FP8 by one scale; one program per row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCKS * 32)
    inside = column < cols
    half = x.dtype.element_ty
    r = tl.load(x + row * cols + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        r = r + tl.load(residual + row * cols + column, mask=inside, other=0.0)
        tl.store(residual + row * cols + column, r, mask=inside)
    value = r.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / cols + epsilon)
    w = tl.load(weight + column, mask=inside, other=0.0)
    y = ((value * factor).to(half) * w).to(tl.float32)
    if IS_MX:
        scaled, byte = to_mx(y, BLOCKS, MOST, ROUNDING, EXPONENT)
        block = tl.arange(0, BLOCKS)
        tl.store(scales + row * (cols // 32) + block, byte, mask=block < cols // 32)
    else:
        scaled = tl.clamp(y * (1.0 / tl.load(scale)), -MOST, MOST)
    tl.store(q + row * cols + column, scaled.to(q.dtype.element_ty), mask=inside)


def runner(kernel: Any) -> Any:
    """Return the kernel for this process's device: Triton's own launcher, or the emulator's."""
    if devices.current().kind != "emulator":
        return kernel
    from hipforge.emulator import triton as emulated

    return emulated.jit(kernel)


def _meta(dtype: torch.dtype) -> dict[str, Any]:
    most, exponent, rounding = FORMATS[dtype]
    return {"MOST": most, "EXPONENT": exponent, "ROUNDING": rounding, "num_warps": WARPS}


def _scales(rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty((rows, cols // MX), dtype=torch.uint8, device=like.device)


def run_quantize(x: torch.Tensor, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MX-FP8 of x [rows, K] in ``dtype``, or MXFP4 where it is None."""
    rows, k = x.shape
    blocks = x.numel() // MX
    grid, scales = (triton.cdiv(blocks, QUANTIZE_BLOCKS),), _scales(rows, k, x)
    if dtype is None:
        q = torch.empty((rows, k // 2), dtype=torch.uint8, device=x.device)
        most, exponent, rounding = E2M1
        meta = {"MOST": most, "EXPONENT": exponent, "ROUNDING": rounding, "num_warps": WARPS}
        runner(quantize_fp4)[grid](x, q, scales, blocks, BLOCKS=QUANTIZE_BLOCKS, **meta)
    else:
        q = torch.empty((rows, k), dtype=dtype, device=x.device)
        runner(quantize_fp8)[grid](x, q, scales, blocks, BLOCKS=QUANTIZE_BLOCKS, **_meta(dtype))
    return q, scales


def run_activation(gate_up: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return SwiGLU of gate_up: FP8 codes by ``scale``, or MX-FP8 where it is None."""
    rows, d = gate_up.shape[0], gate_up.shape[1] // 2
    q, scales = torch.empty((rows, d), dtype=dtype, device=gate_up.device), _scales(rows, d, gate_up)
    grid = (rows, triton.cdiv(d, ACTIVATION_BLOCKS * MX))
    runner(activation)[grid](
        gate_up, q, scales, scales if scale is None else scale, d, d // MX,
        BLOCKS=ACTIVATION_BLOCKS, IS_MX=scale is None, **_meta(dtype),
    )  # fmt: skip
    return (q, scales) if scale is None else (q,)


def run_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return the norm of x, or of residual += x: FP8 codes by ``scale``, or MX-FP8 where it is None."""
    rows, cols = x.shape
    q, scales = torch.empty((rows, cols), dtype=dtype, device=x.device), _scales(rows, cols, x)
    blocks = triton.next_power_of_2(cols // MX)
    # 8 elements a lane; more lanes than elements would add to the residual twice, since several would own one.
    meta = {**_meta(dtype), "num_warps": min(16, max(1, blocks // 16))}
    runner(norm)[(rows,)](
        x, x if residual is None else residual, weight, q, scales, scales if scale is None else scale, cols, epsilon,
        BLOCKS=blocks, HAS_RESIDUAL=residual is not None, IS_MX=scale is None, **meta,
    )  # fmt: skip
    return (q, scales) if scale is None else (q,)
