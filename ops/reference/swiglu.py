"""SwiGLU with an fp8 or MX-FP8 result: the exact order of operations, in torch."""

from __future__ import annotations

import torch

from hipforge.ops.reference.fp8_static import to_fp8_static
from hipforge.ops.reference.mxfp8 import quantize_mxfp8

LOG2_E = 1.44269504089


def swiglu(
    gate_up: torch.Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None, interleaved: bool = False
) -> torch.Tensor:
    """Return ``g / (1 + 2^(-g alpha log2 e)) * (u + beta)`` in float32; plain SwiGLU is the default.

    With a limit, ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``; both keep a NaN. A gate of -inf gives
    NaN, since the quotient is -inf / inf; one of +inf gives u's infinity, or NaN where u is 0.

    Args:
        gate_up: float16 or bfloat16 [rows, 2 d]: gate in the left half of the columns, up in the right one.
        alpha: factor of the gate inside the sigmoid.
        beta: added to up.
        limit: where gate and up are clamped.
        interleaved: gate in the even columns, up in the odd ones.

    Returns:
        float32 [rows, d].
    """
    x = gate_up.float()
    gate, up = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if beta:
        up = up + beta
    return gate / (1.0 + torch.exp2(gate * (-alpha * LOG2_E))) * up


def swiglu_fp8(
    gate_up: torch.Tensor,
    scale_tensor: torch.Tensor,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    fp8_max: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return :func:`swiglu` times ``1 / scale``, clamped to ``fp8_max`` and rounded to nearest even once.

    Args:
        gate_up: float16 or bfloat16 [rows, 2 d].
        scale_tensor: one float32; 0 is taken as 1.
        fp8_dtype: dtype of the result.
        fp8_max: where the result saturates; default: the format's largest value.
        alpha: as there, and so for the rest.
        beta: as there.
        limit: as there.
        interleaved: as there.
    """
    return to_fp8_static(swiglu(gate_up, alpha, beta, limit, interleaved), scale_tensor, fp8_dtype, fp8_max)


def swiglu_mxfp8(
    gate_up: torch.Tensor,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`swiglu` in MX-FP8: ``(q, scales)``, quantised from float32.

    Args:
        gate_up: float16 or bfloat16 [rows, 2 d], d a multiple of 32.
        fp8_dtype: dtype of q.
        alpha: as there, and so for the rest.
        beta: as there.
        limit: as there.
        interleaved: as there.
    """
    return quantize_mxfp8(swiglu(gate_up, alpha, beta, limit, interleaved), fp8_dtype)
