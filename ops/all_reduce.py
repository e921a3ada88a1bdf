"""Sums of rows over GPUs in one launch: alone, or added to a residual and normalised, in 16 bits or in MX-FP8.

:class:`hipforge.nn.Peers` holds what the ops take of a group: ``buffer``, ``addresses``, ``rank`` and ``polls``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import programmatic
from hipforge.ops.core.checks import require_dtype, require_finite, require_rank, require_tensor
from hipforge.ops.core.dispatch import Accepted, Decision, Refused, plan_kernel
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.formats import BLOCK, HALVES
from hipforge.ops.core.operator import operator
from hipforge.ops.core.outputs import new_or_given_mxfp8
from hipforge.ops.core.stub import stub
from hipforge.ops.peers import CHUNK, HEADER, MAX_RANKS, POLLS, SLOTS, Peers, launch

PUBLIC = ("all_reduce", "all_reduce_residual_rms", "all_reduce_residual_rms_mxfp8")
EXAMPLES = {
    "all_reduce": "R=1,C=4096",
    "all_reduce_residual_rms": "R=1,C=4096",
    "all_reduce_residual_rms_mxfp8": "R=1,C=4096",
}

all_reduce_out = stub(
    "all_reduce_out",
    "module_all_reduce",
    "out, buffer, x, addresses: Tensor; rank, polls: int; programmatic: bool",
    "Write ``out`` as :func:`all_reduce` says.",
    variant=lambda out, buffer, x, *rest: {"HF_INPUT": HALVES[x.dtype]},
    mutates=("out", "buffer"),
)

all_reduce_rms_out = stub(
    "all_reduce_rms_out",
    "module_all_reduce",
    "out: Tensor; block_scales: Tensor?; residual: Tensor; also_out: Tensor?; buffer, x, weight, addresses: Tensor; "
    "epsilon, weight_offset: float; rank, polls: int; programmatic: bool",
    "Write the first four as :func:`all_reduce_residual_rms_mxfp8` says; without scales, ``out`` is the norm itself.",
    variant=lambda out, block_scales, residual, also_out, buffer, x, *rest: {"HF_INPUT": HALVES[x.dtype]},
    mutates=("out", "block_scales", "residual", "also_out", "buffer"),
)


def _decision(op: str, x: torch.Tensor, buffer: torch.Tensor, addresses: torch.Tensor, unit: int) -> Decision:
    require_rank("x", x, 2, "[rows, cols]")
    require_dtype("x", x, tuple(HALVES))
    require_rank("buffer", buffer, 3, "[buffers, rows, words]")
    require_rank("addresses", addresses, 1, "[ranks]")
    (rows, cols), (_, most, words), ranks = x.shape, buffer.shape, addresses.shape[0]
    if cols < unit or cols % unit:
        raise GuardError(f"x must have a multiple of {unit} columns; got {cols}")
    if not 1 <= ranks <= MAX_RANKS:
        raise GuardError(f"addresses must be those of 1 to {MAX_RANKS} ranks; got {ranks}")
    columns = (words - HEADER) // (SLOTS * ranks)
    refusal = None
    if rows > most or cols > columns:
        refusal = f"the buffer is for {most} rows of {columns} columns; got {rows} of {cols}"
    decision = plan_kernel(op, x.device, refusal)
    if decision.accepted is not None and decision.accepted.path != "kernel":  # torch reads no other rank's memory
        return Decision(None, decision.refused)
    return Decision(decision.accepted, (Refused("torch", "the kernel takes this call"),))


def _plan(x: torch.Tensor, buffer: torch.Tensor, addresses: torch.Tensor) -> Decision:
    return _decision("all_reduce", x, buffer, addresses, CHUNK)


def _plan_norm(op: str, unit: int) -> Callable[..., Decision]:
    def plan(x: torch.Tensor, buffer: torch.Tensor, addresses: torch.Tensor, weight_offset: float = 0.0) -> Decision:
        require_finite(weight_offset=weight_offset)
        return _decision(op, x, buffer, addresses, unit)

    return plan


@operator(_plan, fake=lambda x: torch.empty_like(x), outs=("out",), mutates=("buffer",), rows=("x",))
def all_reduce(
    taken: Accepted,
    x: torch.Tensor,
    buffer: torch.Tensor,
    addresses: torch.Tensor,
    rank: int,
    polls: int = POLLS,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the sum of every rank's x, the same bits on all of them, in one launch: ``all_reduce(x, *peers)``.

    For the few rows of a decode step, whose sum takes as long as a message does: each GPU writes its part into the
    memory of the others and polls its own; no barrier stands before or after. The parts are added in fp32 in the order
    of ranks and rounded once. Every rank makes the same calls with the same shapes in the same order, each in one
    stream at a time; a captured graph may be replayed. A rank whose part does not come within ``polls`` reads, about a
    minute by default, is an error of the device (LaunchError where torch meets it, and the process has to end).

    Args:
        taken: the path that was decided; callers do not pass it.
        x: contiguous float16 or bfloat16 [rows, cols], cols a multiple of 8, at a multiple of 16 bytes.
        buffer: of :class:`hipforge.nn.Peers`; overwritten.
        addresses: int64 [ranks] of Peers: where each rank's buffer is for this GPU.
        rank: of Peers: this process's place among them.
        polls: reads of a part until its rank is given up.
        out: where to write the sum, in other memory than x; default: a new tensor.

    Returns:
        [rows, cols] of x's dtype; ``out`` itself where it is given. None where no kernel runs on this device, or the
        buffer is for fewer rows or columns: add up with ``torch.distributed.all_reduce``.

    Raises:
        GuardError: an argument is not of this form (ArchError: a device without the kernel).
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> from hipforge.nn import Peers
        >>> alone = Peers.alone(rows=1, columns=8)
        >>> hipforge.all_reduce(torch.ones(1, 8).half(), *alone).tolist()
        [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    require_tensor(buffer=buffer, addresses=addresses)
    out = torch.empty_like(x) if out is None else out
    given = out, buffer, x, addresses, rank, polls, programmatic.active()
    launch(all_reduce_out, rank, addresses, polls, *given)
    return out


@operator(
    _plan_norm("all_reduce_residual_rms", CHUNK),
    fake=lambda x: torch.empty_like(x),
    outs=("out",),
    mutates=("residual", "buffer"),
    returns=("residual",),
    rows=("x", "residual"),
)
@documented_like(all_reduce)
def all_reduce_residual_rms(
    _taken: Accepted,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    buffer: torch.Tensor,
    addresses: torch.Tensor,
    rank: int,
    polls: int = POLLS,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Do what :func:`residual_rms` does without a scale to the sum of every rank's x, in the launch that adds it up.

    The same bits as ``residual_rms(all_reduce(x, *peers), residual, ...)``, with 16-bit results of every step.

    Args:
        residual: like x, in other memory, the same on every rank; overwritten.
        weight: contiguous [cols] of the same dtype.
        epsilon: added to the mean; finite, at least 0.
        weight_offset: added to the weight; finite.
        out: where to write the norm; default: a new tensor.

    Returns:
        ``(y, residual)``: y [rows, cols] of x's dtype; residual is the argument. None as :func:`all_reduce` has it.

    Example:
        >>> import torch, hipforge
        >>> from hipforge.nn import Peers
        >>> alone = Peers.alone(rows=1, columns=8)
        >>> x, residual = torch.ones(1, 8).half(), torch.ones(1, 8).half()
        >>> y, _ = hipforge.all_reduce_residual_rms(x, residual, torch.ones(8).half(), 0.0, *alone)
        >>> y[0, 0].item(), residual[0, 0].item()
        (1.0, 2.0)
    """
    require_tensor(residual=residual, weight=weight, buffer=buffer, addresses=addresses)
    out = torch.empty_like(x) if out is None else out
    launch(
        all_reduce_rms_out, rank, addresses, polls,
        out, None, residual, None, buffer, x, weight, addresses, epsilon, weight_offset, rank, polls,
        programmatic.active(),
    )  # fmt: skip
    return out, residual


@operator(
    _plan_norm("all_reduce_residual_rms_mxfp8", BLOCK),
    fake=lambda x: new_or_given_mxfp8(x, x.shape),
    outs=("out", "scale_out"),
    mutates=("residual", "buffer", "also_out"),
    returns=("residual",),
    rows=("x", "residual"),
)
@documented_like(all_reduce_residual_rms)
def all_reduce_residual_rms_mxfp8(
    _taken: Accepted,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    buffer: torch.Tensor,
    addresses: torch.Tensor,
    rank: int,
    polls: int = POLLS,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    also_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Do what :func:`residual_rms_mxfp8` does to the sum of every rank's x, in the launch that adds it up.

    What follows ``o_proj`` and ``down`` in a layer whose weights several GPUs share: the sum, the residual stream, the
    norm, and the MX-FP8 activations of the next product. The same bits as the ops one by one.

    Args:
        x: contiguous float16 or bfloat16 [rows, cols], cols a multiple of 32, at a multiple of 16 bytes.
        out: where to write q; default: a new tensor.
        scale_out: where to write the scales, uint8 or float8_e8m0fnu; default: a new uint8 tensor.
        also_out: also write y here, [rows, cols] of x's dtype.

    Returns:
        ``(q, scales, residual)``: q [rows, cols], the e4m3 of the device; scales uint8 [rows, cols / 32], e8m0;
        residual is the argument. None as :func:`all_reduce` has it.

    Example:
        >>> import torch, hipforge
        >>> from hipforge.nn import Peers
        >>> alone = Peers.alone(rows=1, columns=32)
        >>> x, residual = torch.ones(1, 32).half(), torch.ones(1, 32).half()
        >>> weight = torch.ones(32).half()
        >>> q, scale, _ = hipforge.all_reduce_residual_rms_mxfp8(x, residual, weight, 0.0, *alone)
        >>> q.shape, scale.shape
        (torch.Size([1, 32]), torch.Size([1, 1]))
    """
    require_tensor(residual=residual, weight=weight, buffer=buffer, addresses=addresses)
    out, scale_out = new_or_given_mxfp8(x, x.shape, out, scale_out)
    launch(
        all_reduce_rms_out, rank, addresses, polls,
        out, scale_out, residual, also_out, buffer, x, weight, addresses, epsilon, weight_offset, rank, polls,
        programmatic.active(),
    )  # fmt: skip
    return out, scale_out, residual


def example(op: str, rows: int, columns: int) -> functools.partial[Any]:
    """Return a call of an op, of one rank, for ``hipforge profile``."""
    x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    peers = Peers.alone(max(rows, 16), columns)  # of any small batch, as a server's
    if op == "all_reduce":
        return functools.partial(all_reduce, x, *peers)
    norm = all_reduce_residual_rms if op == "all_reduce_residual_rms" else all_reduce_residual_rms_mxfp8
    return functools.partial(norm, x, residual, torch.ones(columns).bfloat16(), 1e-5, *peers)
