"""Decode attention's launches at full size, recorded for the model of time.

A cache of 128 sequences of 131072 keys is 4 GB. Only the addresses of what a kernel reads matter to the model, so
caches are zeros, which take no memory where nothing is written, and the emulator executes few work-groups to their end
(:func:`hipforge.emulator.timing.capture.sample`). Long sequences are modelled at two smaller lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hipforge.ops.decode_attention.kernels import (
    BLOCK_M,
    INT4_BLOCK_N,
    blocks_per_wave,
    empty_lse,
    empty_output,
    ranges,
    workspace_bytes,
)
from hipforge.tuning.families.decode_attention.cases import AttentionCell, AttentionOperands
from hipforge.tuning.families.decode_attention.counts import run

if TYPE_CHECKING:
    from hipforge.emulator.timing import Capture, Timing

MODELLED_BLOCKS = (4, 8)  # of a wave, where it has more


def reserved(cell: AttentionCell, arch: str) -> AttentionOperands:
    """Return operands of zeros; pages follow each other, because in random order each work-group is unlike others."""
    slots = cell.page_size or cell.keys
    pages = -(-cell.keys // slots) * cell.batch
    words = cell.num_groups + cell.d // 8 if cell.num_groups else cell.d // 4
    k, v = (torch.zeros(pages, slots, cell.kv_heads, words, dtype=torch.int32) for _ in range(2))
    rows = (0,) if cell.num_groups else (pages, slots, cell.kv_heads)
    k_rows, v_rows = (torch.zeros(rows, dtype=torch.int32) for _ in range(2))
    tables = torch.arange(pages, dtype=torch.int32).view(cell.batch, -1) if cell.page_size else None
    return AttentionOperands(
        arch, torch.zeros(cell.batch, 1, cell.kv_heads * cell.group, cell.d, dtype=torch.bfloat16), k, k_rows, v,
        v_rows, torch.full((cell.batch,), cell.keys, dtype=torch.int32), tables, cell.num_groups,
    )  # fmt: skip


def whole_groups(cell: AttentionCell, configuration: Mapping[str, int], xcds: int) -> list[int]:
    """Return the work-groups that run to their end: the first, and those of a shorter last split on the first XCD.

    Nothing in the beginning of a work-group says how many keys it has; the model simulates the first XCD.
    """
    splits = configuration["split_k"]
    of_a_split = math.ceil(cell.group / BLOCK_M) * cell.batch * cell.kv_heads
    blocks = math.ceil(cell.keys / configuration.get("block_n", INT4_BLOCK_N))
    parts = splits * ranges(configuration, cell.d)
    if blocks == parts * blocks_per_wave(configuration, cell.d, cell.keys):
        return [0]
    last = range((splits - 1) * of_a_split, splits * of_a_split)
    return [0, *(group for group in last if group % xcds == 0 or group == last[-1])]


def record(cell: AttentionCell, arch: str, configuration: Mapping[str, int]) -> Capture:
    """Return a recording of a call's launches in one configuration: of the work-groups of the first XCD."""
    from hipforge.emulator.timing import machine
    from hipforge.emulator.timing.capture import sample
    from hipforge.emulator.timing.context import gpu_of

    xcds = int(machine(gpu_of(arch))["xcds"])
    parts, splits = reserved(cell, arch), configuration["split_k"]
    out, lse = empty_output(parts.q, quantised=False), empty_lse(parts.q)
    workspace = torch.zeros(workspace_bytes(parts.q, splits), dtype=torch.uint8)
    pairs = cell.batch * cell.kv_heads
    most = pairs * max(cell.group, math.ceil(cell.group / BLOCK_M) * splits)
    return sample(
        lambda: run(parts, configuration, out=out, lse_out=lse, workspace=workspace),
        whole_groups(cell, configuration, xcds),
        range(0, most, xcds),
    )


def modelled(cell: AttentionCell, arch: str, configuration: Mapping[str, int]) -> tuple[float, str]:
    """Return the modelled microseconds of a replayed call with operands in HBM, and its bound.

    A call whose waves have more than ``MODELLED_BLOCKS[1]`` blocks is modelled with as many and with
    ``MODELLED_BLOCKS[0]``; what each further block takes is the difference of the two.
    """
    from hipforge.emulator.timing import estimate
    from hipforge.emulator.timing.context import gpu_of

    blocks = blocks_per_wave(configuration, cell.d, cell.keys)

    def times(most: int) -> Timing:
        block_n = configuration.get("block_n", INT4_BLOCK_N)
        keys = block_n * math.ceil(cell.keys * most / (blocks * block_n)) if blocks > most else cell.keys
        return estimate(record(replace(cell, keys=keys), arch, configuration), gpu_of(arch), "cold")

    few, many = MODELLED_BLOCKS
    last = times(many)
    us = last.replay_us
    if blocks > many:
        us += (blocks - many) * (us - times(few).replay_us) / (many - few)
    return us, last.bound
