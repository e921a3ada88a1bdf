"""What is shown while many modules are built: how many, about how long, and each as it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hipforge import settings

if TYPE_CHECKING:
    from rich.console import Console

    from hipforge.jit.fleet import Event, Planned


def spoken_seconds(seconds: float) -> str:
    """Return a duration for people: ``40 s``, ``6 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class BuildProgress:
    """One line at the start, a line per library as it ends, and a bar where ``console`` is a terminal.

    ``HIPFORGE_QUIET=1`` leaves only failures.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.quiet = settings.QUIET.get()
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=self.quiet,
        )
        self.task = self.progress.add_task("building", total=None)
        self.running: dict[str, float | None] = {}

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def on_plan(self, planned: Sequence[Planned], jobs: int) -> None:
        """Say what :func:`hipforge.jit.fleet.build_many` is about to do; nothing where all of it is there."""
        from hipforge.jit import fleet

        missing = sum(item.entry is None and item.problem is None for item in planned)
        self.progress.update(self.task, total=missing)
        if missing and not self.quiet:
            self.console.print(
                f"{len(planned)} libraries: {len(planned) - missing} need no build, {missing} to build with {jobs} "
                f"commands at once, about {spoken_seconds(fleet.expected_seconds(planned, jobs))}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
            self.progress.start()

    def on_event(self, event: Event) -> None:
        """Show one event of :func:`hipforge.jit.fleet.build_many`."""
        title = event.planned.title
        if event.kind == "started":
            self.running[title] = event.planned.estimate
        else:
            self.running.pop(title, None)
            self.progress.advance(self.task)
            seconds = event.outcome.seconds if event.outcome else 0.0
            mark = "[green]built[/]" if event.kind == "finished" else "[red]failed[/]"
            if event.kind == "failed" or not self.quiet:
                self.console.print(f"{mark}  {title}  {seconds:.1f} s", highlight=False)
        names = ", ".join(
            name if estimate is None else f"{name} (about {estimate:.0f} s)" for name, estimate in self.running.items()
        )
        self.progress.update(self.task, description=names or "building")


