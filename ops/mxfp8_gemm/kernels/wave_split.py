"""The MX-FP8 GEMM whose K is split over the waves of a work-group: its stub, its raw op and its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.few_rows import modelled_us, rows_by_default
from hipforge.ops.mxfp8_gemm.raw import FEW_ROWS, MAX_K, OPERANDS, ROWS, STEP_BYTES, k_steps, rows_to_try, run_raw

COLUMNS = (16, 24, 32)  # tried for any shape
ACCEPTED_COLUMNS = range(16, 81, 4)
FITTED_ROUNDS = (1, 2)
WAVES = (1, 2, 4, 8, 16)
RUN_STEPS = {16: 12, 32: 8, 64: 8}  # of straight code on gfx950, by rows
MOST_STEPS = 6  # per wave, where there are enough waves: all of a wave's loads are then in flight at once or nearly
MOST_HALVED = 1.5  # work-groups of 64 rows for each compute unit of gfx942, up to which twice as many of 32 are faster
LONG_PART = 16  # steps of a wave that are worth more waves than four


def columns_to_try(m: int, n: int, rows: int, cu_count: int) -> list[int]:
    """Return numbers of columns: the usual ones, and those that make one or two work-groups for each compute unit."""
    blocks = -(-m // rows)
    unit = ACCEPTED_COLUMNS.step
    fitted = (-(-n * blocks // (cu_count * rounds * unit)) * unit for rounds in FITTED_ROUNDS)
    return sorted({*COLUMNS, *(columns for columns in fitted if columns in ACCEPTED_COLUMNS)})


def max_waves(rows: int, columns: int = COLUMNS[0]) -> int:
    """Return how many waves a work-group may have: registers decide."""
    return 16 if (rows, columns) == (16, 16) else 8 if columns <= COLUMNS[-1] else 4


def steps_ahead(rows: int, columns: int = COLUMNS[0]) -> int:
    """Return how many K steps of its operands a wave has in flight on gfx950."""
    if columns > COLUMNS[-1]:
        return 3
    return {16: 4, 32: 6, 64: 3}[rows] if columns == COLUMNS[0] else {16: 3, 32: 3, 64: 2}[rows]


def waves_to_try(rows: int, columns: int, k: int) -> list[int]:
    """Return the numbers of waves to try; with more than 16 columns each wave has at most two runs of steps."""
    steps = k_steps(k)
    most = max_waves(rows, columns)
    least = 1 if columns == COLUMNS[0] else min(most, -(-steps // (2 * RUN_STEPS[rows])))
    return [waves for waves in WAVES if least <= waves <= min(steps, most)]


def default_waves(k: int, most: int) -> int:
    """Return the least waves, of at most ``most``, that leave each at most MOST_STEPS steps, or all of them."""
    steps = k_steps(k)
    allowed = [waves for waves in WAVES if waves <= min(most, steps)]
    return next((waves for waves in allowed if waves * MOST_STEPS >= steps), allowed[-1])


def waves_by_default(rows: int, columns: int, k: int) -> int:
    """Return a number of waves on gfx950.

    Two waves or, past two times MOST_STEPS steps, four are fastest at the shapes of MiniMax-M3 (modelled); more only
    where each would still have more than LONG_PART steps. With more than 32 columns four are: they store whole rows.
    """
    steps = k_steps(k)
    waves = 4 if steps > 2 * MOST_STEPS or (columns > COLUMNS[-1] and steps >= 4) else 2
    while waves * LONG_PART < steps:
        waves *= 2
    return min(waves, steps, max_waves(rows, columns))


def _on_gfx942(m: int, n: int, k: int, cu_count: int) -> Configuration:
    """Return a configuration for gfx942, where a wave has fewer steps in flight than on gfx950.

    Waves have MOST_STEPS steps each, but are no more than four where the work-groups fill the GPU or have more than 16
    rows of X, which each wave reads its part of: modelled, (M, N, K) = (1, 2304, 6144) takes 6.7 us with eight and 8.0
    with four, (16, 6144, 6144) 20.4 with eight and 14.4 with four. A wave of 64 rows has one step in flight: where
    work-groups are few, two of 32 rows take their place, (64, 2304, 6144) 12.4 us for 25.1.
    """
    rows = next((rows for rows in ROWS if m <= rows), ROWS[-1])
    if rows == ROWS[-1] and m <= rows and n <= MOST_HALVED * COLUMNS[0] * cu_count:
        rows = ROWS[-2]
    groups = -(-m // rows) * -(-n // COLUMNS[0])
    waves = default_waves(k, 8 if rows == ROWS[0] and groups <= cu_count else 4)
    return {"rows": rows, "columns": COLUMNS[0], "waves": waves}


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key[:3]
    if arch == "gfx942":
        yield 0.0, _on_gfx942(m, n, k, cu_count)
    elif m <= FEW_ROWS:
        for rows in rows_by_default(m):
            for columns in columns_to_try(m, n, rows, cu_count):
                us = modelled_us(m, n, k, rows, columns, 1, cu_count)
                yield us, {"rows": rows, "columns": columns, "waves": waves_by_default(rows, columns, k)}


def invariant(problem: Any, arch: str, cu_count: int) -> Configuration:
    """Return a configuration with the waves of few rows; waves alone decide the order of sums.

    Rows and columns of a work-group follow the batch: each row's sums are its own.
    """
    m, n, k = problem.key[:3]
    if arch == "gfx942":
        waves = _on_gfx942(ROWS[0], n, k, cu_count)["waves"]
        return {**_on_gfx942(m, n, k, cu_count), "waves": waves}
    waves = waves_by_default(ROWS[0], COLUMNS[-1], k)
    tried = (
        (modelled_us(m, n, k, rows, columns, 1, cu_count), rows, columns)
        for rows in rows_by_default(m)
        for columns in columns_to_try(m, n, rows, cu_count)
        if waves <= max_waves(rows, columns)
    )
    _, rows, columns = min(tried)
    return {"rows": rows, "columns": columns, "waves": waves}


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    return [
        {"rows": rows, "columns": columns, "waves": waves}
        for rows in rows_to_try(cell.m)
        for columns in columns_to_try(cell.m, cell.n, rows, archs.get(arch).cu_count)
        for waves in waves_to_try(rows, columns, cell.k)
    ]


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    rows, columns, waves, k = given["rows"], given["columns"], given["waves"], key[2]
    if arch == "gfx942" and columns > COLUMNS[0]:
        return f"columns={COLUMNS[0]} on gfx942"
    if k > MAX_K or waves > k_steps(k):
        return f"K of at most {MAX_K} and no more waves than steps of 128"
    most = max_waves(rows, columns)
    return f"at most {most} waves with these rows and columns" if waves > most else None


def _pipeline(given: Configuration, cell: Any, arch: str) -> Pipeline:
    columns = given["columns"]
    return Pipeline(steps_ahead(given["rows"], columns) * STEP_BYTES * columns // COLUMNS[0])


mxfp8_wave_split_out = stub(
    "mxfp8_wave_split_out",
    "module_mxfp8_gemm_wave_split",
    f"{OPERANDS}; rows, columns, waves: int",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16.",
    variant={"HF_ROWS": "rows"},
)


@documented_like(run_raw)
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
        rows: rows of X that a work-group multiplies with its rows of W: 16, 32 or 64.
        waves: of a work-group, each with a part of K: 1, 2, 4, with up to 32 columns 8, and with 16 rows and columns
            16. Their sums are added in a fixed order.
        columns: rows of W of a work-group: 16 or, on gfx950, a multiple of 4 up to 80.
    """
    return run_raw(WAVE_SPLIT, Xq, Wq, Xq, Xs, Wq, Ws, bias, rows=rows, columns=columns, waves=waves)


WAVE_SPLIT = Kernel(
    "mxfp8_wave_split",
    archs=("gfx950", "gfx942"),
    parameters=MappingProxyType({"rows": ROWS, "columns": ACCEPTED_COLUMNS, "waves": WAVES}),
    launch=mxfp8_wave_split_out,
    candidates=_candidates,
    pipeline=_pipeline,
    refusal=_refusal,
    default=_default,
    loop="wave_split_kernel.h",
)
