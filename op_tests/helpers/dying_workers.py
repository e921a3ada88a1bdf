"""What workers do in tests of their deaths: apart from the tests, because a worker that imports torch takes seconds."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace


def task(number: int, folder: Path) -> SimpleNamespace:
    """A task in as far as a pool knows it."""
    return SimpleNamespace(cell=(number, str(folder)))


def die_once(asked: SimpleNamespace) -> int:
    """Leave a mark; a worker that finds none for task 2 dies as a killed process does."""
    number, folder = asked.cell
    first = not list(Path(folder).glob(f"{number}.*"))
    (Path(folder) / f"{number}.{os.getpid()}").touch()
    if number == 2 and first:
        os._exit(9)
    return number


def die_always(asked: SimpleNamespace) -> int:
    number, _folder = asked.cell
    if number == 1:
        os._exit(9)
    return number
