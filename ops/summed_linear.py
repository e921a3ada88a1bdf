"""MX-FP8 products around a sum over GPUs, on sm_90, for a row or two: no launch is between a product and the next.

``o_proj`` and ``down`` send each element to all GPUs as they make it (:func:`send_mxfp8_linear`,
:func:`send_swiglu_mxfp8_linear`); the product behind the sum makes its activations, the norm of the residual stream, of
what comes (:func:`summed_rms_mxfp8_linear`). The results are those of :func:`hipforge.mxfp8_linear`,
:func:`hipforge.all_reduce` and :func:`hipforge.ops.fused_linear.residual_rms_mxfp8_linear`, bit for bit where the
products are in the same configuration. :func:`refusal` says where they are not for; others add up with
:func:`hipforge.all_reduce_residual_rms_mxfp8`.

The two ends take turns: a call that sends, then one that receives, on all GPUs, with the same rows and columns always.
"""

from __future__ import annotations

import math

import torch

from hipforge import devices
from hipforge.jit import registry
from hipforge.ops.core import programmatic
from hipforge.ops.core.kernel import Configuration
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.kernels import row_stream_made
from hipforge.ops.peers import Peers

MODULE = "module_mxfp8_gemm_row_stream_summed"
_CONFIGURATION = "tiles, sharers, blocks: int; programmatic: bool"

mxfp8_row_stream_send_out = stub(
    "mxfp8_row_stream_send_out",
    MODULE,
    f"buffer, Xq, Xs, Wq, Ws: Tensor; bias: Tensor?; addresses: Tensor; rank, {_CONFIGURATION}",
    "Send X @ Wq^T + bias, bf16 [M, N], to all ranks.",
    variant={"HF_TILES": "tiles"},
    mutates=("buffer",),
)
mxfp8_row_stream_swiglu_send_out = stub(
    "mxfp8_row_stream_swiglu_send_out",
    MODULE,
    "buffer, gate_up, Wq, Ws: Tensor; bias: Tensor?; addresses: Tensor; alpha, beta, limit: float; "
    f"rank, {_CONFIGURATION}",
    "Send swiglu(gate_up) @ Wq^T + bias, bf16 [M, N], to all ranks.",
    variant={"HF_TILES": "tiles"},
    mutates=("buffer",),
)
mxfp8_row_stream_summed_norm_out = stub(
    "mxfp8_row_stream_summed_norm_out",
    MODULE,
    "out, sum_out, buffer, residual, norm_weight, Wq, Ws: Tensor; bias: Tensor?; addresses: Tensor; "
    f"epsilon, weight_offset: float; rank, polls, {_CONFIGURATION}",
    "Write norm(residual + sum) @ Wq^T + bias into ``out`` [M, N] bf16, and residual + sum into ``sum_out`` [M, K].",
    variant={"HF_TILES": "tiles"},
    mutates=("out", "sum_out", "buffer"),
)


def refusal(m: int, hidden: int, *, sending: tuple[int, ...], receiving: tuple[int, ...]) -> str | None:
    """Return what the products need and a model's layers do not have, or None.

    Args:
        m: rows.
        hidden: columns of what is added up.
        sending: K of the products that send; their N is ``hidden``.
        receiving: N of those behind a sum; their K is ``hidden``.
    """
    archs = registry.module(MODULE).archs
    if devices.current().arch_of() not in archs:
        return f"the kernels are for {' and '.join(archs)}"
    found = [row_stream_made.norm_refusal(m, n, hidden) for n in receiving]
    found += [row_stream_made.swiglu_refusal(m, hidden, k) for k in sending]
    return next((reason for reason in found if reason is not None), None)


def _configuration(wq: torch.Tensor) -> Configuration:
    n, k = wq.shape
    return row_stream_made.configuration(n, k, devices.current().cu_count(wq.device.index or 0))


def send_mxfp8_linear(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    peers: Peers,
    bias: torch.Tensor | None = None,
) -> None:
    """Send X W^T + bias, rounded to bfloat16, to all ranks.

    Args:
        xq: e4m3 [M, K].
        x_scale: e8m0 bytes [M, K / 32].
        wq: weights e4m3 [N, K], this rank's columns of them.
        w_scale: e8m0 bytes [N, K / 32].
        peers: of M rows and N columns, which only these functions use.
        bias: bfloat16 [N], of one rank alone.

    Raises:
        GuardError: operands of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    buffer, addresses, rank, _ = peers
    mxfp8_row_stream_send_out(
        buffer, xq, x_scale, wq, w_scale, bias, addresses, rank, *_configuration(wq).values(), programmatic.active()
    )


def send_swiglu_mxfp8_linear(
    gate_up: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    peers: Peers,
    bias: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> None:
    """Send SwiGLU(gate_up) W^T + bias, rounded to bfloat16, to all ranks.

    Args:
        gate_up: contiguous bfloat16 [M, 2 K], gate in its first K columns.
        wq: weights e4m3 [N, K], this rank's columns of them.
        w_scale: e8m0 bytes [N, K / 32].
        peers: of M rows and N columns, which only these functions use.
        bias: bfloat16 [N], of one rank alone.
        alpha: of SwiGLU, as the next two.
        beta: added to up.
        limit: where gate and up are clamped, or None.

    Raises:
        GuardError: operands of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    buffer, addresses, rank, _ = peers
    mxfp8_row_stream_swiglu_send_out(
        buffer, gate_up, wq, w_scale, bias, addresses, alpha, beta, math.inf if limit is None else limit, rank,
        *_configuration(wq).values(), programmatic.active(),
    )  # fmt: skip


def summed_rms_mxfp8_linear(
    peers: Peers,
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
    """Return norm(residual + sum) W^T + bias and residual + sum, the sum that of what all ranks have sent.

    A rank whose elements do not come within ``peers.polls`` reads is an error of the device.

    Args:
        peers: of M rows and K columns, which only these functions use.
        residual: contiguous bfloat16 [M, K]; it stays as it is, because every block reads it.
        norm_weight: bfloat16 [K].
        epsilon: added to the mean square.
        wq: weights e4m3 [N, K].
        w_scale: e8m0 bytes [N, K / 32].
        bias: bfloat16 [N].
        weight_offset: added to ``norm_weight``.
        out: contiguous bfloat16 [M, N] to write into.
        sum_out: like residual, in other memory, for residual + sum.

    Returns:
        ``(y, sum)``: bfloat16 [M, N], and residual + sum, rounded to bfloat16; ``out`` and ``sum_out`` where given.

    Raises:
        GuardError: operands of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    out = new_or_given(out, (residual.shape[0], wq.shape[0]), torch.bfloat16, residual.device)
    sum_out = new_or_given(sum_out, residual.shape, torch.bfloat16, residual.device)
    buffer, addresses, rank, polls = peers
    mxfp8_row_stream_summed_norm_out(
        out, sum_out, buffer, residual, norm_weight, wq, w_scale, bias, addresses, epsilon, weight_offset, rank, polls,
        *_configuration(wq).values(), programmatic.active(),
    )  # fmt: skip
    return out, sum_out
