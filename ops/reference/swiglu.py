"""SwiGLU with an fp8 or MX-FP8 result: the exact order of operations, in torch."""

from __future__ import annotations

import torch

from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.mxfp8 import quantize_mxfp8

LOG2_E = 1.44269504089


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``g / (1 + 2^(-g log2 e)) * u`` in float32, g and u the left and right half of the columns.

    A gate of -inf gives NaN, since the quotient is -inf / inf; one of +inf gives u's infinity, or NaN where u is 0.

    Args:
        gate_up: float16 or bfloat16 [rows, 2 d].

    Returns:
        float32 [rows, d].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp2(-gate * LOG2_E)) * up


def swiglu_fp8(
    gate_up: torch.Tensor,
    scale_tensor: torch.Tensor,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    fp8_max: float | None = None,
) -> torch.Tensor:
    """Return :func:`swiglu` times ``1 / scale``, clamped to ``fp8_max`` and rounded to nearest even once.

    Args:
        gate_up: float16 or bfloat16 [rows, 2 d].
        scale_tensor: one float32; 0 stands for 1.
        fp8_dtype: dtype of the result.
        fp8_max: where the result saturates; default: the format's largest value.
    """
    return to_fp8_static(swiglu(gate_up), scale_tensor, fp8_dtype, fp8_max)


def swiglu_mxfp8(
    gate_up: torch.Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`swiglu` in MX-FP8: ``(q, scales)``, quantised from float32.

    Args:
        gate_up: float16 or bfloat16 [rows, 2 d], d a multiple of 32.
        fp8_dtype: dtype of q.
    """
    return quantize_mxfp8(swiglu(gate_up), fp8_dtype)
