"""The grouped MX-FP8 GEMM for a short K, whose rows of W stream past slots that stay in registers, on gfx950."""

from __future__ import annotations

from types import MappingProxyType

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_rank
from hipforge.ops.core.dispatch import Choice

KERNEL = "mxfp8_grouped_stream"
ARCH = "gfx950"
ROWS = 16  # slots at a time
K_STEP = 128
MAX_K = 512
WIDE_GROUPS = 3  # of a compute unit, with which a work-group may have more columns than usual
COLUMNS = (64, 128, 192, 256, 320, 384, 448, 512)  # of a work-group


def choice(columns: int) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType({"columns": columns}))


def default_choice(slots: int, experts: int, n: int, k: int, cu_count: int) -> Choice | None:
    """Return the configuration for a problem where this kernel is faster; None where the kernel that splits K is.

    That is where work-groups of its usual width, 128 columns, or 256 with a K of more than 256, are many for each
    compute unit if every slot has another expert (``python op_tests/bench_moe_peers.py --published DIR``).
    """
    if not takes(k) or slots > ROWS * experts // 2:  # experts with more slots than a tile of registers
        return None
    columns_per_cu = n * min(slots, experts) / cu_count
    usual, least = (128, 3) if k <= 2 * K_STEP else (256, 8)
    if columns_per_cu < least * usual:
        return None
    return choice(max([usual, *(columns for columns in (256, 512) if columns_per_cu >= WIDE_GROUPS * columns)]))


def takes(k: int) -> bool:
    """Return whether the kernel has a variant for a K."""
    return 0 < k <= MAX_K and k % K_STEP == 0


@compile_ops(
    "module_mxfp8_grouped_gemm_stream",
    variant=lambda *given: {"HF_STEPS": min(MAX_K // K_STEP, max(1, given[12] // K_STEP))},
)
def mxfp8_grouped_stream_out(
    out: torch.Tensor,
    a_q: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_weight_by: torch.Tensor | None,
    bias: torch.Tensor | None,
    E: int,
    N: int,
    K: int,
    num_valid_tokens: int,
    M_act: int,
    a_div: int,
    block_m: int,
    columns: int,
) -> None:
    """Write the rows of ``out`` that tiles in use cover; ``columns`` per work-group."""


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
        a_q: activations [M_act, K] e4m3fn; K a multiple of 128, at most 512, M_act·K at most 2^31 - 1; slot t reads row
            t // ``a_div``.
        a_scale: their scales [M_act, K/32].
        w: weights [E, N, K]; N·K at most 2^31 - 1, any E.
        w_scale: their scales [E, N, K/32]; like ``a_scale`` at a multiple of 4 bytes.
        sorted_token_ids: int32, whole tiles of ``block_m`` slots; an entry outside 0 … ``num_valid_tokens`` - 1 is
            padding, wherever it stands in its tile.
        expert_ids: int32, one per tile; one outside 0 … E - 1 skips the tile.
        num_tokens_post_padded: int32 [1]; tiles that start there or later are skipped.
        out: contiguous bfloat16 with at least ``num_valid_tokens`` · N elements; row t is slot t. Rows of slots that
            no tile holds, and of skipped tiles, stay as they are.
        num_valid_tokens: slots, T · top_k.
        a_div: slots per activation row.
        block_m: entries of a tile, a multiple of 4.
        mul_weight_by: float32 with one weight per slot, multiplied in float32 before the result is rounded.
        bias: float32 [E, N], added in float32 before the weight.
        columns: of a work-group: a multiple of 64 up to 512.

    Returns:
        ``out``.

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    require_rank("w", w, 3, "[E, N, K]")
    experts, n, k = w.shape
    mxfp8_grouped_stream_out(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias,
        experts, n, k, num_valid_tokens, a_q.shape[0], a_div, block_m, columns,
    )  # fmt: skip
    return out
