"""Products whose activations are made in the same launch: MX-FP8 of a residual norm or of SwiGLU, MXFP4 of floats.

On sm_90 every block of the MX-FP8 GEMM for few rows makes all of X in shared memory while its first rows of W are under
way; on gfx950 every work-group of the MXFP4 GEMM for few rows quantises its rows of X into LDS. What the launch before
would take is then hidden. Elsewhere, and for more rows, these are two launches. The result is the same, bit for bit,
where both products are in the same configuration; of MXFP4, where K is cut into the same number of parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from hipforge import devices
from hipforge.ops.core import dispatch, invariance, programmatic
from hipforge.ops.core.arguments import require_sound
from hipforge.ops.core.checks import Described, require_bias, require_factors, require_rank, require_shape
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import HALVES
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given, product_result
from hipforge.ops.core.tuned import TunedRow
from hipforge.ops.mx_quantize import mxfp4_quantize
from hipforge.ops.mxfp4_gemm import mxfp4_linear
from hipforge.ops.mxfp4_gemm.family import FAMILY as MXFP4
from hipforge.ops.mxfp4_gemm.kernels import made
from hipforge.ops.mxfp4_gemm.raw import Problem, launch
from hipforge.ops.mxfp4_made import FAMILY
from hipforge.ops.mxfp8_gemm import mxfp8_linear
from hipforge.ops.mxfp8_gemm.kernels import row_stream_made
from hipforge.ops.rmsnorm_fp8 import require_norm_operands, residual_rms_mxfp8
from hipforge.ops.swiglu_fp8 import check_activation, swiglu_mxfp8

_BF16 = torch.bfloat16
QUANTISE_US = 1.9  # of a launch that quantises few rows, by the model of time


def _planned(op: str, two: str, refusal: str | None, device: torch.device, module: str) -> Decision:
    """Return the decision for one launch, not yet configured, or for two where ``refusal`` or the device says so."""
    if invariance.STATE.on:
        refusal = "a result that does not depend on the other rows needs the launches of their own"
    decision = plan_kernel(op, device, refusal, module=module)
    assert decision.accepted is not None
    if decision.accepted.path != "kernel":
        return replace(decision, accepted=replace(decision.accepted, kernel=two, reason="two launches"))
    return decision


def _decided(op: str, two: str, refusal: str | None, device: torch.device, key: tuple[int, int, int]) -> Decision:
    decision = _planned(op, two, refusal, device, row_stream_made.MODULE)
    assert decision.accepted is not None
    if decision.accepted.path != "kernel":
        return decision
    units = devices.current().cu_count(device.index or 0)
    found: Mapping[str, int] = MappingProxyType(row_stream_made.configuration(*key[1:], units))
    return replace(decision, accepted=replace(decision.accepted, configuration=found))


def _plan_quantised(x: Described, wq: Described, w_scale: Described, shuffled: bool) -> Decision:
    problem = Problem.of_floats(x, wq, w_scale, shuffled=shuffled)
    refusal = None if x.dtype in HALVES else f"x of float16 or bfloat16; got {x.dtype}"
    target = dispatch.target_of(x.device)
    taken = None
    if refusal is None and not isinstance(target, dispatch.Refused) and target[0] in FAMILY.archs:
        found = FAMILY.decide(problem)
        taken = found.accepted
        refusal = found.refused[0].reason if taken is None else _two_are_faster(problem, *target, taken.row)
    decision = _planned("quantize_mxfp4_linear", "mxfp4_quantize, mxfp4_linear", refusal, x.device, made.MODULE)
    assert decision.accepted is not None
    return replace(decision, accepted=taken) if taken and decision.accepted.path == "kernel" else decision


def _two_are_faster(problem: Problem, arch: str, cu_count: int, row: TunedRow | None) -> str | None:
    """Return why one launch is not taken, or None; rough times decide where none was measured."""
    if row is not None and row.values["us"] is not None:
        return None
    us = min(one[0] for one in made.MADE.default(problem, arch, cu_count))
    able = (kernel for kernel in MXFP4.kernels if arch in kernel.archs)
    two_us = QUANTISE_US + min(one[0] for kernel in able for one in kernel.default(problem, arch, cu_count))
    return None if us <= two_us else f"two launches are faster by the rough times: {two_us:.1f} us for {us:.1f}"


def _plan_norm(x: Described, wq: Described) -> Decision:
    m, n, k = require_factors(x, wq, ("x", "wq"))
    refusal = None if x.dtype == _BF16 else f"x of bfloat16; got {x.dtype}"
    refusal = refusal or row_stream_made.norm_refusal(m, n, k)
    return _decided("residual_rms_mxfp8_linear", "residual_rms_mxfp8, mxfp8_linear", refusal, x.device, (m, n, k))


def _plan_swiglu(
    gate_up: Described, wq: Described, alpha: float, beta: float, limit: float | None, interleaved: bool
) -> Decision:
    check_activation(alpha, beta, limit)
    require_rank("gate_up", gate_up, 2, "[M, 2 K]")
    require_rank("wq", wq, 2, "[N, K]")
    m, n, k = gate_up.shape[0], *wq.shape
    require_shape("gate_up", gate_up, (m, 2 * k), "[M, 2 K] with wq's K")
    refusal = None if gate_up.dtype == _BF16 else f"gate_up of bfloat16; got {gate_up.dtype}"
    refusal = refusal or ("gate and up that do not take turns" if interleaved else None)
    refusal = refusal or row_stream_made.swiglu_refusal(m, n, k)
    return _decided("swiglu_mxfp8_linear", "swiglu_mxfp8, mxfp8_linear", refusal, gate_up.device, (m, n, k))


def _new(x: torch.Tensor, wq: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.size(0), wq.size(0)), dtype=_BF16, device=x.device)


@operator(_plan_norm, fake=lambda x, wq: (_new(x, wq), torch.empty_like(x)), outs=("out", "sum_out"))
def residual_rms_mxfp8_linear(
    taken: Accepted,
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    sum_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`hipforge.mxfp8_linear` makes of :func:`hipforge.residual_rms_mxfp8`, and the residual sum.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: contiguous bfloat16 [M, K], K a multiple of 32.
        residual: like x; it stays as it is, because every block reads it.
        norm_weight: bfloat16 [K].
        epsilon: added to the mean square.
        wq: weights [N, K] in the device's e4m3.
        w_scale: e8m0 bytes [N, K/32].
        bias: bfloat16 [N].
        weight_offset: added to ``norm_weight``.
        out: contiguous bfloat16 [M, N] to write into.
        sum_out: like x, in other memory than x and residual, for x + residual.

    Returns:
        ``(y, sum)``: bfloat16 [M, N], and x + residual, rounded to bfloat16; ``out`` and ``sum_out`` where given.

    Raises:
        GuardError: operands of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch
        >>> from hipforge.ops.fused_linear import residual_rms_mxfp8_linear
        >>> import hipforge
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.ones(8, 64))
        >>> x = torch.ones(1, 64).bfloat16()
        >>> y, total = residual_rms_mxfp8_linear(x, x, torch.ones(64).bfloat16(), 0.0, w, w_scale)
        >>> y[0, 0].item(), total[0, 0].item()
        (64.0, 2.0)
    """
    result = product_result(x, wq, _BF16, out, bias)
    total = new_or_given(sum_out, x.shape, x.dtype, x.device, "sum_out")
    if taken.path == "kernel":
        row_stream_made.mxfp8_row_stream_norm_out(
            result, total, x, residual, norm_weight, wq, w_scale, bias, epsilon, weight_offset,
            *taken.configuration.values(), programmatic.active(),
        )  # fmt: skip
        return result, total
    require_norm_operands(x, residual, norm_weight)
    total.copy_(residual)
    q, scale, _ = residual_rms_mxfp8(x, total, norm_weight, epsilon, weight_offset=weight_offset)
    return mxfp8_linear(q, scale, wq, w_scale, bias, out=result), total


@operator(_plan_swiglu, fake=lambda gate_up, wq: _new(gate_up, wq), outs=("out",))
def swiglu_mxfp8_linear(
    taken: Accepted,
    gate_up: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what :func:`hipforge.mxfp8_linear` makes of :func:`hipforge.swiglu_mxfp8`.

    Args:
        taken: the path that was decided; callers do not pass it.
        gate_up: contiguous bfloat16 [M, 2 K], K a multiple of 32.
        wq: weights [N, K] in the device's e4m3.
        w_scale: e8m0 bytes [N, K/32].
        bias: bfloat16 [N].
        alpha: of SwiGLU, as the next three.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        interleaved: gate in the even columns of ``gate_up``, up in the odd ones.
        out: contiguous bfloat16 [M, N] to write into.

    Returns:
        bfloat16 [M, N]; ``out`` itself where it is given.

    Raises:
        GuardError: operands of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch
        >>> from hipforge.ops.fused_linear import swiglu_mxfp8_linear
        >>> import hipforge
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.ones(8, 64))
        >>> y = swiglu_mxfp8_linear(torch.full((1, 128), 64.0).bfloat16(), w, w_scale)
        >>> y[0, 0].item()
        262144.0
    """
    result = product_result(gate_up, wq, _BF16, out, bias)
    if taken.path == "kernel":
        row_stream_made.mxfp8_row_stream_swiglu_out(
            result, gate_up, wq, w_scale, bias, alpha, beta, math.inf if limit is None else limit,
            *taken.configuration.values(), programmatic.active(),
        )  # fmt: skip
        return result
    q, scale = swiglu_mxfp8(gate_up, alpha=alpha, beta=beta, limit=limit, interleaved=interleaved)
    return mxfp8_linear(q, scale, wq, w_scale, bias, out=result)


@operator(_plan_quantised, fake=lambda x, wq: _new(x, wq), outs=("out",))
def quantize_mxfp4_linear(
    taken: Accepted,
    x: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    shuffled: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what :func:`hipforge.mxfp4_linear` makes of :func:`hipforge.mxfp4_quantize` in mode ``even``.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: float32, float16 or bfloat16 [M, K], any strides, K a multiple of 32. One launch quantises and multiplies
            float16 and bfloat16 on gfx950 for M up to 256, where that is faster by the rough times.
        wq: weights [N, K/2].
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        bias: bfloat16 [N], added to the rounded product.
        shuffled: the weight and its scales are in the shuffled order.
        out: contiguous bfloat16 [M, N] to write into.

    Returns:
        bfloat16 [M, N]; ``out`` itself where it is given.

    Raises:
        GuardError: operands, ``bias`` or ``out`` of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch
        >>> from hipforge.ops.fused_linear import quantize_mxfp4_linear
        >>> import hipforge
        >>> w, w_scale = hipforge.mxfp4_quantize(torch.ones(16, 128))
        >>> quantize_mxfp4_linear(torch.full((1, 128), 2.0).bfloat16(), w, w_scale)[0, 0].item()
        256.0
    """
    if taken.path != "kernel":
        return mxfp4_linear(*mxfp4_quantize(x.contiguous()), wq, w_scale, bias, out, shuffled=shuffled)
    n = wq.shape[0]
    result = new_or_given(out, (x.shape[0], n), _BF16, x.device)
    if bias is not None:
        require_bias(bias, n, _BF16, x.device)
        require_sound("quantize_mxfp4_linear", {"bias": bias, "out": result}, ("out",))  # no binding sees the bias
    launch(made.MADE, taken.configuration, result, x, None, wq, w_scale, shuffled)
    return result if bias is None else result.add_(bias)
