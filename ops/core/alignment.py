"""Payload views that start off a 16-byte boundary, which kernels that load 16 bytes per lane refuse."""

from __future__ import annotations

import torch

LOAD_BYTES = 16


def realigned(*payloads: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors with copies in place of those that do not start at 16 bytes; None if all of them do.

    For use after a kernel's guard has refused a call: checking addresses in advance would cost every call.
    """
    packed = [x.contiguous() for x in payloads]
    if not any(x.data_ptr() % LOAD_BYTES for x in packed):
        return None
    return tuple(x.clone() if x.data_ptr() % LOAD_BYTES else x for x in packed)
