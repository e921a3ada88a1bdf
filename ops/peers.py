"""The memory through which the GPUs of a group add up their parts: what ``hipforge.all_reduce`` and its like take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hipforge.errors import ConfigError, EmulatorFault, GuardError
from hipforge.ops.core.checks import require_int

HEADER, SLOTS, CHUNK, MAX_RANKS = 32, 2, 8, 8  # as csrc/all_reduce/all_reduce.cu has them
POLLS = 1 << 27


class Peers(NamedTuple):
    """This process among the ranks of a group, as the ops take it: ``hipforge.all_reduce(x, *peers)``.

    Attributes:
        buffer: int32 [1, rows, words]: a header per row and two slots with a place for each rank. Only the ops may
            write it.
        addresses: int64 [ranks]: where each rank's buffer is for this device.
        rank: of this process.
        polls: reads of a rank's part until it is given up; 2^27 take about a minute.

    Example:
        >>> import torch, hipforge
        >>> from hipforge.nn import Peers
        >>> peers = Peers.alone(rows=4, columns=4096)
        >>> peers.rank, peers.rows, peers.columns, peers.nbytes
        (0, 4, 4096, 131584)
    """

    buffer: torch.Tensor
    addresses: torch.Tensor
    rank: int
    polls: int = POLLS

    @classmethod
    def of_group(cls, rows: int, columns: int, group: Any = None, device: torch.device | None = None) -> Peers:
        """Return the memory of a process group whose GPUs reach each other's memory; all of its processes call it.

        torch's symmetric memory allocates it and gives the addresses (``torch.distributed._symmetric_memory``).

        Args:
            rows: the most that a call may have; each takes 8 bytes per column and rank.
            columns: the most that a row may have.
            group: a ``ProcessGroup`` of 2 to 8 processes, one on each GPU; default: all processes.
            device: of this process; default: the current GPU.

        Raises:
            ConfigError: there is no process group, or this torch sees no GPU.
            GuardError: rows, columns or the number of processes are not in range.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "Peers.of_group needs torch's process group: start the processes with torchrun and call "
                "torch.distributed.init_process_group first; Peers.alone is a group of one process"
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                "Peers.of_group needs a GPU for each process, whose memory the others reach, and torch sees none; "
                "Peers.on_one_device has ranks for tests"
            )
        from torch.distributed import _symmetric_memory

        group = dist.group.WORLD if group is None else group
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        shape = _shape(dist.get_world_size(group), rows, columns)
        buffer = _symmetric_memory.empty(1, *shape, dtype=torch.int32, device=device)
        buffer.zero_()
        torch.cuda.synchronize(device)  # zero before another process can know where it is
        handle: Any = _symmetric_memory.rendezvous(buffer, group)
        return cls(buffer, torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device), dist.get_rank(group))

    @classmethod
    def alone(cls, rows: int, columns: int, device: torch.device | str = "cpu") -> Peers:
        """Return a group of one rank, whose sums are what it has.

        Raises:
            GuardError: rows or columns are not in range.
        """
        buffer = torch.zeros(1, *_shape(1, rows, columns), dtype=torch.int32, device=device)
        return cls(buffer, torch.zeros(1, dtype=torch.int64, device=device), 0)

    @classmethod
    def on_one_device(
        cls, ranks: int, rows: int, columns: int, device: torch.device | str = "cpu", polls: int = POLLS
    ) -> list[Peers]:
        """Return the ranks of a group on one device, for tests: a stream or thread for each, as they wait for another.

        Raises:
            GuardError: rows, columns or ranks are not in range.
        """
        shape = _shape(ranks, rows, columns)
        return cls.in_memory(torch.zeros(ranks, *shape, dtype=torch.int32, device=device), polls)

    @classmethod
    def in_memory(cls, buffers: torch.Tensor, polls: int = POLLS) -> list[Peers]:
        """Return the ranks of a group whose buffers are one tensor, int32 [ranks, rows, words] of zeros."""
        distance = buffers.stride(0) * buffers.element_size()
        places = [buffers.data_ptr() + rank * distance for rank in range(len(buffers))]
        addresses = torch.tensor(places, dtype=torch.int64, device=buffers.device)
        return [cls(buffers, addresses, rank, polls) for rank in range(len(buffers))]

    @property
    def rows(self) -> int:
        """The most rows that a call may have."""
        return self.buffer.shape[1]

    @property
    def columns(self) -> int:
        """The most columns that a row may have."""
        return (self.buffer.shape[2] - HEADER) // (SLOTS * len(self.addresses))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes


def _shape(ranks: int, rows: int, columns: int) -> tuple[int, int]:
    if not 1 <= require_int("ranks", ranks) <= MAX_RANKS:
        raise GuardError(f"a group must have 1 to {MAX_RANKS} ranks; got {ranks}")
    rows, columns = require_int("rows", rows), require_int("columns", columns)
    if rows < 1 or columns < 1:
        raise GuardError(f"rows and columns must be at least 1; got {rows} and {columns}")
    whole = -(-columns // (2 * CHUNK)) * 2 * CHUNK  # two slots of them are lines of 128 bytes
    return rows, HEADER + SLOTS * ranks * whole


def launch(stub: Callable[..., None], rank: int, addresses: torch.Tensor, polls: int, *given: Any) -> None:
    """Call a stub with what is given, whose kernel waits for other ranks; a fault says first where it gave one up."""
    try:
        stub(*given)
    except EmulatorFault as error:
        raise _explained(error, rank, len(addresses), polls) from None


def _explained(error: EmulatorFault, rank: int, ranks: int, polls: int) -> EmulatorFault:
    if "the kernel trapped" not in str(error):
        return error
    return EmulatorFault(
        f"rank {rank} of {ranks} gave up: another rank's part did not come in {polls} "
        "reads. Every rank makes the same calls in the same order, with the same shapes and dtype, each in a thread or "
        f"process of its own; then make the group anew, since the ranks of this one are out of step\n{error}"
    )
