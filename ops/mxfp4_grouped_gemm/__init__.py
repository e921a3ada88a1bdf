"""MoE grouped GEMM with MXFP4 weights and MX-FP8 activations: every routed slot's row times its expert's weight.

``a_q`` [M_act, K] holds e4m3 elements in the device's format (float8_e4m3fn, or uint8 with the same bits; on gfx942
float8_e4m3fnuz), ``w`` [E, N, K/2] two e2m1 elements per byte, the even one in the low nibble (uint8 or
float4_e2m1fn_x2), in plain order; ``a_scale`` [M_act, K/32] and ``w_scale`` [E, N, K/32] hold e8m0 bytes. K is a
multiple of 32. Slots, tiles, experts, biases and weights are those of :mod:`hipforge.ops.mxfp8_grouped_gemm`; products
are exact in float32, summed in it, and rounded once to bfloat16.

On gfx950 the matrix instruction takes both formats as they are; on gfx942 the kernel makes e4m3 of e2m1 elements, which
it holds exactly. With a K of 128 to 512 and many experts gfx950 streams rows of W past slots in registers. On sm_90 the
kernel makes f16 of both.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.kernel import Configuration
from hipforge.ops.core.operator import operator
from hipforge.ops.core.stub import stub
from hipforge.ops.gate_up_split import MXFP4
from hipforge.ops.moe_align import moe_align_block_size
from hipforge.ops.moe_gate_up import GateUp, launch_split, new_gate_up, planned, split_configuration
from hipforge.ops.moe_gate_up import run as run_gate_up
from hipforge.ops.mxfp4_grouped_gemm import streams
from hipforge.ops.mxfp4_grouped_gemm.family import BY_NAME, FAMILY, KERNEL
from hipforge.ops.mxfp8_grouped_gemm import grouped_gemm_mxfp8, new_result, run
from hipforge.ops.mxfp8_grouped_gemm.kernels import launch_aligned
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, Operands, by_expert
from hipforge.ops.reference import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
from hipforge.ops.reference.e8m0 import product_dtype

PUBLIC = ("grouped_gemm_mxfp4", "grouped_mxfp4_linear")
EXAMPLES = {
    "grouped_gemm_mxfp4": "M=4,N=1536,K=2880,E=8,TOPK=2",
    "grouped_mxfp4_linear": "M=4,N=1536,K=2880,E=8,TOPK=2",
}

GATE_UP_KERNEL = "mxfp4_gate_up"

mxfp4_gate_up_out = stub(
    "mxfp4_gate_up_out",
    "module_mxfp4_grouped_gemm_gate_up",
    f"{GATE_UP}; workspace: Tensor?; rows, parts, groups: int",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    variant={"HF_ROWS": "rows"},
    mutates=("out", "out_scales", "workspace"),
)


def grouped_mm(parts: Operands) -> torch.Tensor:
    """Return the product in float32, by torch."""
    compute = product_dtype(parts.a_scale, parts.w_scale)
    activations = dequantize_mxfp8(parts.a_q, parts.a_scale, compute)
    return by_expert(
        parts, lambda rows, e: activations[rows] @ dequantize_mxfp4(parts.w[e], parts.w_scale[e], compute).T
    )


def example(op: str, tokens: int, n: int, k: int, experts: int, top_k: int) -> functools.partial[Any]:
    """Return a call of an op for ``hipforge profile``."""
    a_q, a_scale = quantize_mxfp8(torch.randn(tokens, k), fp8_dtypes("cpu")[0])
    # All experts have one weight: making those of hundreds takes minutes.
    weights = (part.expand(experts, -1, -1).contiguous() for part in quantize_mxfp4(torch.randn(n, k) * 0.1))
    slots = moe_align_block_size(torch.rand(tokens, experts).topk(top_k, dim=1).indices.int(), 64, experts)
    function: Any = {"grouped_gemm_mxfp4": grouped_gemm_mxfp4, "grouped_mxfp4_linear": grouped_mxfp4_linear}[op]
    counts = {"num_valid_tokens": tokens * top_k, "block_m": 64, "a_div": top_k}
    return functools.partial(function, a_q, a_scale, *weights, *slots, **counts)


def _start(kernel: str, configuration: Configuration, result: torch.Tensor, operands: Operands) -> None:
    def launch(given: Operands) -> None:
        routed = given.mul_weight_by, given.bias, *given.sizes
        BY_NAME[kernel].run(configuration, (), result, *given.tensors, *routed)

    launch_aligned(launch, operands)


@operator(FAMILY.plan, fake=new_result, outs=("out",))
@documented_like(grouped_gemm_mxfp8)
def grouped_gemm_mxfp4(
    taken: Accepted,
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    num_valid_tokens: int,
    block_m: int,
    a_div: int,
    mul_weight_by: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    uncovered: str = "zero",
) -> torch.Tensor | None:
    """Multiply each slot's activation row with its expert's weight, or return None where the fallback must.

    Args:
        a_q: activations [M_act, K] in the device's e4m3, any strides; slot t reads row t // ``a_div``.
        a_scale: e8m0 bytes [M_act, K/32].
        w: weights [E, N, K/2], two e2m1 elements per byte.
        w_scale: e8m0 bytes [E, N, K/32].

    Returns:
        bfloat16 [num_valid_tokens, N], with rows that no tile covers as ``uncovered`` says; None outside the envelope,
        as ``hipforge.explain(grouped_gemm_mxfp4, ...)`` says.

    Raises:
        GuardError: operands or indices of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(2, 64))
        >>> w, w_scale = (part.view(2, 16, -1) for part in hipforge.mxfp4_quantize(torch.ones(32, 64)))
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
        >>> y = hipforge.grouped_gemm_mxfp4(x, x_scale, w, w_scale, *slots, 2, 16, 1)
        >>> None if y is None else y[:, 0].tolist()
        [64.0, 64.0]
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w.view(torch.uint8), w_scale, *indices, block_m, a_div, mul_weight_by, bias)
    return run(taken, parts, out, uncovered, grouped_mm, _start)


@operator(FAMILY.plan_total, fake=new_result, outs=("out",))
@documented_like(grouped_gemm_mxfp4)
def grouped_mxfp4_linear(
    taken: Accepted,
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    num_valid_tokens: int,
    block_m: int,
    a_div: int,
    mul_weight_by: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    uncovered: str = "zero",
) -> torch.Tensor:
    """Multiply each slot's activation row with its expert's weight, always: the kernel where it applies, else torch.

    Returns:
        bfloat16 [num_valid_tokens, N], with rows that no tile covers as ``uncovered`` says.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(2, 64))
        >>> w, w_scale = (part.view(2, 16, -1) for part in hipforge.mxfp4_quantize(torch.ones(32, 64)))
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
        >>> hipforge.grouped_mxfp4_linear(x, x_scale, w, w_scale, *slots, 2, 16, 1)[:, 0].tolist()
        [64.0, 64.0]
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w.view(torch.uint8), w_scale, *indices, block_m, a_div, mul_weight_by, bias)
    return run(taken, parts, out, uncovered, grouped_mm, _start)


_SPLIT = functools.partial(split_configuration, kind=MXFP4)
FUSED = {KERNEL: GateUp(GATE_UP_KERNEL, _SPLIT, functools.partial(launch_split, mxfp4_gate_up_out)), **streams.FUSED}


@operator(planned(FAMILY.plan_total, FUSED, packing=2), fake=new_gate_up)
@documented_like(grouped_mxfp4_linear)
def grouped_swiglu_mxfp4(
    taken: Accepted,
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    num_valid_tokens: int,
    block_m: int,
    a_div: int,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`hipforge.swiglu_mxfp8` makes of :func:`hipforge.grouped_mxfp4_linear`'s gate and up.

    Args:
        w: weights [E, 2 d, K/2], d a multiple of 32.
        w_scale: e8m0 bytes [E, 2 d, K/32].
        bias: float32 [E, 2 d], in the order of ``w``'s rows.
        alpha: of SwiGLU, as the next three.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        interleaved: even rows of ``w`` are the gate's, odd ones up's.

    Returns:
        ``(q, scales)``: [num_valid_tokens, d] in the device's e4m3 and uint8 [num_valid_tokens, d / 32]; rows that no
        tile covers are undefined. Gate and up are rounded to bfloat16 on either path.
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w.view(torch.uint8), w_scale, *indices, block_m, a_div, bias=bias)
    return run_gate_up(taken, FUSED, grouped_mxfp4_linear, parts, (alpha, beta, limit, interleaved))
