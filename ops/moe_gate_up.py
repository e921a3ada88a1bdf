"""The first GEMM of a MoE layer with SwiGLU and MX quantisation: in its epilogue where it can be, else after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core import invariance
from hipforge.ops.core.dispatch import Accepted, Decision
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.kernel import Configuration
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given_mxfp8
from hipforge.ops.core.stub import stub
from hipforge.ops.gate_up_split import MX_FP8, Problem, split_of_problem
from hipforge.ops.mxfp8_grouped_gemm import grouped_mxfp8_linear
from hipforge.ops.mxfp8_grouped_gemm.family import GROUPED
from hipforge.ops.mxfp8_grouped_gemm.kernels import (
    launch_aligned,
    pass_stream,
    row_stream,
    tile_stream,
    tiles,
    wave_split,
)
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, Operands
from hipforge.ops.swiglu_fp8 import swiglu_mxfp8

KERNEL = "mxfp8_gate_up"


def split_workspace(slots: int, n: int, groups: int, device: torch.device, block: int = BLOCK) -> torch.Tensor | None:
    """Return the workspace for sums and counters of work-groups that meet; None where one does all.

    Those meet that share K or have some of ``block`` results with one scale. Its contents mean nothing before and after
    a launch, and no other launch may use it at the same time.
    """
    meet = groups * (block // BLOCK)
    if meet < 2:
        return None
    each = meet * 2 * BLOCK + 2 * (meet - 1)  # the latter are 64-bit words
    return torch.empty(slots * -(-n // (2 * block)) * each, dtype=torch.float32, device=device)


mxfp8_gate_up_out = stub(
    "mxfp8_gate_up_out",
    "module_mxfp8_grouped_gemm_gate_up",
    f"{GATE_UP}; workspace: Tensor?; rows, parts, groups: int",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    variant={"HF_ROWS": "rows"},
    mutates=("out", "out_scales", "workspace"),
)


def split_configuration(taken: Accepted, experts: int, n: int, k: int, kind: int = MX_FP8) -> Configuration:
    """Return the configuration with the epilogue, where the kernel that splits K over waves was accepted."""
    slots = invariance.ROWS if invariance.STATE.on else taken.problem.slots
    split = split_of_problem(Problem(slots, n, k, experts, kind, taken.problem.device))
    return {"rows": taken.configuration["rows"], **split}


def launch_split(
    entry: Callable[..., None],
    out: torch.Tensor,
    out_scales: torch.Tensor,
    *given: Any,
    rows: int,
    parts: int,
    groups: int,
) -> None:
    """Launch an entry whose kernel splits K, with the workspace that its work-groups need."""
    workspace = split_workspace(out.shape[0], 2 * out.shape[1], groups, out.device)
    entry(out, out_scales, *given, workspace, rows, parts, groups)


@dataclass(frozen=True)
class GateUp:
    """What a kernel of the grouped GEMM is with the epilogue of gate and up.

    Attributes:
        name: which ``explain`` shows.
        configuration: (the grouped GEMM's accepted path, E, N, K) -> its own, or why the activation is a launch of
            its own.
        launch: (q, scales, the entries' operands and activation, configuration by name) -> None.
    """

    name: str
    configuration: Callable[[Accepted, int, int, int], Configuration | str]
    launch: Callable[..., None]


FUSED = {
    wave_split.KERNEL: GateUp(KERNEL, split_configuration, partial(launch_split, mxfp8_gate_up_out)),
    pass_stream.KERNEL: GateUp("mxfp8_gate_up_pass_stream", pass_stream.of_gate_up, pass_stream.launch_gate_up),
    row_stream.KERNEL: GateUp("mxfp8_gate_up_row_stream", row_stream.of_gate_up, row_stream.launch_gate_up),
    tile_stream.KERNEL: GateUp("mxfp8_gate_up_tile_stream", tile_stream.of_gate_up, tile_stream.launch_gate_up),
    tiles.KERNEL: GateUp("mxfp8_gate_up_tiles", tiles.of_gate_up, tiles.launch_gate_up),
}
"""By the name of the grouped GEMM's kernel; where it has none, the activation is a launch of its own."""


def planned(total: Callable[..., Decision], fused: Mapping[str, GateUp], packing: int = 1) -> Callable[..., Decision]:
    """Return what plans an op: the grouped GEMM's decision, with the epilogue where a kernel has one.

    Args:
        total: plans the grouped GEMM.
        fused: by the name of its kernel.
        packing: elements of w in a byte.
    """

    def plan(w: torch.Tensor, **given: Any) -> Decision:
        return with_activation(total(w=w, **given), fused, w, packing)

    return plan


def with_activation(decision: Decision, fused: Mapping[str, GateUp], w: torch.Tensor, packing: int = 1) -> Decision:
    """Return the grouped GEMM's decision with the epilogue of gate and up, where its kernel has one that applies."""
    taken = decision.accepted
    experts, n, k = w.shape
    own = None if taken is None else fused.get(taken.kernel)
    if taken is None or own is None or n % (2 * BLOCK):
        return decision
    found = own.configuration(taken, experts, n, packing * k)
    if isinstance(found, str):
        return replace(decision, accepted=replace(taken, reason=f"{taken.reason}; SwiGLU is not fused: {found}"))
    return replace(decision, accepted=replace(taken, kernel=own.name, configuration=MappingProxyType(found)))


def new_gate_up(a_q: torch.Tensor, w: torch.Tensor, num_valid_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the elements and scales of gate and up, w's rows."""
    return new_or_given_mxfp8(a_q, (num_valid_tokens, w.shape[1] // 2))


Pair = tuple[torch.Tensor, torch.Tensor]


def run(
    taken: Accepted,
    fused: Mapping[str, GateUp],
    linear: Callable[..., torch.Tensor],
    parts: Operands,
    activation: tuple[float, float, float | None, bool],
    activated: Callable[..., Pair] = swiglu_mxfp8,
    new: Callable[[torch.Tensor, torch.Tensor, int], Pair] = new_gate_up,
) -> Pair:
    """Return SwiGLU of ``linear``'s product, quantised: by the kernel that was decided, or in a launch of its own.

    Args:
        taken: the path that :func:`planned` decided.
        fused: as there.
        linear: the grouped GEMM for every call.
        parts: its operands.
        activation: alpha, beta, limit and whether gate and up are interleaved.
        activated: the launch of its own, (gate and up, activation) -> elements and scales.
        new: (activations, weights, slots) -> memory for both.
    """
    alpha, beta, limit, interleaved = activation
    own = next((one for one in fused.values() if one.name == taken.kernel), None)
    if own is None:
        counts = parts.num_valid_tokens, parts.block_m, parts.a_div
        gate_up = linear(*parts.tensors, *counts, bias=parts.bias, uncovered="undefined")
        return activated(gate_up, alpha=alpha, beta=beta, limit=limit, interleaved=interleaved)
    q, scales = new(parts.a_q, parts.w, parts.num_valid_tokens)
    parameters = alpha, beta, math.inf if limit is None else limit, interleaved

    def stub(given: Operands) -> None:
        own.launch(q, scales, *given.tensors, given.bias, *given.sizes, *parameters, **taken.configuration)

    launch_aligned(stub, parts)
    return q, scales


@operator(planned(GROUPED.plan_total, FUSED), fake=new_gate_up)
@documented_like(grouped_mxfp8_linear)
def grouped_swiglu_mxfp8(
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
    """Return what :func:`hipforge.swiglu_mxfp8` makes of :func:`hipforge.grouped_mxfp8_linear`'s gate and up.

    Args:
        w: weights [E, 2 d, K], d a multiple of 32.
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
    indices = sorted_token_ids, expert_ids, num_tokens_post_padded
    parts = Operands(a_q, a_scale, w, w_scale, *indices, num_valid_tokens, block_m, a_div, bias=bias)
    return run(taken, FUSED, grouped_mxfp8_linear, parts, (alpha, beta, limit, interleaved))
