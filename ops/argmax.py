"""The greedy choice of a token: the index of each row's largest logit, in one launch."""

from __future__ import annotations

import functools

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core import programmatic
from hipforge.ops.core.alignment import require_copyable
from hipforge.ops.core.checks import require_dtype, require_rank
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import FLOATS
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given
from hipforge.ops.peers import Peers, launch

PUBLIC = ("argmax",)
EXAMPLES = {"argmax": "M=1,V=128256"}

MAX_COLUMNS = 2**31 - 1


@compile_ops("module_argmax", variant=lambda out, logits, *rest: {"HF_INPUT": FLOATS[logits.dtype]})
def argmax_out(out: torch.Tensor, logits: torch.Tensor, programmatic: bool) -> None:
    """Write ``out`` as :func:`argmax` says; the rows of ``logits`` are contiguous."""


@compile_ops(
    "module_argmax", variant=lambda out, logits, *rest: {"HF_INPUT": FLOATS[logits.dtype]}, mutates=("out", "buffer")
)
def argmax_of_ranks_out(
    out: torch.Tensor,
    logits: torch.Tensor,
    buffer: torch.Tensor,
    addresses: torch.Tensor,
    rank: int,
    polls: int,
    programmatic: bool,
) -> None:
    """Write ``out`` as :func:`argmax_of_ranks` says; the rows of ``logits`` are contiguous."""


def _plan(logits: torch.Tensor) -> Decision:
    require_rank("logits", logits, 2, "[M, V]")
    require_dtype("logits", logits, tuple(FLOATS))
    columns = logits.shape[1]
    if columns < 1:
        raise GuardError(f"logits must have at least one column (V), of which one is the largest; got {columns}")
    refusal = None if columns <= MAX_COLUMNS else f"the kernel takes {MAX_COLUMNS} columns; got {columns}"
    return plan_kernel("argmax", logits.device, refusal)


def _new(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


@operator(_plan, fake=_new, outs=("out",))
def argmax(taken: Accepted, logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``torch.argmax(logits, 1)``, the same index in every case: a step's greedy choice of tokens.

    The first of equal elements, among them 0 and -0; where there is a NaN, the first NaN. Made for a few rows of a
    large V, read from L2; any number is taken.

    Args:
        taken: the path that was decided; callers do not pass it.
        logits: float32, float16 or bfloat16 [M, V], V at least 1; rows may lie apart. Columns that do are copied first.
        out: contiguous int64 [M] to write into.

    Returns:
        int64 [M]; ``out`` itself where it is given.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device that is neither gfx942 nor gfx950).
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> hipforge.argmax(torch.tensor([[0.5, 2.0, 2.0], [1.0, -1.0, float("nan")]])).tolist()
        [1, 2]
    """
    out = new_or_given(out, logits.shape[:1], torch.int64, logits.device)
    if taken.path == "kernel":
        if logits.stride(1) != 1:  # also of one column, whose stride torch lets be anything
            require_copyable(logits, out)
            logits = logits.clone(memory_format=torch.contiguous_format)
        argmax_out(out, logits, programmatic.active())
    else:
        out.copy_(torch.argmax(logits, 1))
    return out


def argmax_of_ranks(logits: torch.Tensor, peers: Peers, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return :func:`argmax` of the columns of all ranks, which follow each other in the order of the ranks.

    What travels between GPUs is a value and an index of each row, so that nobody needs all logits.

    Args:
        logits: float32, float16 or bfloat16 [M, V], this rank's columns, each row contiguous; M and V are those of all.
        peers: of at least M rows, which only this function uses; all ranks call it as often.
        out: contiguous int64 [M] to write into.

    Returns:
        int64 [M], the same on all ranks: ``argmax(torch.cat(logits of all ranks, 1))``.

    Raises:
        GuardError: operands of the wrong dtype, shape or device.
        BuildError, LaunchError: the kernel could not be built or run, or a rank did not come.

    Example:
        >>> import torch
        >>> from hipforge.nn import Peers
        >>> from hipforge.ops.argmax import argmax_of_ranks
        >>> argmax_of_ranks(torch.tensor([[0.5, 2.0, 2.0]]), Peers.alone(rows=1, columns=8)).tolist()
        [1]
    """
    require_rank("logits", logits, 2, "[M, V]")
    require_dtype("logits", logits, tuple(FLOATS))
    out = new_or_given(out, logits.shape[:1], torch.int64, logits.device)
    given = out, logits, *peers, programmatic.active()
    launch(argmax_of_ranks_out, peers.rank, peers.addresses, peers.polls, *given)
    return out


def example(op: str, rows: int, columns: int) -> functools.partial[torch.Tensor]:
    """Return a call of the op for ``hipforge profile``."""
    return functools.partial(argmax, torch.randn(rows, columns).bfloat16())
