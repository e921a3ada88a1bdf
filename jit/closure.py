"""The files that determined a build: those that compilers read, and those that a failed compiler did not find."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from hipforge.jit import children
from hipforge.jit.cache.depfile import Spellings, absent_headers, missing_headers, read_depfile
from hipforge.jit.cache.stability import NO_SUCH_FILE, InputsChanged
from hipforge.jit.digest import ABSENT, UNREADABLE, DigestStore
from hipforge.jit.ninja import Step
from hipforge.jit.spec import BuildSpec

log = logging.getLogger("hipforge")


def closure(spec: BuildSpec, staging: Path, digests: DigestStore, failed: bool = False) -> list[tuple[str, str]]:
    """Return every file the compilers read, named by placeholder, with its digest, sorted.

    After a failure, places where a missing header was looked for are in it too, as absent.

    Raises:
        InputsChanged: after a success, there is no file of a name that a compiler reported.
    """
    paths: dict[str, None] = {}
    relative: list[str] = []
    spellings = Spellings()
    where = os.path.realpath(staging)  # the compilers' working directory
    for step in spec.steps:
        if step.depfile is None:
            continue
        if failed and not (staging / step.depfile).exists():
            _scan(spec, step, staging)
        for path in read_depfile(staging / step.depfile):
            # ccache with a base_dir makes all paths relative; the build's own files stay out.
            full = os.path.join(where, path)
            full = os.path.realpath(full) if ".." in path else os.path.normpath(full)
            if not os.path.isabs(path) and (full.startswith(where + os.sep) or (failed and not Path(full).exists())):
                relative.append(path)
            else:
                paths.update(dict.fromkeys(map(spec.roots.hide, spellings.of(full) or [full])))
    paths.update(dict.fromkeys(map(spec.roots.hide, _embedded(spec, paths, where))))
    found = [(hidden, digests.of_any(spec.roots.show(hidden))) for hidden in sorted(paths)]
    if not failed:
        _refuse_absent(spec, found, [path for path in relative if not (staging / path).exists()])
        found += _could_appear(spec, paths)
    if failed:
        relative = [path for path in relative if not (staging / path).exists()]
        tried = missing_headers(relative, [spec.roots.show(hidden) for hidden in paths], _include_dirs(spec))
        found += [(spec.roots.hide(path), ABSENT) for path in tried if digests.of(path) == ABSENT]
    return found


def _refuse_absent(spec: BuildSpec, found: list[tuple[str, str]], made_here: list[str]) -> None:
    """Fail a build that read a vanished file: no later look-up could tell whether it changed."""
    absent = [spec.roots.show(path) for path, digest in found if digest in (ABSENT, UNREADABLE)] + made_here
    if absent:
        raise InputsChanged(spec.title, absent, found, in_key=False, how=NO_SUCH_FILE)


_OWN = ("${CSRC}/", "${MODULE_DIR}/")
_HEADER_SUFFIXES = (".h", ".hpp", ".hh", ".hxx", ".cuh", ".inc")


def _could_appear(spec: BuildSpec, paths: Iterable[str]) -> list[tuple[str, str]]:
    """Return, as absent, the places where a new file of the project would be read in place of an old one.

    Places that could shadow a system header are left out: a thousand of them would cost every warm load milliseconds.
    """
    own = [spec.roots.show(hidden) for hidden in paths if hidden.startswith(_OWN)]
    headers = [path for path in own if path.endswith(_HEADER_SUFFIXES)]
    sources = [path for path in own if not path.endswith(_HEADER_SUFFIXES)]
    every = [os.path.realpath(folder) for folder in _include_dirs(spec)]
    search = [folder for folder in every if spec.roots.hide(folder + "/").startswith(_OWN)]
    places = {spec.roots.hide(place) for place in absent_headers(headers, sources, search, every)}
    return [(hidden, ABSENT) for hidden in sorted(places)]


_INCBIN = re.compile(r"""\.incbin\s+\\?["']([^"'\\]+)""")


def _embedded(spec: BuildSpec, paths: Iterable[str], where: str) -> list[str]:
    """Return the files that the module's sources embed with ``.incbin``; no depfile lists them."""
    found: list[str] = []
    for hidden in paths:
        if hidden.startswith(("${CSRC}/", "${MODULE_DIR}/")):
            with contextlib.suppress(OSError):
                text = Path(spec.roots.show(hidden)).read_text(errors="replace")
                for name in _INCBIN.findall(text) if ".incbin" in text else ():
                    places = (Path(folder) / name for folder in (where, *_include_dirs(spec)))
                    found += [str(place) for place in places if place.is_file()][:1]
    return found


_INCLUDE_OPTIONS = ("-I", "-iquote", "-isystem", "-idirafter")
_INCLUDE_VARIABLES = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
_SYSTEM_INCLUDES = ("/usr/local/include", "/usr/include")


def _include_dirs(spec: BuildSpec) -> list[str]:
    words = [spec.roots.show(word) for step in spec.steps for word in step.argv]
    joined = [word.removeprefix(option) for word in words for option in _INCLUDE_OPTIONS if word.startswith(option)]
    apart = [path for option, path in itertools.pairwise(words) if option in _INCLUDE_OPTIONS]
    named = [path for name in _INCLUDE_VARIABLES for path in os.environ.get(name, "").split(os.pathsep)]
    return [path for path in dict.fromkeys([*joined, *apart, *named, *_SYSTEM_INCLUDES]) if path]


def _scan(spec: BuildSpec, step: Step, staging: Path) -> None:
    """Ask the compiler for the headers of a source it could not compile, missing ones included."""
    if not step.scan:
        return
    argv = [spec.roots.show(word) for word in step.scan]
    try:
        with children.waited_for():
            subprocess.run(argv, cwd=staging, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        log.debug("%s: the headers of a failed compile could not be listed", spec.title)
