"""Plans of the kernels that stream W past a few rows of X on sm_90: how W is spread over blocks, warps and passes.

A block has consecutive rows of W and visits them in passes of 8 x ``tiles``; ``sharers`` of its warps share the lines
of 128 bytes of a pass, and groups of them take different passes at once (csrc/mxfp8_gemm/nvidia/row_stream_kernel.h).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hipforge.ops.core.kernel import Configuration, ceil_div

TILES = (1, 2, 3, 4)  # of 8 rows of W, in a pass
SHARERS = (1, 2, 4, 8, 16)  # warps that share K
MOST_BLOCKS = 1 << 20
SHARED_BYTES = 227 * 1024  # that a block can have
LINE = 128  # bytes of a row of W in a step
LONG_RUN_BYTES = 64 * 1024  # of scales that a block keeps, before there are several blocks for each multiprocessor


def warps(rows: int, tiles: int) -> int:
    """Return the warps of a block: what registers allow."""
    return 16 if rows <= 16 and tiles <= 3 else 8


def shared_bytes(rows: int, tiles: int, block_rows: int, k: int) -> int:
    """Return the shared memory of a block that has ``block_rows`` rows of W: ring, sums, scales."""
    count = warps(rows, tiles)
    slots = {1: 4, 2: 3 if count == 16 else 4, 3: 2 if count == 16 else 3, 4: 3}[tiles]
    return count * slots * tiles * 8 * LINE + 2 * count * tiles * 8 * rows * 4 + block_rows * (k // 32) + 32


def blocks_for(n: int, k: int, units: int) -> int:
    """Return how many blocks share the rows of W: one a multiprocessor, or several where its scales are many."""
    rounds = 1
    while ceil_div(n, units * rounds) * (k // 32) > LONG_RUN_BYTES:
        rounds += 1
    return min(n, units * rounds)


def fewest(n: int, k: int, blocks: int, tiles: int) -> int:
    """Return how many blocks visit the rows of W in as few passes each as ``blocks`` do, at least half as many.

    The others would shorten no block's work, and each reads all of X. Fewer than half keep too few bytes in flight.
    ``k`` is that of W's scales, 0 where it has none, of which a block keeps no more than :func:`blocks_for` allows.
    """
    rows = 8 * tiles
    found = ceil_div(n, rows * ceil_div(ceil_div(n, blocks), rows))
    fits = 2 * found >= blocks and ceil_div(n, found) * (k // 32) <= LONG_RUN_BYTES
    return found if fits else blocks


@dataclass(frozen=True)
class RowStream:
    """The plans of one kernel.

    Attributes:
        rows: of X that a block may multiply at once.
        step_k: k of a line of W.
        x_per_row: of a tile's time a row of X costs in each step, however many tiles share it.
        word_tiles: numbers of tiles that need a K of whole steps.
        scaled: W has a scale for each 32 k, which blocks keep in shared memory.
        most_meetings: of up to 8 rows of X, so many meetings take time, which W hides of further ones; None: all do.
    """

    rows: tuple[int, ...]
    step_k: int
    x_per_row: float
    word_tiles: tuple[int, ...] = ()
    scaled: bool = True
    most_meetings: int | None = None

    @property
    def parameters(self) -> Mapping[str, Sequence[int]]:
        """Return the kernel's parameters and their accepted values."""
        return MappingProxyType(
            {"rows": self.rows, "tiles": TILES, "sharers": SHARERS, "blocks": range(1, MOST_BLOCKS + 1)}
        )

    def fitting(self, m: int) -> int:
        """Return the rows of X that a block takes at once: all of them, where so many are accepted."""
        return next((rows for rows in self.rows if m <= rows), self.rows[-1])

    def steps(self, k: int) -> int:
        """Return how many steps K takes; the last may be partial."""
        return ceil_div(k, self.step_k)

    def configurations(self, m: int, n: int, k: int, units: int) -> list[Configuration]:
        """Return what a tuner may try."""
        rows, steps, scaled = self.fitting(m), max(1, self.steps(k)), k if self.scaled else 0
        blocks = blocks_for(n, k, units) if self.scaled else min(n, units)
        needed = ceil_div(ceil_div(n, blocks), 8)
        # With fewer, warps without a pass of their own are idle at the end; a power of two: 3 steps have a number too.
        least = min(2 if rows <= 16 else 4, 1 << (steps.bit_length() - 1))
        allowed = [tiles for tiles in TILES if (tiles == 1 and needed == 1) or 2 <= tiles <= max(2, needed)]
        return [
            {"rows": rows, "tiles": tiles, "sharers": sharers, "blocks": fewest(n, scaled, blocks, tiles)}
            for tiles in allowed
            if tiles not in self.word_tiles or k % self.step_k == 0
            for sharers in SHARERS
            if least <= sharers <= min(warps(rows, tiles), steps)
        ]

    def best(self, m: int, n: int, k: int, units: int) -> Configuration:
        """Return the configuration whose busiest warp is done first; of equals the wider pass, then fewer teams."""
        tried = self.configurations(m, n, k, units)
        return min(tried, key=lambda given: (self.busy(n, k, **given), -given["tiles"], -given["sharers"]))

    def busy(self, n: int, k: int, *, rows: int, tiles: int, sharers: int, blocks: int) -> float:
        """Return how long a warp is busy, in tiles of steps: in each of its passes its steps and one meeting."""
        count = warps(rows, tiles)
        passes = ceil_div(ceil_div(ceil_div(n, blocks), 8 * tiles), count // sharers)
        step = tiles + self.x_per_row * rows
        share = count / 16 if count == 16 or rows == 32 else 0.55
        meetings = passes if self.most_meetings is None or rows > 8 else min(passes, self.most_meetings)
        return (passes * ceil_div(self.steps(k), sharers) * step + meetings * tiles) * share

    def refusal(self, given: Configuration, key: Sequence[int], arch: str) -> str | None:
        """Return what a kernel needs and does not get in a configuration, or None."""
        _, n, k = key
        rows, tiles, sharers, blocks = (given[name] for name in ("rows", "tiles", "sharers", "blocks"))
        if sharers > warps(rows, tiles):
            return f"sharers of at most {warps(rows, tiles)} with these rows and tiles"
        if tiles in self.word_tiles and k % self.step_k:
            return f"K of a multiple of {self.step_k} with tiles={tiles}"
        if blocks > n:
            return "blocks of at most N"
        most = shared_bytes(rows, tiles, ceil_div(n, blocks) if self.scaled else 0, k)
        return None if most <= SHARED_BYTES else f"more blocks: shared memory of {most} bytes exceeds {SHARED_BYTES}"
