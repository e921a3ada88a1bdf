"""The tuner of decode attention: keys of a block, waves of a work-group and splits, for each problem size.

By default B 1 to 128 x keys 256 to 131072 x the usual heads at D = 128, for any page size.

On a GPU candidates are timed at full size, with Triton's kernels beside them. On the emulator they are ranked by the
model of :mod:`hipforge.tuning.model` over the counts of :mod:`.counts`, and those that come first by the model of time
(:mod:`.recording`). Either way each candidate runs on real data first and is rejected if its result is wrong or its
build exceeds the module's resource limits. Caches have a scale and a shift per row, the more costly of the two kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from hipforge.ops.core.family import Family
from hipforge.ops.decode_attention.family import FAMILY, Problem
from hipforge.ops.decode_attention.kernels import ANY_PAGE_SIZE
from hipforge.ops.triton import decode_attention_fp8 as triton_attention
from hipforge.tuning import timing
from hipforge.tuning.families.decode_attention.cases import AttentionCell, AttentionOperands, expected, operands
from hipforge.tuning.families.decode_attention.counts import run, works
from hipforge.tuning.families.decode_attention.recording import modelled
from hipforge.tuning.tuner import Baselines, Counted, Tuner, no_baselines

OPTIONS = ("attention",)

# Rounding the weights and the output to bfloat16 gives 1.7e-3 each, 2.4e-3 together; a key left out of 4096 with equal
# weights, the least that goes wrong, 1.6e-2.
MAX_ERROR = 4e-3

# (KV heads, query heads per KV head) of a layer on one GPU.
HEADS = ((1, 1), (1, 8), (1, 16), (2, 1), (2, 8))
BATCHES = tuple(1 << shift for shift in range(8))
KEYS = tuple(1 << shift for shift in range(8, 18))
HEAD_DIM = 128
USUAL = {"heads": HEADS, "dims": (HEAD_DIM,), "page_sizes": (ANY_PAGE_SIZE,), "keys": KEYS, "batches": BATCHES}
"""What the options' cells have where an option is not given."""


def cells(
    page_sizes: Iterable[int],
    heads: Iterable[tuple[int, int]],
    keys: Iterable[int],
    batches: Iterable[int],
    **more: int,
) -> tuple[AttentionCell, ...]:
    """Return every combination at the usual head dimension; ``more`` attributes are those of all cells."""
    return tuple(
        AttentionCell(kv_heads, group, HEAD_DIM, page, length, batch, **more)
        for page, (kv_heads, group), length, batch in itertools.product(page_sizes, heads, keys, batches)
    )


# Any page size, then the pages and sizes that are common enough to have rows of their own.
DEFAULT_CELLS = (
    *cells((ANY_PAGE_SIZE,), HEADS, KEYS, BATCHES),
    *cells((64, 256), itertools.product((1, 2), (1, 8)), (2048, 8192), (1, 16, 64)),
)


def _count(cell: AttentionCell, arch: str) -> Counted:
    return lambda choice: works(cell, arch, choice.configuration)


def _baselines(cell: AttentionCell, copies: Sequence[AttentionOperands]) -> Baselines:
    """Return microseconds of Triton's resident kernel, and of its best kernel over a few numbers of splits."""
    if triton_attention.unavailable(copies[0].q.device) is not None:
        return None

    def time(config: triton_attention.SplitConfig, splits: int) -> float:
        return timing.microseconds_per_call(
            lambda i: triton_attention.prepare(copies[i].triton_problem(splits), config).run(), len(copies)
        )

    resident, streaming = (
        min(time(config, splits) for splits in (4, 16, 64))
        for config in (triton_attention.RESIDENT_64, triton_attention.STREAMING)
    )
    return resident, min(resident, streaming)


def tuner_of(
    family: Family[Problem],
    max_error: float,
    cells: tuple[AttentionCell, ...],
    baselines: Callable[[AttentionCell, Sequence[AttentionOperands]], Baselines] = no_baselines,
) -> Tuner[AttentionCell, AttentionOperands]:
    """Return the tuner of a cache format."""
    return Tuner(
        family=family,
        max_error=max_error,
        default_cells=cells,
        cell=lambda heads, d, page_size, keys, batch: replace(
            cells[0], kv_heads=heads[0], group=heads[1], d=d, page_size=page_size, keys=keys, batch=batch
        ),
        operands=operands,
        expected=lambda cell, parts: expected(parts)[0],
        run=lambda choice, cell, parts: run(parts, choice.configuration)[0],
        count=_count,
        copies=lambda parts, number: [parts, *(parts.clone() for _ in range(number - 1))],
        bytes_per_call=lambda parts: parts.nbytes,
        baselines=baselines,
        modelled=lambda choice, cell, arch: modelled(cell, arch, choice.configuration),
        problem=lambda cell: Problem(
            cell.batch, 1, cell.kv_heads * cell.group, cell.kv_heads, cell.d, cell.keys, cell.page_size, torch.bfloat16,
            torch.uint8 if cell.num_groups else torch.float8_e4m3fn, torch.device("cpu"),
        ),
    )  # fmt: skip


TUNER = tuner_of(FAMILY, MAX_ERROR, DEFAULT_CELLS, _baselines)
