"""The queue kernel of the skinny fp8 GEMM: its stub, its raw op, its default rule and its value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge import archs
from hipforge.ops.core import dispatch
from hipforge.ops.core.dispatch import Choice, Refused
from hipforge.ops.core.kernel import Configuration as Given
from hipforge.ops.core.kernel import Kernel, Pipeline
from hipforge.ops.core.stub import stub
from hipforge.ops.fp8_skinny_gemm.raw import ARCHS, FORMATS, MAX_M, Problem, column_major, row_major
from hipforge.ops.fp8_skinny_gemm.space import OP_M, TILES, Configuration, refusal, require

MAX_SPLIT_K = 16  # of the queue kernel's default rule
TILE_BLOCKS = 0.25  # what the end of a tile costs there, in k blocks: its stores, most of them behind the next loads

# The queue kernel's default tile and waves for m up to the key: few instructions, 32 to 48 KB of weights in flight in a
# work-group, at most 60 KB of LDS.
_DEFAULTS: Mapping[int, Configuration] = MappingProxyType(
    {
        8: Configuration(op_m=8, b_lanes=2, ops=8, a_producers=2, b_producers=4, consumers=2, qsize=3),
        16: Configuration(op_m=16, b_lanes=3, ops=8, a_producers=2, b_producers=6, consumers=2, qsize=3),
        32: Configuration(op_m=32, b_lanes=2, ops=8, a_producers=2, b_producers=6, consumers=2, qsize=4),
    }
)


def default_configuration(m: int, n: int, k: int, cu_count: int) -> Configuration:
    """Return the queue kernel's configuration for a shape: tiles as high as m asks for, and the split that costs least.

    Split parts fill the compute units of the last round, and add tiles and traffic: every part writes and reads fp32
    sums of its own. The cost is that of all three in units of one read of the weights by all compute units.
    """
    whole = _DEFAULTS[next((height for height in _DEFAULTS if m <= height), MAX_M)]
    tiles = whole.tiles(m, n)

    def cost(split_k: int) -> float:
        rounds = -(-tiles * split_k // cu_count)
        idle, sums = rounds * cu_count / (tiles * split_k), 2 * 4 * m * split_k * whole.consumers / k
        return idle + sums + TILE_BLOCKS * split_k / whole.blocks(k)

    splits = range(1, min(MAX_SPLIT_K, whole.blocks(k)) + 1)
    return dataclasses.replace(whole, split_k=min(splits, key=cost))


def _variant(*given: Any) -> dict[str, int]:
    op_m, a_lanes, b_lanes, ops = given[7:11]
    return {"HF_TILE": 1000 * op_m + 100 * a_lanes + 10 * b_lanes + ops}


skinny_gemm_fp8_out = stub(
    "skinny_gemm_fp8_out",
    "module_fp8_skinny_gemm_queue",
    "out, a, b, scale: Tensor; workspace: Tensor?; accumulate: bool; split_k, op_m, a_lanes, b_lanes, ops, "
    "a_producers, b_producers, consumers, qsize, workgroups: int",
    """Write or add (``accumulate``) scale * (a @ b) to ``out`` fp16 [m, n].

    ``workspace`` float32 [split_k * consumers, m, n] holds the partial sums; None adds with packed fp16 atomics, which
    takes an even n and ``accumulate=True``.
    """,
    variant=_variant,
    mutates=("out", "workspace"),
)


def _launch(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    accumulate: bool,
    deterministic: bool,
    op_m: int,
    a_lanes: int,
    b_lanes: int,
    ops: int,
    a_producers: int,
    b_producers: int,
    consumers: int,
    qsize: int,
    split_k: int,
    workgroups: int | None = None,
) -> None:
    workspace = None
    if deterministic:
        shape = max(split_k * consumers, 1), *out.shape
        workspace = torch.empty(shape, dtype=torch.float32, device=a.device)
    elif not accumulate:
        out.zero_()  # atomics add to what is there
    if workgroups is None:
        target = dispatch.target_of(a.device)
        workgroups = 1 if isinstance(target, Refused) else target[1]  # the stub refuses a device without kernels
    skinny_gemm_fp8_out(
        out, row_major(a, out), column_major(b, out), scale, workspace, accumulate or not deterministic, split_k, op_m,
        a_lanes, b_lanes, ops, a_producers, b_producers, consumers, qsize, workgroups,
    )  # fmt: skip


def run_skinny_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    deterministic: bool = True,
    workgroups: int | None = None,
    op_m: int = 8,
    a_lanes: int = 1,
    b_lanes: int = 2,
    ops: int = 4,
    a_producers: int = 2,
    b_producers: int = 6,
    consumers: int = 2,
    qsize: int = 4,
    split_k: int = 1,
) -> torch.Tensor:
    """Run the queue kernel in the configuration given; any m and n. Shapes as in :mod:`hipforge.ops.fp8_skinny_gemm`.

    A work-group computes tiles of op_m a_lanes rows and 16 b_lanes columns (32 b_lanes with op_m 32).

    Args:
        a: e4m3 [m, k].
        b: e4m3 [k, n].
        scale: one float32.
        output: float16 [m, n], added to in place; None makes a new tensor.
        deterministic: fp32 partial sums in a fixed order; False adds with packed fp16 atomics (n must be even).
        workgroups: size of the persistent grid; None for one per compute unit.
        op_m: rows of a matrix instruction: 8 (sparse), 16 or 32; with the next three one of ``space.TILES``.
        a_lanes: instructions side by side along m, 1 to 3.
        b_lanes: and along n, 2, 3 or 5.
        ops: depth of a block of k, in 4 or 8 instructions of gfx942 (512 / op_m of k each).
        a_producers: waves that load a.
        b_producers: waves that load b.
        consumers: waves that multiply; all three together at most 16.
        qsize: slots of the queue, at least a_producers / a_lanes, b_producers / b_lanes and consumers.
        split_k: parts that k is cut into, at most the number of k blocks.

    Returns:
        float16 [m, n].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    k = Problem.of(a, b, scale, output).k
    chosen = Configuration(op_m, a_lanes, b_lanes, ops, a_producers, b_producers, consumers, qsize, split_k)
    target = dispatch.target_of(a.device)
    if not isinstance(target, Refused) and target[0] in FORMATS:  # the stub refuses the other devices
        require(chosen, target[0], k)
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float16, device=a.device) if output is None else output
    _launch(out, a, b, scale, output is not None, deterministic, **chosen.parameters(), workgroups=workgroups)
    return out


# The tuner's values of each parameter; the model has no LDS latency, which a single consumer would bear alone.
A_PRODUCERS = (1, 2, 4)
B_PRODUCERS = (4, 6, 8, 10, 12)
CONSUMERS = (2, 3)
QSIZE = (6, 5, 4, 3, 2, 1)
SPLIT_K = tuple(range(1, 17))


def tiles_for(m: int) -> list[tuple[int, int, int, int]]:
    """Return the tiles that are the lowest of their op_m to hold m rows, and not half empty."""
    return [tile for tile in TILES if tile[1] == -(-m // tile[0]) and (tile[0] == OP_M[0] or m > tile[0] // 2)]


def _candidates(cell: Any, arch: str) -> Iterator[Given]:
    """Yield configurations, few splits and waves first: ties go to them."""
    for split_k in SPLIT_K:
        for waves in ((a, b, c) for b in B_PRODUCERS for c in CONSUMERS for a in A_PRODUCERS):
            for tile in tiles_for(cell.m):
                possible = (Configuration(*tile, *waves, qsize, split_k) for qsize in QSIZE)
                deepest = next((c for c in possible if refusal(c, arch, cell.k) is None), None)
                if deepest is not None:
                    yield deepest.parameters()


@functools.lru_cache(maxsize=4096)
def busiest_share(tiles: int, splits: int, blocks: int, cu_count: int) -> float:
    """Return the k blocks of the busiest work-group over those of the average one.

    Work-groups take contiguous runs of the ``tiles`` (split parts counted, the last split's last), the first ones one
    more where they do not divide; the last split has the blocks that are left over.
    """
    workgroups = min(tiles, cu_count)
    length, longer = divmod(tiles, workgroups)
    first_of_last = tiles - tiles // splits  # its parts come last
    each = blocks // splits
    more = blocks - splits * each

    def run(workgroup: int) -> int:
        begin, end = (index * length + min(index, longer) for index in (workgroup, workgroup + 1))
        return (end - begin) * each + max(0, end - max(begin, first_of_last)) * more

    return max(map(run, range(workgroups))) * workgroups / (tiles // splits * blocks)


def pipeline(c: Configuration, cell: Any, cu_count: int) -> Pipeline:
    """Return how b is streamed: producers have a part of a block in flight, and the slower ones lead."""
    blocks_per_trip = min(c.a_producers / c.a_lanes, c.b_producers / c.b_lanes)
    return Pipeline(
        in_flight_bytes=int(blocks_per_trip * c.tile_n * c.block_k / c.waves),
        matrix_waves=c.consumers,
        busiest=busiest_share(c.tiles(cell.m, cell.n), c.split_k, c.blocks(cell.k), cu_count),
    )


def choice(configuration: Configuration) -> Choice:
    """Return this kernel in a configuration."""
    return QUEUE.choice(configuration.parameters())


def _refusal(given: Given, key: Sequence[int], arch: str) -> str | None:
    return refusal(Configuration(**given), arch, key[2])


QUEUE = Kernel(
    "skinny_gemm_fp8",
    archs=ARCHS,
    parameters=MappingProxyType({name: range(1, 1 << 20) for name in Configuration().parameters()}),
    launch=_launch,
    candidates=_candidates,
    pipeline=lambda given, cell, arch: pipeline(Configuration(**given), cell, archs.get(arch).cu_count),
    refusal=_refusal,
)
