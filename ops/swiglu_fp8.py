"""SwiGLU and FP8 quantisation in one launch: by one static scale, as MX-FP8, or by scales per row or block."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import described, require_device, require_dtype, require_finite, require_tensor
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.formats import HALVES
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import (
    new_or_given_fp8,
    new_or_given_mxfp8,
    require_buffer,
    require_format,
    written,
)
from hipforge.ops.core.stub import stub
from hipforge.ops.reference.fp8 import quantize_fp8
from hipforge.ops.reference.swiglu import swiglu

PUBLIC = ("swiglu_fp8", "swiglu_fp8_dynamic", "swiglu_mxfp8")
EXAMPLES = {"swiglu_fp8_dynamic": "R=4,D=6656"}


_OPTIONS = "alpha, beta, limit: float; interleaved, force_scalar, programmatic: bool"

swiglu_fp8_out = stub(
    "swiglu_fp8_out",
    "module_swiglu_fp8",
    f"out: Tensor; next_buffer: Tensor?; gate_up, scale: Tensor; fp8_max: float; {_OPTIONS}",
    "Write ``out`` and ``next_buffer`` as :func:`swiglu_fp8` says; every number is explicit, no limit infinite.",
    variant=lambda out, next_buffer, gate_up, *rest: {"HF_INPUT": HALVES[gate_up.dtype]},
    mutates=("out", "next_buffer"),
)


swiglu_mxfp8_out = stub(
    "swiglu_mxfp8_out",
    "module_swiglu_fp8",
    f"out, block_scales: Tensor; next_buffer: Tensor?; gate_up: Tensor; {_OPTIONS}",
    "Write the first three as :func:`swiglu_mxfp8` says.",
    variant=lambda out, block_scales, next_buffer, gate_up, *rest: {"HF_INPUT": HALVES[gate_up.dtype]},
    mutates=("out", "block_scales", "next_buffer"),
)


swiglu_dynamic_out = stub(
    "swiglu_dynamic_out",
    "module_swiglu_fp8_dynamic",
    "out, scales: Tensor; next_buffer: Tensor?; gate_up: Tensor; alpha, beta, limit: float; interleaved, blocks, "
    "force_scalar, programmatic: bool",
    "Write the first three as :func:`swiglu_fp8_dynamic` says.",
    variant=lambda out, scales, next_buffer, gate_up, *rest: {"HF_INPUT": HALVES[gate_up.dtype]},
    mutates=("out", "scales", "next_buffer"),
)


def _plan_swiglu(
    gate_up: torch.Tensor, scale_tensor: torch.Tensor, alpha: float, beta: float, limit: float | None
) -> Decision:
    require_tensor(gate_up=gate_up, scale_tensor=scale_tensor)
    require_device("scale_tensor", scale_tensor, gate_up.device)
    return _plan("swiglu_fp8", gate_up, alpha, beta, limit)


def _plan(op: str, gate_up: torch.Tensor, alpha: float, beta: float, limit: float | None) -> Decision:
    require_dtype("gate_up", gate_up, HALVES)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise GuardError(f"gate_up must be [rows, 2 d]; got {described(gate_up)}")
    check_activation(alpha, beta, limit)
    return plan_kernel(op, gate_up.device)


def _plan_dynamic(
    gate_up: torch.Tensor, alpha: float, beta: float, limit: float | None, out_format: str, e8m0: bool
) -> Decision:
    require_format(out_format, e8m0)
    return _plan("swiglu_fp8_dynamic", gate_up, alpha, beta, limit)


def _shape(gate_up: torch.Tensor) -> tuple[int, int]:
    return gate_up.shape[0], gate_up.shape[1] // 2


def _new(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(_shape(gate_up), dtype=fp8_dtypes(gate_up.device)[0])


def _new_mxfp8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return new_or_given_mxfp8(gate_up, _shape(gate_up))


@operator(_plan_swiglu, fake=_new, outs=("out",), mutates=("next_buffer",))
def swiglu_fp8(
    _taken: Accepted,
    gate_up: torch.Tensor,
    scale_tensor: torch.Tensor,
    next_buffer: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    force_scalar: bool = False,
    fp8_max: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``g * sigmoid(alpha g) * (u + beta)`` quantised by a static scale; plain SwiGLU is the default.

    ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``, both of which keep a NaN. In fp32 without a rounding
    in between: ``y = g / (1 + 2^(-g alpha log2 e)) * (u + beta)``, ``q = clamp(y * (1 / scale))``, rounded to nearest
    even. So ``y ≈ q.float() * scale``. MiniMax-M3 and gpt-oss use alpha 1.702, beta 1 and limit 7, gpt-oss interleaved.

    Special values: a scale of 0 is taken as 1; an infinite scale gives zeros; a NaN anywhere gives NaN. A gate of -inf
    gives NaN (the quotient is -inf / inf). Without a limit, a gate of +inf saturates by u's sign, and gives NaN where u
    is 0. With no rows nothing is launched.

    Args:
        gate_up: contiguous float16 or bfloat16 [rows, 2 d]: gate in columns [0, d), up in [d, 2 d), d at least 1. Any
            alignment, but d that are a multiple of 8 and data at multiples of 16 bytes are read 16 bytes at a time.
        scale_tensor: one float32 on the device.
        next_buffer: contiguous float16 or bfloat16 [rows, buffer_cols], zeroed in the same launch.
        alpha: factor of the gate inside the sigmoid; finite.
        beta: added to up after the clamp; finite. In vLLM, an alpha without a beta means beta = 1.
        limit: where gate and up are clamped; positive and finite, or None.
        interleaved: gate in the even columns of ``gate_up``, up in the odd ones.
        force_scalar: take the path for unaligned data.
        fp8_max: where q saturates; default: the format's largest value (448, on gfx942 240).
        out: where to write q; default: a new tensor.

    Returns:
        q [rows, d], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; ``out`` itself where it is given.

    Raises:
        GuardError: an argument is not of this form (ArchError: an AMD device that is neither gfx942 nor gfx950).

    Example:
        >>> import torch, hipforge
        >>> q = hipforge.swiglu_fp8(torch.ones(2, 64).half(), torch.ones(1), alpha=1.702, beta=1.0, limit=7.0)
        >>> q.shape
        torch.Size([2, 32])
    """
    dtype = fp8_dtypes(gate_up.device)[0]
    if _taken.path == "torch":
        require_buffer(next_buffer, gate_up.shape[0], gate_up.device)
        q = reference.swiglu_fp8(gate_up, scale_tensor, dtype, fp8_max, alpha, beta, limit, interleaved)
        (q,) = written(out=(out, q))
        if next_buffer is not None:
            next_buffer.zero_()
        return q
    if out is None:
        out = _new(gate_up)
    fp8_limit = torch.finfo(dtype).max if fp8_max is None else fp8_max
    activation = (alpha, beta, math.inf if limit is None else limit, interleaved)
    swiglu_fp8_out(out, next_buffer, gate_up, scale_tensor, fp8_limit, *activation, force_scalar, programmatic.active())
    return out


@operator(
    functools.partial(_plan, "swiglu_mxfp8"), fake=_new_mxfp8, outs=("out", "scale_out"), mutates=("next_buffer",)
)
@documented_like(swiglu_fp8)
def swiglu_mxfp8(
    _taken: Accepted,
    gate_up: torch.Tensor,
    next_buffer: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    force_scalar: bool = False,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`swiglu_fp8`'s y in MX-FP8: what :func:`hipforge.mxfp8_gemv` takes as activations.

    y as there, in fp32. Each 32 columns share the smallest power of two that clips none of them (RCEIL). A block with a
    NaN or an infinity gets scale byte 255 and NaN elements.

    Args:
        gate_up: contiguous float16 or bfloat16 [rows, 2 d], d a multiple of 32.
        out: where to write q; default: a new tensor.
        scale_out: where to write the scales, uint8 or float8_e8m0fnu; default: a new uint8 tensor.

    Returns:
        ``(q, scales)``: q [rows, d], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; scales uint8
        [rows, d / 32], e8m0.

    Example:
        >>> import torch, hipforge
        >>> q, scale = hipforge.swiglu_mxfp8(torch.ones(2, 64).half())
        >>> q.shape, scale.shape
        (torch.Size([2, 32]), torch.Size([2, 1]))
    """
    if _taken.path == "torch":
        require_buffer(next_buffer, gate_up.shape[0], gate_up.device)
        dtype = fp8_dtypes(gate_up.device)[0]
        q, scales = reference.swiglu_mxfp8(gate_up, dtype, alpha, beta, limit, interleaved)
        q, scales = written(out=(out, q), scale_out=(scale_out, scales))
        if next_buffer is not None:
            next_buffer.zero_()
        return q, scales
    out, scale_out = new_or_given_mxfp8(gate_up, _shape(gate_up), out, scale_out)
    activation = (alpha, beta, math.inf if limit is None else limit, interleaved)
    swiglu_mxfp8_out(out, scale_out, next_buffer, gate_up, *activation, force_scalar, programmatic.active())
    return out, scale_out


@operator(
    _plan_dynamic,
    fake=lambda gate_up, out_format="rows", e8m0=False: new_or_given_fp8(gate_up, _shape(gate_up), out_format, e8m0),
    outs=("out", "scale_out"),
    mutates=("next_buffer",),
)
@documented_like(swiglu_fp8)
def swiglu_fp8_dynamic(
    _taken: Accepted,
    gate_up: torch.Tensor,
    next_buffer: torch.Tensor | None = None,
    *,
    out_format: str = "rows",
    e8m0: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    force_scalar: bool = False,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`swiglu_fp8`'s y with scales chosen per row or block: what :func:`hipforge.fp8_linear` takes.

    y as there, in fp32, is quantised as :func:`hipforge.fp8_quant_rows` and :func:`hipforge.fp8_quant_blocks` do.

    Args:
        out_format: ``rows`` for a scale per row, ``blocks`` for one per 128 elements of it.
        e8m0: the scales of ``blocks`` are rounded up to powers of two, in e8m0.
        out: where to write q; default: a new tensor.
        scale_out: where to write the scales; default: a new tensor.

    Returns:
        ``(q, scales)``: q [rows, d], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; scales float32 [rows] or
        [rows, ceil(d / 128)], uint8 with ``e8m0``.

    Example:
        >>> import torch, hipforge
        >>> q, scale = hipforge.swiglu_fp8_dynamic(torch.ones(2, 512).half(), out_format="blocks", e8m0=True)
        >>> q.shape, scale.shape, scale.dtype
        (torch.Size([2, 256]), torch.Size([2, 2]), torch.uint8)
    """
    if _taken.path == "torch":
        require_buffer(next_buffer, gate_up.shape[0], gate_up.device)
        y = swiglu(gate_up, alpha, beta, limit, interleaved)
        q, scales = quantize_fp8(y, fp8_dtypes(gate_up.device)[0], out_format, e8m0)
        q, scales = written(out=(out, q), scale_out=(scale_out, scales))
        if next_buffer is not None:
            next_buffer.zero_()
        return q, scales
    out, scale_out = new_or_given_fp8(gate_up, _shape(gate_up), out_format, e8m0, out, scale_out)
    activation = (alpha, beta, math.inf if limit is None else limit, interleaved)
    options = out_format == "blocks", force_scalar, programmatic.active()
    swiglu_dynamic_out(out, scale_out, next_buffer, gate_up, *activation, *options)
    return out, scale_out


def example(op: str, rows: int, columns: int) -> functools.partial[Any]:
    """Return a call of an op for ``hipforge profile``."""
    return functools.partial(swiglu_fp8_dynamic, torch.randn(rows, 2 * columns).bfloat16())


def check_activation(alpha: float, beta: float, limit: float | None) -> None:
    """Refuse parameters that no clamped SwiGLU has."""
    require_finite(alpha=alpha, beta=beta)
    if limit is not None and not 0 < limit < math.inf:
        raise GuardError(f"limit must be positive and finite, or None for no clamp; got {limit}")
