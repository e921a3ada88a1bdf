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
ROWS = (8, 16, 32)  # slots of an expert that a block multiplies at once
SHARERS = (1, 2, 4, 8, 16)  # warps that share K
MOST_SLOTS = 2048  # groups that a block can list, if every slot has another expert
MOST_BLOCKS = 1 << 16
MAX_K, MAX_N = 1 << 22, 1 << 23
PASS_ROWS = 16
# Rough microseconds of a call on an H100: a start, and bytes of W over what the kernel reaches with 8, 16 and 32 slots.
START_US = {8: 4.5, 16: 6.5, 32: 8.0}
BYTES_PER_US = {8: 2.6e6, 16: 2.5e6, 32: 1.5e6}
LARGE_MEAN = 64  # slots of an expert
X_PER_ROW = 0.045  # of the time of 8 rows of W a slot costs in each step


def warps(rows: int) -> int:
    """Return the warps of a block: what registers allow."""
    return 16 if rows <= 16 else 8


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


def _steps(passes: float, k: int, *, rows: int, sharers: int, blocks: int) -> float:
    """Return how long a warp is busy, in tiles of steps: in each of its passes its steps and one meeting."""
    rounds = -(-max(1, round(passes)) // (warps(rows) // sharers))
    return rounds * (-(-k_steps(k) // sharers) * (2 + X_PER_ROW * rows) + 2)


def _configurations(problem: Any, units: int, choices: Sequence[int]) -> list[Configuration]:
    _, _, k = problem.key[:3]
    return [
        {"rows": rows, "sharers": sharers, "blocks": units}
        for rows in choices
        for sharers in SHARERS
        if sharers <= min(warps(rows), max(1, k_steps(k)))
    ]


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    slots, n, k = problem.key[:3]
    if slots > MOST_SLOTS or n > MAX_N or k > MAX_K:
        return
    for rows in ROWS:
        read = loads(slots, problem.experts, rows)
        # Of equals more sharers, whose rounds are finer.
        best = min(
            _configurations(problem, cu_count, (rows,)),
            key=lambda given: (_steps(read * -(-n // PASS_ROWS) / cu_count, k, **given), -given["sharers"]),
        )
        yield START_US[rows] + read * n * k / BYTES_PER_US[rows], best


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    if given["sharers"] > warps(given["rows"]):
        return f"sharers of at most {warps(given['rows'])} with these rows"
    if key[0] > MOST_SLOTS:
        return f"M of at most {MOST_SLOTS}"
    return None if key[1] <= MAX_N and key[2] <= MAX_K else f"N of at most {MAX_N} and K of at most {MAX_K}"


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
        rows: slots of an expert that are multiplied at once, 8, 16 or 32; its W is read once for each.
        sharers: warps that share K: a power of two up to 16, or 8 with 32 rows.
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
    candidates=lambda cell, arch: _configurations(cell, archs.get(arch).cu_count, ROWS),
    refusal=_refusal,
    default=_default,
)
