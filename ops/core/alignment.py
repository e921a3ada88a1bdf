"""Copies of operands that a kernel cannot read where they are: not contiguous, or off a 16-byte boundary."""

from __future__ import annotations

import torch

from hipforge.jit.call import tensors
from hipforge.ops.core.arguments import require_readable

LOAD_BYTES = 16


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous copy of it; its storage is looked at before it is read.

    Raises:
        GuardError: its storage was freed or shortened.
    """
    if x.is_contiguous():
        return x
    require_readable(operand=x)
    return x.contiguous()


def realigned(*payloads: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors with copies in place of those that do not start at 16 bytes; None if all of them do.

    For use after a kernel's guard has refused a call: checking addresses in advance would cost every call.
    """
    if any(tensors.problem(x) for x in payloads):  # the guard has said which
        return None
    contiguous = [x.contiguous() for x in payloads]
    if not any(x.data_ptr() % LOAD_BYTES for x in contiguous):
        return None
    return tuple(x.clone() if x.data_ptr() % LOAD_BYTES else x for x in contiguous)
