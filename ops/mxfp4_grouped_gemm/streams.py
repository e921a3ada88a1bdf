"""The grouped MXFP4 GEMM on sm_90, which streams W once for each few slots of an expert: its stubs and its values.

``csrc/mxfp8_grouped_gemm/nvidia`` has the kernels. A block lists at most 2,048 groups of slots, so calls that may have
more are several launches of ``mxfp4_grouped_row_stream``, each over some of the tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from hipforge.ops.core import programmatic
from hipforge.ops.core.kernel import Choice, ceil_div
from hipforge.ops.core.stub import stub
from hipforge.ops.moe_gate_up import GateUp
from hipforge.ops.mxfp8_grouped_gemm.kernels import pass_stream, row_stream
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, OPERANDS, ROUTED

ROWS_KERNEL, PASSES_KERNEL = "mxfp4_grouped_row_stream", "mxfp4_grouped_pass_stream"
MOST_GROUPS = row_stream.MOST_SLOTS
MOST_BLOCK_M = MOST_GROUPS * row_stream.ROWS[0]  # slots of a tile whose groups a block can list
_INDICES, _PADDED = slice(4, 6), 6  # of an entry's operands: sorted_token_ids and expert_ids; num_tokens_post_padded

mxfp4_grouped_pass_stream_out = stub(
    "mxfp4_grouped_pass_stream_out",
    "module_mxfp4_grouped_gemm_pass_stream",
    f"out, {OPERANDS}; {ROUTED}; sharers, blocks: int; programmatic: bool",
    "Write the rows of ``out`` that tiles in use cover; 8 slots at a time.",
)

mxfp4_gate_up_pass_stream_out = stub(
    "mxfp4_gate_up_pass_stream_out",
    "module_mxfp4_grouped_gemm_pass_stream",
    f"{GATE_UP}; sharers, blocks: int; programmatic: bool",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    mutates=("out", "out_scales"),
)

mxfp4_grouped_row_stream_out = stub(
    "mxfp4_grouped_row_stream_out",
    "module_mxfp4_grouped_gemm_row_stream",
    f"out, {OPERANDS}; {ROUTED}; rows, sharers, blocks: int; programmatic: bool",
    "Write the rows of ``out`` that tiles in use cover; ``rows`` slots at a time.",
    variant={"HF_ROWS": "rows"},
)

mxfp4_gate_up_row_stream_out = stub(
    "mxfp4_gate_up_row_stream_out",
    "module_mxfp4_grouped_gemm_gate_up_row_stream",
    f"{GATE_UP}; rows, blocks: int; programmatic: bool",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    variant={"HF_ROWS": "rows"},
    mutates=("out", "out_scales"),
)


def launches(given: tuple[Any, ...], slots: int, block_m: int, rows: int) -> Iterator[tuple[Any, ...]]:
    """Yield an entry's operands for each of its launches: whole tiles, of whose groups a block can list all.

    Args:
        given: the operands, from ``a_q`` on.
        slots: num_valid_tokens.
        block_m: slots of a tile.
        rows: slots of a group.
    """
    sorted_ids, expert_ids = given[_INDICES]
    tiles, groups = sorted_ids.numel() // block_m, ceil_div(block_m, rows)
    if min(tiles * groups, slots) <= MOST_GROUPS:
        yield given
        return
    most = MOST_GROUPS // groups
    for first in range(0, tiles, most):
        some = sorted_ids[first * block_m : (first + most) * block_m], expert_ids[first : first + most]
        yield *given[: _INDICES.start], *some, given[_PADDED] - first * block_m, *given[_PADDED + 1 :]


def _launch_rows(out: torch.Tensor, *given: Any) -> None:
    slots, _, _, block_m, rows = given[12:17]
    for operands in launches(given, slots, block_m, rows):
        mxfp4_grouped_row_stream_out(out, *operands, programmatic.active())


def _launch_gate_up_rows(q: torch.Tensor, scales: torch.Tensor, *given: Any, rows: int, blocks: int) -> None:
    slots, _, _, block_m = given[11:15]
    for operands in launches(given, slots, block_m, rows):
        mxfp4_gate_up_row_stream_out(q, scales, *operands, rows, blocks, programmatic.active())


def _launch_passes(out: torch.Tensor, *given: Any) -> None:
    mxfp4_grouped_pass_stream_out(out, *(*given, programmatic.active()))


def _launch_gate_up_passes(q: torch.Tensor, scales: torch.Tensor, *given: Any, sharers: int, blocks: int) -> None:
    mxfp4_gate_up_pass_stream_out(q, scales, *given, sharers, blocks, programmatic.active())


PASSES = replace(
    pass_stream.STREAM,
    name=PASSES_KERNEL,
    launch=_launch_passes,
    candidates=functools.partial(pass_stream.candidates, packing=2),
    refusal=functools.partial(pass_stream.refusal, packing=2),
    default=functools.partial(pass_stream.timed, packing=2),
)
ROWS = replace(
    row_stream.STREAM,
    name=ROWS_KERNEL,
    launch=_launch_rows,
    refusal=row_stream.large_weight,
    default=row_stream.timed,  # two elements of a byte take it as long as two bytes
)
KERNELS = (PASSES, ROWS)
FUSED = {
    PASSES_KERNEL: GateUp("mxfp4_gate_up_pass_stream", pass_stream.of_gate_up, _launch_gate_up_passes),
    ROWS_KERNEL: GateUp("mxfp4_gate_up_row_stream", row_stream.of_gate_up, _launch_gate_up_rows),
}


def invariant(k: int, cu_count: int) -> Choice:
    """Return the choice whose order of sums no number of slots changes."""
    rows = row_stream.ROWS[0]
    return ROWS.choice({"rows": rows, "sharers": row_stream.sharers_for(math.inf, k, rows), "blocks": cu_count})
