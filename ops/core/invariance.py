"""Batch invariance on request: a row's result does not depend on the rows around it, bit for bit.

A kernel computes each row by itself. The batch decides which kernel runs and in how many parts a sum is cut. So a
family has a second rule (:attr:`hipforge.ops.core.family.Family.invariant`), which takes both from the other sizes
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hipforge import settings
from hipforge.errors import GuardError
from hipforge.ops.core import dispatch

ROWS = 32
"""Rows for which an invariant rule decides how a sum is cut, whatever the batch is."""

REASON = "batch_invariant: the same order of sums for every batch"


class _Block:
    """A ``with`` block that is not over, and what it asks for."""

    def __init__(self, on: bool) -> None:
        self.on = on


class _State:
    """Whether the mode is on; a traced call reads the attribute, which makes it a guard of the graph.

    The block that was entered last and is not over decides, also where blocks of several threads, or of several
    coroutines, end in another order than the reverse.
    """

    def __init__(self) -> None:
        self.on = settings.BATCH_INVARIANT.get()
        self._blocks = [_Block(self.on)]  # the first is the process's own

    def turn(self, on: bool) -> None:
        """Turn the mode on or off for the block that decides now, and forget what was decided before."""
        self._blocks[-1].on = on
        self._decide()

    def enter(self, on: bool) -> _Block:
        """Begin a block, and forget what was decided before."""
        block = _Block(on)
        self._blocks.append(block)
        self._decide()
        return block

    def leave(self, block: _Block) -> None:
        """End a block, and forget what was decided before."""
        self._blocks.remove(block)
        self._decide()

    def _decide(self) -> None:
        self.on = self._blocks[-1].on
        dispatch.clear_decisions()


STATE = _State()


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Make results of ops independent of the batch around a row, bit for bit, inside ``with``; ``False`` ends it.

    It holds for the GEMMs (dense, grouped, MXFP4, skinny) and decode attention; the other ops always are invariant.
    Tuned rows are then ignored, and tuned speed with them. A GEMM outside its kernel's sizes runs in torch, which
    promises nothing. HIPFORGE_BATCH_INVARIANT=1 turns the mode on for a process. It is the process's, not a thread's:
    of several blocks the one entered last decides until it is over. Entering one forgets cached decisions: enter it
    once around a server's loop and not around each call.
    A function compiled by torch is compiled once for each state; a captured graph keeps the state of its capture.

    Raises:
        GuardError: ``enabled`` is no bool.

    Example:
        >>> import torch, hipforge
        >>> x, x_scale = hipforge.mxfp8_quantize(torch.randn(70, 256))
        >>> w, w_scale = hipforge.mxfp8_quantize(torch.randn(8, 256))
        >>> with hipforge.batch_invariant():
        ...     whole = hipforge.mxfp8_linear(x, x_scale, w, w_scale)
        ...     alone = hipforge.mxfp8_linear(x[:1], x_scale[:1], w, w_scale)
        >>> torch.equal(whole[:1], alone)
        True
    """
    if not isinstance(enabled, bool):
        raise GuardError(f"enabled must be True or False; got {enabled!r}")
    block = STATE.enter(enabled)
    try:
        yield
    finally:
        STATE.leave(block)
