"""Which MX-FP8 kernel up to 64 rows get where no tuned row says: a rough model of their times on gfx950.

A work-group that multiplies ``columns`` rows of W with its rows of X reads both over its part of K, and the CU can have
only so much in flight: a launch takes as long as the CU with the most to read. The constants come near
``hipforge time`` at the 15 shapes of MiniMax-M3 with M = 1 to 64: the choice takes 3 % more modelled time than the best
configuration in the mean, 13 % at most (``python op_tests/bench_default_rule.py``).
"""

from __future__ import annotations

from hipforge.ops.mxfp8_gemm.raw import ROWS

TILE = 16
START_US = 1.7  # of a launch, with the first loads and the last stores
BYTES_PER_US = 49_500  # of one CU
ROUND_US = 0.4  # of each round of work-groups after the first
TILE_US = 0.07  # per tile of sums: added over the waves, stored
WIDE_US = 0.9  # of waves with several tiles of columns: fewer steps in flight
MEET_US = 1.1  # of work-groups that share K: sums stored, met, read
MEETING_US = 0.15  # of each meeting


def modelled_us(m: int, n: int, k: int, rows: int, columns: int, k_splits: int, cu_count: int) -> float:
    """Return a rough modelled time of waves that split K, in ``k_splits`` work-groups.

    Args:
        m: rows of X.
        n: rows of W.
        k: columns of both.
        rows: of X in a work-group.
        columns: rows of W in a work-group.
        k_splits: work-groups that share K.
        cu_count: of the GPU.
    """
    rounds = -(-(-(-m // rows) * -(-n // columns) * k_splits) // cu_count)
    read = rounds * (min(rows, m) + columns) * k / k_splits / BYTES_PER_US + ROUND_US * (rounds - 1)
    met = 0.0 if k_splits == 1 else MEET_US + MEETING_US * (k_splits.bit_length() - 1)
    tiles = -(-rows // TILE) * -(-columns // TILE)
    return START_US + read + met + TILE_US * tiles + (WIDE_US if columns > TILE else 0.0)


def rows_by_default(m: int) -> list[int]:
    """Return the numbers of rows in a work-group that the default rule compares: all of X's, and at most two tiles."""
    fitting = next((rows for rows in ROWS if m <= rows), ROWS[-1])
    return sorted({fitting, min(fitting, 2 * TILE)})
