"""Names of ops in ``torch.profiler``: a call is a range while a profiler runs, and nothing else is done for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._profiler import _RecordFunctionFast

P = ParamSpec("P")
R = TypeVar("R")


class Idle:
    """In place of ``torch.autograd.profiler`` where no range is wanted."""

    _is_profiler_enabled = False


def ranged(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as a range ``hipforge::name`` of the profile that is being recorded."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _RecordFunctionFast(f"hipforge::{name}"):
            return function(*args, **kwargs)

    return call
