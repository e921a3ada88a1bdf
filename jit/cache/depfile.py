"""Depfiles as compilers write them (``-MD``): which files did this translation unit read?"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_PIECE = re.compile(
    r"(?P<run>\\+)(?P<escaped>[ #:])|(?P<dollar>\$\$)|(?P<joined>\\\r?\n)|(?P<newline>\n)|(?P<space>\s)"
    r"|(?P<text>\\+|\$|[^\s\\$]+)"
)


def parse_depfile(text: str) -> list[str]:
    r"""Return the prerequisites, each once, in order; escapes are ninja's.

    2N + 1 backslashes and a space are N backslashes and a space of the name; after 2N backslashes it ends the name. A
    backslash before ``#`` or ``:`` escapes it, ``$$`` is ``$``, a backslash before a line break continues the line, and
    any other backslash is part of the name. A name may hold every other character, also those that end a name for
    ninja.

    >>> parse_depfile("a.o: x.cu \\\n  dir\\ one/y.h a\\b/z.h\n")
    ['x.cu', 'dir one/y.h', 'a\\b/z.h']
    """
    found: dict[str, None] = {}
    name, targets = "", True
    for piece in _PIECE.finditer(text + "\n"):
        kind, what = piece.lastgroup, piece.group()
        if kind == "escaped":
            run, escaped = piece["run"], piece["escaped"]
            if escaped == " ":
                name += run[: len(run) // 2] + " " if len(run) % 2 else run
                ends = len(run) % 2 == 0
            else:
                ends = escaped == ":" and text[piece.end() : piece.end() + 1] in " \t\r\n"
                name += what if ends else run[1:] + escaped
        else:
            ends = kind in ("joined", "newline", "space")
            name += "" if ends else "$" if kind == "dollar" else what
        if not ends:
            continue
        if not targets and (whole := name.removesuffix(":")):
            found[whole] = None
        targets = (targets and not name.endswith(":")) or kind == "newline"
        name = ""
    return list(found)


def read_depfile(path: Path) -> list[str]:
    """Return the prerequisites in the depfile at ``path``; none if there is no such file."""
    try:
        return parse_depfile(path.read_text(errors="surrogateescape"))
    except FileNotFoundError:
        return []


class Spellings:
    """Which files a compiler may mean: clang writes a path's backslashes into a depfile as slashes."""

    def __init__(self) -> None:
        self._odd: dict[str, list[tuple[str, list[str]]]] = {}

    def of(self, path: str) -> list[str]:
        """Return the files whose names clang writes like the absolute ``path``; more than one can be there."""
        if os.path.exists(path) and not any(map(self._odd_names, map(str, Path(path).parents))):
            return [path]
        found = [("/", _parts(path))]
        files: list[str] = []
        while found:
            place, rest = found.pop()
            if not rest:
                files.append(place)
                continue
            plain = os.path.join(place, rest[0])
            found += [(plain, rest[1:])] if os.path.lexists(plain) else []
            odd = ((name, parts) for name, parts in self._odd_names(place) if rest[: len(parts)] == parts)
            found += [(os.path.join(place, name), rest[len(parts) :]) for name, parts in odd]
        return files

    def _odd_names(self, folder: str) -> list[tuple[str, list[str]]]:
        """Return a folder's names with a backslash, each with the parts into which clang cuts it."""
        if folder not in self._odd:
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = [name for name in os.listdir(folder) if "\\" in name]
            self._odd[folder] = [(name, _parts(name)) for name in names]
        return self._odd[folder]


def _parts(path: str) -> list[str]:
    return [part for part in path.replace("\\", "/").split("/") if part]


_HAS_INCLUDE = re.compile(r"""__has_include(?:_next)?\s*\(\s*[<"]([^>"\n]+)[>"]""")


def absent_headers(
    headers: Sequence[str], sources: Sequence[str], search: Sequence[str], all_dirs: Sequence[str]
) -> list[str]:
    """Return the empty places at which a new file would change a compiler's input.

    These are the places where one of ``headers`` would be found first: beside a file that may include it, and in the
    folders of ``search`` before its own. Names that a false ``__has_include`` asks for may appear anywhere on the path.

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
    """Return the places at which missing headers could appear: beside any file read, or on the include path."""
    places = dict.fromkeys([*include_dirs, *(os.path.dirname(path) for path in read)])
    return [f"{place}/{name}" for name in relative for place in places]
