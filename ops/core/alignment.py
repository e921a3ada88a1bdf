"""Copies of operands that a kernel cannot read in place: not contiguous, or off a 16-byte boundary."""

from __future__ import annotations

import torch

from hipforge.jit.call import tensors
from hipforge.ops.core.arguments import require_sound

LOAD_BYTES = 16


def packed(x: torch.Tensor, *written: torch.Tensor | None) -> torch.Tensor:
    """Return x, or a contiguous copy of it; its storage is looked at before it is read.

    ``written`` are the call's outputs: the kernel's binding, which looks for memory that they share with an operand,
    sees only the copy.

    Raises:
        GuardError: its storage was freed or shortened, or is one of an output.
    """
    if x.is_contiguous():
        return x
    require_copyable(x, *written)
    return x.contiguous()


def require_copyable(x: torch.Tensor, *written: torch.Tensor | None) -> None:
    """Refuse what :func:`packed` refuses to copy."""
    outputs = {f"output {i}": each for i, each in enumerate(written)}
    require_sound("", {"operand": x, **outputs}, outputs)


def realigned(*payloads: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors with copies in place of those that do not start at 16 bytes; None if all of them do.

    For use after a kernel's guard has refused a call: checking addresses in advance would cost every call. ``out`` is
    the call's output, if the caller has not compared them.
    """
    shared = out is not None and any(tensors.may_share(x, out) for x in payloads)
    if shared or any(tensors.problem(x) for x in payloads):  # a guard says which
        return None
    contiguous = [x.contiguous() for x in payloads]
    if not any(x.data_ptr() % LOAD_BYTES for x in contiguous):
        return None
    return tuple(x.clone() if x.data_ptr() % LOAD_BYTES else x for x in contiguous)
