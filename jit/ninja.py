"""Build steps → ninja text.

The body names every file by placeholder, so that it is the same wherever the package lies, and enters the cache key.
The prologue, which assigns the placeholders, does not enter it. ninja runs commands in order and in parallel, no more.
It never decides whether a file is up to date, because every build starts in an empty directory.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hipforge.errors import ToolchainError
from hipforge.jit.roots import PLACEHOLDER, quote

_RULE = """\
builddir = ${OUT}
rule run
  command = cd ${OUT} && : > $step.started && ${LAUNCHER}$cmd > $step.log 2>&1 $share && : > $step.done $
    || { echo $$? > $step.rc; exit 1; }
  description = $what
  pool = ${POOL}
"""
COMPILE_POOL = "compile"
"""Where many builds share one ninja, compiles are in this pool, so that a link never queues behind them all."""


@dataclass(frozen=True)
class Step:
    """One command, run in the build directory; ``inputs`` and ``outputs`` are names in that directory."""

    name: str
    argv: tuple[str, ...]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    depfile: str | None = None
    compiles: bool = True
    scan: tuple[str, ...] = ()
    """Command that lists the headers of a source that does not compile, missing ones too, into ``depfile``."""

    def leaves(self) -> tuple[str, ...]:
        """Return the names of the files that a step leaves behind when it succeeds, but for its mark."""
        return (f"{self.name}.started", f"{self.name}.log", *([self.depfile] if self.depfile else ()), *self.outputs)

    def command(self) -> str:
        """Return the shell command, placeholders left in."""
        return " ".join(quote(argument) for argument in self.argv)


def _escape(text: str) -> str:
    """Escape ``$`` for ninja, but for placeholders, which are ninja variables."""
    pieces: list[str] = []
    end = 0
    for match in PLACEHOLDER.finditer(text):
        pieces += [text[end : match.start()].replace("$", "$$"), match.group(0)]
        end = match.end()
    return "".join([*pieces, text[end:].replace("$", "$$")])


def body(steps: Iterable[Step], title: str, receivers: Mapping[str, Sequence[str]] = MappingProxyType({})) -> str:
    """Return the location-free part: one build statement per step.

    ``receivers`` names for each step the neighbouring directories that get a copy of its output.
    """
    lines: list[str] = []
    for step in steps:
        others = receivers.get(step.name, ())
        outputs = " ".join(f"{place}/{name}" for place in ("${OUT}", *others) for name in step.outputs)
        inputs = "".join(f" ${{OUT}}/{name}" for name in step.inputs)
        lines += [
            f"build {outputs}: run{inputs}",
            f"  step = {step.name}",
            f"  what = {title} {step.name}",
            f"  cmd = {_escape(step.command())}",
        ]
        if others:
            lines.append(f"  share = {''.join(_share(step, other) for other in others)}")
        if not step.compiles:
            lines += ["  LAUNCHER =", "  POOL ="]
    return "\n".join(lines) + "\n"


def _share(step: Step, other: str) -> str:
    """Return what follows a step's command: its files and then its mark go to the directory ``other`` too."""
    return f"&& cp -p {' '.join(map(quote, step.leaves()))} ../{other} && : > ../{other}/{step.name}.done "


def prologue(paths: Mapping[str, str], *, out: str, launcher: str, pool: str) -> str:
    """Return the assignments that tie a body to this machine.

    ``out`` is the build directory relative to where ninja runs, a plain name without spaces.
    """
    values = {name: shlex.quote(path) for name, path in paths.items()}
    values.update(OUT=out, POOL=pool)
    lines = [f"{name} = {value.replace('$', '$$')}\n" for name, value in values.items()]
    # "$ " is a literal space, which ninja would otherwise strip from the end of a value.
    lines.append(f"LAUNCHER = {launcher.replace('$', '$$')}$ \n" if launcher else "LAUNCHER =\n")
    return "".join(lines)


def whole_file(paths: Mapping[str, str], text: str, *, out: str, launcher: str = "", pool: str = "") -> str:
    """Return a complete ninja file for one build; several can be joined by :func:`joint_file`, with a ``pool``."""
    return prologue(paths, out=out, launcher=launcher, pool=pool) + _RULE + text


def joint_file(files: Iterable[str], *, out: str, compiles: int) -> str:
    """Return a ninja file over several others, which compiles at most ``compiles`` sources at once."""
    lines = [f"builddir = {out}", f"pool {COMPILE_POOL}", f"  depth = {compiles}"]
    return "\n".join([*lines, *(f"subninja {file}" for file in files)]) + "\n"


def executable() -> str:
    """Return the path of ninja: beside this Python, else on ``PATH``.

    Raises:
        ToolchainError: there is none.
    """
    beside = Path(sys.executable).parent / "ninja"
    if beside.is_file():
        return str(beside)
    found = shutil.which("ninja")
    if found is None:
        raise ToolchainError("ninja was not found beside this Python nor on PATH; install it: pip install ninja")
    return found
