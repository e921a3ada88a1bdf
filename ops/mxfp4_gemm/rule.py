"""Which kernel a shape gets where no tuned row says: a rough model of their times on gfx950.

Waves that split K read as fast as one compute unit can have loads in flight; tiles take rounds of steps
(:class:`~hipforge.ops.core.tiles.TileKernel`). The constants come near ``hipforge time`` at shapes with M = 1 to 4,096.
At 16 others what is chosen takes 5 % more modelled time than the best configuration in the mean, 31 % at most (``python
op_tests/bench_default_rule.py --op mxfp4_gemm -m 4 -m 16 -m 64 -m 256 --shapes 2304,6144 --shapes 7168,2048 --shapes
8192,3584 --shapes 4096,4096``).
"""

from __future__ import annotations

from types import MappingProxyType

from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.tiles import MAX_K, TileKernel

WAVES = "mxfp4_gemm"  # the kernel whose waves split K
SUB_TILES = (1, 2, 4)  # of 16 rows or columns, per wave
K_SPLITS = (1, 2, 4, 8)  # over the waves of a work-group
MOST_TILES = 64  # that the waves of a work-group hold, all parts of K together: LDS decides
K_STEP = 128
MOST_ROWS = 256  # from which on only tiles are tried

START_US = 2.2  # of a launch, with the first loads and the last stores
BYTES_PER_US = 24_000  # of one compute unit, whose loads take half a cache line
SHARED_X = 0.65  # of X's bytes, which neighbours find in caches
STEP_US = 0.045  # of each step of a wave
ROUND_US = 0.5  # of each round of waves after the first, eight to a compute unit
WIDE_US = 0.6  # of each tile of columns after the first: fewer steps in flight

TILED = TileKernel(
    "mxfp4_gemm_tiles",
    k_step=256,
    step_us=MappingProxyType(
        {(256, 256): 1.55, (192, 256): 1.27, (192, 128): 0.82, (128, 192): 0.9, (128, 128): 0.675, (64, 128): 0.57,
         (64, 64): 0.365, (32, 64): 0.325}
    ),
    partial_us=2e-4,
)  # fmt: skip


def k_steps(k: int) -> int:
    """Return how many 128-wide K steps the waves take; the last may be partial."""
    return -(-k // K_STEP)


def waves(m_sub: int, n_sub: int, k_splits: int) -> Choice:
    """Return the kernel whose waves split K in a configuration."""
    return Choice(WAVES, MappingProxyType({"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}))


def waves_to_try(m: int, k: int) -> list[tuple[int, int, int]]:
    """Return (m_sub, n_sub, k_splits) that leave no tile of rows without work, fewest splits first."""
    return [
        (m_sub, n_sub, k_splits)
        for k_splits in K_SPLITS
        if k_splits <= k_steps(k)
        for m_sub in SUB_TILES
        if m_sub == 1 or 16 * m_sub // 2 < m
        for n_sub in SUB_TILES
        if m_sub * n_sub * k_splits <= MOST_TILES
    ]


def waves_us(m: int, n: int, k: int, m_sub: int, n_sub: int, k_splits: int, cu_count: int) -> float:
    """Return a rough modelled time of waves that split K.

    Args:
        m: rows of X.
        n: rows of W.
        k: columns of both.
        m_sub: tiles of 16 rows per wave.
        n_sub: tiles of 16 columns per wave.
        k_splits: waves of a work-group.
        cu_count: of the GPU.
    """
    rows, columns = 16 * m_sub, 16 * n_sub
    groups = -(-m // rows) * -(-n // columns)
    read = -(-groups // cu_count) * (SHARED_X * min(m, rows) + columns) * k / 2 / BYTES_PER_US
    later_rounds = -(-groups * k_splits // (8 * cu_count)) - 1
    steps = -(-k_steps(k) // k_splits)
    return START_US + read + STEP_US * steps + ROUND_US * later_rounds + WIDE_US * (n_sub - 1)


def default_choice(m: int, n: int, k: int, cu_count: int) -> Choice:
    """Return the kernel and configuration with the least rough time."""
    timed = []
    if m <= MOST_ROWS or k > MAX_K:
        timed += [(waves_us(m, n, k, *given, cu_count), waves(*given)) for given in waves_to_try(m, k)]
    if k <= MAX_K:
        timed.append(TILED.best(m, n, k, cu_count))
    return min(timed, key=lambda one: one[0])[1]
