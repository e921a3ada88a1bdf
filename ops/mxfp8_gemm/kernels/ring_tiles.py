"""The MX-FP8 GEMM in tiles on sm_90 whose ring a producer warp fills: its stub, its raw op and its value.

The default from 17 rows on where it is the fastest by rough times; ``docs/measured.md`` has those of an H100.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed, ceil_div
from hipforge.ops.core.stub import stub
from hipforge.ops.core.tiles import NEAR, Tile, tile_number
from hipforge.ops.mxfp8_gemm.raw import OPERANDS, k_steps, run_raw

MOST_K = 1 << 24
MOST_SPLITS = 8  # blocks of a cluster, which share K
INVARIANT_TILE = (64, 128)
MULTIPROCESSORS = 132  # that the invariant plan reckons with, whatever the card


@dataclass(frozen=True)
class Rate:
    """Rough microseconds on an H100, fitted to measured times.

    Attributes:
        start_us: of a call.
        step_us: of a block's or a team's step of 128 k.
        round_us: of the ends of a round of blocks.
        share_us: where blocks or teams share K, and a third of it more for each more.
        bytes_per_us: of W.
        blocks: of a multiprocessor.
        beside_us: of a step, where two blocks are on a multiprocessor.
    """

    start_us: float
    step_us: float
    round_us: float
    share_us: float
    bytes_per_us: float
    blocks: int = 1
    beside_us: float = 0.0


# By the tile, and whether the scales of W are shared too.
RATES = MappingProxyType({
    ((32, 128), 0): Rate(3.2, 0.50, 1.3, 2.8, 2.5e6, 2, 0.80),
    ((64, 128), 0): Rate(3.0, 0.88, 2.7, 3.3, 2.4e6, 2, 0.94),
    ((64, 256), 0): Rate(2.0, 0.82, 5.7, 3.6, 2.2e6),
    ((128, 128), 0): Rate(6.1, 0.52, 2.3, 3.2, 1.95e6),
    ((128, 256), 0): Rate(5.7, 0.86, 3.1, 4.2, 1.87e6),
    ((128, 256), 1): Rate(5.4, 0.53, 3.1, 4.3, 1.87e6),
})  # fmt: skip
TILES = tuple(dict.fromkeys(tile for tile, _ in RATES))
# Multiprocessors, of 132, that clusters of so many blocks can have: a cluster stays in a part of the GPU.
CLUSTERED = MappingProxyType({1: 132, 2: 132, 3: 114, 4: 120, 8: 112})
TEAM_TILES = (128128, 128256)  # which two blocks have half of each: a team
MOST_TEAMS = 66
TEAM_SPLITS = (1, 2, 3, 4)
# Weights whose scales are shared before look like others: they are slower where they are shared again, and no faster in
# tiles of 64 rows and fewer, which scale each product. So both have to be faster than other choices by as much.
NOT_WHOLE, AGAIN = 1.1, 1.15
# Teams take 0.7 to 0.8 of their time where a weight's scales were shared before. Beside other kernels they count as if
# half of the weights were.
MAY_BE_SHARED = 0.87
MOST_SHARED = 1 << 30  # bytes of W that a call makes again
SHARED_BYTES_PER_US = 2.3e6  # of codes read and written again with shared scales
COPIED_US = 2.0  # where K is no multiple of 512: scales of W are copied to whole lines


mxfp8_ring_tiles_out = stub(
    "mxfp8_ring_tiles_out",
    "module_mxfp8_gemm_ring_tiles",
    f"{OPERANDS}; workspace: Tensor; tile, k_splits, shared: int; programmatic: bool",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] bf16; ``workspace`` is uint8 of :func:`workspace_bytes`.",
    variant={"HF_TILE": "tile"},
)


def _launch(out: torch.Tensor, *given: Any) -> None:
    mxfp8_ring_tiles_out(out, *given, programmatic.active())


def workspace_bytes(m: int, n: int, k: int, tile: int, shared: int, k_splits: int = 1) -> int:
    """Return the bytes of a launch's workspace: X, its scales, scales of W in whole lines, and W where it is shared.

    Teams that share tiles leave their sums there too.
    """
    rows, columns = divmod(tile, 1000)
    padded, steps = ceil_div(m, rows) * rows, k_steps(k)
    scales = n * 16 * ceil_div(k, 512)  # always, since W's scales may start anywhere
    parts = 0
    if tile in TEAM_TILES and k_splits > 1:
        teams = min(MOST_TEAMS, ceil_div(m, rows) * ceil_div(n, columns) * k_splits)
        parts = teams * rows * columns * 4 + 1024
    return sum(256 * ceil_div(part, 256) for part in (m * k, 4 * steps * padded, scales, n * k * shared, parts))


def _workspace(given: Configuration, key: Sequence[int], device: torch.device) -> torch.Tensor:
    m, n, k = key
    size = workspace_bytes(m, n, k, given["tile"], given["shared"], given["k_splits"])
    return torch.empty(size, dtype=torch.uint8, device=device)


@documented_like(run_raw)
def mxfp8_ring_tiles(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: int = tile_number((128, 128)),
    k_splits: int = 1,
    shared: int = 0,
) -> torch.Tensor:
    """Run the kernel on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`.

    X is multiplied in a form in which as much of a row as possible has one scale; a code that this rounds is off by at
    most 2^-11 of the largest of its block (``csrc/mxfp8_gemm/nvidia/share_scales.h``).

    Args:
        tile: rows of X times 1000 plus rows of W that a block multiplies: 32128, 64128 or 64256; or a team of two
            blocks: 128128 or 128256.
        k_splits: blocks that share K, 1 to 8, each with at least one step of 128. Of teams, at most so many for a tile;
            with more than 1 all teams have the same number of steps.
        shared: 1 for W in that form too, which the call makes: for many rows of X.
    """
    return run_raw(RING_TILES, Xq, Wq, Xq, Xs, Wq, Ws, bias, tile=tile, k_splits=k_splits, shared=shared)


def slots(cluster: int, units: int) -> int:
    """Return how many of a GPU's multiprocessors clusters of so many blocks can have."""
    return max(1, units * CLUSTERED[min(size for size in CLUSTERED if size >= cluster)] // CLUSTERED[1])


def _busy_us(m: int, n: int, k: int, tile: Tile, k_splits: int, rate: Rate, units: int) -> float:
    """Return the time of the rounds of a launch's blocks, where clusters share the K of tiles."""
    blocks = ceil_div(m, tile[0]) * ceil_div(n, tile[1]) * k_splits
    places = slots(k_splits, units)
    beside = rate.blocks > 1 and blocks > places
    rounds = ceil_div(blocks, places * (rate.blocks if beside else 1))
    steps = ceil_div(k_steps(k), k_splits)
    busy = rounds * (steps * (rate.beside_us if beside else rate.step_us) + rate.round_us)
    return busy + (rate.share_us * (1 + 0.35 * (k_splits - 1)) if k_splits > 1 else 0)


def _busy_team_us(m: int, n: int, k: int, tile: Tile, k_splits: int, rate: Rate, units: int) -> float:
    """Return the time of the teams' steps: whole tiles in rounds, or the same number of steps for each team."""
    tiles, steps = ceil_div(m, tile[0]) * ceil_div(n, tile[1]), k_steps(k)
    teams = min(MOST_TEAMS, max(1, units // 2), tiles * k_splits)
    if k_splits == 1 or tiles % teams == 0:
        return ceil_div(tiles, teams) * (steps * rate.step_us + rate.round_us)
    if tiles > teams:
        return tiles * steps / teams * rate.step_us + ceil_div(tiles, teams) * rate.round_us + 1.35 * rate.share_us
    of_team = ceil_div(tiles * steps, teams)
    parts = ceil_div(steps, of_team)
    return of_team * rate.step_us + rate.round_us + rate.share_us * (1 + 0.35 * (parts - 1))


def _rough_us(m: int, n: int, k: int, tile: Tile, k_splits: int, shared: int, units: int) -> float:
    rate = RATES[tile, shared]
    of_blocks = _busy_team_us if tile_number(tile) in TEAM_TILES else _busy_us
    made = 2 * k * (m + n * shared) / SHARED_BYTES_PER_US + (COPIED_US if k % 512 else 0)
    return rate.start_us + made + max(of_blocks(m, n, k, tile, k_splits, rate, units), n * k / rate.bytes_per_us)


def _splits(m: int, n: int, k: int, tile: Tile, units: int) -> Iterator[int]:
    tiles, steps = ceil_div(m, tile[0]) * ceil_div(n, tile[1]), k_steps(k)
    for k_splits in TEAM_SPLITS if tile_number(tile) in TEAM_TILES else CLUSTERED:
        if k_splits == 1 or (
            k_splits <= steps and (tile_number(tile) in TEAM_TILES or tiles * k_splits <= slots(k_splits, units))
        ):
            yield k_splits


def _timed(m: int, n: int, k: int, units: int) -> list[Timed]:
    return [
        (
            _rough_us(m, n, k, tile, k_splits, shared, units),
            {"tile": tile_number(tile), "k_splits": k_splits, "shared": shared},
        )
        for tile, shared in RATES
        if n * k * shared <= MOST_SHARED
        for k_splits in _splits(m, n, k, tile, units)
    ]


def _as_wanted(timed: Timed, m: int) -> float:
    us, given = timed
    if given["shared"]:
        return us * AGAIN
    return us * (NOT_WHOLE if m > INVARIANT_TILE[0] and given["tile"] not in TEAM_TILES else 1)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    us, given = min(_timed(m, n, k, cu_count), key=lambda one: _as_wanted(one, m))
    may_be_shared = given["tile"] in TEAM_TILES and not given["shared"]
    yield us * (MAY_BE_SHARED if may_be_shared else 1), given


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    timed = sorted(_timed(m, n, k, archs.get(arch).cu_count), key=lambda one: one[0])
    return [given for us, given in timed if us <= NEAR * timed[0][0]]


def invariant(problem: Any) -> Configuration:
    """Return the configuration that every M gets where results must not depend on it, nor on the card."""
    _, n, k = problem.key
    k_splits = max(1, min(MULTIPROCESSORS // ceil_div(n, INVARIANT_TILE[1]), MOST_SPLITS, k_steps(k)))
    return {"tile": tile_number(INVARIANT_TILE), "k_splits": k_splits, "shared": 0}


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    if key[2] > MOST_K:
        return f"K of at most {MOST_K}"
    steps = k_steps(key[2])
    return None if given["k_splits"] <= steps else f"k_splits of at most {steps}, the steps of 128 of K"


RING_TILES = Kernel(
    "mxfp8_ring_tiles",
    archs=("sm_90",),
    parameters=MappingProxyType({
        "tile": tuple(map(tile_number, TILES)), "k_splits": range(1, MOST_SPLITS + 1), "shared": (0, 1)
    }),
    workspace=_workspace,
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
