"""The grouped MX-FP8 GEMM for some slots of an expert on sm_90, which streams tiles of W: stubs, raw op and value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import require_rank
from hipforge.ops.core.dispatch import Accepted
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed, ceil_div
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.raw import K_STEP
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import MAX_N, MOST_BLOCKS, PASS_ROWS, loads
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import mxfp8_grouped_split
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, OPERANDS, ROUTED

KERNEL = "mxfp8_grouped_tile_stream"
MODULE = "module_mxfp8_grouped_gemm_tile_stream"
SLOTS = (16, 32, 48)  # of an expert that a block multiplies at once
# Bytes of shared memory: of a block; not for X and W, of that; of a listed group; of a team's stage of W.
SHARED, KEPT, GROUP, STAGE = 227 * 1024, 11 * 1024, 12, 64 * K_STEP
TEAMS, LEAST_STAGES = 2, 2
# Rough microseconds of a call, scaled from an H200 to an H100: a start, longer with a longer K; bytes of W over what
# the kernel reaches; products.
START_US, K_PER_US = 6.5, 700
BYTES_PER_US = {16: 3.1e6, 32: 3.05e6, 48: 2.95e6}
PRODUCTS_PER_US = 6e8


def stages(slots: int, k: int, groups: int) -> int:
    """Return how many stages of W a team has beside X of ``slots`` slots and a list of so many groups.

    Example:
        >>> stages(32, 2048, 3), stages(48, 2048, 3), stages(32, 4096, 3)
        (5, 3, 1)
    """
    x, scales = slots * (k + k // 8), TEAMS * 2 * 2 * k
    return (SHARED - KEPT - x - scales - groups * GROUP) // (TEAMS * STAGE)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    slots, n, k = problem.key[:3]
    for at_once in SLOTS:
        given = {"slots": at_once, "blocks": cu_count}
        if _refusal(given, problem.key, arch) is None:
            read = loads(slots, problem.experts, at_once) * n * k / BYTES_PER_US[at_once]
            yield START_US + k / K_PER_US + read + slots * n * k / PRODUCTS_PER_US, given


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    slots, n, k = key[:3]
    if n % PASS_ROWS or n > MAX_N:
        return f"N of a multiple of {PASS_ROWS}, at most {MAX_N}"
    if k % K_STEP:
        return f"K of a multiple of {K_STEP}"
    groups = ceil_div(slots, given["blocks"]) + 3  # of a block, if every slot has another expert
    fits = stages(given["slots"], k, groups) >= LEAST_STAGES
    return None if fits else "a smaller M or K, or fewer slots: X leaves no room for W in shared memory"


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    found = [{"slots": slots, "blocks": archs.get(arch).cu_count} for slots in SLOTS]
    return [given for given in found if _refusal(given, cell.key, arch) is None]


mxfp8_grouped_tile_stream_out = stub(
    "mxfp8_grouped_tile_stream_out",
    MODULE,
    f"out, {OPERANDS}; {ROUTED}; slots, blocks: int; programmatic: bool",
    "Write the rows of ``out`` that tiles in use cover.",
    variant={"HF_SLOTS": "slots"},
)
mxfp8_gate_up_tile_stream_out = stub(
    "mxfp8_gate_up_tile_stream_out",
    MODULE,
    f"{GATE_UP}; slots, blocks: int; programmatic: bool",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    variant={"HF_SLOTS": "slots"},
    mutates=("out", "out_scales"),
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_grouped_tile_stream_out(out, *(*given, programmatic.active()))


def of_gate_up(taken: Accepted, experts: int, n: int, k: int) -> Configuration:
    """Return the configuration of the kernel with the epilogue of gate and up, where this one was accepted."""
    return taken.configuration


def launch_gate_up(out: torch.Tensor, out_scales: torch.Tensor, *given: Any, slots: int, blocks: int) -> None:
    """Launch it: the operands of the entry, then its configuration."""
    mxfp8_gate_up_tile_stream_out(out, out_scales, *given, slots, blocks, programmatic.active())


@documented_like(mxfp8_grouped_split)
def mxfp8_grouped_tile_stream(
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
    slots: int = SLOTS[1],
    blocks: int = 132,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, writing into ``out``.

    Args:
        slots: of an expert that a block multiplies at once, 16, 32 or 48; X of as many, all of K, is in shared memory.
        blocks: how many share the rows of W.

    Returns:
        ``out``.
    """
    given = STREAM.require(slots=slots, blocks=blocks)
    require_rank("w", w, 3, "[E, N, K]")
    _launch(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias,
        *w.shape, num_valid_tokens, a_q.shape[0], a_div, block_m, *given.values(),
    )  # fmt: skip
    return out


STREAM = Kernel(
    KERNEL,
    archs=("sm_90",),
    parameters=MappingProxyType({"slots": SLOTS, "blocks": range(1, MOST_BLOCKS + 1)}),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
