"""Docstrings of ops that take the same arguments: each is described once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def documented_like(source: Callable[..., Any]) -> Callable[[F], F]:
    """Complete a docstring from ``source``'s: arguments that it leaves out, ``Returns`` and ``Raises``.

    Example:
        >>> def first(x: int) -> int:
        ...     '''Return x.
        ...
        ...     Args:
        ...         x: a number.
        ...     '''
        >>> @documented_like(first)
        ... def second(x: int, y: int) -> int:
        ...     '''Return x + y.
        ...
        ...     Args:
        ...         y: another.
        ...     '''
        >>> print(second.__doc__.partition("Args:")[2])
        <BLANKLINE>
            x: a number.
            y: another.
    """

    def decorate(function: F) -> F:
        if function.__doc__ is None or source.__doc__ is None:  # python -OO
            return function
        own, other = _sections(function.__doc__), _sections(source.__doc__)
        described = {**_entries(other["Args"]), **_entries(own["Args"])}
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        own["Args"] = "\n".join(described[name] for name in names if name in described)
        for title in ("Returns", "Raises"):
            own[title] = own[title] or other[title]
        function.__doc__ = "\n\n".join(
            f"{title}:\n{text}" if title else text for title, text in own.items() if text.strip()
        )
        return function

    return decorate


def _sections(text: str) -> dict[str, str]:
    """Return a docstring's sections in order, each without its title; the text before them has the title ''."""
    head, *rest = re.split(r"\n\n?(Args|Returns|Raises|Example):\n", inspect.cleandoc(text))
    found = dict.fromkeys(("", "Args", "Returns", "Raises", "Example"), "")
    return {**found, "": head, **dict(zip(rest[::2], rest[1::2], strict=True))}


def _entries(text: str) -> dict[str, str]:
    """Return what a section says of each argument."""
    parts = re.split(r"(?m)^(?=    \w+:)", text.strip("\n"))
    return {part.strip().partition(":")[0]: part.rstrip() for part in parts if part.strip()}
