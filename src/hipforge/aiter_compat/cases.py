"""What becomes of each case of an aiter test file: its status, its time without builds, its failed comparisons."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hipforge.errors import BuildError, ConfigError, EmulatorFault, ToolchainError


class Unfinished(BaseException):
    """A case took longer than it was given; no ``except Exception`` of a test catches it."""


class Cases:
    """What became of each case, written to a file after every one: a test may end its process."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.seconds = seconds
        self.done: list[dict[str, Any]] = []
        self.failures: list[list[str]] = []
        self.building = 0.0
        self.collected = 0  # by pytest, of which a sample may have run

    def case(self, title: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a test function whose calls are recorded; what it raises is recorded and not raised."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.failures.append([])
            before, started = len(self.done), time.perf_counter() - self.building
            error, result = None, _NoResult()
            try:
                with self.limit(outermost=len(self.failures) == 1):
                    result = function(*args, **kwargs)
            except (Exception, Unfinished) as raised:
                error = raised
            failures = self.failures.pop()
            if len(self.done) == before or error or failures:  # a case of cases is those cases
                seconds = time.perf_counter() - self.building - started
                self.record(f"{title}({_shown(args, kwargs)})", error, failures, seconds)
            return result

        return call

    def record(self, name: str, error: BaseException | None, failures: Sequence[str], seconds: float) -> None:
        """Add a case that raised ``error`` and whose comparisons found ``failures``."""
        status, detail = _verdict(error, failures, self.seconds)
        self.done.append({"case": name, "status": status, "detail": detail, "seconds": round(seconds, 2)})
        self.save()

    @contextlib.contextmanager
    def limit(self, *, outermost: bool = True) -> Iterator[None]:
        """Raise :class:`Unfinished` in a block that takes longer than a case may, builds of modules left out."""
        if not outermost or not self.seconds:
            yield
            return

        def stop(_signal: int, _frame: FrameType | None) -> None:
            raise Unfinished

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave a block, the build of a module, out of the case's time."""
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.building += time.perf_counter() - started
            if left:
                signal.setitimer(signal.ITIMER_REAL, left)

    def note(self, failure: str) -> None:
        """Record a failed comparison of the case that is running."""
        if self.failures:
            self.failures[-1].append(failure)

    def save(self, end: str = "") -> None:
        """Write what is known; ``end`` says how the file ended, if not by itself."""
        self.path.write_text(json.dumps({"cases": self.done, "end": end, "collected": self.collected}))


class _NoResult(dict[Any, Any]):
    """What a case without a result returns: files put columns of their tables into what their functions return."""

    def __missing__(self, key: Any) -> float:
        return math.nan


def _verdict(error: BaseException | None, failures: Sequence[str], seconds: float) -> tuple[str, str]:
    """Return the status of a case and why."""
    if isinstance(error, Unfinished):
        return "unfinished", f"more than {seconds:.0f} s"
    if isinstance(error, EmulatorFault):
        return "fault", str(error)
    if isinstance(error, BuildError | ConfigError | ToolchainError):
        return "not built", str(error)
    if error is not None:
        return ("skipped", str(error)) if _skips(error) else ("failed", place_of(error))
    return ("failed", "; ".join(failures)) if failures else ("passed", "")


def _skips(error: BaseException) -> bool:
    return type(error).__name__ in ("Skipped", "SkipTest")


def place_of(error: BaseException) -> str:
    """Return an error's type, its text and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip()[:2000]}{place}"


def _shown(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    import torch

    def text(value: Any) -> str:
        return f"tensor{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value).replace("torch.", "")

    return ", ".join([*map(text, args), *(f"{name}={text(value)}" for name, value in kwargs.items())])[:300]
