"""The grouped MX-FP8 GEMM for few slots of an expert on sm_90, which streams W once: its stubs, raw op and value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import require_rank
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.raw import k_steps
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import mxfp8_grouped_split
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, OPERANDS, ROUTED

KERNEL = "mxfp8_grouped_row_stream"
ROWS = (8, 16)  # slots of an expert that a block multiplies at once
SHARERS = (1, 2, 4, 8, 16)  # warps that share K
WARPS = 16  # of a block
MOST_SLOTS = 2048  # groups that a block can list, if every slot has another expert
MOST_BLOCKS = 1 << 16
MAX_K, MAX_N = 1 << 22, 1 << 23
PASS_ROWS = 16
LARGE_MEAN = 64  # slots of an expert
# Rough microseconds of a call on an H100: a start, and bytes of W over what the kernel reaches with 8 and 16 slots.
START_US = {8: 4.5, 16: 6.0}
BYTES_PER_US = {8: 2.5e6, 16: 2.4e6}
LEAST_STEPS = {8: 2, 16: 3}  # of a warp that shares K, where there are passes for all warps
MOST_SHARERS, MOST_WASTE = 8, 1.1  # of those warps, and their steps over those that there are


def loads(slots: int, experts: int, rows: int) -> float:
    """Return how often experts' W is read, once for each ``rows`` slots of one, if the routing is uniform.

    Example:
        >>> round(loads(64, 128, 8)), round(loads(1024, 128, 8)), round(loads(1024, 128, 16))
        (50, 181, 128)
    """
    mean = slots / experts
    if mean > LARGE_MEAN:
        return experts * (mean / rows + 0.5)
    total, up_to, chance = 0.0, 0.0, math.exp(-mean)  # of an expert with so many slots: a Poisson distribution
    for count in range(int(mean + 12 * mean**0.5) + 12):
        up_to += chance
        if count % rows == 0:
            total += 1 - up_to
        chance *= mean / (count + 1)
    return experts * total


def sharers_for(passes: float, k: int, rows: int) -> int:
    """Return how many warps share K where a block has so many passes: more where some would have none."""
    steps = k_steps(k)
    able = [
        count
        for count in SHARERS
        if count <= MOST_SHARERS
        and LEAST_STEPS[rows] * count <= steps <= -(-steps // count) * count <= MOST_WASTE * steps
    ]
    sharers = max(able, default=1)
    while 2 * passes <= WARPS // sharers and 2 * sharers <= min(WARPS, steps):
        sharers *= 2
    return sharers


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    most = min(WARPS, max(1, k_steps(cell.key[2])))
    return [
        {"rows": rows, "sharers": sharers, "blocks": archs.get(arch).cu_count}
        for rows in ROWS
        for sharers in SHARERS
        if sharers <= most
    ]


def timed(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    """Yield rough times of the configurations for a problem."""
    slots, n, k = problem.key[:3]
    if n > MAX_N or k > MAX_K:
        return
    for rows in ROWS:
        read = loads(slots, problem.experts, rows)
        sharers = sharers_for(read * -(-n // PASS_ROWS) / cu_count, k, rows)
        us = START_US[rows] + read * n * k / BYTES_PER_US[rows]
        yield us, {"rows": rows, "sharers": sharers, "blocks": cu_count}


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    return timed(problem, arch, cu_count) if problem.key[0] <= MOST_SLOTS else iter(())


def large_weight(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    """Return what N and K must be where they are too large."""
    return None if key[1] <= MAX_N and key[2] <= MAX_K else f"N of at most {MAX_N} and K of at most {MAX_K}"


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    return f"M of at most {MOST_SLOTS}" if key[0] > MOST_SLOTS else large_weight(given, key, arch)


mxfp8_grouped_row_stream_out = stub(
    "mxfp8_grouped_row_stream_out",
    "module_mxfp8_grouped_gemm_row_stream",
    f"out, {OPERANDS}; {ROUTED}; rows, sharers, blocks: int; programmatic: bool",
    "Write the rows of ``out`` that tiles in use cover; ``rows`` slots at a time.",
    variant={"HF_ROWS": "rows"},
)
mxfp8_gate_up_row_stream_out = stub(
    "mxfp8_gate_up_row_stream_out",
    "module_mxfp8_grouped_gemm_gate_up_row_stream",
    f"{GATE_UP}; rows, blocks: int; programmatic: bool",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    variant={"HF_ROWS": "rows"},
    mutates=("out", "out_scales"),
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_grouped_row_stream_out(out, *(*given, programmatic.active()))


def of_gate_up(taken: Accepted, experts: int, n: int, k: int) -> Configuration:
    """Return the configuration of the kernel with the epilogue of gate and up, where this one was accepted."""
    return {"rows": taken.configuration["rows"], "blocks": taken.configuration["blocks"]}


def launch_gate_up(out: torch.Tensor, out_scales: torch.Tensor, *given: Any, rows: int, blocks: int) -> None:
    """Launch it: the operands of the entry, then its configuration."""
    mxfp8_gate_up_row_stream_out(out, out_scales, *given, rows, blocks, programmatic.active())


@documented_like(mxfp8_grouped_split)
def mxfp8_grouped_row_stream(
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    out: torch.Tensor,
    num_valid_tokens: int,
    a_div: int,
    block_m: int,
    mul_weight_by: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    rows: int = ROWS[0],
    sharers: int = 4,
    blocks: int = 132,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, writing into ``out``.

    Args:
        rows: slots of an expert that are multiplied at once, 8 or 16; its W is read once for each.
        sharers: warps that share K: a power of two up to 16.
        blocks: how many share the rows of W.

    Returns:
        ``out``.
    """
    given = STREAM.require(rows=rows, sharers=sharers, blocks=blocks)
    require_rank("w", w, 3, "[E, N, K]")
    _launch(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias,
        *w.shape, num_valid_tokens, a_q.shape[0], a_div, block_m, *given.values(),
    )  # fmt: skip
    return out


STREAM = Kernel(
    KERNEL,
    archs=("sm_90",),
    parameters=MappingProxyType({"rows": ROWS, "sharers": SHARERS, "blocks": range(1, MOST_BLOCKS + 1)}),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
