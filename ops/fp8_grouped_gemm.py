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

:func:`grouped_swiglu_fp8` is the first product of a layer with SwiGLU and quantisation. With scales of blocks and few
slots they are in the product's launch: it takes 32 results of an expert's slots in each work-group, and the four whose
results share a scale meet (``csrc/mxfp8_grouped_gemm/amd/gate_up_kernel.h``). A scale per row needs the largest of all
of a slot's results, which many more of them have: there the activation is a launch of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core import checks, invariance
from hipforge.ops.core.dispatch import Accepted, Decision
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.family import Family
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.kernel import Configuration, kernel_table
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given_fp8, new_or_given_mxfp8
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tuned import NEXT, Column, gemm_shape
from hipforge.ops.moe_align import moe_align_block_size
from hipforge.ops.moe_gate_up import (
    GateUp,
    Pair,
    split_configuration,
    split_workspace,
    with_activation,
)
from hipforge.ops.moe_gate_up import run as run_gate_up
from hipforge.ops.mxfp8_grouped_gemm import family as mx
from hipforge.ops.mxfp8_grouped_gemm import grouped_gemm_mxfp8, new_result, run
from hipforge.ops.mxfp8_grouped_gemm.kernels import launch_aligned, wave_split
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, OPERANDS, ROUTED, Operands, by_expert
from hipforge.ops.reference.e8m0 import product_dtype
from hipforge.ops.reference.fp8 import (
    Scales,
    fp8_mm,
    quantize_fp8_blocks,
    quantize_fp8_rows,
    quantize_fp8_weights,
    scales_of,
)
from hipforge.ops.swiglu_fp8 import check_activation, swiglu_fp8_dynamic, swiglu_mxfp8

PUBLIC = ("grouped_fp8_linear", "grouped_gemm_fp8", "grouped_swiglu_fp8")
EXAMPLES = {
    "grouped_fp8_linear": "M=4,N=1536,K=4096,E=8,TOPK=2",
    "grouped_gemm_fp8": "M=4,N=1536,K=4096,E=8,TOPK=2",
    "grouped_swiglu_fp8": "M=4,N=1536,K=4096,E=8,TOPK=2",
}

KERNEL, GATE_UP_KERNEL = "fp8_grouped_split", "fp8_gate_up"
_ROW_BYTES = 16
# Of gate and up with SwiGLU in one launch (python op_tests/bench_moe_peers.py --fused): slots, and on gfx942 blocks of
# 32 results for each compute unit. Its waves scale and add each product, so that full compute units do not gain.
MOST_FUSED_SLOTS = 512
MOST_FNUZ_ROUNDS = 2

fp8_grouped_split_out = stub(
    "fp8_grouped_split_out",
    "module_fp8_grouped_gemm_split",
    f"out, {OPERANDS}; {ROUTED}; scales, rows, waves, columns: int",
    "Write the rows of ``out`` that tiles in use cover; K a multiple of 16; ``scales`` as in ``Scales``.",
    variant={"HF_ROWS": "rows", "HF_SCALES": "scales"},
)

fp8_gate_up_out = stub(
    "fp8_gate_up_out",
    "module_fp8_grouped_gemm_gate_up",
    f"{GATE_UP}; scales: int; workspace: Tensor?; rows, parts, groups: int",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: SwiGLU of the product, quantised.",
    variant={"HF_ROWS": "rows", "HF_SCALES": "scales"},
    mutates=("out", "out_scales", "workspace"),
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


WAVE_SPLIT = replace(wave_split.WITHOUT_LINES, name=KERNEL, launch=fp8_grouped_split_out)


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
    """Return a call of an op for ``hipforge profile``, with a scale per row, or per 128 x 128 for gate and up."""
    own, x = fp8_dtypes("cpu")[0], torch.randn(tokens, k)
    routing = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(2))  # as of the grouped MX-FP8 GEMM
    ids = routing.topk(top_k, dim=1).indices.int()
    slots = moe_align_block_size(ids, 64, experts)
    weights: tuple[torch.Tensor, ...]
    if op == "grouped_swiglu_fp8":
        a_q, a_scale = quantize_fp8_blocks(x, own)
        # All experts have one weight: making those of hundreds takes minutes.
        one = quantize_fp8_weights(torch.randn(n, k) * 0.1, own)
        weights = tuple(part.expand(experts, -1, -1).contiguous() for part in one)
        function: Any = grouped_swiglu_fp8
    else:
        a_q, a_scale = quantize_fp8_rows(x, own)
        w_q, w_scale = quantize_fp8_rows(torch.randn(experts * n, k) * 0.1, own)
        weights = w_q.view(experts, n, k), w_scale.view(experts, n)
        function = {"grouped_gemm_fp8": grouped_gemm_fp8, "grouped_fp8_linear": grouped_fp8_linear}[op]
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


# SwiGLU with its quantisation as a launch of its own, by the kind of scales of its result.
_ACTIVATED: dict[Scales, Callable[..., Pair]] = {
    Scales.ONCE: swiglu_fp8_dynamic,
    Scales.BLOCKS: functools.partial(swiglu_fp8_dynamic, out_format="blocks"),
    Scales.BLOCKS_E8M0: functools.partial(swiglu_fp8_dynamic, out_format="blocks", e8m0=True),
    Scales.MX_SHARED: swiglu_mxfp8,
}


def _kind_of_result(scales: Scales, out_format: str | None) -> Scales:
    """Return the kind of scales of gate and up's result, for operands of a kind."""
    if out_format is None:
        return scales
    checks.require_choice("out_format", out_format, ("rows", "blocks", "mx"))
    if out_format == "blocks":
        return Scales.BLOCKS if scales in (Scales.ONCE, Scales.BLOCKS) else Scales.BLOCKS_E8M0
    return Scales.ONCE if out_format == "rows" else Scales.MX_SHARED


def new_of_kind(kind: Scales, a_q: torch.Tensor, w: torch.Tensor, num_valid_tokens: int) -> Pair:
    """Return memory for the elements and scales of gate and up, w's rows, with a kind of scales."""
    shape = num_valid_tokens, w.shape[1] // 2
    if kind is Scales.MX_SHARED:
        return new_or_given_mxfp8(a_q, shape)
    return new_or_given_fp8(a_q, shape, "rows" if kind is Scales.ONCE else "blocks", kind is Scales.BLOCKS_E8M0)


def _new_gate_up(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    num_valid_tokens: int,
    out_format: str | None,
) -> Pair:
    (m, k), (experts, n, _) = a_q.shape, w.shape
    kind = _kind_of_result(scales_of(m, n, k, a_scale, w_scale, experts), out_format)
    return new_of_kind(kind, a_q, w, num_valid_tokens)


def _gate_up_configuration(taken: Accepted, experts: int, n: int, k: int) -> Configuration | str:
    slots = taken.problem.slots
    if invariance.STATE.on:
        return "batch_invariant: its sums are those of one order for every batch"
    if slots > MOST_FUSED_SLOTS:
        return f"more than {MOST_FUSED_SLOTS} slots gain nothing by one; got {slots}"
    cu_count, blocks = devices.current().cu_count(), n // (2 * BLOCK) * min(slots, experts)
    if taken.problem.fnuz and blocks > MOST_FNUZ_ROUNDS * cu_count:
        return f"{blocks} blocks of 32 results are more than {MOST_FNUZ_ROUNDS} for each compute unit"
    return split_configuration(taken, experts, n, k, taken.problem.scales.block)


def _launch_gate_up(
    scales: Scales, out: torch.Tensor, out_scales: torch.Tensor, *given: Any, rows: int, parts: int, groups: int
) -> None:
    workspace = split_workspace(out.shape[0], 2 * out.shape[1], groups, out.device, scales.block)
    fp8_gate_up_out(out, out_scales, *given, int(scales), workspace, rows, parts, groups)


FUSED: dict[Scales, dict[str, GateUp]] = {
    scales: {KERNEL: GateUp(GATE_UP_KERNEL, _gate_up_configuration, functools.partial(_launch_gate_up, scales))}
    for scales in Scales
    if scales is not Scales.ONCE  # whose results share a scale with those of many work-groups
}


def _plan_gate_up(
    w: torch.Tensor, alpha: float, beta: float, limit: float | None, out_format: str | None = None, **given: Any
) -> Decision:
    decision = FAMILY.plan_total(w=w, **given)
    if w.shape[1] % 2:
        raise GuardError(f"w must hold gate and up, an even number of rows for each expert; got shape {tuple(w.shape)}")
    check_activation(alpha, beta, limit)
    kind = _kind_of_result(Scales.ONCE, out_format)  # refuses a format that does not exist
    taken = decision.accepted
    if taken is None or taken.path != "kernel":
        return decision
    kind = _kind_of_result(taken.problem.scales, out_format)
    return with_activation(decision, FUSED[kind], w) if kind is taken.problem.scales and kind in FUSED else decision


@operator(_plan_gate_up, fake=_new_gate_up)
@documented_like(grouped_fp8_linear)
def grouped_swiglu_fp8(
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
    out_format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SwiGLU of :func:`hipforge.grouped_fp8_linear`'s gate and up in fp8: what a layer's second product takes.

    It is what :func:`hipforge.swiglu_fp8_dynamic`, or of scales of 32 x 32 blocks :func:`hipforge.swiglu_mxfp8`, makes
    of that product: in its launch where few slots are multiplied under scales of blocks, and else in a launch of its
    own. Gate and up are rounded to bfloat16 on either path.

    Args:
        w: weights [E, 2 d, K].
        bias: float32 [E, 2 d], in the order of ``w``'s rows.
        alpha: of SwiGLU, as the next three.
        beta: added to up.
        limit: where gate and up are clamped, or None.
        interleaved: even rows of ``w`` are the gate's, odd ones up's.
        out_format: scales of the result: ``rows``, ``blocks`` (of 128, float32 or e8m0 as the operands' are) or ``mx``
            (e8m0 of 32, d a multiple of 32). By default of the operands' kind, which operands of a single block leave
            open.

    Returns:
        ``(q, scales)``: [num_valid_tokens, d] in the device's e4m3, and float32 [num_valid_tokens], float32 or uint8
        [num_valid_tokens, ceil(d / 128)], or uint8 [num_valid_tokens, d / 32]; rows that no tile covers are undefined.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.fp8_quant_blocks(torch.ones(2, 256))
        >>> w, w_scale = (part.unflatten(0, (2, 64)) for part in hipforge.fp8_quant_blocks(torch.ones(128, 256)))
        >>> slots = hipforge.moe_align_block_size(torch.tensor([[1], [0]], dtype=torch.int32), 16, 2)
        >>> q, scales = hipforge.grouped_swiglu_fp8(x, x_scale, w, w_scale[:, :1], *slots, 2, 16, 1)
        >>> (q.float() * scales)[:, 0].tolist()
        [65536.0, 65536.0]
    """
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens
    parts = Operands(a_q, a_scale, w, w_scale, *indices, block_m, a_div, bias=bias)
    if taken.path == "kernel":
        scales = taken.problem.scales
    else:
        scales = scales_of(a_q.shape[0], w.shape[1], w.shape[2], a_scale, w_scale, w.shape[0])
    kind = _kind_of_result(scales, out_format)
    activation = alpha, beta, limit, interleaved
    new = functools.partial(new_of_kind, kind)
    return run_gate_up(taken, FUSED.get(kind, {}), grouped_fp8_linear, parts, activation, _ACTIVATED[kind], new)
