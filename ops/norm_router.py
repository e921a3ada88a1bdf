"""The residual norm before a mixture of experts and its router's logits: one launch for few tokens on sm_90."""

from __future__ import annotations

from dataclasses import replace

import torch

from hipforge.ops.core import invariance, programmatic
from hipforge.ops.core.checks import Described, require_dtype, require_factors
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import BLOCK, HALVES
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given, new_or_given_mxfp8
from hipforge.ops.core.stub import stub
from hipforge.ops.rmsnorm_fp8 import require_norm_operands, residual_rms_mxfp8
from hipforge.ops.router_gemm import router_gemm

MODULE = "module_norm_router"
MOST_TOKENS = 16  # every block makes its token's norm again: for more, launches of their own take less
MOST_HIDDEN = 8192  # a thread has two chunks of 8 of it
_WEIGHTS = {torch.float32: "f32", torch.bfloat16: "bf16"}

norm_router_out = stub(
    "norm_router_out",
    MODULE,
    "logits, sum_out, q, q_scales, x, residual, norm_weight, w: Tensor; bias: Tensor?; epsilon, weight_offset: float; "
    "programmatic: bool",
    "Write what :func:`residual_rms_mxfp8_router` returns.",
    variant=lambda logits, sum_out, q, q_scales, x, residual, norm_weight, w, *rest: {"HF_WEIGHT": _WEIGHTS[w.dtype]},
    mutates=("logits", "sum_out", "q", "q_scales"),
)


def refusal(tokens: int, hidden: int) -> str | None:
    """Return what one launch needs and rows [tokens, hidden] do not have, or None."""
    if not 1 <= tokens <= MOST_TOKENS or hidden > MOST_HIDDEN or hidden % BLOCK:
        wanted = f"1 to {MOST_TOKENS} tokens and H of a multiple of {BLOCK} up to {MOST_HIDDEN}"
        return f"{wanted}; got {tokens} and H={hidden}"
    return None


def _plan(x: Described, w: Described) -> Decision:
    require_dtype("x", x, tuple(HALVES))
    m, _, k = require_factors(x, w, ("x", "w"))
    reason = None if x.dtype == torch.bfloat16 else f"x of bfloat16; got {x.dtype}"
    if invariance.STATE.on:
        reason = "a result that does not depend on the other rows needs the launches of their own"
    decision = plan_kernel("residual_rms_mxfp8_router", x.device, reason or refusal(m, k), module=MODULE)
    taken = decision.accepted
    if taken is None or taken.path == "kernel":
        return decision
    return replace(decision, accepted=replace(taken, kernel="residual_rms_mxfp8, router_gemm", reason="two launches"))


def _new(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)
    return logits, torch.empty_like(x), *new_or_given_mxfp8(x, x.shape)


@operator(_plan, fake=_new, outs=("out", "sum_out", "q_out", "scale_out"))
def residual_rms_mxfp8_router(
    taken: Accepted,
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    epsilon: float,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    sum_out: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what :func:`hipforge.router_gemm` makes of a residual norm, the residual sum, and the norm in MX-FP8.

    The bits are those of :func:`hipforge.residual_rms_mxfp8` with ``also_out`` and of :func:`hipforge.router_gemm`.

    Args:
        taken: the path that was decided; callers do not pass it.
        x: contiguous bfloat16 [T, H], H a multiple of 32; one launch takes up to 16 tokens with H up to 8192.
        residual: like x; it stays as it is, because every block reads it.
        norm_weight: bfloat16 [H].
        epsilon: added to the mean square.
        w: the router's weights, contiguous float32 or bfloat16 [E, H].
        bias: float32 [E], added to the logits.
        weight_offset: added to ``norm_weight``.
        out: contiguous float32 [T, E] to write the logits into.
        sum_out: like x, in other memory than x and residual, for x + residual.
        q_out: e4m3 [T, H] to write the norm's elements into.
        scale_out: e8m0 bytes [T, H/32] to write their scales into.

    Returns:
        ``(logits, sum, q, scale)``; ``out``, ``sum_out``, ``q_out`` and ``scale_out`` where given.

    Raises:
        GuardError: operands of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch
        >>> from hipforge.ops.norm_router import residual_rms_mxfp8_router
        >>> x = torch.ones(1, 32).bfloat16()
        >>> logits, total, q, scale = residual_rms_mxfp8_router(x, x, torch.ones(32).bfloat16(), 0.0, torch.ones(2, 32))
        >>> logits.tolist(), total[0, 0].item()
        ([[32.0, 32.0]], 2.0)
    """
    logits = new_or_given(out, (x.shape[0], w.shape[0]), torch.float32, x.device)
    total = new_or_given(sum_out, x.shape, x.dtype, x.device, "sum_out")
    q, scale = new_or_given_mxfp8(x, x.shape, q_out, scale_out)
    if taken.path == "kernel":
        norm_router_out(
            logits, total, q, scale, x, residual, norm_weight, w, bias, epsilon, weight_offset, programmatic.active()
        )
        return logits, total, q, scale
    require_norm_operands(x, residual, norm_weight)
    y = torch.empty_like(x)
    total.copy_(residual)
    residual_rms_mxfp8(
        x, total, norm_weight, epsilon, weight_offset=weight_offset, out=q, scale_out=scale, also_out=y
    )
    return router_gemm(y, w, bias, out=logits), total, q, scale
