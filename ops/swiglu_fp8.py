"""SwiGLU and FP8 quantisation, by one static scale or as MX-FP8, in one launch."""

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
    "module_swiglu_fp8",
    variant=lambda out, next_buffer, gate_up, *rest: {"HF_INPUT": _INPUTS[gate_up.dtype]},
    mutates=("out", "next_buffer"),
)
def swiglu_fp8_out(
    out: torch.Tensor,
    next_buffer: torch.Tensor | None,
    gate_up: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: float,
    force_scalar: bool,
) -> None:
    """Write ``out`` and ``next_buffer`` as :func:`swiglu_fp8` says; every number is explicit here."""


@compile_ops(
    "module_swiglu_fp8",
    variant=lambda out, block_scales, next_buffer, gate_up, *rest: {"HF_INPUT": _INPUTS[gate_up.dtype]},
    mutates=("out", "block_scales", "next_buffer"),
)
def swiglu_mxfp8_out(
    out: torch.Tensor,
    block_scales: torch.Tensor,
    next_buffer: torch.Tensor | None,
    gate_up: torch.Tensor,
    force_scalar: bool,
) -> None:
    """Write the first three as :func:`swiglu_mxfp8` says."""


def _plan_swiglu(gate_up: torch.Tensor, *args: object, **kwargs: object) -> Decision:
    _check(gate_up)
    return plan_kernel("swiglu_fp8", gate_up.device)


def _plan_swiglu_mxfp8(gate_up: torch.Tensor, *args: object, **kwargs: object) -> Decision:
    _check(gate_up)
    return plan_kernel("swiglu_mxfp8", gate_up.device)


@planned_by(_plan_swiglu)
def swiglu_fp8(
    gate_up: torch.Tensor,
    scale_tensor: torch.Tensor,
    next_buffer: torch.Tensor | None = None,
    *,
    force_scalar: bool = False,
    fp8_max: float | None = None,
) -> torch.Tensor:
    """Return ``silu(gate) * up`` quantised by a static scale.

    In fp32 without a rounding in between: ``y = g / (1 + 2^(-g log2 e)) * u``, ``q = clamp(y * (1 / scale))``, rounded
    to nearest even. So ``y ≈ q.float() * scale``.

    Values that are not ordinary: a scale of 0 stands for 1; an infinite scale gives zeros; a NaN anywhere gives NaN. A
    gate of -inf gives NaN (the quotient is -inf / inf); one of +inf saturates by u's sign, and gives NaN where u is 0.
    With no rows nothing is launched.

    Args:
        gate_up: contiguous float16 or bfloat16 [rows, 2 d]: gate in columns [0, d), up in [d, 2 d), d at least 1. Any
            alignment, but d that are a multiple of 8 and data at multiples of 16 bytes are read 16 bytes at a time.
        scale_tensor: one float32 on the device.
        next_buffer: contiguous float16 or bfloat16 [rows, buffer_cols], zeroed in the same launch.
        force_scalar: take the path for unaligned data.
        fp8_max: where q saturates; default: the format's largest value (448, on gfx942 240).

    Returns:
        q [rows, d], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
    """
    _check(gate_up)
    dtype = fp8_dtypes(gate_up.device)[0]
    if devices.kind() == "reference":
        if next_buffer is not None:
            next_buffer.zero_()
        return reference.swiglu_fp8(gate_up, scale_tensor, dtype, fp8_max)
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=dtype, device=gate_up.device)
    limit = torch.finfo(dtype).max if fp8_max is None else fp8_max
    swiglu_fp8_out(out, next_buffer, gate_up, scale_tensor, limit, force_scalar)
    return out


@planned_by(_plan_swiglu_mxfp8)
def swiglu_mxfp8(
    gate_up: torch.Tensor, next_buffer: torch.Tensor | None = None, *, force_scalar: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``silu(gate) * up`` in MX-FP8: what :func:`hipforge.mxfp8_gemv` takes as activations.

    y as in :func:`swiglu_fp8`, in fp32. Each 32 columns share the smallest power of two that clips none of them
    (RCEIL). A block with a NaN or an infinity gets scale byte 255, which makes all of it NaN.

    Args:
        gate_up: as there, with d a multiple of 32.
        next_buffer: as there.
        force_scalar: as there.

    Returns:
        ``(q, scales)``: q [rows, d], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; scales uint8
        [rows, d / 32], e8m0.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
    """
    _check(gate_up)
    dtype = fp8_dtypes(gate_up.device)[0]
    if devices.kind() == "reference":
        if next_buffer is not None:
            next_buffer.zero_()
        return reference.swiglu_mxfp8(gate_up, dtype)
    rows, d = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, d), dtype=dtype, device=gate_up.device)
    block_scales = torch.empty((rows, d // reference.BLOCK), dtype=torch.uint8, device=gate_up.device)
    swiglu_mxfp8_out(out, block_scales, next_buffer, gate_up, force_scalar)
    return out, block_scales


def _check(gate_up: torch.Tensor) -> None:
    require_tensor(gate_up=gate_up)
    if gate_up.dtype not in _INPUTS:
        raise GuardError(f"gate_up must be float16 or bfloat16; got {gate_up.dtype}")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise GuardError(f"gate_up must be [rows, 2 d]; got shape {tuple(gate_up.shape)}")
