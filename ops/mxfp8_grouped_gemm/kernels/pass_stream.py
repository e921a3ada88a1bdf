"""The grouped MX-FP8 GEMM for up to 8 slots of an expert at once on sm_90, by the copy engine: stubs, raw op, value."""

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
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.raw import K_STEP, k_steps
from hipforge.ops.mxfp8_grouped_gemm.kernels.row_stream import (
    MAX_N,
    MOST_BLOCKS,
    MOST_SLOTS,
    PASS_ROWS,
    SHARERS,
    WARPS,
    loads,
)
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import mxfp8_grouped_split
from hipforge.ops.mxfp8_grouped_gemm.reference import GATE_UP, OPERANDS, ROUTED

KERNEL = "mxfp8_grouped_pass_stream"
MODULE = "module_mxfp8_grouped_gemm_pass_stream"
ROWS = 8  # slots of an expert that a block multiplies at once
MOST_STEPS = 3  # of K, of a warp
BEST_STEPS = MappingProxyType({1: 2, 2: 3})  # at most, by the elements in a byte of W
MOST_K = 4096  # two passes in shared memory
# By the elements in a byte of W: what K is a multiple of, and the largest.
_K_LIMITS = MappingProxyType({1: (K_STEP, MOST_K), 2: (K_STEP // 2, MOST_STEPS * WARPS * K_STEP)})
GATE_UP_SHARERS = 4  # the fewest, with gate and up
# Rough microseconds of a call on an H100: a start, and bytes of W over what the kernel reaches, less with a short K.
START_US, BYTES_PER_US = 4.0, 2.8e6
SHORT_K, SHORT_BYTES_PER_US = 1024, 2.5e6


def steps_refusal(k: int, sharers: int, packing: int = 1) -> str | None:
    """Return what warps that share K need and do not have, or None; W has ``packing`` elements in a byte."""
    multiple, most = _K_LIMITS[packing]
    if k % multiple or k > most:
        return f"K of a multiple of {multiple}, at most {most}"
    fits = k_steps(k) <= MOST_STEPS * sharers
    return None if fits else f"more sharers: a warp keeps {MOST_STEPS} steps of K, of {K_STEP}"


def sharers_for(k: int, passes: float = WARPS, steps: int = BEST_STEPS[1]) -> int:
    """Return how many warps share K: the fewest that have up to ``steps`` steps, more where some would have no pass.

    Args:
        k: K.
        passes: of a block.
        steps: of a warp, at most.
    """
    sharers, of_k = 1, k_steps(k)
    while sharers < WARPS and (of_k > steps * sharers or (2 * passes <= WARPS // sharers and 2 * sharers <= of_k)):
        sharers *= 2
    return sharers


def candidates(cell: Any, arch: str, packing: int = 1) -> list[Configuration]:
    """Return configurations for a tuner to compare."""
    k = cell.key[2]
    blocks = archs.get(arch).cu_count
    fit = [count for count in SHARERS if count <= max(1, k_steps(k)) and steps_refusal(k, count, packing) is None]
    return [{"sharers": sharers, "blocks": blocks} for sharers in fit if cell.key[1] % PASS_ROWS == 0]


def timed(problem: Any, arch: str, cu_count: int, packing: int = 1) -> Iterator[Timed]:
    """Yield the rough time of the configuration for a problem that the kernel takes."""
    slots, n, k = problem.key[:3]
    read = loads(slots, problem.experts, ROWS)
    sharers = sharers_for(k, read * n / PASS_ROWS / cu_count, BEST_STEPS[packing])
    given = {"sharers": sharers, "blocks": cu_count}
    if refusal(given, problem.key, arch, packing) is None:
        rate = SHORT_BYTES_PER_US if k < SHORT_K else BYTES_PER_US
        yield START_US + read * n * k / packing / rate, given


def refusal(given: Configuration, key: Sequence[int], arch: str, packing: int = 1) -> str | None:
    """Return what a problem must be for the kernel in a configuration, or None."""
    slots, n, k = key[:3]
    if slots > MOST_SLOTS:
        return f"M of at most {MOST_SLOTS}"
    if n % PASS_ROWS or n > MAX_N:
        return f"N of a multiple of {PASS_ROWS}, at most {MAX_N}"
    return steps_refusal(k, given["sharers"], packing)


mxfp8_grouped_pass_stream_out = stub(
    "mxfp8_grouped_pass_stream_out",
    MODULE,
    f"out, {OPERANDS}; {ROUTED}; sharers, blocks: int; programmatic: bool",
    "Write the rows of ``out`` that tiles in use cover; 8 slots at a time.",
)
mxfp8_gate_up_pass_stream_out = stub(
    "mxfp8_gate_up_pass_stream_out",
    MODULE,
    f"{GATE_UP}; sharers, blocks: int; programmatic: bool",
    "Write the rows of ``out`` and ``out_scales`` that tiles in use cover: MX-FP8 of SwiGLU of the product.",
    mutates=("out", "out_scales"),
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_grouped_pass_stream_out(out, *(*given, programmatic.active()))


def of_gate_up(taken: Accepted, experts: int, n: int, k: int) -> Configuration:
    """Return the configuration of the kernel with the epilogue of gate and up, where this one was accepted."""
    given = taken.configuration
    return {"sharers": max(GATE_UP_SHARERS, given["sharers"]), "blocks": given["blocks"]}


def launch_gate_up(out: torch.Tensor, out_scales: torch.Tensor, *given: Any, sharers: int, blocks: int) -> None:
    """Launch it: the operands of the entry, then its configuration."""
    mxfp8_gate_up_pass_stream_out(out, out_scales, *given, sharers, blocks, programmatic.active())


@documented_like(mxfp8_grouped_split)
def mxfp8_grouped_pass_stream(
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
    sharers: int = WARPS,
    blocks: int = 132,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, writing into ``out``.

    Args:
        sharers: warps that share K: a power of two up to 16. A warp keeps up to 3 steps of 128, and K is at most 4096.
        blocks: how many share the rows of W.

    Returns:
        ``out``.
    """
    given = STREAM.require(sharers=sharers, blocks=blocks)
    require_rank("w", w, 3, "[E, N, K]")
    _launch(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias,
        *w.shape, num_valid_tokens, a_q.shape[0], a_div, block_m, *given.values(),
    )  # fmt: skip
    return out


STREAM = Kernel(
    KERNEL,
    archs=("sm_90",),
    parameters=MappingProxyType({"sharers": SHARERS, "blocks": range(1, MOST_BLOCKS + 1)}),
    launch=_launch,
    candidates=candidates,
    refusal=refusal,
    default=timed,
)
