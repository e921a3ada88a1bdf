"""The tuner of the skinny fp8 GEMM: kernel and configuration for each (M, N, K) and architecture.

By default the QKV, gate/up and down projections of Llama-3.1-405B under TP8 x M = 1, 8, 16, 32.

Candidates are what the rules of :mod:`hipforge.ops.fp8_skinny_gemm.kernels.wave_split` and, for the queue kernel, of
:mod:`hipforge.ops.fp8_skinny_gemm.space` allow, with one row of tiles, so that a weight byte is loaded once, and the
deepest queue that fits. There are thousands: the model over what is known without running them (bytes, trips to memory,
the share of the busiest work-group) picks the most promising, which on a GPU are timed. On the emulator they are run,
at full size, and the model ranks them by their counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hipforge import devices
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.fp8 import to_fp8
from hipforge.ops.fp8_skinny_gemm.family import FAMILY
from hipforge.ops.fp8_skinny_gemm.kernels import WAVE_SPLIT, launch, queue
from hipforge.ops.fp8_skinny_gemm.kernels.scaled_mm import SCALED_MM
from hipforge.ops.fp8_skinny_gemm.space import Configuration
from hipforge.ops.reference.skinny import skinny_gemm as reference
from hipforge.tuning import model, timing
from hipforge.tuning.cases import Cell, cells
from hipforge.tuning.gemm import Operands, both, gemm_tuner
from hipforge.tuning.tuner import Baselines

OPTIONS = ("gemm",)

# One rounding to fp16 gives at most 2^-11 = 4.9e-4, fp32 sums of 2^14 products less; a single wrong block of 256 k of
# 16384 gives more than 1e-1.
MAX_ERROR = 2e-3

# (K, N) of Llama-3.1-405B under tensor parallelism 8: QKV, gate/up and down projection.
LLAMA_405B: tuple[tuple[int, int], ...] = ((16384, 2304), (16384, 13312), (6656, 16384))
ROWS = (1, 8, 16, 32)

MOST_TRIALS = 18  # up to 16 of them of the wave_split kernel
REDUCE_THREADS, REDUCE_WAVES = 256, 4  # of a work-group of the sum over partial results
MOST_OCCUPANCY = 8


def bound(candidate: Choice, cell: Cell, machine: model.Machine) -> float:
    """Return the model's seconds for a candidate whose instructions take no time: only bytes and trips to memory."""
    if candidate.kernel == WAVE_SPLIT.name:  # few: all of them are tried
        return machine.launch_s + cell.n * cell.k / machine.bandwidth
    c = Configuration(**candidate.configuration)
    streams = queue.pipeline(c, cell, machine.cu_count)
    a_bytes, b_bytes, elements = cell.m * cell.k, cell.n * cell.k, cell.m * cell.n
    column_tiles = -(-cell.n // c.tile_n)
    partial_bytes = 4 * elements * c.split_k * c.consumers
    product = model.Work(
        workgroups=min(c.tiles(cell.m, cell.n), machine.cu_count),
        waves_per_workgroup=c.waves,
        loaded_bytes=b_bytes + column_tiles * a_bytes,
        unique_bytes=a_bytes + b_bytes,
        streamed_bytes=b_bytes,
        occupancy=MOST_OCCUPANCY,
        in_flight_bytes=streams.in_flight_bytes,
        busiest=streams.busiest,
    )
    workgroups = -(-elements // REDUCE_THREADS)
    addition = model.Work(
        workgroups=workgroups,
        waves_per_workgroup=REDUCE_WAVES,
        loaded_bytes=partial_bytes,
        unique_bytes=partial_bytes + 2 * elements,
        streamed_bytes=partial_bytes,
        occupancy=MOST_OCCUPANCY,
        in_flight_bytes=-(-partial_bytes // (workgroups * REDUCE_WAVES)),
    )
    return model.total([model.estimate(work, machine) for work in (product, addition)])


def _reference(parts: Operands) -> torch.Tensor:
    a, a_scale, b, b_scale = parts
    return reference(a, b.t(), a_scale * b_scale, None, torch.float32, torch.float32)


def _run(choice: Choice, parts: Operands) -> torch.Tensor:
    a, a_scale, b, b_scale = parts
    return launch(a, b.t(), a_scale * b_scale, None, choice)


def _torch_is_a_candidate() -> bool:
    device = devices.current()
    return device.is_gpu and device.arch_of() in SCALED_MM.archs


def _baselines(cell: Cell, copies: Sequence[Operands]) -> Baselines:
    """Return microseconds of ``torch._scaled_mm`` (hipBLASLt), stock and best at once: it has nothing to choose.

    None on sm_90, where it is a candidate: a row that left a shape to torch would mean the reference.
    """
    if _torch_is_a_candidate():
        return None

    def call(index: int) -> torch.Tensor:
        a, a_scale, b, b_scale = copies[index]
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.float16)

    us = timing.microseconds_per_call(call, len(copies))
    return us, us


TUNER = gemm_tuner(
    FAMILY,
    max_error=MAX_ERROR,
    default_cells=cells(LLAMA_405B, ROWS),
    quantizers=both(to_fp8),
    reference=_reference,
    run=_run,
    baselines=_baselines,
    weight="b",
    bound=bound,
    most_trials=MOST_TRIALS,
)
