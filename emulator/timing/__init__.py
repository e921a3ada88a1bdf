"""A model of time: microseconds of gfx950 and gfx942 code, from what the emulator executes.

The emulator records the instructions and the addresses of work-groups (:class:`Capture`); an event-driven simulator of
one XCD gives the time (:func:`estimate`). Every figure is *modelled*, never measured; docs/time-model.md states the
error against AMD's published times.
"""

from __future__ import annotations

from hipforge.emulator.timing.capture import Capture
from hipforge.emulator.timing.machines import MI300X, MI355X, Machine, machine
from hipforge.emulator.timing.model import STARTS, Start, Timing, estimate

__all__ = ["MI300X", "MI355X", "STARTS", "Capture", "Machine", "Start", "Timing", "estimate", "machine"]
