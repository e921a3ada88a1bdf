"""MoE grouped GEMM over fp8 with scales per tensor, per row, or per block: every routed slot times its expert's weight.

``a_q`` [M_act, K] and ``w`` [E, N, K] hold e4m3 elements in the device's format: float8_e4m3fn (or uint8 with the same
bits), on gfx942 float8_e4m3fnuz. Slots, tiles and experts are those of :mod:`hipforge.ops.mxfp8_grouped_gemm`. Scales
are of the kinds of :mod:`hipforge.ops.fp8_gemm`, ``w_scale`` with those of each expert; shapes and dtypes say which:

================  ==============================  =====================================  ==============================
kind              ``a_scale``                     ``w_scale``                            dtype of both
================  ==============================  =====================================  ==============================
per tensor, row   one element, [M_act],           [E], [E, 1], [E, N] or [E, N, 1]       float32
                  or [M_act, 1]
128 x 128 blocks  [M_act, ceil(K / 128)]          [E, ceil(N / 128), ceil(K / 128)]      float32, or e8m0
32 x 32 blocks    [M_act, K / 32]                 [E, ceil(N / 32), K / 32]              e8m0 (K a multiple of 32)
================  ==============================  =====================================  ==============================

Sums, scales and NaN are those of :func:`hipforge.fp8_gemm`; then the bias is added and the slot's weight multiplied,
in float32, and the result is rounded once to bfloat16. The kernel reads rows of a multiple of 16 bytes: another K is
for torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.family import Family
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.kernel import Configuration, kernel_table
from hipforge.ops.core.operator import operator
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tuned import NEXT, Column, gemm_shape
from hipforge.ops.moe_align import moe_align_block_size
from hipforge.ops.mxfp8_grouped_gemm import family as mx
from hipforge.ops.mxfp8_grouped_gemm import grouped_gemm_mxfp8, new_result, run
from hipforge.ops.mxfp8_grouped_gemm.kernels import launch_aligned, wave_split
from hipforge.ops.mxfp8_grouped_gemm.reference import OPERANDS, ROUTED, Operands, by_expert
from hipforge.ops.reference.e8m0 import product_dtype
from hipforge.ops.reference.fp8 import Scales, fp8_mm, quantize_fp8_rows, scales_of

PUBLIC = ("grouped_fp8_linear", "grouped_gemm_fp8")
EXAMPLES = {
    "grouped_fp8_linear": "M=4,N=1536,K=4096,E=8,TOPK=2",
    "grouped_gemm_fp8": "M=4,N=1536,K=4096,E=8,TOPK=2",
}

KERNEL = "fp8_grouped_split"
_ROW_BYTES = 16

fp8_grouped_split_out = stub(
    "fp8_grouped_split_out",
    "module_fp8_grouped_gemm_split",
    f"out, {OPERANDS}; {ROUTED}; scales, rows, waves, columns: int",
    "Write the rows of ``out`` that tiles in use cover; K a multiple of 16; ``scales`` as in ``Scales``.",
    variant={"HF_ROWS": "rows", "HF_SCALES": "scales"},
)


@dataclass(frozen=True)
class Problem(mx.Problem):
    """``slots`` rows of activations [M_act, K], each times its expert's weight [N, K]."""

    scales: Scales = Scales.ONCE

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N, K, a_div, has_weight and the rows of W that share scales."""
        return (*super().key, self.scales.block)

    @classmethod
    def given(
        cls,
        a_q: checks.Described,
        a_scale: checks.Described,
        w: checks.Described,
        w_scale: checks.Described,
        sorted_token_ids: checks.Described,
        expert_ids: checks.Described,
        num_tokens_post_padded: checks.Described,
        num_valid_tokens: int,
        block_m: int,
        a_div: int,
        mul_weight_by: checks.Described | None = None,
    ) -> Problem:
        """Return the problem of operands; raises GuardError for ones that are malformed."""
        checks.require_tensor(a_scale=a_scale, w_scale=w_scale)
        indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens, block_m, a_div
        problem = cls.unscaled(a_q, w, *indices, mul_weight_by)
        for name, scale in (("a_scale", a_scale), ("w_scale", w_scale)):
            checks.require_device(name, scale, problem.device)
        scales = scales_of(problem.m_act, problem.n, problem.k, a_scale, w_scale, problem.experts)
        return replace(problem, scales=scales)


def _envelope(problem: Problem, arch: str) -> str | None:
    if problem.k % _ROW_BYTES:
        return f"K must be a multiple of {_ROW_BYTES}; got {problem.k}"
    return mx.envelope(problem, arch)


WAVE_SPLIT = replace(wave_split.WAVE_SPLIT, name=KERNEL, launch=fp8_grouped_split_out)


FAMILY = Family(
    problem=Problem.given,
    table=kernel_table(
        "fp8_grouped_gemm",
        (WAVE_SPLIT,),
        shape=gemm_shape(NEXT),
        extra_key=(*mx.EXTRA_KEY, Column("block", int, accepted=(0, 32, 128))),
    ),
    kernels=(WAVE_SPLIT,),
    archs=WAVE_SPLIT.archs,
    envelope=_envelope,
    reference="fp8_mm",
    invariant=mx.invariant_of(WAVE_SPLIT),
)


def grouped_mm(parts: Operands) -> torch.Tensor:
    """Return the product in float32, by torch."""
    compute = product_dtype(*(scale for scale in (parts.a_scale, parts.w_scale) if scale.dtype != torch.float32))
    one = parts.a_scale.numel() == 1 < len(parts.a_q)  # of several rows; a row's own has its row's shape

    def product(rows: torch.Tensor, expert: int) -> torch.Tensor:
        a_scale = parts.a_scale.flatten() if one else parts.a_scale[rows]
        return fp8_mm(parts.a_q[rows], a_scale, parts.w[expert], parts.w_scale[expert], torch.float32, compute)

    return by_expert(parts, product)


def example(op: str, tokens: int, n: int, k: int, experts: int, top_k: int) -> functools.partial[Any]:
    """Return a call of an op, with a scale per row, for ``hipforge profile``."""
    x, w = torch.randn(tokens, k), torch.randn(experts * n, k) * 0.1
    (a_q, a_scale), (w_q, w_scale) = (quantize_fp8_rows(part, fp8_dtypes("cpu")[0]) for part in (x, w))
    ids = torch.rand(tokens, experts).topk(top_k, dim=1).indices.int()
    slots = moe_align_block_size(ids, 64, experts)
    function: Any = {"grouped_gemm_fp8": grouped_gemm_fp8, "grouped_fp8_linear": grouped_fp8_linear}[op]
    weights = w_q.view(experts, n, k), w_scale.view(experts, n)
    counts: dict[str, Any] = {"num_valid_tokens": tokens * top_k, "block_m": 64, "a_div": top_k}
    return functools.partial(function, a_q, a_scale, *weights, *slots, **counts)


def _run(taken: Accepted, parts: Operands, out: torch.Tensor | None, uncovered: str) -> torch.Tensor:
    def start(kernel: str, configuration: Configuration, result: torch.Tensor, operands: Operands) -> None:
        def launch(given: Operands) -> None:
            routed = given.mul_weight_by, given.bias, *given.sizes, int(taken.problem.scales)
            WAVE_SPLIT.run(configuration, (), result, *given.tensors, *routed)

        launch_aligned(launch, operands)

    return run(taken, parts, out, uncovered, grouped_mm, start)


@operator(FAMILY.plan, fake=new_result, outs=("out",))
@documented_like(grouped_gemm_mxfp8)
def grouped_gemm_fp8(
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
        a_q: activations [M_act, K], any strides; slot t reads row t // ``a_div``.
        a_scale: their scales, of a kind that :mod:`hipforge.ops.fp8_grouped_gemm` lists.
        w: weights [E, N, K].
        w_scale: their scales, of the same kind.

    Returns:
        bfloat16 [num_valid_tokens, N], with rows that no tile covers as ``uncovered`` says; None outside the envelope,
        as ``hipforge.explain(grouped_gemm_fp8, ...)`` says.

    Raises:
        GuardError: operands or indices of the wrong dtype, shape or device, or scales of no kind.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.fp8_quant_rows(torch.ones(2, 64))
        >>> w, w_scale = (part.unflatten(0, (2, 16)) for part in hipforge.fp8_quant_rows(torch.ones(32, 64)))
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
        >>> y = hipforge.grouped_gemm_fp8(x, x_scale, w, w_scale, *slots, 2, 16, 1)
        >>> None if y is None else y[:, 0].tolist()
        [64.0, 64.0]
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w, w_scale, *indices, block_m, a_div, mul_weight_by, bias)
    return _run(taken, parts, out, uncovered)


@operator(FAMILY.plan_total, fake=new_result, outs=("out",))
@documented_like(grouped_gemm_fp8)
def grouped_fp8_linear(
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
        >>> x, x_scale = hipforge.fp8_quant_blocks(torch.ones(2, 256))
        >>> w, w_scale = (part.unflatten(0, (2, 16)) for part in hipforge.fp8_quant_blocks(torch.ones(32, 256)))
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
        >>> hipforge.grouped_fp8_linear(x, x_scale, w, w_scale[:, :1], *slots, 2, 16, 1)[:, 0].tolist()
        [256.0, 256.0]
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w, w_scale, *indices, block_m, a_div, mul_weight_by, bias)
    return _run(taken, parts, out, uncovered)
