"""Tensor-wise FP8 quantisation as one HIP module: amax, scale and cast on the device, and a transposed copy on request.

The scale stays on the device, so nothing synchronises; the transposed copy is what the backward products of a linear
layer need (:mod:`hipforge.ops.fp8_linear`), written in the pass that casts. Results equal
:func:`hipforge.ops.fp8_linear.to_fp8` bit for bit on finite input.
"""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_tensor
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.fp8 import FP8_DTYPES, fp8_dtypes, to_fp8
from hipforge.ops.core.operator import operator

PUBLIC = ("fp8_quant_tensorwise",)

# torch dtype -> the module's variant
_INPUTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@compile_ops(
    "module_fp8_quant",
    variant=lambda out, out_t, inv_scale, workspace, x: {"HF_INPUT": _INPUTS[x.dtype]},
    mutates=("out", "out_t", "inv_scale", "workspace"),
)
def fp8_quant_tensorwise_out(
    out: torch.Tensor, out_t: torch.Tensor | None, inv_scale: torch.Tensor, workspace: torch.Tensor, x: torch.Tensor
) -> None:
    """Write x's codes to ``out``, their transpose to ``out_t`` [C, R], and the factor back to ``inv_scale`` [1]."""


def _plan(x: torch.Tensor, dtype: torch.dtype | None, transpose: bool) -> Decision:
    require_tensor(x=x)
    if x.dtype not in _INPUTS:
        raise GuardError(f"x must be float32, float16 or bfloat16; got {x.dtype}")
    if dtype is not None and dtype not in FP8_DTYPES:
        raise GuardError(f"dtype must be one of {', '.join(map(str, FP8_DTYPES))}; got {dtype}")
    if transpose and x.dim() != 2:
        raise GuardError(f"x must have 2 dimensions for a transposed copy; got shape {tuple(x.shape)}")
    return plan_kernel("fp8_quant_tensorwise", x.device)


@operator(_plan)
def fp8_quant_tensorwise(
    taken: Accepted, x: torch.Tensor, dtype: torch.dtype | None = None, *, transpose: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise a tensor with one scale on the device: ``x ≈ x8.float() * inv_scale``.

    ``scale = finfo(dtype).max / max(amax, 1e-12)`` in double, rounded to fp32; ``x8 = clamp(x * scale)`` rounded to
    nearest even; ``inv_scale = 1 / scale``. A NaN in x makes every code and inv_scale NaN. An infinity makes
    the scale 0: its own code is NaN, those of finite elements are 0, and inv_scale is infinite.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: contiguous float32, float16 or bfloat16, any shape (2-D with ``transpose``); may be empty.
        dtype: float8 dtype of the device's own formats, e4m3 or e5m2; default: the e4m3 one.
        transpose: also write the transposed codes, in the same pass over x.

    Returns:
        ``(x8, inv_scale, x8_t)``: x8 like x, inv_scale a 0-dim float32, x8_t [C, R] contiguous or None.

    Raises:
        GuardError: x or dtype is not one of these (ArchError: a device that is neither gfx942 nor gfx950).

    Example:
        >>> import torch, hipforge
        >>> x8, inv_scale, _ = hipforge.fp8_quant_tensorwise(torch.tensor([[1.0, -2.0]]))
        >>> (x8.float() * inv_scale).tolist()
        [[1.0, -2.0]]
    """
    if not x.is_contiguous():
        raise GuardError(f"x must be contiguous; got strides {x.stride()} for shape {tuple(x.shape)}")
    dtype = dtype or fp8_dtypes(x.device)[0]
    if taken.path == "torch":
        x8, inv_scale = to_fp8(x, dtype)
        return x8, inv_scale, x8.t().contiguous() if transpose else None
    out = torch.empty_like(x, dtype=dtype)
    out_t = torch.empty(x.shape[::-1], dtype=dtype, device=x.device) if transpose else None
    inv_scale = torch.empty((), dtype=torch.float32, device=x.device)
    workspace = torch.empty(1, dtype=torch.int32, device=x.device)
    fp8_quant_tensorwise_out(out, out_t, inv_scale, workspace, x)
    return out, inv_scale, out_t
