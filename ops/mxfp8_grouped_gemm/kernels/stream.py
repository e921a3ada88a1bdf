"""The grouped MX-FP8 GEMM for a short K, whose rows of W stream past slots that stay in registers, on gfx950."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core.checks import require_rank
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_grouped_gemm.kernels.wave_split import mxfp8_grouped_split
from hipforge.ops.mxfp8_grouped_gemm.reference import OPERANDS, ROUTED

KERNEL = "mxfp8_grouped_stream"
ARCH = "gfx950"
ROWS = 16  # slots at a time
K_STEP = 128
MAX_K = 512
WIDE_GROUPS = 3  # of a compute unit, with which a work-group may have more columns than usual
BYTES_AHEAD = 8 * 2048  # of a wave: two tiles of 16 columns with a K of 512, three with 256
COLUMNS = (64, 128, 192, 256, 320, 384, 448, 512)  # of a work-group


def choice(columns: int) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType({"columns": columns}))


def default_choice(slots: int, experts: int, n: int, k: int, cu_count: int, packing: int = 1) -> Choice | None:
    """Return the configuration for a problem where this kernel is faster; None where the kernel that splits K is.

    That is where work-groups of its usual width, 128 columns, or 256 with rows of W of more than 256 bytes, each of
    ``packing`` elements, are many for each
    compute unit if every slot has another expert (``python op_tests/bench_moe_peers.py --published DIR``).
    """
    if not takes(k) or slots > ROWS * experts // 2:  # experts with more slots than a tile of registers
        return None
    columns_per_cu = n * min(slots, experts) / cu_count
    usual, least = (128, 3) if k <= 2 * K_STEP * packing else (256, 8)
    if columns_per_cu < least * usual:
        return None
    return choice(max([usual, *(columns for columns in (256, 512) if columns_per_cu >= WIDE_GROUPS * columns)]))


def takes(k: int) -> bool:
    """Return whether the kernel has a variant for a K."""
    return 0 < k <= MAX_K and k % K_STEP == 0


def variant(*given: Any) -> dict[str, int]:
    """Return the variant of a module for an entry's arguments, by K."""
    return {"HF_STEPS": min(MAX_K // K_STEP, max(1, given[12] // K_STEP))}


mxfp8_grouped_stream_out = stub(
    "mxfp8_grouped_stream_out",
    "module_mxfp8_grouped_gemm_stream",
    f"out, {OPERANDS}; {ROUTED}; columns: int",
    "Write the rows of ``out`` that tiles in use cover; ``columns`` per work-group.",
    variant=variant,
)


@documented_like(mxfp8_grouped_split)
def mxfp8_grouped_stream(
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
    columns: int = 256,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, writing into ``out``.

    Args:
        a_q: activations [M_act, K] in e4m3fn; K a multiple of 128, at most 512; slot t reads row t // ``a_div``.
        a_scale: their scales [M_act, K/32], at a multiple of 4 bytes.
        w_scale: their scales [E, N, K/32], at a multiple of 4 bytes.
        columns: of a work-group: a multiple of 64 up to 512.

    Returns:
        ``out``.
    """
    require_rank("w", w, 3, "[E, N, K]")
    experts, n, k = w.shape
    mxfp8_grouped_stream_out(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias,
        experts, n, k, num_valid_tokens, a_q.shape[0], a_div, block_m, columns,
    )  # fmt: skip
    return out


def default(problem: Any, arch: str, cu_count: int, packing: int = 1) -> Iterator[Timed]:
    """Yield the configuration of :func:`default_choice`, with a time that puts it first."""
    slots, n, k = problem.key[:3]
    taken = default_choice(slots, problem.experts, n, k, cu_count, packing)
    if taken is not None:
        yield 0.0, taken.configuration  # before the kernel that splits K


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    return None if takes(key[2]) else f"K a multiple of {K_STEP} up to {MAX_K}"


STREAM = Kernel(
    KERNEL,
    archs=(ARCH,),
    parameters=MappingProxyType({"columns": COLUMNS}),
    launch=mxfp8_grouped_stream_out,
    candidates=lambda cell, arch: [{"columns": columns} for columns in COLUMNS if takes(cell.k)],
    pipeline=lambda given, cell, arch: Pipeline(BYTES_AHEAD),
    refusal=_refusal,
    default=default,
)
