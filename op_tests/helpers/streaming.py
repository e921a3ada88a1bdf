"""The least time that the model gives to reading some bytes once: a kernel that loads whole lines and nothing else."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import torch

from hipforge.emulator.timing import Capture, model
from hipforge.emulator.timing.machines import Machine
from hipforge.jit import register
from hipforge.jit.compile_ops import compile_ops

register(Path(__file__).parents[1] / "bench_sources" / "bench_stream.json")
LOAD_BYTES = 1024
GROUPS_PER_CU, WAVES, IN_TURN = (1, 2), (4, 8), (False, True)
"""All combinations are tried: which one is fastest depends on the number of bytes."""


@compile_ops("module_bench_stream")
def bench_stream_out(out: torch.Tensor, data: torch.Tensor, groups: int, waves: int, in_turn: bool) -> None:
    """Read ``data``; ``out`` is never written."""


@cache
def _times(loads: int, gpu: str, start: model.Start) -> tuple[model.Timing, ...]:
    of = model.machine(gpu)
    # Pages that are never written take no memory, and times do not depend on values.
    data, out = torch.zeros(loads * LOAD_BYTES, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    found = []
    for per_cu, waves, in_turn in product(GROUPS_PER_CU, WAVES, IN_TURN):
        capture = Capture()
        with capture.recording():
            bench_stream_out(out, data, per_cu * of.cu_count, waves, in_turn)
        found.append(model.estimate(capture, of, start))
    return tuple(found)


def least(read: int, of: Machine, start: model.Start = "cold") -> model.Timing:
    """Return the modelled time of the fastest way tried to read ``read`` bytes, rounded down to whole KiB, once."""
    return min(_times(read // LOAD_BYTES, of.name, start), key=lambda timing: timing.kernel_us)
