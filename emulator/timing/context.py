"""``timed``: the modelled time of everything that a ``with`` block launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hipforge.emulator.timing.capture import Capture
from hipforge.emulator.timing.machines import MACHINES, Machine
from hipforge.emulator.timing.model import Start, Timing, estimate
from hipforge.errors import GuardError


class Timed:
    """What :func:`timed` yields: the recording, and the times once the block has ended."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._result: Timing | None = None

    @property
    def result(self) -> Timing:
        """The modelled time of the block's launches, one after another.

        Raises:
            GuardError: the block has not ended yet, or it launched nothing.
        """
        if self._result is None:
            raise GuardError("no time is known: the timed block has not ended, or it launched nothing")
        return self._result

    def __str__(self) -> str:
        from hipforge.emulator.timing import report

        return report.text(self.result)


def gpu_of(arch: str) -> str:
    """Return the GPU whose parameters stand for an architecture: ``gfx950`` is the MI355X, ``gfx942`` the MI300X."""
    return next(name for name, machine in MACHINES.items() if machine.arch == arch)


@contextlib.contextmanager
def timed(gpu: str | Machine | None = None, start: Start = "cold") -> Iterator[Timed]:
    """Model the time of the launches that this thread makes in a ``with`` block.

    Results are what they are without it: every work-group runs. Recording slows the emulator down a few times.

    Args:
        gpu: whose parameters to use; by default the MI355X for gfx950 and the MI300X for gfx942.
        start: where operands are at the start: ``cold`` (HBM), ``mall`` (Infinity Cache) or ``l2``.

    Raises:
        GuardError: the block launched code for another architecture than the GPU's.

    >>> with emulator.timed() as t:                      # doctest: +SKIP
    ...     hipforge.mxfp8_gemv(xq, x_scale, wq, w_scale)
    >>> t.result.kernel_us                               # doctest: +SKIP
    6.4
    """
    capture = Capture()
    timing = Timed(capture)
    with capture.recording():
        yield timing
    recorded = capture.launches()
    if recorded:
        timing._result = estimate(capture, gpu or gpu_of(recorded[0]["arch"]), start)
