"""Launches that may start before their predecessor in the stream has ended (sm_90 only)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from hipforge.ops.core.checks import require_int

_state = threading.local()


def active() -> bool:
    """Return whether this thread is inside :func:`programmatic_launch`."""
    return getattr(_state, "depth", 0) > 0


def promised_new_keys() -> int:
    """Return the promise of :func:`programmatic_launch` about caches and positions, 0 for none."""
    return int(getattr(_state, "new_keys", 0))


@contextlib.contextmanager
def programmatic_launch(new_keys: int = 0) -> Iterator[None]:
    """Let kernels ask for their weights before the stream's earlier work has ended (programmatic dependent launch).

    The caller promises that no earlier work in the stream writes the weights or their scales. Activations and outputs
    are safe: each kernel waits for its predecessor before it touches them. It holds for this thread, inside ``with``,
    also while a graph is captured; kernels without it, and architectures without it, launch as always.

    Args:
        new_keys: where positive, the caller promises as well that neither the last ordinary launch of the stream (one
            outside of ``with``, or of torch's) nor what came after it has written lengths, block tables, positions or
            slots, or of the caches more than the last ``new_keys`` keys of each sequence. Attention then asks for its
            other keys early, as for weights, and RoPE for its angles. With 0 they wait before they read any.

    Raises:
        GuardError: ``new_keys`` is not an integer of at least 0.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.ones(1, 64))
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.ones(8, 64))
        >>> with hipforge.programmatic_launch():
        ...     y = hipforge.mxfp8_linear(x, x_scale, w, w_scale)
        >>> y[0, 0].item()
        64.0
    """
    require_int("new_keys", new_keys, 0)
    before = promised_new_keys()
    _state.depth, _state.new_keys = getattr(_state, "depth", 0) + 1, new_keys
    try:
        yield
    finally:
        _state.depth, _state.new_keys = _state.depth - 1, before
