"""The grouped MX-FP8 GEMM in tiles on sm_90, for any number of slots of an expert: stubs, raw op and value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import require_rank
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import loads
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import mxfp8_grouped_split
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, OPERANDS, ROUTED

KERNEL = "mxfp8_grouped_tiles"
SLOTS = (32, 64)  # of an expert that a block multiplies at once
ROWS = 128  # of W
MAX_K, MAX_N = 1 << 24, 65535 * ROWS
# Rough microseconds of a call on an H100: a start, and bytes of W over what the kernel reaches with so many slots.
START_US = 8.0
BYTES_PER_US = {32: 2.15e6, 64: 1.6e6}


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    slots, n, k = problem.key[:3]
    if n > MAX_N or k > MAX_K:
        return
    for at_once in SLOTS:
        yield START_US + loads(slots, problem.experts, at_once) * n * k / BYTES_PER_US[at_once], {"slots": at_once}


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    return None if key[1] <= MAX_N and key[2] <= MAX_K else f"N of at most {MAX_N} and K of at most {MAX_K}"


mxfp8_grouped_tiles_out = stub(
    "mxfp8_grouped_tiles_out",
    "module_mxfp8_grouped_gemm_tiles",
    f"out, {OPERANDS}; {ROUTED}; slots: int; programmatic: bool",
    "Write the rows of ``out`` that tiles in use cover.",
    variant={"HF_SLOTS": "slots"},
)
mxfp8_gate_up_tiles_out = stub(
    "mxfp8_gate_up_tiles_out",
    "module_mxfp8_grouped_gemm_gate_up_tiles",
    f"{GATE_UP}; slots: int; programmatic: bool",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    variant={"HF_SLOTS": "slots"},
    mutates=("out", "out_scales"),
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_grouped_tiles_out(out, *(*given, programmatic.active()))


def of_gate_up(taken: Accepted, experts: int, n: int, k: int) -> Configuration:
    """Return the configuration of the kernel with the epilogue of gate and up, where this one was accepted."""
    return taken.configuration


def launch_gate_up(out: torch.Tensor, out_scales: torch.Tensor, *given: Any, slots: int) -> None:
    """Launch it: the operands of the entry, then its configuration."""
    mxfp8_gate_up_tiles_out(out, out_scales, *given, slots, programmatic.active())


@documented_like(mxfp8_grouped_split)
def mxfp8_grouped_tiles(
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
    slots: int = SLOTS[0],
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, writing into ``out``.

    Args:
        slots: of an expert that are multiplied at once, 32 or 64; its W is read once for each.

    Returns:
        ``out``.
    """
    given = TILES.require(slots=slots)
    require_rank("w", w, 3, "[E, N, K]")
    _launch(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias,
        *w.shape, num_valid_tokens, a_q.shape[0], a_div, block_m, *given.values(),
    )  # fmt: skip
    return out


TILES = Kernel(
    KERNEL,
    archs=("sm_90",),
    parameters=MappingProxyType({"slots": SLOTS}),
    launch=_launch,
    candidates=lambda cell, arch: [{"slots": slots} for slots in SLOTS],
    refusal=_refusal,
    default=_default,
)
