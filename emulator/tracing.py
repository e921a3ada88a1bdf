"""``trace``: print what one lane of one wave does, instruction by instruction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from hipforge.emulator import library, runtime


@contextlib.contextmanager
def trace(
    sink: Callable[[str], object] = print, *, kernel: str = "", workgroup: int = 0, wave: int = 0, lane: int = 0
) -> Iterator[None]:
    """Send every instruction that one wave executes to ``sink``, with the registers it touches in one lane.

    Args:
        sink: called with one line of text at a time.
        kernel: only kernels whose symbol contains this; empty for all.
        workgroup: the work-group, counted with x fastest.
        wave: the wave within it.
        lane: 0 to 63.

    Example:
        >>> import torch, hipforge
        >>> lines = []
        >>> with hipforge.emulator.trace(lines.append):
        ...     _ = hipforge.moe_combine(torch.ones(2, 64), top_k=2)
        >>> "s_endpgm" in lines[-1]
        True
    """
    emulator = runtime.load().library
    forward = library.TRACE_SINK(lambda line, _context: sink(line.decode()) and None)
    emulator.hfemu_set_trace(forward, None, kernel.encode(), workgroup, wave, lane)
    try:
        yield
    finally:
        emulator.hfemu_set_trace(library.TRACE_SINK(), None, b"", 0, 0, 0)
