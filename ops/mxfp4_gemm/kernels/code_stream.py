"""MXFP4 weights times few rows of X on sm_90, W streamed once: the kernel's stub, its plans, its raw op and its value.

Activations are bfloat16 or MXFP4. Both operands become float16 in the kernel: W exactly, with its scale, X times a
power of two for each row, MXFP4 ones exactly too: where that cannot be, because scales of a row are further than 2^35
apart, its blocks are summed alone (csrc/mxfp4_gemm/nvidia/code_stream_kernel.h).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import programmatic
from hipforge.ops.core.kernel import Configuration, Kernel, Timed, ceil_div
from hipforge.ops.core.row_stream import MOST_BLOCKS, SHARED_BYTES, SHARERS
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp4_gemm.raw import run_raw

ROWS = (8, 16)  # of X that a block multiplies at once
TILES = (2, 3, 4)  # of 8 rows of W, in a pass
SPLITS = (1, 2, 4, 8)  # blocks of a cluster, which share K
WARPS, STEP_K, TILE_ROWS = 16, 128, 8
# What it takes to make 8 rows and 128 k of X float16, by the bits of its elements, in what `busy` counts in.
MADE = MappingProxyType({4: 0.02, 16: 0.07})

mxfp4_code_stream_out = stub(
    "mxfp4_code_stream_out",
    "module_mxfp4_gemm_code_stream",
    "out, x: Tensor; Xs: Tensor?; Wq, Ws: Tensor; bits, rows, tiles, sharers, splits, blocks: int; programmatic: bool",
    "Write X @ Wq^T into ``out`` [M, N] bf16; ``bits`` of X's elements are 4, with ``Xs``, or 16.",
    variant={"HF_BITS": "bits", "HF_ROWS": "rows", "HF_TILES": "tiles"},
)


def shared_bytes(n: int, k: int, *, rows: int, tiles: int, sharers: int, splits: int, blocks: int) -> int:
    """Return the shared memory of a block: ring, sums, what a cluster exchanges, X and the scales of its rows of W."""
    slots = 3 if rows == 8 and tiles > 2 else 2
    steps = ceil_div(ceil_div(k, STEP_K), splits)
    sums = WARPS * (tiles * TILE_ROWS + 4) * rows * 4
    exchanged = 2 * (WARPS // sharers) * tiles * TILE_ROWS * rows * 4 if splits > 1 else 0
    scales = ceil_div(n, blocks) * ((4 * steps + 30) // 16 * 16)
    return WARPS * slots * tiles * 512 + sums + 128 + exchanged + steps * rows * 256 + scales


def blocks_for(n: int, splits: int, units: int) -> int:
    """Return how many clusters share the rows of W: a block a multiprocessor; clusters of 4 and 8 leave some idle."""
    return max(1, min(n, units // splits if splits < 4 else units * 10 // 11 // splits))


def configurations(m: int, n: int, k: int, units: int) -> list[Configuration]:
    """Return what a tuner may try; none where X is too long for shared memory."""
    steps = ceil_div(k, STEP_K)
    for rows in ROWS[:1] if m <= ROWS[0] else ROWS[::-1]:
        found: list[Configuration] = []
        for splits, tiles, sharers in itertools.product(SPLITS, TILES, SHARERS):
            if splits * sharers > max(steps, splits) or splits > steps:
                continue
            given = {"rows": rows, "tiles": tiles, "sharers": sharers, "splits": splits}
            blocks = blocks_for(n, splits, units)
            while (needed := shared_bytes(n, k, **given, blocks=blocks)) > SHARED_BYTES and blocks < n:
                blocks = min(n, 2 * blocks)
            if needed <= SHARED_BYTES:
                found.append({**given, "blocks": blocks})
        if found:
            return found
    return []


def busy(m: int, n: int, k: int, units: int, given: Configuration, bits: int) -> float:
    """Return how long a block is busy, in pairs of tiles of steps: fitted to an H100's times (docs/measured.md)."""
    rows, tiles, sharers, splits, blocks = (given[name] for name in ("rows", "tiles", "sharers", "splits", "blocks"))
    own, pairs = ceil_div(ceil_div(k, STEP_K), splits), ceil_div(tiles, 2)
    rounds = ceil_div(ceil_div(ceil_div(n, blocks), tiles * TILE_ROWS), WARPS // sharers)
    stream = rounds * (ceil_div(own, sharers) * (pairs + 0.3) + 2) + 2 * pairs
    stream *= (1 + 0.06 * math.log2(WARPS // sharers)) * (1.1 if splits > 1 else 1) * ceil_div(blocks * splits, units)
    return stream + (0, 2, 2, 10)[SPLITS.index(splits)] + MADE[bits] * own * min(m, rows) / 8


def best(m: int, n: int, k: int, units: int, bits: int) -> Configuration | None:
    """Return the configuration that is done first, the simplest of equals; None where there is none."""
    tried = configurations(m, n, k, units)
    return min(tried, key=lambda given: busy(m, n, k, units, given, bits)) if tried else None


def _bits(problem: Any) -> int:
    return 16 if getattr(problem, "bf16", False) else 4  # a tuner's cells have MXFP4 activations


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    xs: torch.Tensor | None,
    wq: torch.Tensor,
    ws: torch.Tensor,
    shuffled: bool,
    *given: int,
) -> None:
    mxfp4_code_stream_out(out, x, xs, wq, ws, 16 if xs is None else 4, *given, programmatic.active())


def run_mxfp4_code_stream(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    rows: int = ROWS[0],
    tiles: int = 2,
    sharers: int = 4,
    splits: int = 1,
    blocks: int = 132,
) -> torch.Tensor:
    """Run the kernel of sm_90 that makes X float16, as configured; operands as in :mod:`hipforge.ops.mxfp4_gemm`.

    Args:
        x: activations [M, K/2] with ``x_scale``, or bfloat16 [M, K] without.
        x_scale: e8m0 bytes [M, K/32], or None.
        wq: weights [N, K/2] in plain order.
        w_scale: e8m0 bytes [N, K/32].
        rows: rows of X that a block takes at once: 8 or 16. W is read once for each.
        tiles: rows of W in a pass over 8: 2 to 4.
        sharers: warps that share K: a power of two up to 16.
        splits: blocks of a cluster that split K between them: 1, 2, 4 or 8, at most one for each 128 k.
        blocks: how many clusters the rows of W are spread over, at most N.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    configuration = {"rows": rows, "tiles": tiles, "sharers": sharers, "splits": splits, "blocks": blocks}
    return run_raw(CODE_STREAM, configuration, x, x_scale, wq, w_scale, False)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    if (given := best(m, n, k, cu_count, _bits(problem))) is not None:
        yield 1.0, given


def invariant(problem: Any, cu_count: int) -> Configuration | None:
    """Return a configuration that shares K as few rows do, which alone decides the order of sums; None without one."""
    m, n, k = problem.key
    fitting = [
        given
        for given in configurations(ROWS[-1], n, k, cu_count)
        if all(shared_bytes(n, k, **{**given, "rows": rows}) <= SHARED_BYTES for rows in ROWS)
    ]
    if not fitting:
        return None
    most = min(fitting, key=lambda given: busy(ROWS[-1], n, k, cu_count, given, _bits(problem)))
    return {**most, "rows": ROWS[m > ROWS[0]]}


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    m, n, k = cell.key
    return configurations(m, n, k, archs.get(arch).cu_count)


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    _, n, k = key
    if given["splits"] > ceil_div(k, STEP_K):
        return f"splits of at most one for each {STEP_K} k"
    if given["blocks"] > n:
        return "blocks of at most N"
    most = shared_bytes(n, k, **given)
    return (
        None if most <= SHARED_BYTES else f"more blocks or splits: shared memory of {most} bytes exceeds {SHARED_BYTES}"
    )


CODE_STREAM = Kernel(
    "mxfp4_code_stream",
    archs=("sm_90",),
    parameters=MappingProxyType(
        {"rows": ROWS, "tiles": TILES, "sharers": SHARERS, "splits": SPLITS, "blocks": range(1, MOST_BLOCKS + 1)}
    ),
    launch=_launch,
    candidates=_candidates,
    refusal=_refusal,
    default=_default,
)
