"""GEMMs whose tiles pass through LDS (``mx_tiles/kernel.h``): names of tiles, workspace, which tile a shape gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from hipforge.ops.core.dispatch import Choice

K_SPLITS = (1, 2, 4, 8)
MAX_K = 1 << 22
START_US = 3.0  # of a launch, with the first loads and the last stores
MEET_US = 1.0  # of each meeting, until the last work-group of a tile knows that it is the last
MOST_ROUNDS = 3  # of work-groups that share K
NEAR = 1.5  # over the least rough time: what a tuner tries

Tile = tuple[int, int]
"""Rows of X and rows of W that a work-group multiplies."""


def tile_number(tile: Tile) -> int:
    """Return how the modules' variants name a tile."""
    return tile[0] * 1000 + tile[1]


def split_workspace(m: int, n: int, tile: int, k_splits: int, device: torch.device) -> torch.Tensor | None:
    """Return the workspace for sums and counters of work-groups that share a tile; None where K is not split.

    Its contents mean nothing before and after a launch, and no other launch may use it at the same time.
    """
    if k_splits < 2:
        return None
    rows, columns = divmod(tile, 1000)
    tiles, parts = -(-m // rows) * -(-n // columns), min(k_splits, K_SPLITS[-1])
    meetings = 2 * (parts - 1)  # float32 of 64-bit words
    return torch.empty(tiles * (parts * rows * columns + meetings), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class TileKernel:
    """A kernel in tiles.

    Attributes:
        name: of the kernel in decisions.
        k_step: K of one step.
        step_us: of each tile, a rough modelled time of one step when all compute units are busy, in microseconds.
        partial_us: per partial sum of a tile, which one compute unit reads.
    """

    name: str
    k_step: int
    step_us: Mapping[Tile, float]
    partial_us: float

    @property
    def smallest(self) -> Tile:
        """Return the smallest tile."""
        return min(self.step_us)

    def steps(self, k: int) -> int:
        """Return how many steps K takes; the last may be partial."""
        return -(-k // self.k_step)

    def splits_to_try(self, k: int) -> list[int]:
        """Return the numbers of parts that K can be cut into."""
        return [k_splits for k_splits in K_SPLITS if k_splits <= self.steps(k)]

    def modelled_us(self, m: int, n: int, k: int, tile: Tile, k_splits: int, cu_count: int) -> float:
        """Return a rough modelled time: rounds of work-groups times steps, and the addition of a split K's parts."""
        groups = -(-m // tile[0]) * -(-n // tile[1]) * k_splits
        steps = -(-k // (self.k_step * k_splits))
        parts = k_splits * tile[0] * tile[1]
        reduced = 0.0 if k_splits == 1 else MEET_US * (k_splits.bit_length() - 1) + parts * self.partial_us
        return START_US + -(-groups // cu_count) * steps * self.step_us[tile] + reduced

    def choice(self, tile: Tile, k_splits: int) -> Choice:
        """Return this kernel in a configuration."""
        return Choice(self.name, MappingProxyType({"tile": tile_number(tile), "k_splits": k_splits}))

    def timed(self, m: int, n: int, k: int, cu_count: int) -> list[tuple[float, Tile, int]]:
        """Return the rough time of each tile and split of K, fewest splits and the larger tile first.

        A tile with twice the rows that there are is left out. Parts of K are for results that leave compute units
        idle: at most MOST_ROUNDS of their work-groups.
        """
        pairs = [
            (tile, splits)
            for splits in self.splits_to_try(k)
            for tile in self.step_us
            if tile[0] < 2 * max(m, self.smallest[0])
            if splits == 1 or -(-m // tile[0]) * -(-n // tile[1]) * splits <= MOST_ROUNDS * cu_count
        ]
        return [(self.modelled_us(m, n, k, tile, splits, cu_count), tile, splits) for tile, splits in pairs]

    def candidates(self, m: int, n: int, k: int, cu_count: int) -> list[Choice]:
        """Return the configurations whose rough time is within half of the least, the least first."""
        timed = sorted(self.timed(m, n, k, cu_count), key=lambda one: one[0])
        return [self.choice(tile, k_splits) for us, tile, k_splits in timed if us <= NEAR * timed[0][0]]

    def best(self, m: int, n: int, k: int, cu_count: int) -> tuple[float, Choice]:
        """Return the least rough time with its tile and split of K, the larger tile and fewer splits in a tie."""
        us, tile, k_splits = min(self.timed(m, n, k, cu_count), key=lambda one: one[0])
        return us, self.choice(tile, k_splits)
