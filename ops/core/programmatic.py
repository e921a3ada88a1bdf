"""Launches that may start before their predecessor in the stream has ended (sm_90 only)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_state = threading.local()


def active() -> bool:
    """Return whether this thread is inside :func:`programmatic_launch`."""
    return getattr(_state, "depth", 0) > 0


@contextlib.contextmanager
def programmatic_launch() -> Iterator[None]:
    """Let kernels ask for their weights before the stream's earlier work has ended (programmatic dependent launch).

    The caller promises that no earlier work in the stream writes the weights or their scales. Activations and outputs
    are safe: each kernel waits for its predecessor before it touches them. It holds for this thread, inside ``with``,
    also while a graph is captured; kernels without it, and architectures without it, launch as always.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(1, 64))
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.ones(8, 64))
        >>> with hipforge.programmatic_launch():
        ...     y = hipforge.mxfp8_linear(x, x_scale, w, w_scale)
        >>> y[0, 0].item()
        64.0
    """
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
