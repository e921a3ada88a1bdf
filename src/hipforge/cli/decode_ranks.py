"""The processes that share a model, one on each GPU (tensor parallel), and the sums that make its layers whole again.

Their parts are added up by the product that follows (:mod:`hipforge.ops.summed_linear`), by the norm that follows
(:func:`hipforge.all_reduce_residual_rms_mxfp8`), by the one-shot kernel of torch's symmetric memory, in which every GPU
reads the parts of the others, or by :func:`torch.distributed.all_reduce`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

import hipforge
from hipforge.errors import ConfigError
from hipforge.nn import Peers
from hipforge.ops.argmax import argmax_of_ranks
from hipforge.ops.peers import CHUNK

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
Sums = Literal["products", "norms", "one_shot", "all_reduce"]


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        rank: its number.
        count: of processes.
        sums: how their parts are added up.
    """

    rank: int = 0
    count: int = 1
    sums: Sums = "all_reduce"

    def peers(self, rows: int, columns: int) -> Peers | None:
        """Return the memory through which products or norms add up the processes' rows; None where they do not."""
        return Peers.of_group(rows, columns) if self.count > 1 and self.sums in ("products", "norms") else None

    def choosers(self, rows: int) -> Peers | None:
        """Return the memory through which processes choose the tokens of so many rows; None where they do not."""
        return self.peers(rows, CHUNK)

    def choose(self, columns: torch.Tensor, choosers: Peers | None, out: torch.Tensor) -> torch.Tensor:
        """Write the index of each row's largest logit, of which this process has ``columns``."""
        if choosers is None:
            return hipforge.argmax(self.joined(columns), out=out)
        return argmax_of_ranks(columns, choosers, out)

    def summed(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Callable[[], object]]:
        """Return where a process writes its part, where the sum will be, and the call that adds the parts up."""
        if self.count == 1 or self.sums != "one_shot":
            return part, part, lambda: dist.all_reduce(part)
        from torch.distributed import _symmetric_memory

        group: Any = dist.group.WORLD
        own = _symmetric_memory.empty(*part.shape, dtype=part.dtype, device=part.device)
        _symmetric_memory.rendezvous(own.zero_(), group)
        return own, part, lambda: torch.ops.symm_mem.one_shot_all_reduce_out(own, "sum", group.group_name, out=part)

    def joined(self, columns: torch.Tensor) -> torch.Tensor:
        """Return [rows, N], of which each process has ``columns``, its N / count; every process calls it."""
        if self.count == 1:
            return columns
        parts = torch.empty(self.count * len(columns), columns.shape[1], dtype=columns.dtype, device=columns.device)
        _all_gather(parts, columns)
        return torch.cat(parts.chunk(self.count), 1)

    def kv_heads(self, of: int) -> slice:
        """Return which of the KV heads this process has: some, or one of several processes' one."""
        own = max(1, of // self.count)
        first = self.rank * of // self.count
        return slice(first, first + own)


ALONE = Ranks()


def join(tp: int, sums: Sums) -> Ranks:
    """Make this process one of those that torchrun has started, on a GPU of its own.

    Raises:
        ConfigError: there are not ``tp`` of them, or fewer GPUs.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != tp:
        raise ConfigError(f"--tp {tp} needs {tp} processes; torchrun has started {world} (WORLD_SIZE)")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    return Ranks(dist.get_rank(), tp, sums)


def is_started() -> bool:
    """Whether torchrun has started this process."""
    return "LOCAL_RANK" in os.environ


def start(tp: int, arguments: Sequence[str]) -> int:
    """Run ``hipforge`` with the arguments in ``tp`` processes of torchrun; returns its exit status.

    Raises:
        ConfigError: this machine has fewer GPUs.
    """
    if torch.cuda.device_count() < tp:
        raise ConfigError(f"--tp {tp} needs {tp} GPUs; torch sees {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([*command, "-m", "hipforge", *arguments], env=environment, check=False).returncode
