"""Residual addition, RMS norm and FP8 quantisation, by one static scale or as MX-FP8, in one launch."""

from __future__ import annotations

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.jit import compile_ops
from hipforge.ops import reference
from hipforge.ops.dispatch import Decision, plan_kernel, planned_by
from hipforge.ops.fp8_linear import fp8_dtypes
from hipforge.ops.reference.checks import require_tensor

# torch dtype -> the module's variant
_INPUTS = {torch.float16: "f16", torch.bfloat16: "bf16"}


@compile_ops(
    "module_rmsnorm_fp8",
    variant=lambda out, residual, next_buffer, input, *rest: {"HF_INPUT": _INPUTS[input.dtype]},
    mutates=("out", "residual", "next_buffer"),
)
def residual_rms_out(
    out: torch.Tensor,
    residual: torch.Tensor,
    next_buffer: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    epsilon: float,
    fp8_max: float,
    force_scalar: bool,
) -> None:
    """Write ``out``, ``residual`` and ``next_buffer`` as :func:`residual_rms` says; every number is explicit here."""


@compile_ops(
    "module_rmsnorm_fp8",
    variant=lambda out, block_scales, residual, next_buffer, input, *rest: {"HF_INPUT": _INPUTS[input.dtype]},
    mutates=("out", "block_scales", "residual", "next_buffer"),
)
def residual_rms_mxfp8_out(
    out: torch.Tensor,
    block_scales: torch.Tensor,
    residual: torch.Tensor,
    next_buffer: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    force_scalar: bool,
) -> None:
    """Write the first four as :func:`residual_rms_mxfp8` says."""


def _plan_rms(input: torch.Tensor, *args: object, **kwargs: object) -> Decision:
    _check(input)
    return plan_kernel("residual_rms", input.device)


def _plan_rms_mxfp8(input: torch.Tensor, *args: object, **kwargs: object) -> Decision:
    _check(input)
    return plan_kernel("residual_rms_mxfp8", input.device)


@planned_by(_plan_rms)
def residual_rms(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scale_tensor: torch.Tensor | None = None,
    next_buffer: torch.Tensor | None = None,
    force_scalar: bool = False,
    *,
    fp8_max: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add input to residual in place, normalise the sum, and quantise the result by a static scale.

    With H the inputs' own 16-bit type: ``r = H(input + residual)``, written to residual; ``v`` the mean of
    ``float(r)^2`` over a row, in fp32; ``y = H(float(r) * rsqrt(v + epsilon))``; ``y = H(y * weight)``; then
    ``q = clamp(float(y) * (1 / scale))``, rounded to nearest even. So ``y ≈ q.float() * scale``.

    Values that are not ordinary: a scale of 0 stands for 1; an infinite scale gives zeros; a NaN scale, or a row with
    a NaN, gives NaN. A row with an infinity has an infinite mean, so its finite elements become 0 and the infinities
    NaN. A row of zeros with epsilon 0 gives NaN. With no rows nothing is launched.

    Args:
        input: contiguous float16 or bfloat16 [rows, cols], cols at least 1; any alignment, but cols that are a
            multiple of 8 and data at multiples of 16 bytes are read 16 bytes at a time.
        residual: like input, in other memory; overwritten.
        weight: contiguous [cols] of the same dtype.
        epsilon: added to the mean; finite, at least 0.
        scale_tensor: one float32 on the device, or None for a result in the inputs' dtype.
        next_buffer: contiguous float16 or bfloat16 [rows, buffer_cols], zeroed in the same launch.
        force_scalar: take the path for unaligned data.
        fp8_max: where q saturates; default: the format's largest value (448, on gfx942 240).

    Returns:
        ``(q, residual)``: q [rows, cols], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942, or the inputs' dtype
        without a scale; residual is the argument.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
    """
    _check(input)
    dtype = input.dtype if scale_tensor is None else fp8_dtypes(input.device)[0]
    if devices.kind() == "reference":
        q, r = reference.residual_rms(input, residual, weight, epsilon, scale_tensor, dtype, fp8_max)
        residual.copy_(r)
        if next_buffer is not None:
            next_buffer.zero_()
        return q, residual
    out = torch.empty(input.shape, dtype=dtype, device=input.device)
    limit = torch.finfo(dtype).max if fp8_max is None else fp8_max
    residual_rms_out(out, residual, next_buffer, input, weight, scale_tensor, epsilon, limit, force_scalar)
    _tell_autograd(residual)
    return out, residual


@planned_by(_plan_rms_mxfp8)
def residual_rms_mxfp8(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    next_buffer: torch.Tensor | None = None,
    force_scalar: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what :func:`residual_rms` does, with an MX-FP8 result: what :func:`hipforge.mxfp8_gemv` takes as activations.

    Each 32 columns share the smallest power of two that clips none of them (RCEIL), chosen from the 16-bit y. A block
    with a NaN or an infinity gets scale byte 255, which makes all of it NaN.

    Args:
        input: as there, with cols a multiple of 32.
        residual: as there; overwritten.
        weight: as there.
        epsilon: as there.
        next_buffer: as there.
        force_scalar: as there.

    Returns:
        ``(q, scales, residual)``: q [rows, cols], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; scales uint8
        [rows, cols / 32], e8m0; residual is the argument.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
    """
    _check(input)
    dtype = fp8_dtypes(input.device)[0]
    if devices.kind() == "reference":
        q, scales, r = reference.residual_rms_mxfp8(input, residual, weight, epsilon, dtype)
        residual.copy_(r)
        if next_buffer is not None:
            next_buffer.zero_()
        return q, scales, residual
    rows, cols = input.shape
    out = torch.empty((rows, cols), dtype=dtype, device=input.device)
    block_scales = torch.empty((rows, cols // reference.BLOCK), dtype=torch.uint8, device=input.device)
    residual_rms_mxfp8_out(out, block_scales, residual, next_buffer, input, weight, epsilon, force_scalar)
    _tell_autograd(residual)
    return out, block_scales, residual


def _check(input: torch.Tensor) -> None:
    require_tensor(input=input)
    if input.dtype not in _INPUTS:
        raise GuardError(f"input must be float16 or bfloat16; got {input.dtype}")
    if input.dim() != 2:
        raise GuardError(f"input must be [rows, cols]; got shape {tuple(input.shape)}")


def _tell_autograd(written: torch.Tensor) -> None:
    # A kernel writes behind torch's back: without this, a backward that saved the old values would use the new ones.
    if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling() and not written.is_inference():
        torch.autograd.graph.increment_version(written)
