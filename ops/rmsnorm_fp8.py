"""RMS norm, alone or of a residual sum, with a 16-bit, FP8 or MX-FP8 result, in one launch.

FP8 has a static scale, or, in the ops ``*_fp8_dynamic``, one that the launch chooses per row or per 128 of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import (
    require_dtype,
    require_finite,
    require_operand,
    require_out,
    require_rank,
    require_tensor,
)
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
from hipforge.ops.reference.fp8_static import to_fp8_static

PUBLIC = (
    "residual_rms",
    "residual_rms_fp8_dynamic",
    "residual_rms_mxfp8",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_fp8_dynamic",
    "rms_norm_mxfp8",
)
EXAMPLES = {"residual_rms_fp8_dynamic": "R=4,C=6144", "rms_norm_fp8_dynamic": "R=4,C=6144"}


_WRITTEN = ("residual", "next_buffer", "also_out")
_OPERANDS = "residual, next_buffer, also_out: Tensor?; input, weight: Tensor"

residual_rms_out = stub(
    "residual_rms_out",
    "module_rmsnorm_fp8",
    f"out: Tensor; {_OPERANDS}; scale: Tensor?; epsilon, weight_offset, fp8_max: float; "
    "force_scalar, programmatic: bool",
    "Write the first four as :func:`residual_rms` says; without a residual it is the norm of ``input`` itself.",
    variant=lambda out, residual, next_buffer, also_out, input, *rest: {"HF_INPUT": HALVES[input.dtype]},
    mutates=("out", *_WRITTEN),
)


residual_rms_mxfp8_out = stub(
    "residual_rms_mxfp8_out",
    "module_rmsnorm_fp8",
    f"out, block_scales: Tensor; {_OPERANDS}; epsilon, weight_offset: float; "
    "force_scalar, programmatic: bool",
    "Write the first five as :func:`residual_rms_mxfp8` says; without a residual it is the norm of ``input``.",
    variant=lambda out, block_scales, residual, next_buffer, also_out, input, *rest: {"HF_INPUT": HALVES[input.dtype]},
    mutates=("out", "block_scales", *_WRITTEN),
)


residual_rms_dynamic_out = stub(
    "residual_rms_dynamic_out",
    "module_rmsnorm_fp8_dynamic",
    f"out, scales: Tensor; {_OPERANDS}; epsilon, weight_offset: float; blocks, force_scalar, programmatic: bool",
    "Write the first five as :func:`residual_rms_fp8_dynamic` says; without a residual it is the norm of ``input``.",
    variant=lambda out, scales, residual, next_buffer, also_out, input, *rest: {"HF_INPUT": HALVES[input.dtype]},
    mutates=("out", "scales", *_WRITTEN),
)


def require_norm_operands(x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> None:
    """Refuse a residual or a weight that is not x's, under the names of ops that make the norm of two launches."""
    require_operand("residual", residual, (x.dtype,), x.shape, "x's dtype and shape", x.device)
    require_operand("norm_weight", norm_weight, (x.dtype,), x.shape[1:], "x's dtype, one for each column", x.device)


def _plan(name: str) -> Callable[..., Decision]:
    def plan(weight_offset: float = 0.0, out_format: str = "rows", e8m0: bool = False, **named: Any) -> Decision:
        require_format(out_format, e8m0)
        called = "input" if "input" in named else "x"
        input: Any = named[called]
        require_dtype(called, input, HALVES)
        require_rank(called, input, 2, "[rows, cols]")
        require_finite(weight_offset=weight_offset)
        return plan_kernel(name, input.device)

    return plan


def _new_fp8(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=fp8_dtypes(x.device)[0])


def _new_static(input: torch.Tensor, scale_tensor: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(input) if scale_tensor is None else _new_fp8(input)


class _Given(NamedTuple):
    """Arguments of every norm; outputs are the caller's, or None."""

    input: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    epsilon: float
    weight_offset: float = 0.0
    next_buffer: torch.Tensor | None = None
    force_scalar: bool = False
    out: torch.Tensor | None = None
    scale_out: torch.Tensor | None = None
    also_out: torch.Tensor | None = None


@operator(_plan("residual_rms"), fake=_new_static, outs=("out",), mutates=_WRITTEN, returns=("residual",))
def residual_rms(
    _taken: Accepted,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scale_tensor: torch.Tensor | None = None,
    next_buffer: torch.Tensor | None = None,
    force_scalar: bool = False,
    *,
    weight_offset: float = 0.0,
    fp8_max: float | None = None,
    out: torch.Tensor | None = None,
    also_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add input to residual in place, normalise the sum, and quantise the result by a static scale.

    With H the inputs' own 16-bit type: ``r = H(input + residual)``, written to residual; ``v`` the mean of
    ``float(r)^2`` over a row, in fp32; ``y = H(float(r) * rsqrt(v + epsilon))``; ``y = H(y * weight)``, or with
    an offset ``y = H(float(r) * rsqrt(v + epsilon) * (weight_offset + float(weight)))``, rounded once; then
    ``q = clamp(float(y) * (1 / scale))``, rounded to nearest even. So ``y ≈ q.float() * scale``.

    Special values: a scale of 0 is taken as 1; an infinite scale gives zeros; a NaN scale, or a row with a NaN, gives
    NaN. A row with an infinity has an infinite mean, so its finite elements become 0 and the infinities NaN; a row of
    finite elements whose squares overflow fp32, beyond 1.8e19, gives zeros. A row of zeros with epsilon 0 gives NaN.
    With no rows nothing is launched.

    Args:
        input: contiguous float16 or bfloat16 [rows, cols], cols at least 1; any alignment, but cols that are a
            multiple of 8 and data at multiples of 16 bytes are read 16 bytes at a time.
        residual: like input, in other memory; overwritten.
        weight: contiguous [cols] of the same dtype.
        epsilon: added to the mean; finite, at least 0.
        scale_tensor: one float32 on the device, or None for a result in the inputs' dtype.
        next_buffer: contiguous float16 or bfloat16 [rows, buffer_cols], zeroed in the same launch.
        force_scalar: take the path for unaligned data.
        weight_offset: added to the weight; finite. 1 for Gemma and MiniMax-M3, whose weights are differences from 1.
        fp8_max: where q saturates; default: the format's largest value (448, on gfx942 240).
        out: where to write q; default: a new tensor.
        also_out: also write y here, [rows, cols] of input's dtype; only with a scale.

    Returns:
        ``(q, residual)``: q [rows, cols], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942, or the inputs' dtype
        without a scale; residual is the argument.

    Raises:
        GuardError: an argument is not of this form (ArchError: an AMD device that is neither gfx942 nor gfx950).

    Example:
        >>> import torch, hipforge
        >>> x, residual = torch.ones(1, 2).half(), torch.full((1, 2), 2.0).half()
        >>> q, _ = hipforge.residual_rms(x, residual, torch.ones(2).half(), 0.0, torch.ones(1))
        >>> q.float().tolist(), residual.tolist()
        ([[1.0, 1.0]], [[3.0, 3.0]])
    """
    require_tensor(residual=residual)
    given = _Given(input, residual, weight, epsilon, weight_offset, next_buffer, force_scalar, out, None, also_out)
    return _norm(_taken, given, scale_tensor, fp8_max), residual


@operator(
    _plan("residual_rms_mxfp8"),
    fake=lambda input: new_or_given_mxfp8(input, input.shape),
    outs=("out", "scale_out"),
    mutates=_WRITTEN,
    returns=("residual",),
)
@documented_like(residual_rms)
def residual_rms_mxfp8(
    _taken: Accepted,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    next_buffer: torch.Tensor | None = None,
    force_scalar: bool = False,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    also_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like :func:`residual_rms`, with an MX-FP8 result: activations for :func:`hipforge.mxfp8_gemv`.

    Each 32 columns share the smallest power of two that clips none of them (RCEIL), chosen from the 16-bit y. A block
    with a NaN or an infinity gets scale byte 255 and NaN elements.

    Args:
        input: contiguous float16 or bfloat16 [rows, cols], cols a multiple of 32.
        out: where to write q; default: a new tensor.
        scale_out: where to write the scales, uint8 or float8_e8m0fnu; default: a new uint8 tensor.
        also_out: also write y here, [rows, cols] of input's dtype.

    Returns:
        ``(q, scales, residual)``: q [rows, cols], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; scales uint8
        [rows, cols / 32], e8m0; residual is the argument.

    Example:
        >>> import torch, hipforge
        >>> x, residual = torch.ones(1, 32).half(), torch.ones(1, 32).half()
        >>> q, scale, _ = hipforge.residual_rms_mxfp8(x, residual, torch.ones(32).half(), 0.0)
        >>> q.shape, scale.shape
        (torch.Size([1, 32]), torch.Size([1, 1]))
    """
    require_tensor(residual=residual)
    given = _Given(input, residual, weight, epsilon, weight_offset, next_buffer, force_scalar, out, scale_out, also_out)
    return (*_norm_mxfp8(_taken, given), residual)


@operator(_plan("rms_norm"), fake=lambda x: torch.empty_like(x), outs=("out",))
@documented_like(residual_rms)
def rms_norm(
    _taken: Accepted,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the RMS norm of each row of x times weight, rounded as the y of :func:`residual_rms`.

    A row of finite elements whose squares overflow fp32, beyond 1.8e19, gives zeros, as in torch.

    Args:
        x: contiguous float16 or bfloat16 [rows, cols].
        out: where to write the result, in other memory than x; default: a new tensor.

    Returns:
        [rows, cols] of x's dtype; ``out`` itself where it is given.

    Example:
        >>> import torch, hipforge
        >>> hipforge.rms_norm(torch.full((1, 2), 3.0).half(), torch.ones(2).half(), 0.0).tolist()
        [[1.0, 1.0]]
    """
    return _norm(_taken, _Given(x, None, weight, epsilon, weight_offset, out=out), None, None)


@operator(_plan("rms_norm_fp8"), fake=_new_fp8, outs=("out",), mutates=("also_out",))
@documented_like(rms_norm)
def rms_norm_fp8(
    _taken: Accepted,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scale_tensor: torch.Tensor,
    *,
    weight_offset: float = 0.0,
    fp8_max: float | None = None,
    out: torch.Tensor | None = None,
    also_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return :func:`rms_norm` quantised by a static scale, as :func:`residual_rms` quantises.

    Args:
        scale_tensor: one float32 on the device.
        fp8_max: where q saturates; default: the format's largest value.
        out: where to write q; default: a new tensor.
        also_out: also write the 16-bit norm here.

    Returns:
        q [rows, cols], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; ``out`` itself where it is given.

    Example:
        >>> import torch, hipforge
        >>> x = torch.full((1, 2), 3.0).half()
        >>> hipforge.rms_norm_fp8(x, torch.ones(2).half(), 0.0, torch.tensor([0.5])).float().tolist()
        [[2.0, 2.0]]
    """
    require_tensor(scale_tensor=scale_tensor)
    given = _Given(x, None, weight, epsilon, weight_offset, out=out, also_out=also_out)
    return _norm(_taken, given, scale_tensor, fp8_max)


@operator(
    _plan("rms_norm_mxfp8"),
    fake=lambda x: new_or_given_mxfp8(x, x.shape),
    outs=("out", "scale_out"),
    mutates=("also_out",),
)
@documented_like(rms_norm)
def rms_norm_mxfp8(
    _taken: Accepted,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    also_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`rms_norm` in MX-FP8, as :func:`residual_rms_mxfp8` quantises.

    Args:
        x: contiguous float16 or bfloat16 [rows, cols], cols a multiple of 32.
        out: where to write q; default: a new tensor.
        scale_out: where to write the scales, uint8 or float8_e8m0fnu; default: a new uint8 tensor.
        also_out: also write the 16-bit norm here.

    Returns:
        ``(q, scales)``: q [rows, cols], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; scales uint8
        [rows, cols / 32], e8m0.

    Example:
        >>> import torch, hipforge
        >>> q, scale = hipforge.rms_norm_mxfp8(torch.ones(1, 32).half(), torch.ones(32).half(), 0.0)
        >>> q.shape, scale.shape
        (torch.Size([1, 32]), torch.Size([1, 1]))
    """
    given = _Given(x, None, weight, epsilon, weight_offset, out=out, scale_out=scale_out, also_out=also_out)
    return _norm_mxfp8(_taken, given)


@operator(
    _plan("residual_rms_fp8_dynamic"),
    fake=lambda input, out_format="rows", e8m0=False: new_or_given_fp8(input, input.shape, out_format, e8m0),
    outs=("out", "scale_out"),
    mutates=_WRITTEN,
    returns=("residual",),
)
@documented_like(residual_rms)
def residual_rms_fp8_dynamic(
    _taken: Accepted,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    next_buffer: torch.Tensor | None = None,
    force_scalar: bool = False,
    *,
    out_format: str = "rows",
    e8m0: bool = False,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    also_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what :func:`residual_rms` does, with scales per row or block chosen here: :func:`fp8_linear`'s activations.

    The 16-bit y is quantised as :func:`hipforge.fp8_quant_rows` and :func:`hipforge.fp8_quant_blocks` do.

    Args:
        out_format: ``rows`` for a scale per row, ``blocks`` for one per 128 elements of it.
        e8m0: the scales of ``blocks`` are rounded up to powers of two, in e8m0.
        out: where to write q; default: a new tensor.
        scale_out: where to write the scales; default: a new tensor.
        also_out: also write y here, [rows, cols] of input's dtype.

    Returns:
        ``(q, scales, residual)``: q [rows, cols], float8_e4m3fn on gfx950 and float8_e4m3fnuz on gfx942; scales float32
        [rows] or [rows, ceil(cols / 128)], uint8 with ``e8m0``; residual is the argument.

    Example:
        >>> import torch, hipforge
        >>> x, residual = torch.ones(1, 256).half(), torch.ones(1, 256).half()
        >>> given = x, residual, torch.ones(256).half(), 0.0
        >>> q, scale, _ = hipforge.residual_rms_fp8_dynamic(*given, out_format="blocks")
        >>> q.shape, scale.shape
        (torch.Size([1, 256]), torch.Size([1, 2]))
    """
    require_tensor(residual=residual)
    given = _Given(input, residual, weight, epsilon, weight_offset, next_buffer, force_scalar, out, scale_out, also_out)
    return (*_norm_dynamic(_taken, given, out_format, e8m0), residual)


@operator(
    _plan("rms_norm_fp8_dynamic"),
    fake=lambda x, out_format="rows", e8m0=False: new_or_given_fp8(x, x.shape, out_format, e8m0),
    outs=("out", "scale_out"),
    mutates=("also_out",),
)
@documented_like(residual_rms_fp8_dynamic)
def rms_norm_fp8_dynamic(
    _taken: Accepted,
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    out_format: str = "rows",
    e8m0: bool = False,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    also_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`rms_norm` in fp8, as :func:`residual_rms_fp8_dynamic` quantises.

    Args:
        x: contiguous float16 or bfloat16 [rows, cols].

    Returns:
        ``(q, scales)``, as there.

    Example:
        >>> import torch, hipforge
        >>> q, scale = hipforge.rms_norm_fp8_dynamic(torch.full((1, 2), 3.0).half(), torch.ones(2).half(), 0.0)
        >>> (q.float() * scale[:, None]).tolist()
        [[1.0, 1.0]]
    """
    given = _Given(x, None, weight, epsilon, weight_offset, out=out, scale_out=scale_out, also_out=also_out)
    return _norm_dynamic(_taken, given, out_format, e8m0)


def example(op: str, rows: int, columns: int) -> functools.partial[Any]:
    """Return a call of an op for ``hipforge profile``."""
    x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    weight = torch.ones(columns).bfloat16()
    if op == "rms_norm_fp8_dynamic":
        return functools.partial(rms_norm_fp8_dynamic, x, weight, 1e-5)
    return functools.partial(residual_rms_fp8_dynamic, x, residual, weight, 1e-5)


def _norm(taken: Accepted, given: _Given, scale: torch.Tensor | None, fp8_max: float | None) -> torch.Tensor:
    dtype = given.input.dtype if scale is None else fp8_dtypes(given.input.device)[0]
    if taken.path == "torch":
        if given.also_out is not None and scale is None:
            raise GuardError("also_out is the 16-bit copy of a quantised result; without a scale, out is that already")
        quantise = (lambda y: y) if scale is None else (lambda y: to_fp8_static(y.float(), scale, dtype, fp8_max))
        return _on_torch(given, lambda y: {"out": (given.out, quantise(y))})[0]
    out = torch.empty_like(given.input, dtype=dtype) if given.out is None else given.out
    limit = torch.finfo(dtype).max if fp8_max is None else fp8_max
    residual_rms_out(
        out, given.residual, given.next_buffer, given.also_out, given.input, given.weight, scale, given.epsilon,
        given.weight_offset, limit, given.force_scalar, programmatic.active(),
    )  # fmt: skip
    _tell_autograd(given.residual)
    return out


def _norm_mxfp8(taken: Accepted, given: _Given) -> tuple[torch.Tensor, torch.Tensor]:
    if taken.path == "torch":
        return _quantised_on_torch(given, reference.quantize_mxfp8)
    out, scale_out = new_or_given_mxfp8(given.input, given.input.shape, given.out, given.scale_out)
    _launch_quantising(residual_rms_mxfp8_out, out, scale_out, given, given.force_scalar)
    return out, scale_out


def _norm_dynamic(taken: Accepted, given: _Given, out_format: str, e8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if taken.path == "torch":
        return _quantised_on_torch(given, lambda y, dtype: quantize_fp8(y, dtype, out_format, e8m0))
    out, scale_out = new_or_given_fp8(given.input, given.input.shape, out_format, e8m0, given.out, given.scale_out)
    _launch_quantising(residual_rms_dynamic_out, out, scale_out, given, out_format == "blocks", given.force_scalar)
    return out, scale_out


def _launch_quantising(
    stub: Callable[..., None], out: torch.Tensor, scale_out: torch.Tensor, given: _Given, *options: bool
) -> None:
    stub(
        out, scale_out, given.residual, given.next_buffer, given.also_out, given.input, given.weight, given.epsilon,
        given.weight_offset, *options, programmatic.active(),
    )  # fmt: skip
    _tell_autograd(given.residual)


def _quantised_on_torch(
    given: _Given, quantised: Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = fp8_dtypes(given.input.device)[0]

    def results(y: torch.Tensor) -> _Results:
        q, scales = quantised(y, dtype)
        return {"out": (given.out, q), "scale_out": (given.scale_out, scales)}

    q, scales = _on_torch(given, results)
    return q, scales


_Results = dict[str, tuple[torch.Tensor | None, torch.Tensor]]


def _on_torch(given: _Given, results_of: Callable[[torch.Tensor], _Results]) -> tuple[torch.Tensor, ...]:
    """Return what ``results_of`` makes of y, and write the rest, when no check can fail any more."""
    x = given.input
    require_operand("weight", given.weight, (x.dtype,), x.shape[1:], "the columns of input", x.device)
    if given.residual is not None:
        require_out(given.residual, x.shape, x.dtype, x.device, "residual")
    require_buffer(given.next_buffer, x.shape[0], x.device)
    if not 0 <= given.epsilon < math.inf:
        raise GuardError(f"epsilon must be finite and at least 0; got {given.epsilon}")
    r = x if given.residual is None else x + given.residual
    y = reference.rms_norm(r, given.weight, float(given.epsilon), float(given.weight_offset))
    *results, _ = written(**results_of(y), also_out=(given.also_out, y))
    if given.next_buffer is not None:
        given.next_buffer.zero_()
    if given.residual is not None:
        given.residual.copy_(r)
    return tuple(results)


def _tell_autograd(changed: torch.Tensor | None) -> None:
    # A kernel writes behind torch's back: without this, a backward that saved the old values would use the new ones.
    if changed is None or not torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling():
        return
    if not changed.is_inference():
        torch.autograd.graph.increment_version(changed)
