"""Depfiles as compilers write them (``-MD``): which files did this translation unit read?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
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


_HAS_INCLUDE = re.compile(r"""__has_include(?:_next)?\s*\(\s*[<"]([^>"\n]+)[>"]""")


def absent_headers(
    headers: Sequence[str], sources: Sequence[str], search: Sequence[str], all_dirs: Sequence[str]
) -> list[str]:
    """Return where there is no file, and a new one would change what a compiler reads.

    That is any place where one of ``headers`` would be found earlier than where it is: beside a file that may include
    it, or in a folder of ``search`` before its own; and any place where what a false ``__has_include`` asks for may
    appear.

    Args:
        headers: the project's headers that were read.
        sources: the project's sources.
        search: the project's include folders, in order.
        all_dirs: every include folder, the system's too.
    """
    files = [*headers, *sources]
    folders = list(dict.fromkeys(os.path.dirname(path) for path in files))
    places: dict[str, None] = {}
    for header in headers:
        for number, folder in enumerate(search):
            if header.startswith(folder + "/"):
                name = header[len(folder) + 1 :]
                places.update(dict.fromkeys(f"{place}/{name}" for place in (*folders, *search[:number])))
        name = os.path.basename(header)
        places.update(dict.fromkeys(f"{folder}/{name}" for folder in folders))
    for path in files:
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        for name in _HAS_INCLUDE.findall(text):
            asked = [f"{place}/{name}" for place in dict.fromkeys((os.path.dirname(path), *all_dirs))]
            if not any(map(os.path.exists, asked)):
                places.update(dict.fromkeys(asked))
    return [place for place in places if not os.path.lexists(place)]


def missing_headers(relative: Iterable[str], read: Iterable[str], include_dirs: Iterable[str]) -> list[str]:
    """Return where headers that were not found could appear: beside any file read, or on the include path."""
    places = dict.fromkeys([*include_dirs, *(os.path.dirname(path) for path in read)])
    return [f"{place}/{name}" for name in relative for place in places]
