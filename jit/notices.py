"""Progress of something slow: a line on stderr at its start and end, a bar on a terminal.

``HIPFORGE_QUIET=1`` silences all of it. Nothing here is an error or a warning: those are exceptions and log records.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from hipforge import settings

Advance = Callable[[float], None]

_BAR_AFTER_S = 1.0


def say(text: str) -> None:
    """Print one line on stderr, unless the user asked for quiet."""
    if not settings.QUIET.get():
        print(f"hipforge: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def slow(what: str, expected_s: float | None) -> Iterator[Advance]:
    """Announce ``what``, which begins now, and how long it took once it has ended without an exception.

    Args:
        what: for example ``building module_rmsnorm gfx950``.
        expected_s: seconds it took last time or may take; None if nothing is known.

    Yields:
        A function that takes the part done, 0 to 1, and shows it on a terminal.
    """
    if settings.QUIET.get():
        yield lambda _: None
        return
    say(what if expected_s is None else f"{what} (about {max(1, round(expected_s))} s)")
    started = time.monotonic()
    with _bar(what, started) as advance:
        yield advance
    say(f"{what}: done in {time.monotonic() - started:.1f} s")


@contextlib.contextmanager
def _bar(what: str, started: float) -> Iterator[Advance]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=1.0)

    def advance(part: float) -> None:
        if time.monotonic() - started < _BAR_AFTER_S:
            return
        bar.start()
        bar.update(task, completed=part)

    try:
        yield advance
    finally:
        bar.stop()
