"""Placeholders for the places that may move: ``${CSRC}/x.cu`` instead of ``/home/me/clone/csrc/x.cu``.

Cache keys and manifests name files this way: a moved clone, another virtual environment or a relocated compiler with
the same contents finds the same entries.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")


@functools.cache
def package_dir(name: str) -> Path:
    """Return the directory of the subpackage ``hipforge.<name>`` without importing it."""
    spec = importlib.util.find_spec(f"hipforge.{name}")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"hipforge.{name} is missing: the installation is incomplete; install it again")
    return Path(next(iter(spec.submodule_search_locations))).resolve()


# A root is looked at for every spec; resolving one takes 20 us, and a process does not see its own package move.
_real = functools.lru_cache(maxsize=256)(os.path.realpath)


@dataclass(frozen=True)
class Roots:
    """Placeholder name → absolute path, with the two translations."""

    paths: Mapping[str, str]
    _by_length: list[tuple[str, str]] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        for name, path in self.paths.items():
            for form in {path, _real(path)}:
                self._by_length.append((form, name))
        self._by_length.sort(key=lambda item: -len(item[0]))

    def with_paths(self, **paths: str | Path) -> Roots:
        """Return these roots and ``paths``."""
        return Roots({**self.paths, **{name: str(path) for name, path in paths.items()}})

    def hide(self, path: str | Path) -> str:
        """Return ``path`` with the longest root that contains it replaced by its placeholder."""
        text = os.fspath(path)
        if ".." in text:
            text = os.path.realpath(text)
        for root, name in self._by_length:
            if text == root or text.startswith(root + "/"):
                return f"${{{name}}}{text[len(root):]}"
        return text

    def show(self, text: str) -> str:
        """Return ``text`` with its placeholders replaced by this machine's paths.

        Raises:
            KeyError: a placeholder has no path here.
        """
        if not text.startswith("${") or text.find("${", 2) >= 0:
            return PLACEHOLDER.sub(lambda match: self.paths[match.group(1)], text) if "${" in text else text
        # A path, as in a manifest's long list: without the regular expression, a third of the time.
        name, closed, rest = text[2:].partition("}")
        return self.paths[name] + rest if closed else text


_NAME_BYTES = 255
_PATH_BYTES = 3500
"""Linux takes 4,096; what hipforge puts below needs up to 550."""
_UNUSABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def name_problem(path: str | Path) -> str | None:
    """Return why a path cannot be written into ninja files, depfiles and manifests, or None."""
    found = _UNUSABLE.search(str(path))
    if found is None:
        longest = max(map(len, map(os.fsencode, Path(path).parts)), default=0)
        if longest > _NAME_BYTES:
            return f"a name in it has {longest} bytes, and a file system takes {_NAME_BYTES}"
        length = len(os.fsencode(path))
        return None if length <= _PATH_BYTES else f"it has {length} bytes; {_PATH_BYTES} is the most"
    if found.group() >= "\ud800":
        return "its name is not UTF-8"
    return f"its name contains the control character {found.group()!r}"


@functools.lru_cache(maxsize=4096)  # the commands of many variants have most of their words in common
def quote(argument: str) -> str:
    """Quote one argument for the shell, leaving placeholders to be filled in with quoted paths."""
    pieces: list[str] = []
    end = 0
    for match in PLACEHOLDER.finditer(argument):
        if match.start() > end:
            pieces.append(shlex.quote(argument[end : match.start()]))
        pieces.append(match.group(0))
        end = match.end()
    if end < len(argument) or not argument:
        pieces.append(shlex.quote(argument[end:]))
    return "".join(pieces)


def unknown_placeholders(texts: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the placeholder names in ``texts`` that are not in ``known``, each once, in order."""
    allowed = set(known)
    found = [match.group(1) for text in texts for match in PLACEHOLDER.finditer(text)]
    return [name for name in dict.fromkeys(found) if name not in allowed]


def package_roots() -> Roots:
    """Return the roots every build knows: ``${CSRC}``, ``${JIT}`` and ``${EMULATOR}``."""
    return Roots({name.upper(): str(package_dir(name)) for name in ("csrc", "jit", "emulator")})
