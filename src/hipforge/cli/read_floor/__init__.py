"""What a GPU needs to read bytes once and compute nothing: the floor of a kernel that streams its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hipforge import devices, jit
from hipforge.jit import registry
from hipforge.tuning import timing

BLOCKS = (1, 2, 4)  # of a multiprocessor: the fastest counts


_MODULE = "module_read_floor"


def archs() -> tuple[str, ...]:
    """Return the architectures that have the kernel."""
    jit.register(Path(__file__).parent / "modules.json")
    return tuple(registry.module(_MODULE).archs)


@jit.compile_ops(_MODULE, mutates=("sink",))
def read_floor_out(sink: torch.Tensor, source: torch.Tensor, blocks: int, programmatic: bool) -> None:
    """Read ``source`` (uint8) once and compute nothing."""


def microseconds(sources: Sequence[torch.Tensor], programmatic: bool = False) -> float:
    """Return microseconds of reading one of ``sources``, which together exceed L2, with the fastest number of blocks.

    Args:
        sources: uint8, each a multiple of 16 bytes.
        programmatic: launch as inside :func:`hipforge.programmatic_launch`.
    """
    archs()
    units = devices.current().cu_count()
    sink = torch.zeros(1, dtype=torch.int32, device=sources[0].device)

    def time(blocks: int) -> float:
        return timing.microseconds_per_call(
            lambda i: read_floor_out(sink, sources[i], blocks, programmatic), len(sources)
        )

    return min(time(units * each) for each in BLOCKS)
