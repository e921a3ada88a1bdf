"""Is parsed JSON of the shape that its reader relies on? A cache's files may be damaged, older, newer or foreign.

A shape is a type, ``[shape]`` for a list, ``{str: shape}`` for an object with any keys, ``(shape, ...)`` for a list
of exactly these, or ``{"name": shape, ...}`` for an object that has at least these keys::

    >>> fits({"key": "a", "dependencies": [["x", "y"]]}, {"key": str, "dependencies": [(str, str)]})
    True
    >>> fits({"key": 5}, {"key": str})
    False
"""

from __future__ import annotations

from typing import Any

NUMBER = float
"""An int or a float, and not a bool."""


_PAIRS = [(str, str)]


def fits(value: Any, shape: Any) -> bool:
    """Return whether ``value`` has ``shape``."""
    if shape == _PAIRS:  # a manifest has a thousand of them; this is five times faster than the general case
        return type(value) is list and all(
            type(pair) is list and len(pair) == 2 and type(pair[0]) is str and type(pair[1]) is str for pair in value
        )
    if isinstance(shape, list):
        return type(value) is list and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        sizes_match = type(value) is list and len(value) == len(shape)
        return sizes_match and all(map(fits, value, shape))
    if isinstance(shape, dict):
        if type(value) is not dict:
            return False
        if str in shape:
            return all(fits(item, shape[str]) for item in value.values())
        return all(name in value and fits(value[name], inner) for name, inner in shape.items())
    if shape is NUMBER:
        return type(value) in (int, float)
    if shape is int:
        return type(value) is int
    return isinstance(value, shape)
