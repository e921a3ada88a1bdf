"""Counts of decode attention at full size, from counts at a reduced size.

A cache of 128 sequences of 131072 keys is 4 GB of work for a CPU. The reduction is exact where splits divide the
blocks, and a test holds it to runs at full size:

- Every work-group does the same work: one of them, for one sequence and one KV head, stands for all. Splits that do
  not divide the blocks leave less to the last work-group, which is counted as a whole one.
- What a work-group executes is a number for its start and end plus one for each block: two short runs give both.
- The merge is run with as many splits as it has to merge, for one sequence and one KV head.

How much a wave has in flight is read from the machine code as well: each wait for loads that were issued since the last
wait is a trip to memory, and the bytes of a trip are those of the launch over its trips. Each counts as a trip to HBM,
which overestimates those for block tables, equally for every configuration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hipforge.errors import ConfigError
from hipforge.jit import loader
from hipforge.ops.decode_attention.kernels import (
    BLOCK_M,
    BLOCKS_N,
    INT4_BLOCK_N,
    Options,
    blocks_per_wave,
    ranges,
    run_decode_attention,
    waves_per_range,
)
from hipforge.tuning import model
from hipforge.tuning.families.decode_attention.cases import AttentionCell, AttentionOperands, expected, operands
from hipforge.tuning.tuner import relative_error

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hipforge.emulator.code_object import Kernel
    from hipforge.emulator.counting import KernelCount, PcCount

SAMPLED_BLOCKS = (4, 8)  # of a wave: the two points of the line through the counts
WAVE_SIZE = 64
_COUNTS = ("instructions", "vector", "matrix_cycles", "loaded", "trips")  # fields of Counted that grow with the work


def run(
    parts: AttentionOperands, configuration: Mapping[str, int], **options: Unpack[Options]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel in one configuration and return (out, log-sum-exp)."""
    k, v = (cache if parts.num_groups else cache.view(torch.uint8) for cache in (parts.k, parts.v))
    scales: dict[str, Any] = {"k_scale_shift": parts.k_rows, "v_scale_shift": parts.v_rows}
    if parts.num_groups:
        scales = {"num_groups": parts.num_groups}
    return run_decode_attention(
        parts.q, k, v, parts.block_tables, parts.seqlens, **scales, scale=parts.scale,
        configuration=configuration, **options,
    )  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """Counts of one launch or of one of its work-groups, and the trips to memory in its code.

    ``loaded`` is bytes of every access; ``trips`` waits for loads, added up over waves; ``waves`` the waves of a
    work-group; ``error`` the relative error of the call's output.
    """

    instructions: float
    vector: float
    matrix_cycles: float
    loaded: float
    trips: float
    waves: int
    occupancy: int
    error: float

    def per(self, workgroups: int) -> Counted:
        """Return the share of one of ``workgroups``."""
        return replace(self, **{name: getattr(self, name) / workgroups for name in _COUNTS})

    def work(self, times: int, workgroups: int, unique_bytes: int, streamed_bytes: int) -> model.Work:
        """Return a launch of ``times`` as much work, for the model."""
        return model.Work(
            workgroups=workgroups,
            waves_per_workgroup=self.waves,
            vector_instructions=round(self.vector * times),
            instructions=round(self.instructions * times),
            matrix_cycles=round(self.matrix_cycles * times),
            loaded_bytes=round(self.loaded * times),
            unique_bytes=unique_bytes,
            streamed_bytes=streamed_bytes,
            occupancy=self.occupancy,
            in_flight_bytes=round(streamed_bytes / (self.trips * times)),
        )


def trips(rows: Iterable[PcCount], scalar: bool) -> int:
    """Return how often waves wait for memory: waits with a load since the last one, in the order of addresses.

    Args:
        rows: counts of every instruction of a kernel.
        scalar: whether scalar loads count; those of tables and arguments, which caches keep, should not.
    """
    loads = ("buffer_load", "global_load", "flat_load", *(("s_load",) if scalar else ()))
    counters = ("vmcnt", *(("lgkmcnt",) if scalar else ()))
    found, pending = 0, False
    for row in sorted(rows, key=lambda item: item.pc):
        if row.text.startswith(loads):
            pending = True
        elif pending and row.text.startswith("s_waitcnt") and any(name in row.text for name in counters):
            found, pending = found + row.count, False
    return found


def loaded_kernel(symbol: str) -> Kernel:
    """Return a kernel of the modules that this process has loaded."""
    from hipforge.emulator import CodeObject

    for module in loader.loaded():
        if symbol in module.manifest.kernels:
            return CodeObject(module.path / "module.so").kernels[symbol]
    raise ConfigError(f"no loaded module has a kernel {symbol}")


def occupancy(kernel: Kernel, launch: KernelCount) -> int:
    """Return waves per SIMD that registers and the LDS of a launch allow."""
    return kernel.waves_per_simd(math.prod(launch.block), launch.lds_bytes - kernel.lds_bytes)


def count(cell: AttentionCell, arch: str, configuration: Mapping[str, int]) -> tuple[Counted, Counted | None]:
    """Run a cell on the emulator and return the counts of its split kernel and of its merge kernel, if it has one."""
    from hipforge import emulator

    parts = operands(cell, arch)
    with emulator.counters(per_pc=True) as collector:
        out, _ = run(parts, configuration)
    counts = collector.result
    error = relative_error(out, expected(parts)[0])

    def of(launch: KernelCount, matrix_cycles: int, scalar: bool) -> Counted:
        rows = [row for row in counts.per_pc if row.kernel == launch.name]
        return Counted(
            instructions=sum(row.count for row in rows),
            vector=sum(row.count for row in rows if row.text.startswith("v_") and "mfma" not in row.text),
            matrix_cycles=matrix_cycles,
            loaded=sum(row.bytes for row in rows if "_load" in row.text),
            trips=trips(rows, scalar),
            waves=math.ceil(math.prod(launch.block) / WAVE_SIZE),
            occupancy=occupancy(loaded_kernel(launch.name), launch),
            error=error,
        )

    split, *merge = counts.kernels
    # The merge has no tables: its scalar loads are of what the split kernel has just written.
    return of(split, counts.mfma_cycles, False), of(merge[0], 0, True) if merge else None


@functools.lru_cache(maxsize=4096)
def sampled_blocks(
    group: int, d: int, paged: bool, num_groups: int, arch: str, tile: tuple[tuple[str, int], ...], blocks: int
) -> Counted:
    """Return the counts of one work-group whose waves have ``blocks`` blocks each; ``tile`` lacks the splits."""
    configuration = {**dict(tile), "split_k": 2}
    keys = 2 * ranges(configuration, d) * blocks * configuration.get("block_n", INT4_BLOCK_N)
    split, _ = count(AttentionCell(1, group, d, 64 if paged else 0, keys, 1, num_groups), arch, configuration)
    return split.per(2 * math.ceil(group / BLOCK_M))


def workgroup(cell: AttentionCell, arch: str, configuration: Mapping[str, int]) -> Counted:
    """Return the counts of one work-group of a cell, drawn from two short runs."""
    tile = tuple((name, value) for name, value in configuration.items() if name != "split_k")
    few, many = (
        sampled_blocks(cell.group, cell.d, cell.page_size > 0, cell.num_groups, arch, tile, blocks)
        for blocks in SAMPLED_BLOCKS
    )
    place = (blocks_per_wave(configuration, cell.d, cell.keys) - SAMPLED_BLOCKS[0]) / (
        SAMPLED_BLOCKS[1] - SAMPLED_BLOCKS[0]
    )

    ends = ((name, getattr(few, name), getattr(many, name)) for name in _COUNTS)
    counts = {name: start + place * (end - start) for name, start, end in ends}
    return replace(few, **counts, error=max(few.error, many.error))


@functools.lru_cache(maxsize=4096)
def sampled_merge(group: int, d: int, num_groups: int, arch: str, split_k: int) -> Counted:
    """Return the counts of the merge for one sequence and KV head."""
    configuration = {"block_n": max(BLOCKS_N), "waves": waves_per_range(d), "split_k": split_k}
    if num_groups:
        configuration = {"waves": 1, "split_k": split_k}
    _, merge = count(AttentionCell(1, group, d, 0, split_k * max(BLOCKS_N), 1, num_groups), arch, configuration)
    if merge is None:
        raise ConfigError(f"a merge needs at least 2 splits; got {split_k}")
    return merge


def works(cell: AttentionCell, arch: str, configuration: Mapping[str, int]) -> tuple[list[model.Work], float]:
    """Return a call's launches at full size, for the model, and the error of the runs that were counted."""
    one = workgroup(cell, arch, configuration)
    splits = configuration["split_k"]
    pairs = cell.batch * cell.kv_heads
    tiles = math.ceil(cell.group / BLOCK_M)
    workgroups = tiles * pairs * splits
    rows = pairs * cell.group
    q_bytes = 2 * rows * cell.d
    partial_bytes = 4 * rows * splits * (cell.d + 1) if splits > 1 else 0
    out_bytes = q_bytes + 4 * rows
    unique_bytes = 2 * (cell.cache_bytes + cell.scale_bytes) + q_bytes + (partial_bytes or out_bytes)
    split = one.work(workgroups, workgroups, unique_bytes, 2 * tiles * cell.cache_bytes)
    if splits == 1:
        return [split], one.error
    merged = sampled_merge(cell.group, cell.d, cell.num_groups, arch, splits)
    merge = merged.work(pairs, rows, partial_bytes + out_bytes, partial_bytes)
    return [split, merge], max(one.error, merged.error)
