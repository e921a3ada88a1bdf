"""The grouped MX-FP8 GEMM whose K is split over the waves of a work-group: its stub, raw op and value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.checks import require_int, require_rank
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.kernels.wave_split import default_waves
from hipforge.ops.mxfp8_gemm.raw import STEP_BYTES, k_steps
from hipforge.ops.mxfp8_grouped_gemm.reference import OPERANDS, ROUTED

KERNEL = "mxfp8_grouped_split"
FEW_ROWS = 8  # in loads of whole lines, on gfx950: line_wave.h
TILE_ROWS = (16, 32)
ROWS = (FEW_ROWS, *TILE_ROWS)  # slots of a tile that are multiplied at once
MAX_K = 1 << 22
LINE_PAIR = 256  # k of two lines
LEAST_LINE_K = 2048  # with a shorter one whole lines gain nothing, and the scales come later
LEAST_LINE_TILES = 8  # of 16 columns and a slot, for each compute unit: with fewer of them memory is not the bound
WAVES = (1, 2, 4, 8)  # of 16 columns, each with a part of K
TILE = 16  # columns of a wave, and slots of a tile of sums
COLUMNS = (16, 32, 64, 128)  # of a work-group
MOST_WAVES = 8  # of a work-group; registers decide
WAVES_PER_CU = 3  # python op_tests/bench_moe_peers.py --waves: more of them gain less than the model's error
WIDEST_K = 384  # up to which work-groups of 64 columns are faster than those of 32, because fewer have to start
GROUPS_PER_CU = 2  # least work-groups of more than 16 columns
STEPS_AHEAD = {FEW_ROWS: 4, 16: 3, 32: 4}  # K steps whose operands a wave has in flight on gfx950, by rows


def choice(rows: int, waves: int, columns: int = TILE) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType({"rows": rows, "waves": waves, "columns": columns}))


def of_smallm(slots: int, k: int) -> Choice:
    """Return the successor of the former kernel ``smallm``, for its raw op and for rows with its name."""
    return choice(TILE if slots <= TILE else ROWS[-1], default_waves(max(k, 1), WAVES[-1]))


def fits(waves: int, columns: int) -> bool:
    """Return whether a work-group of so many columns, ``waves`` for each 16, is not too large."""
    return waves * (columns // TILE) <= MOST_WAVES


def default_choice(slots: int, experts: int, n: int, k: int, cu_count: int, lines: bool = False) -> Choice:
    """Return rows for the slots of an expert, twice their mean where there are many, few waves and wide work-groups.

    A tile with more slots than that is computed in several passes, each of which loads the expert's weight again. Eight
    are taken in loads of whole lines where there are such (``lines``) and memory is the bound. Waves are the fewest
    that fill the GPU with an expert per slot, or that K needs, if fewer: more add instructions and sums. Where waves
    need not wait for each other, a work-group has as many columns as leave enough work-groups: each takes time to
    start.
    """
    expected, groups = min(slots, max(1, 2 * slots // experts)), -(-n // TILE) * min(slots, experts)
    pays = lines and k >= LEAST_LINE_K and groups >= LEAST_LINE_TILES * cu_count
    rows = next((rows for rows in (ROWS if pays else TILE_ROWS) if expected <= rows), ROWS[-1])
    filling = next((waves for waves in WAVES if waves * groups >= WAVES_PER_CU * cu_count), WAVES[-1])
    waves = min(filling, default_waves(k, WAVES[-1]))
    return choice(rows, waves, default_columns(groups, waves, k, cu_count))


def has_lines(k: int, arch: str) -> bool:
    """Return whether the kernel has 8 slots at a time, in loads of whole lines; where not, 16 are."""
    return arch == "gfx950" and k % LINE_PAIR == 0


def default_columns(groups: int, waves: int, k: int, cu_count: int) -> int:
    """Return the columns of a work-group where there are ``groups`` of 16 columns: with one wave up to 64 or 32."""
    most = (COLUMNS[2] if k <= WIDEST_K else COLUMNS[1]) // TILE if waves == 1 else 1
    side_by_side = max(1, min(most, groups // (GROUPS_PER_CU * cu_count)))
    return TILE << (side_by_side.bit_length() - 1)


mxfp8_grouped_split_out = stub(
    "mxfp8_grouped_split_out",
    "module_mxfp8_grouped_gemm_split",
    f"out, {OPERANDS}; {ROUTED}; rows, waves, columns: int",
    "Write the rows of ``out`` that tiles in use cover; ``rows`` slots and ``columns`` per work-group.",
    variant={"HF_ROWS": "rows"},
)


def mxfp8_grouped_split(
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
    rows: int = TILE,
    waves: int = 8,
    columns: int = TILE,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors, writing into ``out``.

    Args:
        a_q: activations [M_act, K] in the architecture's e4m3; K a multiple of 32, at most 2^22, M_act·K at most
            2^31 - 1; slot t reads row t // ``a_div``.
        a_scale: their scales [M_act, K/32].
        w: weights [E, N, K]; N·K at most 2^31 - 1, any E.
        w_scale: their scales [E, N, K/32].
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
        rows: slots of a tile that are multiplied at once, 8, 16 or 32; more of them take several passes. 8 are 16 on
            gfx942, and where K is no multiple of 256 or scales do not start at a multiple of 4 bytes.
        waves: for each 16 columns, each with a part of K: 1, 2, 4 or 8. Their sums are added in a fixed order.
        columns: of a work-group: 16, 32, 64 or 128, with at most 8 waves in all.

    Returns:
        ``out``.

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    if require_int("rows", rows) not in ROWS:
        raise GuardError(f"rows must be 8, 16 or 32; got {rows}")
    require_rank("w", w, 3, "[E, N, K]")
    experts, n, k = w.shape
    mxfp8_grouped_split_out(
        out, a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, mul_weight_by, bias,
        experts, n, k, num_valid_tokens, a_q.shape[0], a_div, block_m, rows, waves, columns,
    )  # fmt: skip
    return out


def _candidates(cell: Any, arch: str, lines: bool = False) -> Iterator[Configuration]:
    """Yield every configuration that leaves no wave without a step."""
    for waves in WAVES:
        for columns in COLUMNS:
            for rows in ROWS if lines and has_lines(cell.k, arch) else TILE_ROWS:
                if waves <= k_steps(cell.k) and fits(waves, columns):
                    yield {"rows": rows, "waves": waves, "columns": columns}


def _default(problem: Any, arch: str, cu_count: int, lines: bool = False) -> Iterator[Timed]:
    slots, n, k = problem.key[:3]
    chosen = default_choice(slots, problem.experts, n, k, cu_count, lines and has_lines(k, arch))
    yield 1.0, chosen.configuration  # a rank, no time


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    taken = fits(given["waves"], given["columns"])
    return None if taken else f"at most {MOST_WAVES} waves, columns / {TILE} times waves"


WITHOUT_LINES = Kernel(
    KERNEL,
    archs=("gfx950", "gfx942"),
    parameters=MappingProxyType({"rows": TILE_ROWS, "waves": WAVES, "columns": COLUMNS}),
    launch=mxfp8_grouped_split_out,
    candidates=_candidates,
    pipeline=lambda given, cell, arch: Pipeline(STEPS_AHEAD[given["rows"]] * STEP_BYTES),
    refusal=_refusal,
    default=_default,
)
"""What the kernels for other weights have."""

WAVE_SPLIT = replace(
    WITHOUT_LINES,
    parameters=MappingProxyType({"rows": ROWS, "waves": WAVES, "columns": COLUMNS}),
    candidates=partial(_candidates, lines=True),
    default=partial(_default, lines=True),
)
