"""The MX-FP8 GEMM whose K is split over the waves of a work-group: its stub, its raw op and its configurations."""

from __future__ import annotations

from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.mxfp8_gemm.raw import new_result

KERNEL = "mxfp8_wave_split"
K_STEP = 128
ROWS = (16, 32, 64)
COLUMNS = (16, 24, 32)  # tried for any shape
COLUMN_UNIT, MOST_COLUMNS = 4, 80
FITTED_ROUNDS = (1, 2)
WAVES = (1, 2, 4, 8, 16)
RUN_STEPS = {16: 12, 32: 8, 64: 8}  # of straight code on gfx950, by rows
MOST_STEPS = 6  # per wave, where there are enough waves: all of a wave's loads are then in flight at once or nearly
LONG_PART = 16  # steps of a wave that are worth more waves than four


def takes(columns: int) -> bool:
    """Return whether a work-group may have so many columns."""
    return COLUMNS[0] <= columns <= MOST_COLUMNS and columns % COLUMN_UNIT == 0


def columns_to_try(m: int, n: int, rows: int, cu_count: int) -> list[int]:
    """Return numbers of columns: the usual ones, and those that make one or two work-groups for each compute unit."""
    blocks = -(-m // rows)
    fitted = (-(-n * blocks // (cu_count * rounds * COLUMN_UNIT)) * COLUMN_UNIT for rounds in FITTED_ROUNDS)
    return sorted({*COLUMNS, *filter(takes, fitted)})


def max_waves(rows: int, columns: int = COLUMNS[0]) -> int:
    """Return how many waves a work-group may have: registers decide."""
    return 16 if (rows, columns) == (16, 16) else 8 if columns <= COLUMNS[-1] else 4


def steps_ahead(rows: int, columns: int = COLUMNS[0]) -> int:
    """Return how many K steps of its operands a wave has in flight on gfx950."""
    if columns > COLUMNS[-1]:
        return 3
    return {16: 4, 32: 6, 64: 3}[rows] if columns == COLUMNS[0] else {16: 2, 32: 3, 64: 2}[rows]


def choice(rows: int, waves: int, columns: int = COLUMNS[0]) -> Choice:
    """Return this kernel in a configuration."""
    return Choice(KERNEL, MappingProxyType({"rows": rows, "columns": columns, "waves": waves}))


def waves_to_try(rows: int, columns: int, k: int) -> list[int]:
    """Return the numbers of waves to try; with more than 16 columns each wave has at most two runs of steps."""
    steps = -(-k // K_STEP)
    most = max_waves(rows, columns)
    least = 1 if columns == COLUMNS[0] else min(most, -(-steps // (2 * RUN_STEPS[rows])))
    return [waves for waves in WAVES if least <= waves <= min(steps, most)]


def default_waves(k: int, most: int) -> int:
    """Return the least waves, of at most ``most``, that leave each at most MOST_STEPS steps, or all of them."""
    steps = -(-k // K_STEP)
    allowed = [waves for waves in WAVES if waves <= min(most, steps)]
    return next((waves for waves in allowed if waves * MOST_STEPS >= steps), allowed[-1])


def default_choice(rows: int, columns: int, k: int) -> Choice:
    """Return the tile with its default number of waves on gfx950.

    Two waves or, past two times MOST_STEPS steps, four are fastest at the shapes of MiniMax-M3 (modelled); more only
    where each would still have more than LONG_PART steps.
    """
    steps = -(-k // K_STEP)
    waves = 2 if steps <= 2 * MOST_STEPS else 4
    while waves * LONG_PART < steps:
        waves *= 2
    return choice(rows, min(waves, steps, max_waves(rows, columns)), columns)


def default_choice_gfx942(m: int, n: int, k: int, cu_count: int) -> Choice:
    """Return a configuration for gfx942, where a wave has fewer steps in flight than on gfx950.

    Waves have MOST_STEPS steps each, but are no more than four where the work-groups fill the GPU or have more than 16
    rows of X, which each wave reads its part of: modelled, (M, N, K) = (1, 2304, 6144) takes 6.7 us with eight and 8.0
    with four, (16, 6144, 6144) 20.4 with eight and 14.4 with four.
    """
    rows = next((rows for rows in ROWS if m <= rows), ROWS[-1])
    groups = -(-m // rows) * -(-n // COLUMNS[0])
    return choice(rows, default_waves(k, 8 if rows == ROWS[0] and groups <= cu_count else 4))


@compile_ops("module_mxfp8_gemm_wave_split", variant=lambda *given: {"HF_ROWS": given[-3]})
def mxfp8_wave_split_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    columns: int,
    waves: int,
) -> None:
    """Write Xq @ Wq^T + bias into ``out`` [M, N] bf16."""


def mxfp8_wave_split(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    rows: int = ROWS[0],
    waves: int = 8,
    columns: int = COLUMNS[0],
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    Args:
        Xq: activations [M, K] in the architecture's e4m3; K a multiple of 32, at most 2^22.
        Xs: their scales [M, K/32].
        Wq: weights [N, K].
        Ws: their scales [N, K/32].
        bias: bfloat16 [N], added in float32 before the only rounding.
        rows: rows of X that a work-group multiplies with its rows of W: 16, 32 or 64.
        waves: of a work-group, each with a part of K: 1, 2, 4, with up to 32 columns 8, and with 16 rows and columns
            16. Their sums are added in a fixed order.
        columns: rows of W of a work-group: 16 or, on gfx950, a multiple of 4 up to 80.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    out = new_result(Xq, Wq)
    if require_int("rows", rows) not in ROWS:
        raise GuardError(f"rows must be 16, 32 or 64; got {rows}")
    mxfp8_wave_split_out(out, Xq, Xs, Wq, Ws, bias, rows, columns, waves)
    return out
