"""The MXFP4 grouped GEMM's problem, its kernels, its table's schema and the choice between them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from hipforge.ops.core import checks
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.kernel import kernel_table
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tuned import NEXT, gemm_shape
from hipforge.ops.mxfp4_gemm.raw import PAYLOADS
from hipforge.ops.mxfp4_grouped_gemm import streams
from hipforge.ops.mxfp8_grouped_gemm import family as mx
from hipforge.ops.mxfp8_grouped_gemm.kernels import stream, wave_split
from hipforge.ops.mxfp8_grouped_gemm.reference import OPERANDS, ROUTED

KERNEL, STREAM_KERNEL = "mxfp4_grouped_split", "mxfp4_grouped_stream"

mxfp4_grouped_split_out = stub(
    "mxfp4_grouped_split_out",
    "module_mxfp4_grouped_gemm_split",
    f"out, {OPERANDS}; {ROUTED}; rows, waves, columns: int",
    "Write the rows of ``out`` that tiles in use cover.",
    variant={"HF_ROWS": "rows"},
)

mxfp4_grouped_stream_out = stub(
    "mxfp4_grouped_stream_out",
    "module_mxfp4_grouped_gemm_stream",
    f"out, {OPERANDS}; {ROUTED}; columns: int",
    "Write the rows of ``out`` that tiles in use cover, with a K of 128 to 512; ``columns`` per work-group.",
    variant=stream.variant,
)


@dataclass(frozen=True)
class Problem(mx.Problem):
    """``slots`` rows of activations [M_act, K], each times its expert's weight [N, K]."""

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
        checks.require_dtype("w", w, PAYLOADS)
        indices = sorted_token_ids, expert_ids, num_tokens_post_padded, num_valid_tokens, block_m, a_div
        problem = cls.unscaled(a_q, w, *indices, mul_weight_by, packing=2)
        problem.require_mx_scales(a_q, a_scale, w_scale)
        return problem


WAVE_SPLIT = replace(wave_split.WITHOUT_LINES, name=KERNEL, launch=mxfp4_grouped_split_out)
STREAM = replace(
    stream.STREAM,
    name=STREAM_KERNEL,
    launch=mxfp4_grouped_stream_out,
    default=functools.partial(stream.default, packing=2),
)
KERNELS = (WAVE_SPLIT, STREAM, *streams.KERNELS)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


_SPLIT_INVARIANT = mx.invariant_of(WAVE_SPLIT)


def _envelope(problem: Problem, arch: str) -> str | None:
    if arch in streams.ROWS.archs and problem.block_m > streams.MOST_BLOCK_M:
        return f"block_m must be at most {streams.MOST_BLOCK_M}; got {problem.block_m}"
    return mx.envelope(problem, arch)


def _invariant(problem: Problem, arch: str, cu_count: int) -> Choice:
    if arch in streams.ROWS.archs:
        return streams.invariant(problem.k, cu_count)
    return _SPLIT_INVARIANT(problem, arch, cu_count)


FAMILY = Family(
    problem=Problem.given,
    table=kernel_table("mxfp4_grouped_gemm", KERNELS, shape=gemm_shape(NEXT), extra_key=mx.EXTRA_KEY),
    kernels=KERNELS,
    archs=(*WAVE_SPLIT.archs, *streams.ROWS.archs),
    envelope=_envelope,
    reference="grouped_mm",
    invariant=_invariant,
)
