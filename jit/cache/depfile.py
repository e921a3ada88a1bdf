"""Depfiles as compilers write them (``-MD``): which files did this translation unit read?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_WORD = re.compile(r"(?:\\.|\$\$|[^\s\\])+")
_UNESCAPE = re.compile(r"\\([ #\\:])|\$(\$)")


def parse_depfile(text: str) -> list[str]:
    r"""Return the prerequisites, each once, in order.

    >>> parse_depfile("a.o: x.cu \\\n  dir\\ one/y.h z.h\n")
    ['x.cu', 'dir one/y.h', 'z.h']
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    found: dict[str, None] = {}
    for line in joined.splitlines():
        _, colon, rest = line.partition(": ")
        if colon:
            for word in _WORD.findall(rest):
                found[_UNESCAPE.sub(lambda match: match.group(1) or "$", word)] = None
    return list(found)


def read_depfile(path: Path) -> list[str]:
    """Return the prerequisites in the depfile at ``path``; none if there is no such file."""
    try:
        return parse_depfile(path.read_text(errors="surrogateescape"))
    except FileNotFoundError:
        return []


def missing_headers(relative: Iterable[str], read: Iterable[str], include_dirs: Iterable[str]) -> list[str]:
    """Return where headers that were not found could appear: beside any file read, or on the include path."""
    places = dict.fromkeys([*include_dirs, *(os.path.dirname(path) for path in read)])  # noqa: PTH120
    return [f"{place}/{name}" for name in relative for place in places]
